"""What stands between the system and a user's environment: every failure becomes one line.

`make_env` constructs, `env_errors` surrounds the calls, `check_observation` and `check_step` hold
the results to the contract. The contract test applies the same rules.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from collectors.env import (
    EnvFactory,
    EnvShard,
    EnvSpec,
    Observation,
    Step,
    check_spec,
    resolve_task,
)
from fastsac.core.config import ConfigError


class EnvError(RuntimeError):
    """A user's environment failed in a run; one line, and the traceback beside it."""

    def __init__(self, message: str, shard: int, details: str) -> None:
        super().__init__(message, shard, details)  # all of them, or it would not unpickle
        self.shard = shard
        self.details = details
        """Traceback of the environment's own exception."""

    def __str__(self) -> str:
        return self.args[0]


class EnvContractError(EnvError):
    """The environment breaks its contract, as it would again."""


class BrokenContract(ValueError):
    """An environment gives what it must not; names the part, what it is, what it should be."""


@contextmanager
def env_errors(shard: int, method: str) -> Iterator[None]:
    """Whatever the environment raises or breaks in `method` becomes an `EnvError` that says so."""
    try:
        yield
    except BrokenContract as error:
        message = f"the environment of shard {shard} breaks its contract: {error}"
        raise EnvContractError(message, shard, message) from error
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise EnvError(
            f"the environment of shard {shard} failed in {method}: {_describe(error)} "
            f"({frame.filename}:{frame.lineno})",
            shard,
            "".join(traceback.format_exception(error)),
        ) from error


def task_name(task: EnvFactory | str) -> str:
    """What a configuration calls a task: `module:Class` of a class."""
    return task if isinstance(task, str) else f"{task.__module__}:{task.__qualname__}"


def make_env(
    task: EnvFactory | str,
    *,
    num_envs: int,
    device: torch.device,
    evaluation: bool,
    args: Mapping[str, Any],
) -> EnvShard:
    """Construct one shard's environments.

    Raises:
        ValueError: no such task, or its constructor, methods or spec are not what we need.
    """
    factory = resolve_task(task) if isinstance(task, str) else task
    ours = {"num_envs": num_envs, "device": device, "evaluation": evaluation}
    taken = sorted(ours.keys() & args.keys())
    if taken:
        raise ValueError(f"env.args gives {', '.join(taken)}, which the fleet sets: leave it out")
    name = task_name(task)
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        signature = None  # a constructor in C; calling it tells
    if signature is not None:
        try:
            signature.bind(**ours, **args)
        except TypeError as error:
            takes = ", ".join(p for p in signature.parameters if p not in ours)
            raise ConfigError(
                f"env.args {dict(args)} do not fit the constructor of {name} ({error}): it takes "
                f"{takes or 'none'}"
            ) from error
    during = " for evaluation" if evaluation else ""
    try:
        env = factory(**ours, **args)
        missing = [m for m in vars(EnvShard) if not m.startswith("_") and not hasattr(env, m)]
    except Exception as error:
        raise ConfigError(f"{name} cannot be constructed{during}: {_describe(error)}") from error
    if missing:
        raise ConfigError(
            f"{name} is no EnvShard, it lacks {', '.join(missing)}: see collectors.env.EnvShard"
        )
    spec = env.spec
    if not isinstance(spec, EnvSpec):
        raise ConfigError(f"spec of {name} is {_what(spec)}: should be a collectors.env.EnvSpec")
    check_spec(spec, num_envs=num_envs)
    return env


def check_observation(
    observation: Observation, spec: EnvSpec, device: torch.device, source: str
) -> None:
    """Hold what a reset shows to the contract; whether it is finite is not looked at.

    Raises:
        BrokenContract: names the part.
    """
    if not isinstance(observation, Observation):
        raise BrokenContract(f"{source} gives {_what(observation)}: should be an Observation")
    _check_obs(observation.actor_obs, spec.actor_obs_dim, spec, device, f"actor_obs of {source}")
    _check_obs(observation.critic_obs, spec.critic_obs_dim, spec, device, f"critic_obs of {source}")


def check_step(step: Step, spec: EnvSpec, device: torch.device) -> None:
    """Hold a step to the contract; whether it is finite is not looked at.

    Raises:
        BrokenContract: names the part.
    """
    if not isinstance(step, Step):
        raise BrokenContract(f"step gives {_what(step)}: should be a collectors.env.Step")
    rows = (spec.num_envs,)
    check_observation(Observation(step.actor_obs, step.critic_obs), spec, device, "step")
    _check_obs(step.final_actor_obs, spec.actor_obs_dim, spec, device, "final_actor_obs of step")
    _check_obs(step.final_critic_obs, spec.critic_obs_dim, spec, device, "final_critic_obs of step")
    check_tensor(step.reward, rows, torch.float32, device, "reward of step")
    check_tensor(step.terminated, rows, torch.bool, device, "terminated of step")
    check_tensor(step.truncated, rows, torch.bool, device, "truncated of step")
    both = (step.terminated & step.truncated).nonzero().flatten().tolist()
    if both:
        raise BrokenContract(f"terminated and truncated of step are both true in envs {both[:10]}")
    for name, values in step.info.items():
        if not isinstance(values, Tensor) or not values.is_floating_point():
            raise BrokenContract(f"info[{name!r}] is {_what(values)}: should be floating point")
        check_tensor(values, rows, values.dtype, device, f"info[{name!r}]")


def check_tensor(
    tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str
) -> None:
    """Refuse a tensor of another shape, dtype or kind of device.

    Raises:
        BrokenContract: names it.
    """
    fits = (
        isinstance(tensor, Tensor)
        and tuple(tensor.shape) == shape
        and tensor.dtype == dtype
        and tensor.device.type == device.type
    )
    if not fits:
        kind = str(dtype).removeprefix("torch.")
        raise BrokenContract(f"{name} is {_what(tensor)}: should be {shape} {kind} on {device}")


def _check_obs(
    obs: Tensor | None, dim: int | None, spec: EnvSpec, device: torch.device, name: str
) -> None:
    if dim is None:
        if obs is not None:
            raise BrokenContract(
                f"{name} is {_what(obs)}: should be None, as spec has no size of it"
            )
        return
    if obs is None:
        raise BrokenContract(f"{name} is None: should be {(spec.num_envs, dim)} as spec says")
    check_tensor(obs, (spec.num_envs, dim), torch.float32, device, name)


def _what(value: object) -> str:
    """A value's kind in a few words."""
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{tuple(value.shape)} {kind} on {value.device}"
    return "None" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}"


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
