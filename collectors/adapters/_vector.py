"""What the adapters of CPU libraries share: their environments as one `EnvShard`, and refusals.

An adapter gives `HostEnvs` in NumPy, as its library has them; `HostShard` flattens, converts,
resets what is done and keeps the final observations apart.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from collectors.env import EnvSpec, Observation, Step
from fastsac.core.shard_state import LocalState


@dataclass(frozen=True, kw_only=True)
class HostStep:
    """Result of one vector step of `HostEnvs`."""

    last_obs: np.ndarray
    """(num_envs, ...) what the action led to: in done rows the last of the episode that ended."""
    reward: np.ndarray
    """(num_envs,)"""
    terminated: np.ndarray
    """(num_envs,) bool"""
    truncated: np.ndarray
    """(num_envs,) bool; may be true together with `terminated`, which then counts."""
    first_obs: np.ndarray | None = None
    """(num_done, ...) starts of the next episodes of done envs, in their order; None where the
    library leaves that reset to `reset_rows`."""


class HostEnvs(Protocol):
    """Environments of one library that advance together on the CPU."""

    def reset(self, seed: int) -> np.ndarray:
        """Allocate what is needed and start afresh; returns observations (num_envs, ...)."""
        ...

    def reset_rows(self, rows: np.ndarray) -> np.ndarray:
        """New episodes in `rows` (num_rows,) int, at least one; returns theirs (num_rows, ...)."""
        ...

    def step(self, action: np.ndarray) -> HostStep:
        """Advance once. `action`: (num_envs, action_dim) float32."""
        ...

    def close(self) -> None: ...


class HostShard:
    """An `EnvShard` over `HostEnvs`; observations are flattened to float32.

    An env's `step` that raises is not caught: what a library refuses is a fault to see.
    """

    def __init__(self, envs: HostEnvs, spec: EnvSpec, device: torch.device) -> None:
        self.spec = spec
        self._envs = envs
        self._device = device

    def reset(self, seed: int) -> Observation:
        self._obs = _flat(self._envs.reset(seed))
        return Observation(self._tensor(self._obs))

    def reset_envs(self, mask: Tensor) -> Observation:
        self._obs = self._begin(self._obs, np.flatnonzero(mask.cpu().numpy()), None)
        return Observation(self._tensor(self._obs))

    def step(self, action: Tensor) -> Step:
        step = self._envs.step(action.cpu().numpy())
        final = _flat(step.last_obs)
        rows = np.flatnonzero(step.terminated | step.truncated)
        self._obs = self._begin(final, rows, step.first_obs)
        return Step(
            actor_obs=self._tensor(self._obs),
            critic_obs=None,
            reward=self._tensor(step.reward.astype(np.float32)),
            terminated=self._tensor(step.terminated),
            truncated=self._tensor(step.truncated & ~step.terminated),
            final_actor_obs=self._tensor(final),
            final_critic_obs=None,
        )

    def report_shard_state(self) -> Mapping[str, LocalState]:
        return {}

    def apply_shard_state(self, state: Mapping[str, Tensor]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError(
            "environments of other libraries cannot be saved exactly: a resumed run starts fresh "
            "episodes"
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("environments of other libraries have no saved state to load")

    def close(self) -> None:
        self._envs.close()

    def _begin(self, obs: np.ndarray, rows: np.ndarray, first: np.ndarray | None) -> np.ndarray:
        """`obs` with new episodes in `rows`; a copy, since what was shown before stays as it is."""
        if not len(rows):
            return obs
        obs = obs.copy()
        obs[rows] = _flat(self._envs.reset_rows(rows) if first is None else first)
        return obs

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _flat(obs: np.ndarray) -> np.ndarray:
    """(num_rows, ...) -> (num_rows, obs_dim) float32, never the library's own buffer."""
    return obs.reshape(len(obs), -1).astype(np.float32)


def child_seeds(seed: int, num_envs: int) -> list[int]:
    """One seed per env, below 2^31: independent streams, also next to those of other shards."""
    children = np.random.SeedSequence(seed).spawn(num_envs)
    return [int(child.generate_state(1)[0] >> 1) for child in children]


def check_known(task: str, task_id: str, known: Iterable[str]) -> None:
    """Refuse a name that the library does not have.

    Raises:
        ValueError: names the nearest ones.
    """
    known = list(known)
    if task_id not in known:
        near = difflib.get_close_matches(task_id, known, n=3, cutoff=0.0)
        raise ValueError(f"env.task {task!r} is not registered: nearest are {', '.join(near)}")


def box_dim(task: str, space: Any) -> int:
    """Elements of an observation `gymnasium.spaces.Box` of any shape.

    Raises:
        ValueError: another space, or an empty one.
    """
    dim = int(np.prod(space.shape)) if _is_box(space) else 0
    if not dim:
        raise ValueError(
            f"{task} has observation space {space}: only a Box with at least one element is "
            "supported; choose another task or flatten it (gymnasium.wrappers.FlattenObservation)"
        )
    return dim


def box_bounds(task: str, space: Any) -> tuple[Tensor, Tensor]:
    """Bounds (action_dim,) of an action `gymnasium.spaces.Box` of any shape.

    Raises:
        ValueError: another space, or infinite bounds.
    """
    if not _is_box(space):
        raise ValueError(
            f"{task} has action space {space}: only continuous ones (Box) are supported; "
            "choose a task with continuous actions"
        )
    return finite_bounds(task, space.low, space.high)


def finite_bounds(task: str, low: np.ndarray, high: np.ndarray) -> tuple[Tensor, Tensor]:
    """Action bounds as float32 (action_dim,) on the CPU.

    Raises:
        ValueError: an infinite bound.
    """
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ValueError(
            f"{task} has action bounds {np.ravel(low).tolist()} to {np.ravel(high).tolist()}: "
            "only finite ones are supported; give the env's actuators finite ranges"
        )
    low, high = (np.ravel(bound).astype(np.float32) for bound in (low, high))
    return torch.from_numpy(low), torch.from_numpy(high)


def check_episode_length(task: str, episode_length: int | None, argument: str) -> int:
    """The time limit in env steps.

    Raises:
        ValueError: there is none.
    """
    if episode_length is None or episode_length < 1:
        raise ValueError(
            f"{task} has a time limit of {episode_length} env steps: at least 1 is needed; "
            f"set env.args.{argument}"
        )
    return episode_length


def _is_box(space: Any) -> bool:
    from gymnasium.spaces import Box  # dm_control, which shares this module, does without it

    return isinstance(space, Box)
