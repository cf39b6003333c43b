"""What velocity tracking looks at, and what the manner of walking costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from collectors.physics.engine import Physics

FOOT_CLEARANCE = 0.06
"""Height of a foot's site below which a moving foot drags, m."""
FOOT_PHASE_S = 0.4
"""Time up or down after which a foot is late, s."""


@dataclass
class View:
    """The worlds' state as the task reads it, float32."""

    height: Tensor
    """(num_envs,) of the base, m"""
    gravity: Tensor
    """(num_envs, 3) unit vector in the frame of the base"""
    velocity: Tensor
    """(num_envs, 3) m/s, likewise"""
    turning: Tensor
    """(num_envs, 3) rad/s, likewise"""
    offset: Tensor
    """(num_envs, num_joints) from the default pose, rad"""
    joint_velocity: Tensor
    """(num_envs, num_joints) rad/s"""
    foot_height: Tensor
    """(num_envs, feet) m, likewise the two that follow"""
    foot_speed_squared: Tensor
    """horizontal, m^2/s^2"""
    foot_contact: Tensor
    """0 or 1"""


def look(physics: Physics, default_pose: Tensor, feet: int) -> View:
    """Read the worlds of a `Robot` with `feet` feet."""
    qpos, qvel = physics.qpos.float(), physics.qvel.float()
    w, x, y, z = qpos[:, 3:7].unbind(1)
    axis = qpos[:, 4:7]
    velocity = qvel[:, :3]
    across = torch.linalg.cross(axis, velocity)
    velocity = velocity + 2 * (torch.linalg.cross(axis, across) - w[:, None] * across)
    position, moving, force = physics.sensordata.float().split([3 * feet, 3 * feet, feet], 1)
    gravity = [2 * (w * y - x * z), -2 * (w * x + y * z), 2 * (x * x + y * y) - 1]
    return View(
        height=qpos[:, 2],
        gravity=torch.stack(gravity, 1),
        velocity=velocity,
        turning=qvel[:, 3:6],
        offset=qpos[:, 7:] - default_pose,
        joint_velocity=qvel[:, 6:],
        foot_height=position[:, 2::3],
        foot_speed_squared=moving.reshape(-1, feet, 3)[:, :, :2].square().sum(2),
        foot_contact=(force > 0).float(),
    )


def unsteadiness(view: View, base_height: float) -> Tensor:
    """(num_envs,) penalty on a base that bobs, rolls, pitches, tilts or is not at its height."""
    return (
        0.1 * view.velocity[:, 2].square()
        + 0.02 * view.turning[:, :2].square().sum(1)
        + view.gravity[:, :2].square().sum(1)
        + 5 * (view.height - base_height).square()
    )


def manner(view: View, change: Tensor, phase_s: Tensor, command: Tensor) -> Tensor:
    """(num_envs,) penalty on changes of the action, on leaving the default pose, and `footwork`.

    Args:
        change: (num_envs, num_joints) of the action since the env step before.
    """
    return (
        0.02 * change.square().sum(1)
        + 0.05 * view.offset.square().sum(1)
        + footwork(view, phase_s, command)
    )


def footwork(view: View, phase_s: Tensor, command: Tensor) -> Tensor:
    """(num_envs,) penalty on feet that slip, on moving feet that are not lifted, and, where the
    robot shall move, on feet that stay up or down for long.

    Args:
        phase_s: (num_envs, feet) how long each foot has been up, or down, s.
        command: (num_envs, 3)
    """
    speed = view.foot_speed_squared
    low = (FOOT_CLEARANCE - view.foot_height).clamp(min=0)
    late = (phase_s - FOOT_PHASE_S).clamp(0, FOOT_PHASE_S)
    late = late * (command != 0).any(1, keepdim=True)
    return (0.1 * view.foot_contact * speed + 20 * low.square() * speed.sqrt() + late).sum(1)
