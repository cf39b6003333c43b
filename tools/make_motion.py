# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""Make the clip of the small humanoid: `python tools/make_motion.py [FILE]`, the same every time.

Postures (pelvis, feet, arms) are joined by minimum-jerk motion (Flash and Hogan 1985), and the
legs follow in closed form: the soles stay flat, and a planted foot stays where it is.

Easy part, 0 to 5 s: stand, squat, raise the arms, shift the weight to either side. Hard part,
5 to 11 s: stand on one leg and then on the other, and march.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import mujoco
import numpy as np

from collectors.tasks.wbt_robots import TrackingRobot, default_motion, load_tracking_robot

FPS = 50
HARD_PART_S = 5.0
"""When the hard part begins, s."""
LEG_M = 0.29
"""Length of a thigh, and of a shin."""
SOLE_M = 0.06
"""Height of an ankle above the floor when the foot stands."""
HIP_M = 0.09
"""Distance of each hip, and of each standing foot, from the middle."""
DERIVATIVE_S = 1e-4
"""Half the interval of the central differences that give velocities."""


@dataclass(frozen=True, kw_only=True)
class Posture:
    """Lengths in m, from where both feet stand; angles in rad."""

    forward: float = 0.02
    """of the pelvis, which puts the centre of mass above the middle of the soles"""
    aside: float = 0.0
    """of the pelvis, to the left"""
    height: float = 0.60
    """of the pelvis"""
    left_lift: float = 0.0
    """of the left foot; a lifted foot also comes forward by a quarter as much"""
    right_lift: float = 0.0
    left_shoulder: float = 0.1
    right_shoulder: float = 0.1
    elbows: float = 0.4


def script() -> list[tuple[float, Posture]]:
    """Times in s and the postures to be in by then."""
    stand = Posture()
    on_left, on_right = replace(stand, aside=0.095), replace(stand, aside=-0.095)
    quick_left, quick_right = replace(stand, aside=0.06), replace(stand, aside=-0.06)
    return [
        (0.0, stand),
        (0.4, stand),
        (1.2, replace(stand, height=0.47, left_shoulder=-1.2, right_shoulder=-1.2, forward=-0.02)),
        (2.0, stand),
        (2.6, replace(stand, left_shoulder=-1.6)),
        (3.2, replace(stand, right_shoulder=-1.6)),
        (3.7, stand),
        (4.2, replace(stand, aside=0.05)),
        (4.8, replace(stand, aside=-0.05)),
        (HARD_PART_S, replace(stand, aside=-0.05)),
        (5.7, on_left),
        (6.0, replace(on_left, right_lift=0.14, left_shoulder=-0.4, right_shoulder=0.4)),
        (6.4, replace(on_left, right_lift=0.14, left_shoulder=-0.4, right_shoulder=0.4)),
        (6.7, on_left),
        (7.5, on_right),
        (7.8, replace(on_right, left_lift=0.14, left_shoulder=0.4, right_shoulder=-0.4)),
        (8.1, replace(on_right, left_lift=0.14, left_shoulder=0.4, right_shoulder=-0.4)),
        (8.4, on_right),
        (9.1, quick_left),
        (9.3, replace(quick_left, right_lift=0.05, left_shoulder=-0.3)),
        (9.5, quick_left),
        (10.0, quick_right),
        (10.2, replace(quick_right, left_lift=0.05, right_shoulder=-0.3)),
        (10.4, quick_right),
        (10.8, stand),
        (11.0, stand),
    ]


def posture_at(time_s: float) -> np.ndarray:
    """(8,): the fields of `Posture` between the script's, at rest in each of them."""
    times = [time for time, _ in script()]
    values = [np.array(list(vars(posture).values())) for _, posture in script()]
    after = min(max(int(np.searchsorted(times, time_s, side="right")), 1), len(times) - 1)
    start, end = times[after - 1], times[after]
    s = np.clip((time_s - start) / (end - start), 0, 1)
    share = s**3 * (10 - 15 * s + 6 * s**2)
    return values[after - 1] + share * (values[after] - values[after - 1])


def qpos_at(time_s: float, robot: TrackingRobot) -> np.ndarray:
    """(7 + num_joints,), the base upright and facing forward."""
    forward, aside, height, left_lift, right_lift, left, right, elbows = posture_at(time_s)
    angles = {"left_shoulder": left, "right_shoulder": right}
    angles |= {"left_elbow": elbows, "right_elbow": elbows}
    for side, lift, sign in (("left", left_lift, 1), ("right", right_lift, -1)):
        foot = np.array([lift / 4, sign * HIP_M, SOLE_M + lift])
        hip = np.array([forward, aside + sign * HIP_M, height])
        angles |= {f"{side}_{joint}": angle for joint, angle in leg(foot - hip).items()}
    joints = [angles[name] for name in robot.joint_names]
    return np.array([forward, aside, height, 1, 0, 0, 0, *joints])


def leg(reach: np.ndarray) -> dict[str, float]:
    """Joint angles, rad, that put the ankle at `reach` (3,) m from the hip, the sole flat."""
    forward, aside, up = reach
    roll = float(np.arctan2(aside, -up))
    knee = float(np.arccos(reach @ reach / (2 * LEG_M**2) - 1))
    lean = float(np.arctan2(forward, np.hypot(aside, up)))
    return {
        "hip_roll": roll,
        "hip_pitch": -lean - knee / 2,
        "knee": knee,
        "ankle_pitch": lean - knee / 2,
        "ankle_roll": -roll,
    }


def make_motion(robot: TrackingRobot) -> dict[str, np.ndarray]:
    """The arrays of a motion file, see `collectors.tasks.motion.load_motion`."""
    model, data = robot.model, mujoco.MjData(robot.model)
    bodies = robot.model_bodies
    frames = round(script()[-1][0] * FPS) + 1
    joints, speeds = np.zeros((2, frames, len(robot.joint_names)))
    places, turns = np.zeros((frames, len(bodies), 3)), np.zeros((frames, len(bodies), 4))
    twists = np.zeros((frames, len(bodies), 6))
    velocity = np.zeros(model.nv)
    for frame in range(frames):
        time = frame / FPS
        before, after = (qpos_at(time + d, robot) for d in (-DERIVATIVE_S, DERIVATIVE_S))
        mujoco.mj_differentiatePos(model, velocity, 2 * DERIVATIVE_S, before, after)
        data.qpos[:], data.qvel[:] = qpos_at(time, robot), velocity
        mujoco.mj_forward(model, data)
        joints[frame], speeds[frame] = data.qpos[7:], data.qvel[6:]
        places[frame], turns[frame] = data.xpos[1:], data.xquat[1:]
        for body in range(len(bodies)):
            mujoco.mj_objectVelocity(
                model, data, mujoco.mjtObj.mjOBJ_XBODY, body + 1, twists[frame, body], 0
            )
    arrays = {
        "joint_pos": joints,
        "joint_vel": speeds,
        "body_pos_w": places,
        "body_quat_w": turns,
        "body_lin_vel_w": twists[..., 3:],
        "body_ang_vel_w": twists[..., :3],
    }
    return {
        "fps": np.array(FPS),
        **{name: array.astype(np.float32) for name, array in arrays.items()},
        "joint_names": np.array(robot.joint_names),
        "body_names": np.array(bodies),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the clip of the small humanoid.")
    parser.add_argument("file", nargs="?", type=Path, default=default_motion("humanoid"))
    file: Path = parser.parse_args().file
    file.parent.mkdir(parents=True, exist_ok=True)
    arrays = make_motion(load_tracking_robot("humanoid"))
    # the checker takes any name for that of the flag allow_pickle
    np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]
    print(file)


if __name__ == "__main__":
    main()
