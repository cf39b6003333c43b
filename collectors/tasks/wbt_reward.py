"""How far a robot is from a motion, and what that is worth.

Terms, weights and thresholds are those of BeyondMimic (Liao et al. 2025, arXiv 2508.08241) as in
its published code, `whole_body_tracking`, and in mjlab 1.6's tracking task.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from collectors.tasks.kinematics import Bodies, rotate, rotation_angle, yaw_matrix

ANCHOR_WEIGHT = 0.5
"""Of the reward terms of the anchor's position and of its orientation, per second."""
BODY_WEIGHT = 1.0
"""Likewise of the bodies' positions, orientations, velocities and turning rates."""
ACTION_RATE_WEIGHT = 0.1
"""Likewise of the penalty on the squared change of the action."""
LIMIT_WEIGHT = 10.0
"""Likewise on joint angles beyond the model's limits, rad."""
POSITION_SIGMA = 0.3
"""m"""
ROTATION_SIGMA = 0.4
"""rad"""
VELOCITY_SIGMA = 1.0
"""m/s"""
TURNING_SIGMA = 3.14
"""rad/s"""
MAX_REWARD = 2 * ANCHOR_WEIGHT + 4 * BODY_WEIGHT
"""Per second."""

MAX_HEIGHT_ERROR = 0.25
"""m, of the anchor and of end effectors, beyond which an episode terminates."""
MAX_TILT_ERROR = 0.8
"""Likewise of the vertical part of gravity's direction in the anchor's frame."""


@dataclass(frozen=True)
class Errors:
    """Of a robot with K tracked bodies."""

    anchor_position: Tensor
    """(num_envs,) m"""
    anchor_rotation: Tensor
    """(num_envs,) rad"""
    anchor_height: Tensor
    """(num_envs,) m, robot less motion"""
    anchor_tilt: Tensor
    """(num_envs,) of the cosine between the anchor's z axis and the vertical, likewise"""
    offset: Tensor
    """(num_envs, K, 3) m, from the motion put at the robot's anchor, see `compare`"""
    rotation: Tensor
    """(num_envs, K) rad, likewise"""
    velocity: Tensor
    """(num_envs, K, 3) m/s"""
    turning: Tensor
    """(num_envs, K, 3) rad/s"""


def compare(robot: Bodies, motion: Bodies, anchor: int) -> Errors:
    """Errors of `robot`.

    Positions and orientations of bodies are compared with those of the motion put at the robot's
    anchor: moved along the ground and turned about the vertical, with its own height and tilt.

    Args:
        anchor: index of the body that stands for the whole.
    """
    here, there = robot.position[:, anchor], motion.position[:, anchor]
    apart = robot.rotation[:, anchor] @ motion.rotation[:, anchor].transpose(1, 2)
    yaw = yaw_matrix(apart)[:, None]
    foot = torch.cat([here[:, :2], there[:, 2:]], 1)
    position = foot[:, None] + rotate(yaw, motion.position - there[:, None])
    rotation = yaw @ motion.rotation
    return Errors(
        anchor_position=(here - there).norm(dim=1),
        anchor_rotation=rotation_angle(apart),
        anchor_height=here[:, 2] - there[:, 2],
        anchor_tilt=robot.rotation[:, anchor, 2, 2] - motion.rotation[:, anchor, 2, 2],
        offset=robot.position - position,
        rotation=rotation_angle(robot.rotation @ rotation.transpose(-1, -2)),
        velocity=robot.velocity - motion.velocity,
        turning=robot.turning - motion.turning,
    )


def likeness(errors: Errors) -> Tensor:
    """Sum of the reward's positive terms, (num_envs,) in [0, MAX_REWARD] per second."""

    def near(squared: Tensor, sigma: float) -> Tensor:
        return (-squared / sigma**2).exp()

    anchor = near(errors.anchor_position.square(), POSITION_SIGMA)
    anchor = anchor + near(errors.anchor_rotation.square(), ROTATION_SIGMA)
    bodies = (
        near(errors.offset.square().sum(2).mean(1), POSITION_SIGMA)
        + near(errors.rotation.square().mean(1), ROTATION_SIGMA)
        + near(errors.velocity.square().sum(2).mean(1), VELOCITY_SIGMA)
        + near(errors.turning.square().sum(2).mean(1), TURNING_SIGMA)
    )
    return ANCHOR_WEIGHT * anchor + BODY_WEIGHT * bodies


def penalty(change: Tensor, joint_pos: Tensor, limits: Tensor) -> Tensor:
    """What is taken off, (num_envs,) per second.

    Args:
        change: (num_envs, num_joints) of the action since the env step before.
        joint_pos: (num_envs, num_joints) rad.
        limits: (num_joints, 2) rad, of the model, where the published code takes off from 90 % of
            the range on: a clip with straight knees then keeps its full reward.
    """
    low, high = limits.unbind(1)
    beyond = (low - joint_pos).clamp(min=0) + (joint_pos - high).clamp(min=0)
    return ACTION_RATE_WEIGHT * change.square().sum(1) + LIMIT_WEIGHT * beyond.sum(1)


def failed(errors: Errors, end_effectors: Tensor) -> Tensor:
    """Whether an episode terminates, (num_envs,) bool.

    Args:
        end_effectors: indices of bodies whose height counts besides the anchor's.
    """
    heights = errors.offset.index_select(1, end_effectors)[..., 2].abs()
    return (
        (errors.anchor_height.abs() > MAX_HEIGHT_ERROR)
        | (errors.anchor_tilt.abs() > MAX_TILT_ERROR)
        | (heights > MAX_HEIGHT_ERROR).any(1)
    )
