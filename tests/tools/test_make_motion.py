# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
import mujoco
import numpy as np
import pytest

from collectors.tasks.motion import fit_motion, load_motion
from collectors.tasks.wbt_robots import default_motion, load_tracking_robot
from tools.make_motion import make_motion, qpos_at

FASTEST_JOINT = 7.0
"""rad/s"""


@pytest.fixture(scope="module")
def robot():
    return load_tracking_robot("humanoid")


@pytest.fixture(scope="module")
def arrays(robot) -> dict[str, np.ndarray]:
    return make_motion(robot)


def test_the_shipped_clip_is_what_the_tool_makes(arrays):
    shipped = default_motion("humanoid")
    assert shipped is not None
    with np.load(shipped) as file:
        assert sorted(file) == sorted(arrays)
        for name, array in arrays.items():
            if array.dtype.kind == "U":
                assert file[name].tolist() == array.tolist()
            else:
                np.testing.assert_allclose(file[name], array, atol=1e-5)


def test_the_shipped_clip_fits_the_robot(robot):
    shipped = default_motion("humanoid")
    assert shipped is not None
    clip = fit_motion(
        load_motion(shipped),
        joint_names=robot.joint_names,
        body_names=robot.body_names,
        fps=1 / (robot.timestep * robot.decimation),
    )
    assert clip.body_pos.shape == (551, len(robot.body_names), 3)


def test_joints_stay_within_their_limits_and_their_speed(robot, arrays):
    low, high = robot.model.jnt_range[1:].T
    assert (arrays["joint_pos"] > low).all()
    assert (arrays["joint_pos"] < high).all()
    assert np.abs(arrays["joint_vel"]).max() < FASTEST_JOINT


def test_velocities_are_the_derivatives_of_places(arrays):
    for place, speed, near in (
        ("joint_pos", "joint_vel", 0.3),
        ("body_pos_w", "body_lin_vel_w", 0.1),
    ):
        middle = (arrays[place][2:] - arrays[place][:-2]) / (2 / arrays["fps"])
        # central differences over 40 ms cut the corners of what is quicker
        assert np.abs(middle - arrays[speed][1:-1]).max() < near
        assert np.abs(middle - arrays[speed][1:-1]).mean() < near / 20


def test_planted_soles_lie_on_the_floor_and_do_not_slide(robot, arrays):
    model, data = robot.model, mujoco.MjData(robot.model)
    root = list(arrays["body_names"]).index(model.body(1).name)
    soles = [[model.geom(f"{side}_sole{n}").id for n in (1, 2, 3, 4)] for side in ("left", "right")]
    places = []
    for frame in range(len(arrays["joint_pos"])):
        data.qpos[:3] = arrays["body_pos_w"][frame, root]
        data.qpos[3:7] = arrays["body_quat_w"][frame, root]
        data.qpos[7:] = arrays["joint_pos"][frame]
        mujoco.mj_kinematics(model, data)
        np.testing.assert_allclose(data.xpos[1:], arrays["body_pos_w"][frame], atol=1e-5)
        places.append([data.geom_xpos[side] for side in soles])
    heights = np.array(places)[..., 2] - model.geom_size[soles[0][0], 0]
    planted = heights.max(-1) < 1e-4
    assert heights.min() > -1e-4
    assert planted.any(1).all()  # one foot is always down
    assert (~planted).any(0).all()  # and each is lifted
    for side in (0, 1):
        down = np.array(places)[planted[:, side], side, :, :2]
        assert np.ptp(down, axis=0).max() < 1e-3


def test_standing_on_one_leg_keeps_the_centre_of_mass_over_the_foot(robot):
    model, data = robot.model, mujoco.MjData(robot.model)
    for time, side in ((6.2, "left"), (7.95, "right")):
        data.qpos[:] = qpos_at(time, robot)
        mujoco.mj_forward(model, data)
        soles = np.array([data.geom(f"{side}_sole{n}").xpos[:2] for n in (1, 2, 3, 4)])
        centre = data.subtree_com[1][:2]
        assert (soles.min(0) < centre).all()
        assert (centre < soles.max(0)).all()
