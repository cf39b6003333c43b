"""RSL-RL vector environments (Isaac Lab, mjlab, legged_gym and others) as env shards."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from collectors.adapters._random_stream import RandomStream
from collectors.env import EnvSpec, Observation, Step
from fastsac.core.shard_state import LocalState

ACTOR_GROUPS = ("actor", "policy")
"""Names of the actor's observation group, in order of preference."""
FINAL_KEYS = ("final_obs", "final_observation", "terminal_observation")
"""Keys of `extras` under which final observations are accepted: groups as `step` returns them."""

FinalObs = Literal["extras", "last_acted_on"]


class VecEnv(Protocol):
    """The part of `rsl_rl.env.VecEnv` (rsl-rl-lib 5) that is used, and a `reset`."""

    num_envs: int
    num_actions: int
    max_episode_length: Any
    device: Any

    def get_observations(self) -> Any: ...

    def reset(self) -> Any: ...

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, dict[str, Any]]: ...


def observation_of(groups: Mapping[str, Any]) -> Observation:
    """Copies of the actor's and the critic's group of an observation dictionary, float32.

    Raises:
        ValueError: no actor group, or a group that is not one vector per env.
    """
    actor = next((name for name in ACTOR_GROUPS if name in groups), None)
    if actor is None:
        raise ValueError(
            f"observation groups are {sorted(groups.keys())}: one must be called "
            f"{' or '.join(map(repr, ACTOR_GROUPS))}"
        )
    names = [actor, "critic"] if "critic" in groups else [actor]
    for name in names:
        if not isinstance(groups[name], Tensor) or groups[name].ndim != 2:
            raise ValueError(
                f"observation group {name!r} is not (num_envs, dim): concatenate and flatten its "
                "terms (images and dictionaries are not supported)"
            )
    # A copy: simulators write the next observation into the same memory.
    parts = [groups[name].to(torch.float32, copy=True) for name in names]
    return Observation(parts[0], parts[1] if len(parts) > 1 else None)


def merge_rows(mask: Tensor, new: Observation, old: Observation) -> Observation:
    """Rows of `new` where `mask` (num_envs,) is true, of `old` elsewhere."""
    critic = None
    if new.critic_obs is not None and old.critic_obs is not None:
        critic = torch.where(mask[:, None], new.critic_obs, old.critic_obs)
    return Observation(torch.where(mask[:, None], new.actor_obs, old.actor_obs), critic)


class VecEnvShard:
    """An RSL-RL `VecEnv` as an env shard.

    A VecEnv resets done envs inside `step` and returns the next episode's observation, so the
    last observation of a truncated episode, which FastSAC bootstraps from, is lost unless the
    environment hands it out. `final_obs` says what is used:

    - `extras` (default): `extras` of `step` holds it under one of `FINAL_KEYS`, as a dictionary
      of groups. Exact. The interface does not tell beforehand: the first truncation without one
      raises.
    - `last_acted_on`: the observation that the last action was chosen from stands in for it. An
      approximation: a truncated transition then bootstraps from the value one env step early.

    Where the environment has a `seed` method, `reset` calls it, and draws from the global
    generators belong to this shard; without one, streams are as reproducible as the environment.
    Partial resets need a `reset` that takes `env_ids` (mjlab's and Isaac Lab's do).
    """

    def __init__(
        self,
        vec_env: VecEnv,
        *,
        action_limit: float | None = None,
        final_obs: FinalObs = "extras",
        control_period_s: float | None = None,
    ) -> None:
        """Read the sizes; the environment was allocated by whoever built it.

        Args:
            action_limit: bound of every action, -limit to limit; VecEnv does not tell.
            control_period_s: simulated time of an env step, s; read from `step_dt` if absent.
        Raises:
            ValueError: an argument is missing or out of range, or the environment lacks `reset`.
        """
        if action_limit is None or not 0 < action_limit < math.inf:
            raise ValueError(
                f"action_limit is {action_limit}: give a positive number, an RSL-RL environment "
                "does not tell its action bounds"
            )
        if final_obs not in ("extras", "last_acted_on"):
            raise ValueError(
                f"final_obs is {final_obs!r}: give 'extras' for an environment that hands out "
                "final observations, or 'last_acted_on' to approximate them"
            )
        if not hasattr(vec_env, "reset"):
            raise ValueError(f"{type(vec_env).__name__} has no reset(): add one that returns obs")
        inner: Any = getattr(vec_env, "unwrapped", vec_env)
        period = control_period_s or getattr(inner, "step_dt", None)
        if period is None:
            raise ValueError(
                f"{type(vec_env).__name__} has no step_dt: give control_period_s in seconds"
            )
        self._env = vec_env
        self._inner = inner
        self._final_obs: FinalObs = final_obs
        self._device = torch.device(vec_env.device)
        self._stream = RandomStream(self._device)
        shown = observation_of(vec_env.get_observations())
        limit = torch.full((vec_env.num_actions,), float(action_limit))
        self._spec = EnvSpec(
            num_envs=vec_env.num_envs,
            actor_obs_dim=shown.actor_obs.shape[1],
            critic_obs_dim=None if shown.critic_obs is None else shown.critic_obs.shape[1],
            action_low=-limit,
            action_high=limit,
            control_period_s=float(period),
            episode_length=int(torch.as_tensor(vec_env.max_episode_length).max()),
        )
        self._shown = shown

    @property
    def spec(self) -> EnvSpec:
        return self._spec

    def reset(self, seed: int) -> Observation:
        """Start every env afresh; reproducible where the environment is."""
        self._stream.seed(seed)
        with self._stream.active():
            seed_env = getattr(self._env, "seed", None)
            if callable(seed_env):
                seed_env(seed)
            result = self._env.reset()
        self._shown = observation_of(result[0] if isinstance(result, tuple) else result)
        return self._shown

    def reset_envs(self, mask: Tensor) -> Observation:
        """Start new episodes where `mask` (num_envs,) is true; returns all observations.

        Raises:
            ValueError: the environment cannot reset single envs.
        """
        env_ids = mask.nonzero().flatten()
        if len(env_ids):
            if "env_ids" not in inspect.signature(self._inner.reset).parameters:
                raise ValueError(
                    f"{type(self._inner).__name__}.reset takes no env_ids: envs with non-finite "
                    "values cannot be started afresh on their own"
                )
            with self._stream.active():
                groups, _ = self._inner.reset(env_ids=env_ids)
            self._shown = merge_rows(mask, observation_of(groups), self._shown)
        return self._shown

    def step(self, action: Tensor) -> Step:
        """Advance one control period. `action`: (num_envs, num_actions) within the bounds.

        Raises:
            ValueError: an episode was truncated and `extras` lacks its final observation.
        """
        acted_on = self._shown
        with self._stream.active():
            # A VecEnv may keep or clip the tensor that it is given.
            groups, reward, dones, extras = self._env.step(action.clone())
        done = dones.bool()
        time_outs = extras.get("time_outs")
        truncated = done & time_outs.bool() if time_outs is not None else torch.zeros_like(done)
        shown = observation_of(groups)
        final = acted_on if self._final_obs == "last_acted_on" else shown
        if self._final_obs == "extras":
            found = next((extras[key] for key in FINAL_KEYS if key in extras), None)
            if found is not None:
                final = observation_of(found)
            elif bool(truncated.any()):
                raise ValueError(
                    f"{type(self._env).__name__} truncates episodes without their final "
                    f"observation (none of {list(FINAL_KEYS)} in extras): add one, or set "
                    "env.args.final_obs to 'last_acted_on' to approximate it"
                )
        self._shown = shown
        return Step(
            actor_obs=shown.actor_obs,
            critic_obs=shown.critic_obs,
            reward=reward.float().clone(),
            terminated=done & ~truncated,
            truncated=truncated,
            final_actor_obs=final.actor_obs,
            final_critic_obs=final.critic_obs,
        )

    def report_shard_state(self) -> Mapping[str, LocalState]:
        """Nothing: VecEnv shows no curriculum."""
        return {}

    def apply_shard_state(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to apply."""

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("an RSL-RL environment cannot be saved")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("an RSL-RL environment cannot be loaded")

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if callable(close):
            close()


def from_factory(
    path: str,
    *,
    num_envs: int,
    device: torch.device,
    evaluation: bool,
    action_limit: float | None = None,
    final_obs: FinalObs = "extras",
    control_period_s: float | None = None,
    **args: Any,
) -> VecEnvShard:
    """The shard around the VecEnv that a `module:function` builds.

    The function is called with `num_envs`, `device`, `evaluation` and `args`. The sizes are known
    only once it has built the environment, so the driver also builds one, on the CPU.

    Raises:
        ValueError: the function does not import, or see `VecEnvShard`.
    """
    module_name, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"rsl_rl task {path!r} has no function: write rsl_rl:module:function")
    try:
        function: Callable[..., VecEnv] = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"rsl_rl task {path!r} cannot be imported ({error}): give module:function with the "
            "module importable from the working directory"
        ) from error
    vec_env = function(num_envs=num_envs, device=device, evaluation=evaluation, **args)
    return VecEnvShard(
        vec_env,
        action_limit=action_limit,
        final_obs=final_obs,
        control_period_s=control_period_s,
    )
