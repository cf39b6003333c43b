# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""The left-right symmetry of a robot, read from its model."""

from __future__ import annotations

import mujoco
import numpy as np
import torch

from collectors.tasks.robot_model import Robot, foot_site
from fastsac.core.mirror import Reflection

TOLERANCE = 2e-3
"""Largest difference between the two sides: in m, in rad, or without unit for directions."""
ACROSS = np.array([1.0, -1.0, 1.0])
"""Reflection of a vector at the plane of symmetry, y = 0."""


def mirror_robot(robot: Robot) -> tuple[Reflection, Reflection] | None:
    """How a robot's joints, and its feet, look in a mirror; None if its two sides differ.

    The partner of a joint or a foot is the one where the mirror shows it, with all hinges at 0
    and the base upright. A rotation about an axis a looks like one about -(a reflected).
    """
    data = mujoco.MjData(robot.model)
    data.qpos[:] = 0
    data.qpos[3] = 1
    mujoco.mj_kinematics(robot.model, data)
    axes = data.xaxis[1:]
    turn = np.einsum("id,jd->ij", -axes * ACROSS, axes)
    joints = _partners(_distances(data.xanchor[1:]) + np.abs(1 - np.abs(turn)))
    feet = _partners(_distances(np.stack([data.site(foot_site(f)).xpos for f in robot.foot_names])))
    if joints is None or feet is None:
        return None
    sign = torch.from_numpy(np.sign(turn[np.arange(len(joints)), joints])).float()
    index = torch.from_numpy(joints)
    pose, reach = robot.default_pose, robot.action_high * robot.action_scale
    alike = {"pose": (sign * pose[index], pose), "reach": (reach[index], reach)}
    if any(bool(((a - b).abs() > TOLERANCE).any()) for a, b in alike.values()):
        return None
    return Reflection(index, sign), Reflection(torch.from_numpy(feet), torch.ones(len(feet)))


def _distances(places: np.ndarray) -> np.ndarray:
    """(n, n): from the mirror image of each place to every place, m."""
    return np.linalg.norm(places[:, None] * ACROSS - places, axis=-1)


def _partners(distances: np.ndarray) -> np.ndarray | None:
    """(n,) index of each one's partner, if they all have one."""
    index = distances.argmin(1)
    near = distances.min(1) < TOLERANCE
    return index if near.all() and np.array_equal(index[index], np.arange(len(index))) else None
