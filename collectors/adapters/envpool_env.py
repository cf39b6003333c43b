"""EnvPool environments, stepped together by its C++ threads: `env.task: envpool:HalfCheetah-v5`."""

from __future__ import annotations

from typing import Any

import envpool
import numpy as np
import torch

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


class EnvpoolShard(HostShard):
    """A registered EnvPool environment in synchronous mode."""

    def __init__(
        self,
        task_id: str,
        *,
        num_envs: int,
        device: torch.device,
        evaluation: bool,
        num_threads: int = 1,
        episode_length: int | None = None,
        control_period_s: float = 1.0,
        **make_args: Any,
    ) -> None:
        """Check the spaces; the pool is made at a reset.

        Args:
            num_threads: of this shard's pool.
            episode_length: time limit, env steps; replaces the registered one.
            control_period_s: EnvPool does not tell it, and training does not depend on it.
            make_args: further arguments of `envpool.make`, such as `frame_skip`.
        Raises:
            ValueError: unknown id, unsupported spaces, no time limit.
        """
        del evaluation  # EnvPool's envs are the same in training and evaluation
        name = f"envpool:{task_id}"
        check_known(name, task_id, envpool.list_all_envs())
        if num_threads < 1:
            raise ValueError(
                f"num_threads is {num_threads}: at least 1 is needed; change env.args.num_threads"
            )
        if episode_length is not None:
            make_args["max_episode_steps"] = check_episode_length(
                name, episode_length, "episode_length"
            )
        registered: Any = envpool.make_spec(task_id, **make_args)
        low, high = box_bounds(name, registered.gymnasium_action_space)
        spec = EnvSpec(
            num_envs=num_envs,
            actor_obs_dim=box_dim(name, registered.gymnasium_observation_space),
            action_low=low,
            action_high=high,
            control_period_s=control_period_s,
            episode_length=check_episode_length(
                name, registered.config.max_episode_steps, "episode_length"
            ),
        )
        pool_args = {"num_envs": num_envs, "num_threads": num_threads, **make_args}
        super().__init__(_Pool(task_id, pool_args), spec, device)


class _Pool:
    """`HostEnvs` over an EnvPool with Gymnasium's API."""

    def __init__(self, task_id: str, pool_args: dict[str, Any]) -> None:
        self._task_id = task_id
        self._pool_args = pool_args
        self._pool: Any = None

    def reset(self, seed: int) -> np.ndarray:
        # Seeds are taken at construction only.
        self.close()
        self._pool = envpool.make(
            self._task_id,
            env_type="gymnasium",
            env_seed=child_seeds(seed, self._pool_args["num_envs"]),
            **self._pool_args,
        )
        obs, info = self._pool.reset()
        return obs[np.argsort(info["env_id"])]

    def reset_rows(self, rows: np.ndarray) -> np.ndarray:
        # EnvPool would reset a done env in its next step, whose action is ignored: a transition
        # that never happened. An explicit reset starts the episode at once.
        obs, info = self._pool.reset(rows.astype(np.int32))
        return obs[np.argsort(info["env_id"])]

    def step(self, action: np.ndarray) -> HostStep:
        space = self._pool.single_action_space
        shaped = action.reshape(len(action), *space.shape).astype(space.dtype)
        obs, reward, terminated, truncated, info = self._pool.step(shaped)
        order = np.argsort(info["env_id"])
        return HostStep(
            last_obs=obs[order],
            reward=reward[order],
            terminated=terminated[order],
            truncated=truncated[order],
        )

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
