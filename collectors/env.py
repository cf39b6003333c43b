"""The environment protocol: what a collector needs from a shard of environments.

An environment class is constructed as `Class(num_envs=…, device=…, evaluation=…, **env.args)`.
Construction must be cheap: the driver also builds one, only to read `spec`. Simulators, threads
and device memory are allocated in `reset`.
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fastsac.core.mirror import Mirror
from fastsac.core.shard_state import LocalState, MergeRule

EnvFactory = Callable[..., "EnvShard"]
"""`factory(num_envs=int, device=torch.device, evaluation=bool, **env.args)`."""


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Sizes and constants of an environment. Tensors are on the CPU."""

    num_envs: int
    """Environments of this shard."""
    actor_obs_dim: int
    critic_obs_dim: int | None = None
    """Size of a separate critic observation; None when the critic sees the actor's."""
    action_low: Tensor
    """(action_dim,) finite lower bounds."""
    action_high: Tensor
    """(action_dim,) finite upper bounds."""
    control_period_s: float
    """Simulated time of one env step, s."""
    episode_length: int
    """Env steps after which an episode is truncated."""
    shard_states: Mapping[str, MergeRule] = field(default_factory=dict)
    """Merge rule of every named state that `report_shard_state` gives."""
    mirror: Mirror | None = None
    """Left-right symmetry, if the environment has one; used with `algorithm.symmetry`."""

    @property
    def action_dim(self) -> int:
        return self.action_low.numel()


@dataclass(frozen=True, kw_only=True)
class Step:
    """Result of one vector step. Tensors are on the shard's device and may be reused by the
    next call of `step`."""

    actor_obs: Tensor
    """(num_envs, actor_obs_dim); after a done, the first observation of the next episode."""
    critic_obs: Tensor | None
    """(num_envs, critic_obs_dim), or None when the critic sees `actor_obs`."""
    reward: Tensor
    """(num_envs,)"""
    terminated: Tensor
    """(num_envs,) bool: the MDP ended."""
    truncated: Tensor
    """(num_envs,) bool: cut off, never together with `terminated`."""
    final_actor_obs: Tensor
    """(num_envs, actor_obs_dim); rows of done envs hold the last observation of the episode
    that ended, other rows are not read."""
    final_critic_obs: Tensor | None
    """(num_envs, critic_obs_dim), likewise; None when the critic sees `actor_obs`."""
    info: Mapping[str, Tensor] = field(default_factory=dict)
    """(num_envs,) values to log as fleet means under `env/`."""


@dataclass(frozen=True)
class Observation:
    """What an environment shows at the start of an episode."""

    actor_obs: Tensor
    """(num_envs, actor_obs_dim)"""
    critic_obs: Tensor | None = None
    """(num_envs, critic_obs_dim), or None when the critic sees `actor_obs`."""


@runtime_checkable
class EnvShard(Protocol):
    """Environments that advance together. `collectors.testing` checks an implementation."""

    @property
    def spec(self) -> EnvSpec: ...

    def reset(self, seed: int) -> Observation:
        """Start every env afresh; the same seed gives the same stream."""
        ...

    def reset_envs(self, mask: Tensor) -> Observation:
        """Start new episodes where `mask` (num_envs,) is true; returns all observations."""
        ...

    def step(self, action: Tensor) -> Step:
        """Advance one control period. `action`: (num_envs, action_dim) within the bounds."""
        ...

    def report_shard_state(self) -> Mapping[str, LocalState]:
        """What was seen since the last report, by state name (see `spec.shard_states`)."""
        ...

    def apply_shard_state(self, state: Mapping[str, Tensor]) -> None:
        """Take the fleet's view (float64 CPU tensors), used at following resets."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


TASKS: dict[str, str] = {
    "cartpole-swingup": "collectors.tasks.cartpole:cartpole_swingup",
    "pendulum-swingup": "collectors.tasks.planar:pendulum_swingup",
    "hopper-hop": "collectors.tasks.planar:hopper_hop",
    "walker-run": "collectors.tasks.planar:walker_run",
    "cheetah-run": "collectors.tasks.planar:cheetah_run",
    "quadruped-velocity": "collectors.tasks.velocity:quadruped_velocity",
    "go1-velocity": "collectors.tasks.velocity:go1_velocity",
    "g1-velocity": "collectors.tasks.velocity:g1_velocity",
    "menagerie-velocity": "collectors.tasks.velocity:menagerie_velocity",
    "humanoid-wbt": "collectors.tasks.wbt:humanoid_wbt",
    "g1-wbt": "collectors.tasks.wbt:g1_wbt",
}
"""Named tasks and the factories that make them."""

ADAPTERS: dict[str, str] = {
    "gymnasium": "collectors.adapters.gymnasium_env:GymnasiumShard",
    "envpool": "collectors.adapters.envpool_env:EnvpoolShard",
    "dm_control": "collectors.adapters.dm_control_env:DmControlShard",
    "mjlab": "collectors.adapters.mjlab_env:MjlabShard",
    "rsl_rl": "collectors.adapters.rsl_rl_env:from_factory",
}
"""`PREFIX:ID` tasks of other libraries: the factory takes the ID first. The prefix is also the
name of the extra that installs the library."""


def resolve_task(task: str) -> EnvFactory:
    """The factory behind a task name, a `prefix:ID` of another library or a `module:Class` path.

    Raises:
        ValueError: unknown name (nearest names listed), a path that does not import, or a library
            that is not installed.
    """
    prefix, colon, task_id = task.partition(":")
    if prefix in ADAPTERS:
        try:
            return functools.partial(_import(ADAPTERS[prefix]), task_id)
        except ImportError as error:
            raise ValueError(
                f"env.task {task!r} needs what is not installed ({error}): "
                f"pip install 'fastsac[{prefix}]'"
            ) from error
    if not colon and task not in TASKS:
        near = difflib.get_close_matches(task, TASKS, n=3, cutoff=0.0)
        raise ValueError(
            f"env.task {task!r} is not a task: nearest are {', '.join(near)}; "
            f"or give 'module:Class' of your own, or PREFIX:ID with a prefix of {list(ADAPTERS)}"
        )
    try:
        return _import(TASKS.get(task, task))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"env.task {task!r} cannot be imported ({error}): give 'module:Class' with the "
            "module importable from the working directory"
        ) from error


def _import(path: str) -> EnvFactory:
    module_name, _, name = path.partition(":")
    return getattr(importlib.import_module(module_name), name)


def check_spec(spec: EnvSpec, *, num_envs: int) -> None:
    """Refuse a spec that cannot be trained on.

    Raises:
        ValueError: names the field, its value and what to change.
    """
    if spec.num_envs != num_envs:
        raise ValueError(
            f"the environment has {spec.num_envs} envs where {num_envs} were asked for: "
            "honour the constructor's num_envs"
        )
    dims = {"actor_obs_dim": spec.actor_obs_dim, "action_dim": spec.action_dim}
    if spec.critic_obs_dim is not None:
        dims["critic_obs_dim"] = spec.critic_obs_dim
    for name, value in dims.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: an environment needs at least 1")
    if spec.episode_length < 1:
        raise ValueError(f"episode_length is {spec.episode_length}: give at least 1 env step")
    bounds = torch.stack([spec.action_low, spec.action_high])
    bad = (~bounds.isfinite().all(0)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"action bounds of joints {bad} are infinite: set finite action_low and action_high"
        )
    empty = (spec.action_low >= spec.action_high).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"action_low is not below action_high for joints {empty}: give low < high")
    if spec.mirror is not None:
        _check_mirror(spec, spec.mirror)


def _check_mirror(spec: EnvSpec, mirror: Mirror) -> None:
    dims = {
        "actor_obs": (mirror.actor_obs, spec.actor_obs_dim),
        "critic_obs": (mirror.critic_obs, spec.critic_obs_dim),
        "action": (mirror.action, spec.action_dim),
    }
    for name, (reflection, dim) in dims.items():
        size = None if reflection is None else len(reflection.index)
        if size != dim:
            raise ValueError(f"spec.mirror.{name} is for {size} numbers, the spec has {dim}")
    low, high = spec.action_low, spec.action_high
    ends = mirror.action(torch.stack([low, high]))
    if not torch.allclose(ends.amin(0), low) or not torch.allclose(ends.amax(0), high):
        raise ValueError(
            "spec.mirror.action leads out of the action bounds: give a joint and its partner the "
            "same ones"
        )
