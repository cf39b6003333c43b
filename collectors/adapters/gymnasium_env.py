"""Gymnasium environments, vectorized in one process: `env.task: gymnasium:Pendulum-v1`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from collectors.adapters._vector import (
    HostShard,
    HostStep,
    box_bounds,
    box_dim,
    check_episode_length,
    check_known,
    child_seeds,
)
from collectors.env import EnvSpec

UNKNOWN_CONTROL_PERIOD_S = 1.0
"""Given where an env tells neither `dt` nor `render_fps`; training does not depend on it."""


class GymnasiumShard(HostShard):
    """A registered Gymnasium environment, or a vector env of one's own."""

    def __init__(
        self,
        task: str | VectorEnv,
        *,
        num_envs: int,
        device: torch.device,
        evaluation: bool,
        autoreset_mode: Literal["next_step", "same_step"] = "next_step",
        episode_length: int | None = None,
        **make_args: Any,
    ) -> None:
        """Check the spaces; environments of an id are made at the first reset.

        Args:
            task: a registered id, or a vector env already made, which keeps its autoreset mode.
            autoreset_mode: of the `SyncVectorEnv` made of an id; both give the same stream.
            episode_length: time limit, env steps; replaces the registered one. For a vector env
                it says which limit that env has.
            make_args: further arguments of `gymnasium.make`.
        Raises:
            ValueError: unknown id, unsupported spaces, no time limit.
        """
        del evaluation  # Gymnasium's envs are the same in training and evaluation
        if isinstance(task, VectorEnv):
            name, vector = type(task.unwrapped).__name__, task
            _check_own(name, vector, num_envs, make_args)
            spec = _spec(name, vector, num_envs, episode_length)
            envs = _VectorEnvs(lambda: vector)
        else:
            name = f"gymnasium:{task}"
            # A "module:Id" registers the id only when it is made.
            if ":" not in task:
                check_known(name, task, gymnasium.registry)
            mode = AutoresetMode[_known_mode(autoreset_mode)]
            if episode_length is not None:
                make_args["max_episode_steps"] = check_episode_length(
                    name, episode_length, "episode_length"
                )
            probe = gymnasium.make(task, **make_args)
            spec = _spec(name, probe, num_envs, episode_length)
            probe.close()
            envs = _VectorEnvs(
                lambda: gymnasium.make_vec(
                    task,
                    num_envs,
                    vectorization_mode="sync",
                    vector_kwargs={"autoreset_mode": mode},
                    **make_args,
                )
            )
        super().__init__(envs, spec, device)


class _VectorEnvs:
    """`HostEnvs` over a Gymnasium vector env in any autoreset mode."""

    def __init__(self, make: Callable[[], VectorEnv]) -> None:
        self._make = make
        self._vector: VectorEnv | None = None

    def reset(self, seed: int) -> np.ndarray:
        if self._vector is None:
            self._vector = self._make()
        self._mode = self._vector.metadata["autoreset_mode"]
        seeds: Any = child_seeds(seed, self._vector.num_envs)
        if not isinstance(self._vector.unwrapped, SyncVectorEnv | AsyncVectorEnv):
            seeds = seeds[0]  # `VectorEnv.reset` promises to take an int only
        self._obs, _ = self._vector.reset(seed=seeds)
        return self._obs

    def reset_rows(self, rows: np.ndarray) -> np.ndarray:
        # In next-step mode the reset would take a vector step of its own, whose action is ignored:
        # a transition that never happened. A masked reset starts the episode at once, draws the
        # same random numbers and clears the pending autoreset.
        assert self._vector is not None
        mask = np.zeros(self._vector.num_envs, dtype=np.bool_)
        mask[rows] = True
        obs, _ = self._vector.reset(options={"reset_mask": mask})
        if not np.array_equal(obs[~mask], self._obs[~mask], equal_nan=True):
            raise ValueError(
                f"{self._vector} changed envs outside options['reset_mask'] of reset: vector envs "
                "must reset only the envs of the mask; use same_step autoreset or Gymnasium's own "
                "SyncVectorEnv"
            )
        self._obs = obs
        return obs[rows]

    def step(self, action: np.ndarray) -> HostStep:
        assert self._vector is not None
        space = self._vector.action_space
        obs, reward, terminated, truncated, info = self._vector.step(
            action.reshape(space.shape or action.shape).astype(space.dtype)
        )
        self._obs = obs
        done = np.flatnonzero(terminated | truncated)
        first_obs = None
        if self._mode == AutoresetMode.SAME_STEP and len(done):
            first_obs = obs[done]
            obs = obs.copy()
            # Rows of envs that go on hold None or anything else.
            obs[done] = np.stack([info["final_obs"][row] for row in done])
        return HostStep(
            last_obs=obs,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            first_obs=first_obs,
        )

    def close(self) -> None:
        if self._vector is not None:
            self._vector.close()
            self._vector = None


def _spec(
    name: str, env: gymnasium.Env | VectorEnv, num_envs: int, episode_length: int | None
) -> EnvSpec:
    vector = isinstance(env, VectorEnv)
    low, high = box_bounds(name, env.single_action_space if vector else env.action_space)
    if episode_length is None and env.spec is not None:
        episode_length = env.spec.max_episode_steps
    return EnvSpec(
        num_envs=num_envs,
        actor_obs_dim=box_dim(
            name, env.single_observation_space if vector else env.observation_space
        ),
        action_low=low,
        action_high=high,
        control_period_s=_control_period_s(env),
        episode_length=check_episode_length(name, episode_length, "episode_length"),
    )


def _control_period_s(env: gymnasium.Env | VectorEnv) -> float:
    dt = getattr(env.unwrapped, "dt", None)
    if dt is not None:
        return float(dt)
    fps = env.metadata.get("render_fps")
    return 1 / fps if fps else UNKNOWN_CONTROL_PERIOD_S


def _known_mode(mode: str) -> str:
    if mode not in ("next_step", "same_step"):
        raise ValueError(
            f"autoreset_mode is {mode!r}: next_step or same_step are allowed; "
            "change env.args.autoreset_mode"
        )
    return mode.upper()


def _check_own(name: str, vector: VectorEnv, num_envs: int, make_args: dict[str, Any]) -> None:
    if vector.num_envs != num_envs:
        raise ValueError(
            f"{name} has {vector.num_envs} envs where {num_envs} are asked for: make it with "
            f"num_envs={num_envs}"
        )
    if make_args:
        raise ValueError(
            f"{name} is already made and takes no arguments {sorted(make_args)}: give them where "
            "it is made"
        )
    if not isinstance(vector.metadata.get("autoreset_mode"), AutoresetMode):
        raise ValueError(
            f"{name} does not say how it resets: set metadata['autoreset_mode'] to a "
            "gymnasium.vector.AutoresetMode"
        )
