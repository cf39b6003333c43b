"""Velocity tracking on flat ground: a legged robot walks as it is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collectors.env import EnvSpec, Observation
from collectors.physics.engine import Engine, Physics
from collectors.tasks.mujoco_env import MujocoEnv, Outcome, Simulation, Task
from collectors.tasks.robots import Robot, load_robot
from collectors.tasks.symmetry import mirror_robot
from fastsac.core.mirror import Mirror, Reflection
from fastsac.core.shard_state import LocalState, MergeRule

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

EPISODE_LENGTH = "episode_length"
"""Shard state: mean env steps of finished episodes."""
TRACKING = "tracking"
"""Shard state: mean of exp(-|planar velocity error|^2 / 0.25) per env step, in [0, 1]."""
PENALTY_SCALE = "penalty_scale"
"""Shard state: factor of the penalties on how the robot moves, in [PENALTY_START, 1]."""
COMMAND_SCALE = "command_scale"
"""Shard state: share of the command range in use, in [COMMAND_START, 1]."""
PENALTY_START = 0.3
COMMAND_START = 0.5
EPISODE_WINDOW = 64
"""Episodes of the whole fleet that the mean episode length remembers."""
TRACKING_WINDOW = 16_000
"""Env steps of the whole fleet that the mean tracking remembers."""
CURRICULUM_RATE = 2e-3
"""Relative change of the two scales per vector step."""


@dataclass
class _View:
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
        randomization: float,
        pushes: float,
        observation_noise: float,
        curriculum: bool,
    ) -> None:
        """See `_velocity`, which has the defaults.

        Raises:
            ValueError: a number is outside its range.
        """
        for name, value in (
            ("randomization", randomization),
            ("pushes", pushes),
            ("observation_noise", observation_noise),
        ):
            if not 0 <= value <= 1:
                raise ValueError(f"env.args.{name} is {value:g}: give a scale in [0, 1]")
        for name, count in (
            ("decimation", decimation),
            ("episode_length", episode_length),
            ("training_episode_length", training_episode_length),
        ):
            if count < 1:
                raise ValueError(f"env.args.{name} is {count}: give at least 1")
        self._robot = robot
        self._command_steps = COMMAND_STEPS if evaluation else TRAINING_COMMAND_STEPS
        self._randomization = 0.0 if evaluation else randomization
        self._pushes = 0.0 if evaluation else pushes
        self._noise = 0.0 if evaluation else observation_noise
        self._curriculum = curriculum and not evaluation
        self.simulation = Simulation(
            model=robot.model,
            decimation=decimation,
            max_contacts=robot.max_contacts,
            max_constraints=robot.max_constraints,
            randomized=_RANDOMIZED if self._randomization else (),
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
            shard_states=_shard_states() if curriculum else {},
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
        self._noise_std = self._noise * torch.tensor(
            [0.1] * 3 + [0.2] * 3 + [0.05] * 3 + [0.0] * 3 + [0.01] * joints + [0.5] * joints,
            device=device,
        )
        self._nominal = {
            name: torch.as_tensor(getattr(robot.model, name), dtype=torch.float32, device=device)
            for name in _RANDOMIZED
        }
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
        self._view: _View | None = None

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
        if self._randomization:
            self._physics.set_model(mask, self._draw_models(n))
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
        upright = (
            0.1 * view.velocity[:, 2].square()
            + 0.02 * view.turning[:, :2].square().sum(1)
            + view.gravity[:, :2].square().sum(1)
            + 5 * (view.height - robot.base_height).square()
        )
        manner = (
            0.02 * memory["change"].square().sum(1)
            + 0.05 * view.offset.square().sum(1)
            + self._footwork()
        )
        terminated = (view.gravity[:, 2] > -0.5) | (view.height < robot.fall_height)
        good = tracked + 0.5 * (-4 * turning).exp()
        reward = 0.2 * (good - upright - self._penalty_scale * manner)
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
        if self._noise:
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
        penalty = _steer(self._penalty_scale, lasting, 0.15, 0.5, PENALTY_START, elapsed)
        command = _steer(self._command_scale, following, 0.5, 0.75, COMMAND_START, elapsed)
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

    def _look(self) -> _View:
        if self._view is None:
            qpos, qvel = self._physics.qpos.float(), self._physics.qvel.float()
            w, x, y, z = qpos[:, 3:7].unbind(1)
            axis = qpos[:, 4:7]
            velocity = qvel[:, :3]
            across = torch.linalg.cross(axis, velocity)
            velocity = velocity + 2 * (torch.linalg.cross(axis, across) - w[:, None] * across)
            feet = len(self._robot.foot_names)
            position, moving, force = self._physics.sensordata.float().split(
                [3 * feet, 3 * feet, feet], 1
            )
            gravity = [2 * (w * y - x * z), -2 * (w * x + y * z), 2 * (x * x + y * y) - 1]
            self._view = _View(
                height=qpos[:, 2],
                gravity=torch.stack(gravity, 1),
                velocity=velocity,
                turning=qvel[:, 3:6],
                offset=qpos[:, 7:] - self._default_pose,
                joint_velocity=qvel[:, 6:],
                foot_height=position[:, 2::3],
                foot_speed_squared=moving.reshape(-1, feet, 3)[:, :, :2].square().sum(2),
                foot_contact=(force > 0).float(),
            )
        return self._view

    def _count_phases(self) -> None:
        """How long each foot has been up, or down, s."""
        memory, contact = self.memory, self._look().foot_contact
        same = contact == memory["contact"]
        memory["phase_s"].add_(self.spec.control_period_s).mul_(same)
        memory["contact"].copy_(contact)

    def _footwork(self) -> Tensor:
        """(num_envs,) penalty on feet that slip, on moving feet that are not lifted, and, where
        the robot shall move, on feet that stay up or down for long."""
        view = self._look()
        speed = view.foot_speed_squared
        low = (FOOT_CLEARANCE - view.foot_height).clamp(min=0)
        late = (self.memory["phase_s"] - FOOT_PHASE_S).clamp(0, FOOT_PHASE_S)
        late = late * (self._command != 0).any(1, keepdim=True)
        return (0.1 * view.foot_contact * speed + 20 * low.square() * speed.sqrt() + late).sum(1)

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
        if self._noise:
            noise = self.memory["noise"]
            noise.normal_(generator=self._generator).mul_(self._noise_std)
        if self._pushes:
            unit = self._rand(self.spec.num_envs, 3)
            kick = self._pushes * PUSH_SPEED * (2 * unit[:, :2] - 1)
            kick = torch.where(unit[:, 2:] < 1 / PUSH_STEPS, kick, 0.0)
            self._physics.qvel[:, :2] += kick.to(self._physics.qvel.dtype)

    def _draw_models(self, n: int) -> dict[str, Tensor]:
        """Base mass +-20 %, friction of the feet +-40 %, actuator gains +-10 %, at scale 1."""
        robot = self._robot
        spread = self._randomization * (2 * self._rand(n, 3) - 1)
        mass, friction, gains = (
            1 + 0.2 * spread[:, 0],
            1 + 0.4 * spread[:, 1],
            1 + 0.1 * spread[:, 2],
        )
        fields = {
            name: nominal.expand(n, *nominal.shape).clone()
            for name, nominal in self._nominal.items()
        }
        base = robot.base_body
        extra = (mass - 1) * fields["body_mass"][:, base]
        fields["body_mass"][:, base] *= mass
        fields["body_inertia"][:, base] *= mass[:, None]
        fields["body_subtreemass"][:, : base + 1] += extra[:, None]
        fields["geom_friction"][:, list(robot.foot_geoms), 0] *= friction[:, None]
        fields["actuator_gainprm"][:, :, 0] *= gains[:, None]
        fields["actuator_biasprm"][:, :, 1] *= gains[:, None]
        return fields


FOOT_CLEARANCE = 0.06
"""Height of a foot's site below which a moving foot drags, m."""
FOOT_PHASE_S = 0.4
"""Time up or down after which a foot is late, s."""
_RANDOMIZED = (
    *("body_mass", "body_inertia", "body_subtreemass"),
    *("geom_friction", "actuator_gainprm", "actuator_biasprm"),
)


def _shard_states() -> dict[str, MergeRule]:
    def mean(window: float) -> MergeRule:
        return MergeRule(kind="weighted_mean", size=1, window=window)

    return {
        EPISODE_LENGTH: mean(EPISODE_WINDOW),
        TRACKING: mean(TRACKING_WINDOW),
        PENALTY_SCALE: MergeRule(kind="resolve_one", size=1, initial=PENALTY_START),
        COMMAND_SCALE: MergeRule(kind="resolve_one", size=1, initial=COMMAND_START),
    }


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


def _steer(scale: float, mean: float, low: float, high: float, start: float, steps: int) -> float:
    """`scale` after `steps` env steps: up where `mean` is over `high`, down where under `low`."""
    direction = (mean > high) - (mean < low)
    return min(1.0, max(start, scale * (1 + CURRICULUM_RATE * direction) ** steps))


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
        randomization=randomization,
        pushes=pushes,
        observation_noise=observation_noise,
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
