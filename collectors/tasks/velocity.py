"""Velocity tracking on flat ground: a legged robot walks as it is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from collectors.env import EnvSpec, Observation
from collectors.physics.engine import Engine, Physics
from collectors.tasks.disturbances import MODEL_FIELDS, Disturbances, ModelSpread, draw_pushes
from collectors.tasks.mujoco_env import MujocoEnv, Outcome, Simulation, Task
from collectors.tasks.robot_model import Robot
from collectors.tasks.robots import load_robot
from collectors.tasks.symmetry import mirror_robot
from collectors.tasks.velocity_curriculum import (
    COMMAND_SCALE,
    COMMAND_START,
    EPISODE_LENGTH,
    PENALTY_SCALE,
    PENALTY_START,
    TRACKING,
    shard_states,
    steer,
)
from collectors.tasks.velocity_reward import View, look, manner, unsteadiness
from fastsac.core.mirror import Mirror, Reflection
from fastsac.core.shard_state import LocalState

COMMAND_LOW = (-0.6, -0.4, -0.8)
"""Forward m/s, leftward m/s and yaw rate rad/s, in the frame of the base."""
COMMAND_HIGH = (1.0, 0.4, 0.8)
COMMAND_STEPS = 500
"""Env steps until a new command, in evaluations."""
TRAINING_COMMAND_STEPS = 200
"""Likewise in training: more starts and changes of motion, where falls happen."""
STANDING_SHARE = 0.1
"""Share of commands that are zero."""
PUSH_STEPS = 250
"""Mean env steps between two pushes."""
PUSH_SPEED = 0.5
"""Largest change of the base's horizontal velocity by a push, m/s and direction."""


class VelocityTracking(Task):
    """A legged robot tracks a commanded planar velocity and yaw rate.

    Actor observation: base velocity, turning rate and gravity in the base's frame, the command,
    joint offsets and velocities, the last action; noisy if `observation_noise` is given. The
    critic sees it without noise, and base height, feet's heights, contacts and how long they have
    been up or down besides.
    Action: joint position targets around the default pose, bounded by the joints' limits.

    An episode terminates when the robot tilts over 60 degrees or its base sinks too low.

    Two curricula, steered for the whole fleet: the penalties on how the robot moves grow while
    episodes last, and the range of the commands grows while they are tracked. Both scales are
    computed by every shard from the same merged means and the same present scale, and the lowest
    live shard's answer is everyone's next scale.
    """

    def __init__(
        self,
        robot: Robot,
        *,
        num_envs: int,
        evaluation: bool,
        decimation: int,
        episode_length: int,
        training_episode_length: int,
        disturbances: Disturbances,
        curriculum: bool,
    ) -> None:
        """See `_velocity`, which has the defaults.

        Raises:
            ValueError: a number is outside its range.
        """
        for name, count in (
            ("decimation", decimation),
            ("episode_length", episode_length),
            ("training_episode_length", training_episode_length),
        ):
            if count < 1:
                raise ValueError(f"env.args.{name} is {count}: give at least 1")
        self._robot = robot
        self._command_steps = COMMAND_STEPS if evaluation else TRAINING_COMMAND_STEPS
        self._disturbances = Disturbances() if evaluation else disturbances
        self._curriculum = curriculum and not evaluation
        self.simulation = Simulation(
            model=robot.model,
            decimation=decimation,
            max_contacts=robot.max_contacts,
            max_constraints=robot.max_constraints,
            randomized=MODEL_FIELDS if self._disturbances.randomization else (),
        )
        joints, feet = len(robot.joint_names), len(robot.foot_names)
        actor_obs_dim = 12 + 3 * joints
        self.spec = EnvSpec(
            num_envs=num_envs,
            actor_obs_dim=actor_obs_dim,
            critic_obs_dim=actor_obs_dim + 1 + 3 * feet,
            action_low=robot.action_low,
            action_high=robot.action_high,
            control_period_s=decimation * robot.timestep,
            episode_length=(
                episode_length if evaluation else min(episode_length, training_episode_length)
            ),
            shard_states=shard_states() if curriculum else {},
            mirror=_mirror(robot),
        )
        self._penalty_scale = PENALTY_START if self._curriculum else 1.0
        self._command_scale = COMMAND_START if self._curriculum else 1.0
        self._means = {EPISODE_LENGTH: 0.0, TRACKING: 0.0}

    def allocate(self, physics: Physics, generator: torch.Generator) -> None:
        self._physics = physics
        self._generator = generator
        device = self._device = physics.qpos.device
        robot, n, joints = self._robot, self.spec.num_envs, len(self._robot.joint_names)
        feet = len(robot.foot_names)
        self._default_pose = robot.default_pose.to(device)
        self._default_ctrl = self._default_pose.to(physics.ctrl.dtype)
        self._action_scale = robot.action_scale.to(physics.ctrl)
        self._command_low = torch.tensor(COMMAND_LOW, device=device)
        self._command_high = torch.tensor(COMMAND_HIGH, device=device)
        self._noise_std = self._disturbances.observation_noise * torch.tensor(
            [0.1] * 3 + [0.2] * 3 + [0.05] * 3 + [0.0] * 3 + [0.01] * joints + [0.5] * joints,
            device=device,
        )
        self._push_speeds = self._disturbances.pushes * torch.full((2,), PUSH_SPEED, device=device)
        self._models = ModelSpread(
            robot.model, robot.foot_geoms, self._disturbances.randomization, device
        )
        self.memory = {
            "command": torch.zeros((n, 3), device=device),
            "action": torch.zeros((n, joints), device=device),
            "change": torch.zeros((n, joints), device=device),
            "steps": torch.zeros(n, dtype=torch.int64, device=device),
            "noise": torch.zeros((n, 12 + 2 * joints), device=device),
            "contact": torch.zeros((n, feet), device=device),
            "phase_s": torch.zeros((n, feet), device=device),
            # since the last report: finished episodes, their env steps; summed tracking, env steps
            "lasted": torch.zeros(2, dtype=torch.float64, device=device),
            "tracked": torch.zeros(2, dtype=torch.float64, device=device),
        }
        self._command = self.memory["command"]
        self._view: View | None = None

    def start(self, mask: Tensor) -> None:
        """At rest but for some noise, in the default stance, facing anywhere."""
        robot, n, joints = self._robot, len(mask), len(self._robot.joint_names)
        unit = self._rand(n, 1 + joints + 6 + joints)
        yaw, pose, twist, speed = (2 * unit - 1).split([1, joints, 6, joints], 1)
        half = 0.5 * math.pi * yaw
        zero = torch.zeros_like(yaw)
        qpos = torch.cat(
            [
                *(zero, zero, zero + robot.base_height, half.cos(), zero, zero, half.sin()),
                self._default_pose + 0.1 * pose,
            ],
            1,
        )
        self._physics.set_state(mask, qpos, torch.cat([0.2 * twist, 0.5 * speed], 1))
        self._command.copy_(torch.where(mask[:, None], self._draw_commands(n), self._command))
        for name in ("action", "change", "steps", "contact", "phase_s"):
            tensor = self.memory[name]
            tensor.masked_fill_(mask.reshape(-1, *[1] * (tensor.dim() - 1)), 0)
        if self._disturbances.randomization:
            self._physics.set_model(mask, self._models.draw(self._rand(n, 3)))
        self._view = None

    def act(self, action: Tensor) -> None:
        memory = self.memory
        torch.sub(action, memory["action"], out=memory["change"])
        memory["action"].copy_(action)
        self._physics.ctrl.copy_(action)
        self._physics.ctrl.mul_(self._action_scale).add_(self._default_ctrl)
        self._disturb()
        self._view = None

    def outcome(self, action: Tensor) -> Outcome:
        """Reward terms: exponential tracking and penalties as is common in legged locomotion
        (Rudin et al. 2022; scales are our own), over the control period just simulated."""
        memory, view, robot = self.memory, self._look(), self._robot
        self._count_phases()
        planar = (view.velocity[:, :2] - self._command[:, :2]).square().sum(1)
        turning = (view.turning[:, 2] - self._command[:, 2]).square()
        tracked = (-4 * planar).exp()
        terminated = (view.gravity[:, 2] > -0.5) | (view.height < robot.fall_height)
        good = tracked + 0.5 * (-4 * turning).exp()
        unsteady = unsteadiness(view, robot.base_height)
        walked = manner(view, memory["change"], memory["phase_s"], self._command)
        reward = 0.2 * (good - unsteady - self._penalty_scale * walked)
        reward = torch.where(terminated, -1.0, reward)

        memory["steps"] += 1
        # A broken env step, which the collector drops, counts for nothing.
        memory["tracked"] += torch.stack([tracked.nan_to_num(), tracked.isfinite()]).sum(1)
        info = {
            "velocity_error": planar.sqrt(),
            "yaw_rate_error": turning.sqrt(),
            "fallen": terminated.float(),
        }
        self._renew_commands()
        return Outcome(reward=reward, terminated=terminated, info=info)

    def observe(self) -> Observation:
        view, memory = self._look(), self.memory
        seen = torch.cat(
            [
                view.velocity,
                view.turning,
                view.gravity,
                self._command,
                view.offset,
                view.joint_velocity,
            ],
            1,
        )
        height = (view.height - self._robot.base_height)[:, None]
        feet = [view.foot_height, view.foot_contact, memory["phase_s"]]
        critic = torch.cat([seen, memory["action"], height, *feet], 1)
        if self._disturbances.observation_noise:
            seen = seen + memory["noise"]
        return Observation(torch.cat([seen, memory["action"]], 1), critic)

    def finish(self, done: Tensor, truncated: Tensor) -> None:
        del truncated
        steps = self.memory["steps"]
        self.memory["lasted"] += torch.where(
            done, torch.stack([torch.ones_like(steps), steps]), 0
        ).sum(1)

    def report(self) -> dict[str, LocalState]:
        if not self.spec.shard_states:
            return {}
        episodes, lasted = self.memory["lasted"].tolist()
        tracked, steps = self.memory["tracked"].tolist()
        self.memory["lasted"].zero_()
        self.memory["tracked"].zero_()
        elapsed = round(steps / self.spec.num_envs)
        lasting, following = self._means[EPISODE_LENGTH], self._means[TRACKING]
        penalty = steer(self._penalty_scale, lasting, 0.15, 0.5, PENALTY_START, elapsed)
        command = steer(self._command_scale, following, 0.5, 0.75, COMMAND_START, elapsed)
        return {
            EPISODE_LENGTH: LocalState(value=_vector(lasted), weight=episodes),
            TRACKING: LocalState(value=_vector(tracked), weight=steps),
            PENALTY_SCALE: LocalState(value=_vector(penalty)),
            COMMAND_SCALE: LocalState(value=_vector(command)),
        }

    def apply(self, state: Mapping[str, Tensor]) -> None:
        if not self._curriculum:
            return
        self._means = {
            EPISODE_LENGTH: float(state[EPISODE_LENGTH]) / self.spec.episode_length,
            TRACKING: float(state[TRACKING]),
        }
        self._penalty_scale = float(state[PENALTY_SCALE])
        self._command_scale = float(state[COMMAND_SCALE])

    def _look(self) -> View:
        if self._view is None:
            feet = len(self._robot.foot_names)
            self._view = look(self._physics, self._default_pose, feet)
        return self._view

    def _count_phases(self) -> None:
        """How long each foot has been up, or down, s."""
        memory, contact = self.memory, self._look().foot_contact
        same = contact == memory["contact"]
        memory["phase_s"].add_(self.spec.control_period_s).mul_(same)
        memory["contact"].copy_(contact)

    def _rand(self, *size: int) -> Tensor:
        return torch.rand(size, generator=self._generator, device=self._device)

    def _draw_commands(self, n: int) -> Tensor:
        unit = self._rand(n, 4)
        command = self._command_low + unit[:, :3] * (self._command_high - self._command_low)
        return torch.where(unit[:, 3:] < STANDING_SHARE, 0.0, self._command_scale * command)

    def _renew_commands(self) -> None:
        due = self.memory["steps"] % self._command_steps == 0
        if self._device.type != "cpu" or bool(due.any()):
            drawn = self._draw_commands(len(due))
            self._command.copy_(torch.where(due[:, None], drawn, self._command))

    def _disturb(self) -> None:
        if self._disturbances.observation_noise:
            noise = self.memory["noise"]
            noise.normal_(generator=self._generator).mul_(self._noise_std)
        if self._disturbances.pushes:
            unit = self._rand(self.spec.num_envs, 3)
            kick = draw_pushes(self._push_speeds, PUSH_STEPS, unit)
            self._physics.qvel[:, :2] += kick.to(self._physics.qvel.dtype)


def _mirror(robot: Robot) -> Mirror | None:
    """The task's symmetry, in the order of `VelocityTracking.observe`."""
    sides = mirror_robot(robot)
    if sides is None:
        return None
    joints, feet = sides
    vector, axis = Reflection.of_signs(1, -1, 1), Reflection.of_signs(-1, 1, -1)
    command, height = Reflection.of_signs(1, -1, -1), Reflection.of_signs(1)
    actor = [vector, axis, vector, command, joints, joints, joints]
    return Mirror(
        actor_obs=Reflection.join(actor),
        critic_obs=Reflection.join([*actor, height, feet, feet, feet]),
        action=joints,
    )


def _vector(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _velocity(
    robot: str,
    *,
    num_envs: int,
    device: torch.device,
    evaluation: bool,
    decimation: int = 4,
    episode_length: int = 1000,
    training_episode_length: int = 400,
    randomization: float = 0.0,
    pushes: float = 0.0,
    observation_noise: float = 0.0,
    curriculum: bool = True,
    physics: Engine = "auto",
    max_contacts: int | None = None,
    max_constraints: int | None = None,
) -> MujocoEnv:
    """Make an env shard.

    Args:
        decimation: physics steps per env step.
        episode_length: env steps until truncation.
        training_episode_length: at most so many in training, whose episodes bootstrap there.
        randomization: scale, in [0, 1], of the differences between the worlds' masses, frictions
            and gains; training only, like the next two.
        pushes: scale of sudden changes of the base's velocity.
        observation_noise: scale of the noise on the actor's observation.
        curriculum: whether penalties and commands begin small.
    """
    task = VelocityTracking(
        load_robot(robot),
        num_envs=num_envs,
        evaluation=evaluation,
        decimation=decimation,
        episode_length=episode_length,
        training_episode_length=training_episode_length,
        disturbances=Disturbances(
            randomization=randomization, pushes=pushes, observation_noise=observation_noise
        ),
        curriculum=curriculum,
    )
    return MujocoEnv(
        task,
        device=device,
        evaluation=evaluation,
        physics=physics,
        max_contacts=max_contacts,
        max_constraints=max_constraints,
    )


def quadruped_velocity(**args: Any) -> MujocoEnv:
    """Velocity tracking with the small quadruped that comes along."""
    return _velocity("quadruped", **args)


def go1_velocity(**args: Any) -> MujocoEnv:
    """Velocity tracking with the Unitree Go1 (extra `robots`)."""
    return _velocity("go1", **args)


def g1_velocity(**args: Any) -> MujocoEnv:
    """Velocity tracking with the Unitree G1 humanoid, 29 joints (extra `robots`)."""
    return _velocity("g1", **args)


def menagerie_velocity(*, robot: str, **args: Any) -> MujocoEnv:
    """Velocity tracking with a legged robot of MENAGERIE_ROOT, named by `env.args.robot`."""
    return _velocity(robot, **args)
