from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation, Slerp

from collectors.tasks.motion import fit_motion, load_motion, slerp

JOINTS, BODIES = ("hip", "knee", "ankle"), ("trunk", "shin", "foot")


def arrays(frames: int = 5, joints: int = 3, bodies: int = 3, *, root: bool = False) -> dict:
    rng = np.random.default_rng(0)
    quat = rng.normal(size=(frames, bodies, 4))
    return {
        "fps": np.array([50]),
        "joint_pos": rng.normal(size=(frames, joints + 7 * root)),
        "joint_vel": rng.normal(size=(frames, joints + 6 * root)),
        "body_pos_w": rng.normal(size=(frames, bodies, 3)),
        "body_quat_w": quat / np.linalg.norm(quat, axis=-1, keepdims=True),
        "body_lin_vel_w": rng.normal(size=(frames, bodies, 3)),
        "body_ang_vel_w": rng.normal(size=(frames, bodies, 3)),
    }


def save(folder: Path, values: dict) -> Path:
    path = folder / "clip.npz"
    np.savez(path, **values)
    return path


def test_root_columns_are_left_out(tmp_path):
    values = arrays(root=True)
    motion = load_motion(save(tmp_path, values))
    assert motion.fps == 50
    np.testing.assert_allclose(motion.joint_pos, values["joint_pos"][:, 7:], rtol=1e-6)
    np.testing.assert_allclose(motion.joint_vel, values["joint_vel"][:, 6:], rtol=1e-6)


def test_joints_and_bodies_are_found_by_name_and_other_bodies_ignored(tmp_path):
    values = arrays(bodies=4) | {
        "joint_names": np.array(["ankle", "hip", "knee"]),
        "body_names": np.array(["foot", "hat", "trunk", "shin"]),
    }
    clip = fit_motion(
        load_motion(save(tmp_path, values)), joint_names=JOINTS, body_names=BODIES, fps=50
    )
    np.testing.assert_allclose(clip.joint_pos, values["joint_pos"][:, [1, 2, 0]], rtol=1e-6)
    np.testing.assert_allclose(clip.body_pos, values["body_pos_w"][:, [2, 3, 0]], rtol=1e-6)
    assert (clip.joint_names, clip.body_names) == (JOINTS, BODIES)


def test_without_names_rows_are_those_of_the_model(tmp_path):
    values = arrays(bodies=4)
    clip = fit_motion(
        load_motion(save(tmp_path, values)),
        joint_names=JOINTS,
        body_names=("foot", "trunk"),
        fps=50,
        model_bodies=("trunk", "thigh", "shin", "foot"),
    )
    np.testing.assert_allclose(clip.joint_pos, values["joint_pos"], rtol=1e-6)
    np.testing.assert_allclose(clip.body_pos, values["body_pos_w"][:, [3, 0]], rtol=1e-6)


@pytest.mark.parametrize("fps", [20, 50, 75, 120])
def test_another_rate_is_interpolated_as_scipy_does(tmp_path, fps):
    values = arrays(frames=9)
    clip = fit_motion(
        load_motion(save(tmp_path, values)), joint_names=JOINTS, body_names=BODIES, fps=fps
    )
    given = np.arange(9) / 50
    times = np.arange(int(8 * fps / 50 + 1e-6) + 1) / fps
    assert len(clip.joint_pos) == len(times)
    assert clip.fps == fps
    for body in range(3):
        turned = Slerp(given, Rotation.from_quat(values["body_quat_w"][:, body], scalar_first=True))
        expected = turned(np.clip(times, 0, given[-1])).as_quat(scalar_first=True)
        same = np.abs((clip.body_quat[:, body].numpy() * expected).sum(-1))
        np.testing.assert_allclose(same, 1, atol=1e-6)
    for joint in range(3):
        expected = np.interp(times, given, values["joint_vel"][:, joint])
        np.testing.assert_allclose(clip.joint_vel[:, joint], expected, atol=1e-6)


def test_equal_and_opposite_quaternions_are_one_orientation():
    quat = torch.tensor([[0.6, 0.8, 0.0, 0.0]])
    for other in (quat, -quat):
        turned = slerp(quat, other, torch.tensor([0.3]))
        torch.testing.assert_close((turned * quat).sum(-1).abs(), torch.ones(1))


def changed(**values) -> dict:
    return arrays() | values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (changed(fps=np.array([0.0])), "fps is 0: give a positive number"),
        (changed(fps=np.array([1.0, 2.0])), r"fps is \[1\.0, 2\.0\]: give one number"),
        (arrays(frames=0), "it has no frames"),
        (
            changed(joint_vel=np.zeros((4, 3))),
            r"joint_vel has shape \(4, 3\), should have \(5, J\)",
        ),
        (changed(joint_vel=np.zeros((5, 2))), "joint_pos has 3 columns and joint_vel 2"),
        (changed(body_pos_w=np.full((5, 3, 3), np.nan)), "body_pos_w has a NaN .* in frame 0"),
        (changed(body_quat_w=np.ones((5, 3, 4))), "length is 1 off 1: give unit quaternions"),
        (changed(joint_names=np.array(["a", "a", "b"])), "joint_names has a more than once"),
        (changed(joint_names=np.array(["a"])), "joint_names has 1"),
        (changed(body_names=np.array(["a"])), "body_names has 1 names for 3 bodies"),
        (changed(joint_pos=np.array([[object()] * 3] * 5)), "not a plain array"),
        ({"fps": np.array(50)}, "it has no joint_pos, joint_vel, body_pos_w"),
    ],
)
def test_a_file_that_is_no_motion_is_refused_in_one_line(tmp_path, values, message):
    with pytest.raises(ValueError, match=message) as refusal:
        load_motion(save(tmp_path, values))
    assert "\n" not in str(refusal.value)
    assert "clip.npz" in str(refusal.value)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        load_motion(tmp_path / "none.npz")
    text = tmp_path / "text.npz"
    text.write_text("no motion")
    with pytest.raises(ValueError, match="give an npz file with fps, joint_pos"):
        load_motion(text)


@pytest.mark.parametrize(
    ("names", "robot", "message"),
    [
        (("hip", "knee", "toe"), JOINTS, "only the motion has toe; only the robot has ankle"),
        (None, JOINTS[:2], "the motion has 3 joints without names, the robot 2: hip, knee"),
    ],
)
def test_joints_that_do_not_match_are_named_on_both_sides(tmp_path, names, robot, message):
    values = arrays() | ({} if names is None else {"joint_names": np.array(names)})
    with pytest.raises(ValueError, match=message):
        fit_motion(
            load_motion(save(tmp_path, values)), joint_names=robot, body_names=BODIES, fps=50
        )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("trunk", "shin", "hat"), "lacks bodies that the robot tracks: foot; .* has shin, hat"),
        (None, r"has 3 bodies without names, the robot 2 \(without the world\): trunk, foot"),
    ],
)
def test_bodies_that_do_not_match_are_named_on_both_sides(tmp_path, names, message):
    values = arrays() | ({} if names is None else {"body_names": np.array(names)})
    with pytest.raises(ValueError, match=message):
        fit_motion(
            load_motion(save(tmp_path, values)),
            joint_names=JOINTS,
            body_names=("trunk", "foot"),
            fps=50,
        )
