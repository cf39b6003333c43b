# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""What is in a motion file, and whether it fits a robot."""

from __future__ import annotations

import torch
from torch import Tensor

from collectors.tasks.kinematics import Kinematics
from collectors.tasks.motion import Motion, fit_motion
from collectors.tasks.wbt_robots import load_tracking_robot


def describe(motion: Motion) -> dict[str, str]:
    """Names and values of a motion on its own.

    The two last rows tell how far the velocities are from central differences of the places,
    root mean square; in a sound file they are small against the velocities.
    """
    frames, joints = motion.joint_pos.shape
    bodies = motion.body_pos.shape[1]
    height = motion.body_pos[:, 0, 2]
    rows = {
        "frames": f"{frames:,} at {motion.fps:g} Hz, {(frames - 1) / motion.fps:.2f} s",
        "joints": f"{joints}: {_listed(motion.joint_names)}",
        "bodies": f"{bodies}: {_listed(motion.body_names)}",
        "height of the first body": f"{height.min():.3f} to {height.max():.3f} m",
        "fastest joint": f"{motion.joint_vel.abs().max():.2f} rad/s",
        "fastest body": f"{motion.body_lin_vel.norm(dim=-1).max():.2f} m/s",
    }
    if frames > 2:
        joint = _mismatch(motion.joint_pos, motion.joint_vel, motion.fps)
        body = _mismatch(motion.body_pos, motion.body_lin_vel, motion.fps)
        rows["joint velocities against differences"] = f"{joint:.3f} rad/s"
        rows["body velocities against differences"] = f"{body:.3f} m/s"
    return rows


def describe_fit(motion: Motion, robot_name: str) -> dict[str, str]:
    """How a motion fits a robot at its control rate.

    Raises:
        ValueError: it does not fit, or there is no such robot.
    """
    robot = load_tracking_robot(robot_name)
    clip = fit_motion(
        motion,
        joint_names=robot.joint_names,
        body_names=robot.body_names,
        fps=1 / (robot.timestep * robot.decimation),
        model_bodies=robot.model_bodies,
    )
    low, high = torch.from_numpy(robot.model.jnt_range[1:]).float().unbind(1)
    beyond = torch.maximum(low - clip.joint_pos, clip.joint_pos - high).amax(0)
    worst = int(beyond.argmax())
    root = robot.body_names.index(robot.model_bodies[0])
    qpos = torch.cat([clip.body_pos[:, root], clip.body_quat[:, root], clip.joint_pos], 1)
    forward = Kinematics(robot.model, robot.body_names, torch.device("cpu"))
    places = forward(qpos, torch.zeros(len(qpos), robot.model.nv)).position
    off = (places - clip.body_pos).norm(dim=-1).amax(0)
    farthest = int(off.argmax())
    limits = f"exceeded by {beyond[worst]:.3f} rad at most, {robot.joint_names[worst]}"
    return {
        "env steps": f"{len(clip.joint_pos):,} at {clip.fps:g} Hz",
        "joint limits": limits if beyond[worst] > 0 else "kept",
        "bodies against the robot's kinematics": (
            f"{off[farthest]:.4f} m off at most, {robot.body_names[farthest]}"
        ),
    }


def _listed(names: tuple[str, ...] | None) -> str:
    return "not named" if names is None else ", ".join(names)


def _mismatch(places: Tensor, velocities: Tensor, fps: float) -> float:
    differences = (places[2:] - places[:-2]) * (fps / 2)
    return float((differences - velocities[1:-1]).square().mean().sqrt())
