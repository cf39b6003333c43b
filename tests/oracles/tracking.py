# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""Whole-body tracking in float64 with MuJoCo's and SciPy's own arithmetic, one world at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np
from scipy.spatial.transform import Rotation


@dataclass(frozen=True)
class Frames:
    """Frames of K bodies of one world."""

    position: np.ndarray
    """(K, 3) m"""
    rotation: list[Rotation]
    velocity: np.ndarray
    """(K, 3) m/s"""
    turning: np.ndarray
    """(K, 3) rad/s, in the world's frame"""


def body_frames(
    model: mujoco.MjModel, names: tuple[str, ...], qpos: np.ndarray, qvel: np.ndarray
) -> Frames:
    """Where MuJoCo sees the bodies `names` in a state."""
    data = mujoco.MjData(model)
    data.qpos, data.qvel = qpos, qvel
    mujoco.mj_forward(model, data)
    ids = [model.body(name).id for name in names]
    twists = np.empty((len(ids), 6))
    for twist, body in zip(twists, ids, strict=True):
        mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_XBODY, body, twist, 0)
    return Frames(
        position=data.xpos[ids].copy(),
        rotation=[Rotation.from_matrix(data.xmat[i].reshape(3, 3)) for i in ids],
        velocity=twists[:, 3:],
        turning=twists[:, :3],
    )


def reward_per_second(
    robot: Frames,
    motion: Frames,
    anchor: int,
    change: np.ndarray,
    joint_pos: np.ndarray,
    limits: np.ndarray,
) -> float:
    """The tracking reward: eight terms, weights and widths written out."""
    here, there = robot.position[anchor], motion.position[anchor]
    apart = robot.rotation[anchor] * motion.rotation[anchor].inv()
    matrix = apart.as_matrix()
    yaw = Rotation.from_euler("z", np.arctan2(matrix[1, 0], matrix[0, 0]))
    offsets, angles = [], []
    for k in range(len(robot.position)):
        target = yaw.apply(motion.position[k] - there) + np.array([*here[:2], there[2]])
        offsets.append(np.sum((robot.position[k] - target) ** 2))
        angles.append((robot.rotation[k] * (yaw * motion.rotation[k]).inv()).magnitude() ** 2)
    velocities = np.sum((robot.velocity - motion.velocity) ** 2, 1)
    turnings = np.sum((robot.turning - motion.turning) ** 2, 1)
    reward = 0.5 * np.exp(-np.sum((here - there) ** 2) / 0.3**2)
    reward += 0.5 * np.exp(-(apart.magnitude() ** 2) / 0.4**2)
    reward += np.exp(-np.mean(offsets) / 0.3**2)
    reward += np.exp(-np.mean(angles) / 0.4**2)
    reward += np.exp(-np.mean(velocities) / 1.0**2)
    reward += np.exp(-np.mean(turnings) / 3.14**2)
    reward -= 0.1 * np.sum(change**2)
    for angle, (low, high) in zip(joint_pos, limits, strict=True):
        reward -= 10 * max(low - angle, angle - high, 0)
    return float(reward)


def swaying_motion(
    model: mujoco.MjModel,
    names: tuple[str, ...],
    joint_names: tuple[str, ...],
    pose: np.ndarray,
    *,
    num_frames: int,
    fps: float,
) -> dict[str, np.ndarray]:
    """Arrays of a motion file: every joint sways about `pose` (num_joints,) within its limits and
    the base goes round in a circle, all velocities exact."""
    rng = np.random.default_rng(0)
    joints = len(pose)
    low, high = model.jnt_range[1:].T
    reach = np.minimum(0.2, np.minimum(pose - low, high - pose).clip(min=0))
    rate = rng.uniform(1, 4, joints)
    states = []
    for frame in range(num_frames):
        t = frame / fps
        heading = Rotation.from_euler("zyx", [0.5 * t, 0.1, 0.05])
        qpos = np.concatenate(
            [
                [0.3 * np.cos(t), 0.3 * np.sin(t), 1.0 + 0.05 * np.sin(2 * t)],
                np.roll(heading.as_quat(), 1),
                pose + reach * np.sin(rate * t),
            ]
        )
        qvel = np.concatenate(
            [
                [-0.3 * np.sin(t), 0.3 * np.cos(t), 0.1 * np.cos(2 * t)],
                heading.inv().apply([0, 0, 0.5]),
                reach * rate * np.cos(rate * t),
            ]
        )
        states.append((qpos, qvel))
    frames = [body_frames(model, names, *state) for state in states]
    return {
        "fps": np.array(fps),
        "joint_names": np.array(joint_names),
        "body_names": np.array(names),
        "joint_pos": np.stack([qpos[7:] for qpos, _ in states]),
        "joint_vel": np.stack([qvel[6:] for _, qvel in states]),
        "body_pos_w": np.stack([f.position for f in frames]),
        "body_quat_w": np.stack([[np.roll(r.as_quat(), 1) for r in f.rotation] for f in frames]),
        "body_lin_vel_w": np.stack([f.velocity for f in frames]),
        "body_ang_vel_w": np.stack([f.turning for f in frames]),
    }


def save_motion(path: Path, arrays: dict[str, np.ndarray]) -> str:
    """Write a motion file and say where."""
    np.savez(path, **arrays)  # type: ignore[arg-type]  # its stub takes names for other arguments
    return str(path)
