# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""Robots in a vertical plane, in the spirit of the DeepMind Control Suite (Tassa et al. 2018): the
suite's forms of reward and its episodes of 1000 env steps without termination, on models of our
own. Rewards lie in [0, 1]."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Required, TypedDict, Unpack

import mujoco
import numpy as np
import torch
from torch import Tensor

from collectors.env import EnvSpec, Observation
from collectors.physics.engine import Engine, Physics
from collectors.tasks.cartpole import closeness
from collectors.tasks.mujoco_env import MujocoEnv, Outcome, Simulation, Task

STAND_HEIGHT = {"hopper": 0.6, "walker": 1.2}
"""Height from which a robot stands, m: the hopper's torso over its foot, the walker's torso."""
TARGET_SPEED = {"hopper": 2.0, "walker": 8.0, "cheetah": 10.0}
"""Forward speed of the centre of mass that earns full reward, m/s."""
START_CLEARANCE = 0.01
"""Height above the floor of a robot's lowest point at a start, m."""


class _Args(TypedDict, total=False):
    """What a planar task is made with; `_make` has the defaults."""

    num_envs: Required[int]
    device: Required[torch.device]
    evaluation: Required[bool]
    decimation: int
    """Physics steps, of 0.005 s each, per env step."""
    episode_length: int
    """Env steps until truncation."""
    physics: Engine
    """See `MujocoEnv`, as are the two that follow."""
    max_contacts: int | None
    max_constraints: int | None


def pendulum_swingup(**args: Unpack[_Args]) -> MujocoEnv:
    """Swing a pendulum up with a motor too weak to lift it, and keep it there."""
    return _make(PendulumSwingup, **args)


def hopper_hop(**args: Unpack[_Args]) -> MujocoEnv:
    """Hop forward on one leg at 2 m/s."""
    return _make(HopperHop, **args)


def walker_run(**args: Unpack[_Args]) -> MujocoEnv:
    """Run upright on two legs at 8 m/s."""
    return _make(WalkerRun, **args)


def cheetah_run(**args: Unpack[_Args]) -> MujocoEnv:
    """Run with a long back and two legs at 10 m/s."""
    return _make(CheetahRun, **args)


def _make(
    task: type[PlanarTask],
    *,
    num_envs: int,
    device: torch.device,
    evaluation: bool,
    decimation: int = 4,
    episode_length: int = 1000,
    physics: Engine = "auto",
    max_contacts: int | None = None,
    max_constraints: int | None = None,
) -> MujocoEnv:
    return MujocoEnv(
        task(num_envs=num_envs, decimation=decimation, episode_length=episode_length),
        device=device,
        evaluation=evaluation,
        physics=physics,
        max_contacts=max_contacts,
        max_constraints=max_constraints,
    )


class PlanarTask(Task):
    """A model whose motors take the action as it is, and a reward of the present state alone."""

    robot: ClassVar[str]
    """Name of the XML file."""
    max_contacts: ClassVar[int]
    """Like `max_constraints`, 1.5 times the most that random play needed."""
    max_constraints: ClassVar[int]

    def __init__(self, *, num_envs: int, decimation: int, episode_length: int) -> None:
        path = Path(__file__).with_name(f"{self.robot}.xml")
        self._model = model = mujoco.MjModel.from_xml_path(str(path))
        low, high = torch.tensor(model.actuator_ctrlrange, dtype=torch.float32).unbind(1)
        self.simulation = Simulation(
            model=model,
            decimation=decimation,
            max_contacts=self.max_contacts,
            max_constraints=self.max_constraints,
        )
        self.spec = EnvSpec(
            num_envs=num_envs,
            actor_obs_dim=self._observation_dim(),
            action_low=low,
            action_high=high,
            control_period_s=decimation * model.opt.timestep,
            episode_length=episode_length,
        )
        self.memory = {}

    def allocate(self, physics: Physics, generator: torch.Generator) -> None:
        self._physics = physics
        self._generator = generator

    def act(self, action: Tensor) -> None:
        self._physics.ctrl.copy_(action)

    def outcome(self, action: Tensor) -> Outcome:
        del action
        reward, info = self._judge()
        return Outcome(
            reward=reward, terminated=torch.zeros_like(reward, dtype=torch.bool), info=info
        )

    @abstractmethod
    def _observation_dim(self) -> int: ...

    @abstractmethod
    def _judge(self) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Reward (num_envs,), and values to log."""

    def _rand(self, *size: int) -> Tensor:
        device = self._generator.device
        return torch.rand(size, generator=self._generator, device=device)


class PendulumSwingup(PlanarTask):
    """Observation (3): cos and sin of the angle (0 is upright), angular velocity rad/s. Action (1):
    the motor's command. An episode starts at rest at any angle."""

    robot = "pendulum"
    max_contacts = 0
    max_constraints = 1  # without room for a row, MuJoCo-Warp does not accelerate the world

    def start(self, mask: Tensor) -> None:
        angle = math.pi * (2 * self._rand(len(mask), 1) - 1)
        self._physics.set_state(mask, angle, torch.zeros_like(angle))

    def observe(self) -> Observation:
        angle, velocity = self._physics.qpos.float(), self._physics.qvel.float()
        return Observation(torch.cat([angle.cos(), angle.sin(), velocity], 1))

    def _observation_dim(self) -> int:
        return 3

    def _judge(self) -> tuple[Tensor, Mapping[str, Tensor]]:
        cos_angle = self._physics.qpos[:, 0].float().cos()
        reward = swingup_reward(cos_angle, self._physics.qvel[:, 0].float())
        return reward, {"upright": (1 + cos_angle) / 2}


class PlanarRobot(PlanarTask):
    """A robot on the floor, whose torso slides along x and z and pitches.

    Observation: height of the torso m, cos and sin of its pitch, joint angles rad, all velocities,
    log(1 + force N) of every touch sensor (0 at a start). Action: the motors' commands. An episode
    starts at rest, with joint angles uniform within their limits, just above the floor.

    In the model, the first joints are the three of the torso, and the last sensors are touches.
    """

    start_pitch_rad: ClassVar[float]
    """Half width of the uniform pitch at a start."""

    def allocate(self, physics: Physics, generator: torch.Generator) -> None:
        super().allocate(physics, generator)
        device = physics.qpos.device
        self._skeleton = Skeleton(self._model, device)
        sensors = [self._model.sensor(n) for n in range(self._model.nsensor)]
        self._columns = {s.name: slice(s.adr[0], s.adr[0] + s.dim[0]) for s in sensors}
        self._touches = slice(self._model.nsensordata - self._num_touches(), None)
        ranges = torch.tensor(self._model.jnt_range[2:], dtype=torch.float32)
        ranges[0] = torch.tensor([-self.start_pitch_rad, self.start_pitch_rad])
        self._angle_low, self._angle_high = ranges.to(device).unbind(1)

    def start(self, mask: Tensor) -> None:
        unit = self._rand(len(mask), len(self._angle_low))
        angles = self._angle_low + unit * (self._angle_high - self._angle_low)
        height = START_CLEARANCE - self._skeleton.lowest(angles)
        qpos = torch.cat([torch.zeros_like(height), height, angles], 1)
        self._physics.set_state(mask, qpos, torch.zeros_like(qpos))

    def observe(self) -> Observation:
        _, height, pitch, joints = self._physics.qpos.float().split(
            [1, 1, 1, self._model.nq - 3], 1
        )
        qvel = self._physics.qvel.float()
        touch = self._physics.sensordata[:, self._touches].float()
        parts = [height, pitch.cos(), pitch.sin(), joints, qvel, touch.log1p()]
        return Observation(torch.cat(parts, 1))

    def _observation_dim(self) -> int:
        return self._model.nq + self._model.nv + self._num_touches()

    def _num_touches(self) -> int:
        return int((self._model.sensor_type == mujoco.mjtSensor.mjSENS_TOUCH).sum())

    def _sensor(self, name: str) -> Tensor:
        """(num_envs, dim) of a sensor."""
        return self._physics.sensordata[:, self._columns[name]]

    def _speed(self) -> Tensor:
        """(num_envs,) forward velocity of the centre of mass, m/s."""
        return self._sensor("velocity")[:, 0].float()


class HopperHop(PlanarRobot):
    robot = "hopper"
    max_contacts = 12
    max_constraints = 48
    start_pitch_rad = math.pi

    def _judge(self) -> tuple[Tensor, Mapping[str, Tensor]]:
        height = (self._sensor("torso_position") - self._sensor("foot_position"))[:, 2].float()
        speed = self._speed()
        return hop_reward(height, speed), {"height": height, "speed": speed}


class WalkerRun(PlanarRobot):
    robot = "walker"
    max_contacts = 12
    max_constraints = 54
    start_pitch_rad = math.pi

    def _judge(self) -> tuple[Tensor, Mapping[str, Tensor]]:
        height, pitch = self._physics.qpos[:, 1].float(), self._physics.qpos[:, 2].float()
        speed = self._speed()
        return walk_reward(height, pitch.cos(), speed), {"height": height, "speed": speed}


class CheetahRun(PlanarRobot):
    robot = "cheetah"
    max_contacts = 12
    max_constraints = 48
    start_pitch_rad = 0.0

    def _judge(self) -> tuple[Tensor, Mapping[str, Tensor]]:
        speed = self._speed()
        return ramp(speed, TARGET_SPEED["cheetah"]), {"speed": speed}


class Skeleton:
    """Where the capsules of a planar robot end, as a function of its angles."""

    def __init__(self, model: mujoco.MjModel, device: torch.device) -> None:
        """Add up the chain of bodies that leads to every end: the end's offset from the torso is
        a sum of constant vectors, each turned by the pitch of the body that it is fixed to."""
        turns = np.zeros((model.nq - 2, model.nbody))
        chains = np.zeros((model.nbody, model.nbody, 2))
        for body in range(2, model.nbody):
            parent = model.body_parentid[body]
            chains[body] = chains[parent]
            chains[body, parent] += model.body_pos[body, [0, 2]]
        for joint in range(2, model.njnt):
            root = model.jnt_bodyid[joint]
            moved = chains[:, root].any(1) | (np.arange(model.nbody) == root)
            turns[joint - 2] = moved * model.jnt_axis[joint, 1]
        ends, radii = [], []
        for geom in np.flatnonzero(model.geom_bodyid):
            assert model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_CAPSULE
            axis, body = np.zeros(3), model.geom_bodyid[geom]
            radius, half_length, _ = model.geom_size[geom]
            mujoco.mju_rotVecQuat(axis, np.array([0, 0, half_length]), model.geom_quat[geom])
            for sign in (-1, 1):
                end = chains[body].copy()
                end[body] += (model.geom_pos[geom] + sign * axis)[[0, 2]]
                ends.append(end)
                radii.append(radius)
        x, z = np.moveaxis(np.array(ends), 0, 2).transpose(1, 0, 2)
        self._turns, self._x, self._z, self._radii = (
            torch.tensor(array, dtype=torch.float32, device=device)
            for array in (turns, x, z, radii)
        )

    def lowest(self, angles: Tensor) -> Tensor:
        """Height of the lowest point over the torso's origin, m.

        Args:
            angles: (num_envs, 1 + num_joints) pitch and joint angles, rad.
        Returns:
            (num_envs, 1)
        """
        pitch = angles @ self._turns
        heights = pitch.cos() @ self._z - pitch.sin() @ self._x - self._radii
        return heights.amin(1, keepdim=True)


def swingup_reward(cos_angle: Tensor, velocity: Tensor) -> Tensor:
    """The suite's smooth swing-up reward of its cartpole, less what concerns the cart; the suite's
    own pendulum earns nothing until it is upright.

    Args:
        cos_angle: (num_envs,), 1 is upright.
        velocity: (num_envs,) rad/s.
    """
    return (1 + cos_angle) / 2 * (1 + closeness(velocity, margin=5)) / 2


def hop_reward(height: Tensor, speed: Tensor) -> Tensor:
    """The suite's hop: standing times hopping.

    Args:
        height: (num_envs,) of the torso over the foot, m.
        speed: (num_envs,) forward, m/s.
    """
    return (height >= STAND_HEIGHT["hopper"]) * ramp(speed, TARGET_SPEED["hopper"])


def walk_reward(height: Tensor, upright: Tensor, speed: Tensor) -> Tensor:
    """The suite's run: standing and upright, and up to six times that when also fast.

    Args:
        height: (num_envs,) of the torso, m.
        upright: (num_envs,) cosine of the torso's pitch.
        speed: (num_envs,) forward, m/s.
    """
    stand = STAND_HEIGHT["walker"]
    standing = closeness((stand - height).clamp(min=0), margin=stand / 2)
    posture = (3 * standing + (1 + upright) / 2) / 4
    return posture * (1 + 5 * ramp(speed, TARGET_SPEED["walker"])) / 6


def ramp(speed: Tensor, target: float) -> Tensor:
    """0 at rest and 1 from `target` on: the suite's linear tolerance of a speed, whose value and
    margin meet 0 at rest in every task here."""
    return (speed / target).clamp(0, 1)
