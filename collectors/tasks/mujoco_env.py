# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""The env shard of every native task: a physics engine, episode bookkeeping and a `Task`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from collectors.env import EnvSpec, Observation, Step
from collectors.physics.engine import Engine, Physics, make_physics
from fastsac.core.shard_state import LocalState

if TYPE_CHECKING:
    import mujoco


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """How a task is simulated."""

    model: mujoco.MjModel
    decimation: int
    """Physics steps per env step."""
    max_contacts: int
    """MuJoCo-Warp's room for contacts, per world on average."""
    max_constraints: int
    """MuJoCo-Warp's room for constraint rows in one world."""
    randomized: tuple[str, ...] = ()
    """`MjModel` fields that differ from world to world."""

    def __post_init__(self) -> None:
        if self.decimation < 1:
            raise ValueError(f"decimation is {self.decimation}: give at least 1 physics step")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an env step came to, before any reset."""

    reward: Tensor
    """(num_envs,) float32"""
    terminated: Tensor
    """(num_envs,) bool"""
    truncated: Tensor | None = None
    """(num_envs,) bool: cut off here, where they have not terminated; None if only
    `spec.episode_length` does so."""
    info: Mapping[str, Tensor] = field(default_factory=dict)
    """(num_envs,) values to log as fleet means under `env/`."""


class Task(ABC):
    """What the robot shall do: start states, observations, rewards. `MujocoEnv` calls, in order:
    `start` for new episodes, `observe`; then per env step `act`, `outcome`, `observe`, and, where
    an episode ended, `finish`, `start` and `observe` again.

    A task keeps what it must remember between env steps in `memory`, tensors with one row per env
    or statistics of the shard, which are saved and restored with the shard.
    """

    simulation: Simulation
    spec: EnvSpec
    memory: dict[str, Tensor]

    @abstractmethod
    def allocate(self, physics: Physics, generator: torch.Generator) -> None:
        """Take the worlds and make a fresh `memory`; called at every reset of the shard.

        All random numbers come from `generator`, which is on the device of the worlds."""

    @abstractmethod
    def start(self, mask: Tensor) -> None:
        """Begin new episodes where `mask` (num_envs,). Draws the same numbers whatever the mask,
        so that no one has to wait for the device to know it."""

    @abstractmethod
    def act(self, action: Tensor) -> None:
        """Turn `action` (num_envs, action_dim) into the worlds' controls."""

    @abstractmethod
    def outcome(self, action: Tensor) -> Outcome:
        """Judge the env step just simulated."""

    @abstractmethod
    def observe(self) -> Observation:
        """Observations (float32) of the present state; changes nothing."""

    def finish(  # noqa: B027  (nothing to count is a fine default)
        self, done: Tensor, truncated: Tensor
    ) -> None:
        """Take statistics of the episodes that end, before `start`. Both are (num_envs,)."""

    def report(self) -> dict[str, LocalState]:
        """See `EnvShard.report_shard_state`."""
        return {}

    def apply(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027  (nor is there a state)
        """See `EnvShard.apply_shard_state`; may come before `allocate`. What is kept from it is
        not part of `memory`: a restored shard is told again."""


class MujocoEnv:
    """An env shard of one `Task`: episodes of at most `spec.episode_length` env steps.

    In training, the ages of the first episodes are spread, so that truncations do not come all at
    once.
    """

    def __init__(
        self,
        task: Task,
        *,
        device: torch.device,
        evaluation: bool,
        physics: Engine = "auto",
        max_contacts: int | None = None,
        max_constraints: int | None = None,
    ) -> None:
        """The worlds are allocated by `reset`.

        Args:
            physics: engine, see `make_physics`.
            max_contacts: instead of the task's; likewise `max_constraints`.
        Raises:
            ValueError: unknown engine.
        """
        if physics not in ("auto", "warp", "mujoco"):
            raise ValueError(f"physics is {physics!r}: give 'auto', 'warp' or 'mujoco'")
        self._task = task
        self._device = device
        self._evaluation = evaluation
        self._engine: Engine = physics
        room = task.simulation
        self._max_contacts = room.max_contacts if max_contacts is None else max_contacts
        self._max_constraints = room.max_constraints if max_constraints is None else max_constraints
        self._physics: Physics | None = None
        self._fleet_state: dict[str, Tensor] = {}

    @property
    def spec(self) -> EnvSpec:
        return self._task.spec

    def reset(self, seed: int) -> Observation:
        """Start every env afresh; what the fleet's view has set stays."""
        self._allocate()
        self._generator.manual_seed(seed)
        everything = torch.ones(self.spec.num_envs, dtype=torch.bool, device=self._device)
        self._task.start(everything)
        self._ages.zero_()
        if not self._evaluation:
            self._ages.random_(0, self.spec.episode_length, generator=self._generator)
        return self._task.observe()

    def reset_envs(self, mask: Tensor) -> Observation:
        """Start new episodes where `mask` (num_envs,) is true; returns all observations."""
        self._task.start(mask)
        self._ages.masked_fill_(mask, 0)
        return self._task.observe()

    def step(self, action: Tensor) -> Step:
        """Advance one control period. `action`: (num_envs, action_dim) within the bounds."""
        assert self._physics is not None, "step before reset"
        self._task.act(action)
        self._physics.step()
        self._ages += 1
        outcome = self._task.outcome(action)
        final = observation = self._task.observe()
        truncated = self._ages >= self.spec.episode_length
        if outcome.truncated is not None:
            truncated = truncated | outcome.truncated
        truncated = truncated & ~outcome.terminated
        done = outcome.terminated | truncated
        # On the CPU a look costs less than starting no episode; on a GPU it would be a wait.
        if self._device.type != "cpu" or bool(done.any()):
            self._task.finish(done, truncated)
            observation = self.reset_envs(done)
        return Step(
            actor_obs=observation.actor_obs,
            critic_obs=observation.critic_obs,
            reward=outcome.reward,
            terminated=outcome.terminated,
            truncated=truncated,
            final_actor_obs=final.actor_obs,
            final_critic_obs=final.critic_obs,
            info=outcome.info,
        )

    def report_shard_state(self) -> Mapping[str, LocalState]:
        """What the task saw since the last report.

        Raises:
            ValueError: the engine lost contacts or constraints meanwhile.
        """
        assert self._physics is not None, "report before reset"
        self._physics.check()
        return self._task.report()

    def apply_shard_state(self, state: Mapping[str, Tensor]) -> None:
        """Hand the fleet's view to the task."""
        self._fleet_state = {name: value.clone() for name, value in state.items()}
        self._task.apply(self._fleet_state)

    def state_dict(self) -> dict[str, Any]:
        assert self._physics is not None, "state_dict before reset"
        return {
            "physics": self._physics.state_dict(),
            "generator": self._generator.get_state(),
            "ages": self._ages.clone(),
            "memory": {name: tensor.clone() for name, tensor in self._task.memory.items()},
            "fleet_state": dict(self._fleet_state),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._allocate()
        assert self._physics is not None
        self._physics.load_state_dict(state["physics"])
        self._generator.set_state(state["generator"])
        self._ages.copy_(state["ages"])
        for name, tensor in self._task.memory.items():
            tensor.copy_(state["memory"][name])
        if state["fleet_state"]:
            self.apply_shard_state(state["fleet_state"])

    def close(self) -> None:
        if self._physics is not None:
            self._physics.close()
            self._physics = None

    def _allocate(self) -> None:
        if self._physics is None:
            simulation = self._task.simulation
            self._physics = make_physics(
                self._engine,
                simulation.model,
                num_envs=self.spec.num_envs,
                decimation=simulation.decimation,
                device=self._device,
                max_contacts=self._max_contacts,
                max_constraints=self._max_constraints,
                randomized=simulation.randomized,
            )
            self._generator = torch.Generator(self._device)
            self._ages = torch.zeros(self.spec.num_envs, dtype=torch.int64, device=self._device)
        self._task.allocate(self._physics, self._generator)
