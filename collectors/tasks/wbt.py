# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""Whole-body tracking: a robot does as a clip of motion shows, from any of its frames on.

Observations, rewards, terminations and noise of starts are those of BeyondMimic (Liao et al. 2025,
arXiv 2508.08241) as in its published code, `whole_body_tracking`, and mjlab 1.6's tracking task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from collectors.curriculum.bin_sampler import FAILURES, BinSampler, Form, Mode, Sampling
from collectors.env import EnvSpec, Observation
from collectors.physics.engine import Engine, Physics
from collectors.tasks.kinematics import (
    Bodies,
    Kinematics,
    quat_product,
    quat_to_matrix,
    rotate,
)
from collectors.tasks.motion import Motion, fit_motion, load_motion
from collectors.tasks.mujoco_env import MujocoEnv, Outcome, Simulation, Task
from collectors.tasks.wbt_reward import compare, failed, likeness, penalty
from collectors.tasks.wbt_robots import TrackingRobot, default_motion, load_tracking_robot
from fastsac.core.shard_state import LocalState

POSE_NOISE = (0.05, 0.05, 0.01, 0.1, 0.1, 0.2)
"""Half widths at starts: the base's x, y, z in m, its roll, pitch and yaw in rad."""
TWIST_NOISE = (0.5, 0.5, 0.2, 0.52, 0.52, 0.78)
"""Likewise of its velocity in m/s and turning rate in rad/s, both in the world's frame."""
JOINT_NOISE = 0.1
"""rad, likewise of joint angles."""


@dataclass(frozen=True)
class _Clip:
    """A motion of T frames on the device, as `Motion` has it, with rotation matrices."""

    joint_pos: Tensor
    """(T, J)"""
    joint_vel: Tensor
    bodies: Bodies
    """(T, K, ...)"""

    @classmethod
    def of(cls, motion: Motion, device: torch.device) -> _Clip:
        return cls(
            motion.joint_pos.to(device),
            motion.joint_vel.to(device),
            Bodies(
                motion.body_pos.to(device),
                quat_to_matrix(motion.body_quat.to(device)),
                motion.body_lin_vel.to(device),
                motion.body_ang_vel.to(device),
            ),
        )

    def at(self, frame: Tensor) -> _Clip:
        """(num_envs, ...) of frames (num_envs,)."""
        return _Clip(self.joint_pos[frame], self.joint_vel[frame], self.bodies.at(frame))


class WholeBodyTracking(Task):
    """A robot follows a motion, which goes on by a frame every env step.

    Actor observation: joint angles and velocities of the next frame; position and orientation (two
    columns of the rotation matrix, row by row) of its anchor in the robot's anchor's frame; the
    base's velocity and turning rate in its own frame; joint offsets from the default pose, joint
    velocities, the last action. The critic also sees positions and orientations of the tracked
    bodies in the anchor's frame.
    Action: joint position targets around the default pose, bounded by the joints' limits.

    An episode starts at a frame that `Sampling` chooses, in the motion's state plus noise. It is
    truncated at the clip's last frame, and terminates when the anchor's height, its tilt or the
    height of an end effector is too far off. Failures by bin of the clip are shared in the fleet.

    In evaluations there is no noise, and start frames are spread evenly over the clip.
    """

    def __init__(
        self,
        robot: TrackingRobot,
        motion: Motion,
        *,
        num_envs: int,
        evaluation: bool,
        decimation: int,
        episode_length: int,
        start_noise: float,
        evaluation_start: Literal["uniform", "start"],
        sampling: Sampling,
    ) -> None:
        """`motion` is that of the robot's joints and bodies, a frame per env step. See `_wbt`.

        Raises:
            ValueError: a number is outside its range, or the motion is too short.
        """
        if not 0 <= start_noise <= 1:
            raise ValueError(f"env.args.start_noise is {start_noise:g}: give a scale in [0, 1]")
        if episode_length < 1:
            raise ValueError(f"env.args.episode_length is {episode_length}: give at least 1")
        if evaluation_start not in ("uniform", "start"):
            raise ValueError(
                f"env.args.evaluation_start is {evaluation_start!r}: give uniform or start"
            )
        self._robot = robot
        self._motion = motion
        self._evaluation = evaluation
        self._evaluation_start = evaluation_start
        self._noise = 0.0 if evaluation else start_noise
        self._last_frame = len(motion.joint_pos) - 1
        self._sampler = BinSampler(sampling, num_frames=len(motion.joint_pos), fps=motion.fps)
        self._anchor = robot.body_names.index(robot.anchor)
        self._base = robot.body_names.index(robot.model.body(1).name)
        self.simulation = Simulation(
            model=robot.model,
            decimation=decimation,
            max_contacts=robot.max_contacts,
            max_constraints=robot.max_constraints,
        )
        joints, bodies = len(robot.joint_names), len(robot.body_names)
        actor_obs_dim = 5 * joints + 15
        self.spec = EnvSpec(
            num_envs=num_envs,
            actor_obs_dim=actor_obs_dim,
            critic_obs_dim=actor_obs_dim + 9 * bodies,
            action_low=robot.action_low,
            action_high=robot.action_high,
            control_period_s=decimation * robot.timestep,
            episode_length=(
                self._last_frame if evaluation else min(self._last_frame, episode_length)
            ),
            shard_states=self._sampler.shard_states,
        )

    def allocate(self, physics: Physics, generator: torch.Generator) -> None:
        self._physics = physics
        self._generator = generator
        device = self._device = physics.qpos.device
        robot, n, joints = self._robot, self.spec.num_envs, len(self._robot.joint_names)
        self._kinematics = Kinematics(robot.model, robot.body_names, device)
        self._clip = _Clip.of(self._motion, device)
        self._base_quat = self._motion.body_quat[:, self._base].to(device)
        self._default_pose = robot.default_pose.to(device)
        self._default_ctrl = self._default_pose.to(physics.ctrl.dtype)
        self._action_scale = robot.action_scale.to(physics.ctrl)
        self._limits = torch.tensor(robot.model.jnt_range[1:], dtype=torch.float32, device=device)
        noise = [*POSE_NOISE, *TWIST_NOISE, *[JOINT_NOISE] * joints]
        self._start_noise = self._noise * torch.tensor(noise, device=device)
        self._end_effectors = torch.tensor(
            [robot.body_names.index(name) for name in robot.end_effectors], device=device
        )
        self._sampler.allocate(device)
        self.memory = {
            "frame": torch.zeros(n, dtype=torch.int64, device=device),
            "start_frame": torch.zeros(n, dtype=torch.int64, device=device),
            "action": torch.zeros((n, joints), device=device),
            "change": torch.zeros((n, joints), device=device),
            **self._sampler.memory,
        }
        self._bodies: Bodies | None = None

    def start(self, mask: Tensor) -> None:
        memory, base = self.memory, self._base
        frame = self._draw_frames(len(mask))
        reference, bodies = self._clip.at(frame), self._clip.bodies.at(frame)
        unit = torch.rand(
            (len(mask), len(self._start_noise)), generator=self._generator, device=self._device
        )
        joints = len(self._default_pose)
        shift, turn, twist, bend = (self._start_noise * (2 * unit - 1)).split([3, 3, 6, joints], 1)
        # Small rotations: half the rotation vector beside 1 is the quaternion.
        turn = torch.cat([torch.ones_like(turn[:, :1]), turn / 2], 1)
        quat = quat_product(turn / turn.norm(dim=1, keepdim=True), self._base_quat[frame])
        turning = bodies.turning[:, base] + twist[:, 3:]
        local = rotate(quat_to_matrix(quat).transpose(1, 2), turning)
        low, high = self._limits.unbind(1)
        pose = (reference.joint_pos + bend).clamp(low, high)
        self._physics.set_state(
            mask,
            torch.cat([bodies.position[:, base] + shift, quat, pose], 1),
            torch.cat([bodies.velocity[:, base] + twist[:, :3], local, reference.joint_vel], 1),
        )
        for name in ("frame", "start_frame"):
            memory[name].copy_(torch.where(mask, frame, memory[name]))
        for name in ("action", "change"):
            memory[name].masked_fill_(mask[:, None], 0)
        self._bodies = None

    def act(self, action: Tensor) -> None:
        memory = self.memory
        torch.sub(action, memory["action"], out=memory["change"])
        memory["action"].copy_(action)
        self._physics.ctrl.copy_(action)
        self._physics.ctrl.mul_(self._action_scale).add_(self._default_ctrl)
        memory["frame"] += 1
        self._bodies = None

    def outcome(self, action: Tensor) -> Outcome:
        """Reward per control period, at most `MAX_REWARD` times its length in s."""
        del action
        frame, joint_pos = self.memory["frame"], self._physics.qpos[:, 7:].float()
        reference = self._clip.at(frame)
        errors = compare(self._look(), reference.bodies, self._anchor)
        cost = penalty(self.memory["change"], joint_pos, self._limits)
        reward = self.spec.control_period_s * (likeness(errors) - cost)
        terminated = failed(errors, self._end_effectors)
        self._sampler.count(frame, terminated)
        info = {
            "anchor_position_error": errors.anchor_position,
            "anchor_rotation_error": errors.anchor_rotation,
            "body_position_error": errors.offset.norm(dim=-1).mean(1),
            "body_rotation_error": errors.rotation.mean(1),
            "joint_position_error": (reference.joint_pos - joint_pos).abs().mean(1),
            "failed": terminated.float(),
        }
        if self._evaluation:
            info |= self._survival()
        return Outcome(
            reward=reward,
            terminated=terminated,
            truncated=frame >= self._last_frame,
            info=info,
        )

    def observe(self) -> Observation:
        qpos, qvel = self._physics.qpos.float(), self._physics.qvel.float()
        bodies, anchor = self._look(), self._anchor
        following = self._clip.at((self.memory["frame"] + 1).clamp(max=self._last_frame))
        to_anchor = bodies.rotation[:, anchor].transpose(1, 2)
        to_base = bodies.rotation[:, self._base].transpose(1, 2)
        aim = following.bodies
        actor = [
            following.joint_pos,
            following.joint_vel,
            rotate(to_anchor, aim.position[:, anchor] - bodies.position[:, anchor]),
            (to_anchor @ aim.rotation[:, anchor])[..., :2].flatten(1),
            rotate(to_base, qvel[:, :3]),
            qvel[:, 3:6],
            qpos[:, 7:] - self._default_pose,
            qvel[:, 6:],
            self.memory["action"],
        ]
        apart = bodies.position - bodies.position[:, anchor, None]
        critic = [
            *actor,
            rotate(to_anchor[:, None], apart).flatten(1),
            (to_anchor[:, None] @ bodies.rotation)[..., :2].flatten(1),
        ]
        return Observation(torch.cat(actor, 1), torch.cat(critic, 1))

    def report(self) -> dict[str, LocalState]:
        return self._sampler.report()

    def apply(self, state: Mapping[str, Tensor]) -> None:
        self._sampler.apply(state[FAILURES])

    def _look(self) -> Bodies:
        if self._bodies is None:
            qpos, qvel = self._physics.qpos.float(), self._physics.qvel.float()
            self._bodies = self._kinematics(qpos, qvel)
        return self._bodies

    def _draw_frames(self, n: int) -> Tensor:
        unit = torch.rand(
            (n, 2), dtype=torch.float64, generator=self._generator, device=self._device
        )
        if not self._evaluation:
            return self._sampler.draw(unit)
        if self._evaluation_start == "start":
            return torch.zeros_like(unit[:, 0], dtype=torch.int64)
        place = torch.arange(n, dtype=torch.float64, device=self._device)
        return ((place + unit[:, 0]) / n * self._last_frame).long().clamp(max=self._last_frame - 1)

    def _survival(self) -> dict[str, Tensor]:
        """`start_frame`, and `clip_survived`, whose mean over an episode is the share of the rest
        of the clip that the episode lasted: 1 + 3 + ... + (2 n - 1) is n^2."""
        frame, start = self.memory["frame"], self.memory["start_frame"]
        survived = (2 * (frame - start) - 1) / (self._last_frame - start)
        return {"start_frame": start.double(), "clip_survived": survived}


def _wbt(
    robot: str,
    *,
    num_envs: int,
    device: torch.device,
    evaluation: bool,
    motion: str | None = None,
    decimation: int | None = None,
    episode_length: int = 500,
    start_noise: float = 1.0,
    sampling: Mode = "adaptive",
    form: Form = "mixture",
    rate: float = 0.001,
    exploration: float = 0.1,
    kernel_size: int = 1,
    kernel_decay: float = 0.8,
    initial_bins: Sequence[int] | None = None,
    initial_steps: int = 0,
    evaluation_start: Literal["uniform", "start"] = "uniform",
    physics: Engine = "auto",
    max_contacts: int | None = None,
    max_constraints: int | None = None,
) -> MujocoEnv:
    """Make an env shard.

    Args:
        motion: npz file of the clip; None for the one that comes with the robot.
        decimation: physics steps per env step; None for the robot's own.
        episode_length: env steps until truncation in training; evaluations last to the clip's end.
        start_noise: scale, in [0, 1], of the noise on start states; training only.
        sampling: see `Sampling`, as are `form` to `initial_steps`; training only.
        evaluation_start: where episodes of evaluations start: `uniform`, spread over the clip, or
            `start`, at its first frame.
    Raises:
        ValueError: a value is not allowed, or the motion is missing or does not fit the robot.
    """
    tracking = load_tracking_robot(robot)
    path = default_motion(robot) if motion is None else Path(motion)
    if path is None:
        raise ValueError(f"{robot}-wbt comes without a motion: set env.args.motion to an npz file")
    steps = tracking.decimation if decimation is None else decimation
    if steps < 1:
        raise ValueError(f"env.args.decimation is {steps}: give at least 1")
    clip = fit_motion(
        load_motion(path),
        joint_names=tracking.joint_names,
        body_names=tracking.body_names,
        fps=1 / (steps * tracking.timestep),
    )
    task = WholeBodyTracking(
        tracking,
        clip,
        num_envs=num_envs,
        evaluation=evaluation,
        decimation=steps,
        episode_length=episode_length,
        start_noise=start_noise,
        evaluation_start=evaluation_start,
        sampling=Sampling(
            sampling=sampling,
            form=form,
            rate=rate,
            exploration=exploration,
            kernel_size=kernel_size,
            kernel_decay=kernel_decay,
            initial_bins=None if initial_bins is None else tuple(initial_bins),
            initial_steps=initial_steps,
        ),
    )
    return MujocoEnv(
        task,
        device=device,
        evaluation=evaluation,
        physics=physics,
        max_contacts=max_contacts,
        max_constraints=max_constraints,
    )


def humanoid_wbt(**args: Any) -> MujocoEnv:
    """Whole-body tracking with the small humanoid that comes along, and its clip."""
    return _wbt("humanoid", **args)


def g1_wbt(**args: Any) -> MujocoEnv:
    """Whole-body tracking with the Unitree G1 humanoid (extra `robots`) of `env.args.motion`."""
    return _wbt("g1", **args)
