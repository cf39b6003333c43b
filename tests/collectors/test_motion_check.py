import dataclasses

import pytest

from collectors.tasks.motion import Motion, load_motion
from collectors.tasks.motion_check import describe, describe_fit
from collectors.tasks.wbt_robots import default_motion, load_tracking_robot
from fastsac.cli import main


@pytest.fixture(scope="module")
def clip() -> Motion:
    path = default_motion("humanoid")
    assert path is not None
    return load_motion(path)


def off_by(text: str) -> float:
    return float(text.split()[0])


def test_the_shipped_clip_is_consistent_and_fits(clip):
    rows = describe(clip)
    assert rows["frames"] == "551 at 50 Hz, 11.00 s"
    assert rows["joints"].startswith("14: left_hip_roll, ")
    assert off_by(rows["joint velocities against differences"]) < 0.05
    fit = describe_fit(clip, "humanoid")
    assert fit["joint limits"] == "kept"
    assert off_by(fit["bodies against the robot's kinematics"]) < 1e-3


def test_what_is_inconsistent_shows(clip):
    velocities = dataclasses.replace(clip, joint_vel=clip.joint_vel + 0.5)
    assert off_by(describe(velocities)["joint velocities against differences"]) == pytest.approx(
        0.5, abs=0.05
    )
    robot = load_tracking_robot("humanoid")
    knee = robot.joint_names.index("left_knee")
    bent = clip.joint_pos.clone()
    bent[:, knee] = robot.model.jnt_range[1 + knee, 1] + 0.25
    fit = describe_fit(dataclasses.replace(clip, joint_pos=bent), "humanoid")
    assert fit["joint limits"] == "exceeded by 0.250 rad at most, left_knee"
    shifted = clip.body_pos.clone()
    hand = clip.body_names.index("left_hand") if clip.body_names else 0
    shifted[:, hand, 1] += 0.125
    fit = describe_fit(dataclasses.replace(clip, body_pos=shifted), "humanoid")
    assert fit["bodies against the robot's kinematics"] == "0.1250 m off at most, left_hand"


def test_the_command_prints_and_refuses_in_one_line(tmp_path, capsys):
    path = default_motion("humanoid")
    assert main(["motion", "check", str(path), "--robot", "humanoid"]) == 0
    assert "551 at 50 Hz" in capsys.readouterr().out
    assert main(["motion", "check", str(path), "--robot", "robot"]) == 2
    assert "unknown robot 'robot'" in capsys.readouterr().err
    assert main(["motion", "check", str(tmp_path / "none.npz")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
