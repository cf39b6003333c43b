"""The DeepMind Control Suite: `env.task: dm_control:cartpole-swingup`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from dm_control import suite
from dm_control.rl.control import Environment

from collectors.adapters._vector import (
    HostShard,
    HostStep,
    check_episode_length,
    check_known,
    child_seeds,
    finite_bounds,
)
from collectors.env import EnvSpec

UNLIMITED = 1e10
"""Action bound that the suite gives for an actuator without a range (MuJoCo's mjMAXVAL)."""


class DmControlShard(HostShard):
    """A suite task, one env after the other on one thread."""

    def __init__(
        self,
        task_id: str,
        *,
        num_envs: int,
        device: torch.device,
        evaluation: bool,
        time_limit_s: float | None = None,
        **task_args: Any,
    ) -> None:
        """Check the sizes; simulators are made at the first reset.

        Args:
            task_id: domain and task, joined by a hyphen.
            time_limit_s: simulated time after which an episode is truncated, s; the task's own
                where None.
            task_args: further arguments of the domain's task function.
        Raises:
            ValueError: unknown task, infinite action bounds, no time limit.
        """
        del evaluation  # the suite's tasks are the same in training and evaluation
        name = f"dm_control:{task_id}"
        check_known(name, task_id, ["-".join(names) for names in suite.ALL_TASKS])
        if time_limit_s is not None:
            task_args["time_limit"] = time_limit_s
        domain, _, task = task_id.partition("-")
        envs = _Suite(domain, task, num_envs, task_args)
        super().__init__(envs, _spec(name, envs.load(), num_envs), device)


class _Suite:
    """`HostEnvs` over suite environments, each with a random stream of its own."""

    def __init__(self, domain: str, task: str, num_envs: int, task_args: dict[str, Any]) -> None:
        self._names = domain, task
        self._num_envs = num_envs
        self._task_args = task_args
        self._envs: list[Environment] = []

    def load(self) -> Environment:
        # Some domains draw their model when loaded: one seed, so that all envs are of one task.
        return suite.load(*self._names, task_kwargs={**self._task_args, "random": 0})

    def reset(self, seed: int) -> np.ndarray:
        if not self._envs:
            self._envs = [self.load() for _ in range(self._num_envs)]
        for env, child in zip(self._envs, child_seeds(seed, self._num_envs), strict=True):
            env.task.random.seed(child)
        return self.reset_rows(np.arange(self._num_envs))

    def reset_rows(self, rows: np.ndarray) -> np.ndarray:
        return np.stack([_flat(self._envs[row].reset().observation) for row in rows])

    def step(self, action: np.ndarray) -> HostStep:
        steps = [env.step(row) for env, row in zip(self._envs, action, strict=True)]
        last = np.array([step.last() for step in steps])
        terminated = last & np.array([step.discount == 0 for step in steps])
        return HostStep(
            last_obs=np.stack([_flat(step.observation) for step in steps]),
            reward=np.array([step.reward for step in steps]),
            terminated=terminated,
            truncated=last & ~terminated,
        )

    def close(self) -> None:
        for env in self._envs:
            env.close()
        self._envs = []


def _spec(name: str, env: Environment, num_envs: int) -> EnvSpec:
    action = env.action_spec()
    low, high = finite_bounds(
        name,
        np.where(action.minimum <= -UNLIMITED, -np.inf, action.minimum),
        np.where(action.maximum >= UNLIMITED, np.inf, action.maximum),
    )
    # Only this private number is what the env itself compares its step counter with.
    step_limit = env._step_limit
    return EnvSpec(
        num_envs=num_envs,
        actor_obs_dim=sum(int(np.prod(part.shape)) for part in env.observation_spec().values()),
        action_low=low,
        action_high=high,
        control_period_s=env.control_timestep(),
        episode_length=check_episode_length(
            name, math.ceil(step_limit) if math.isfinite(step_limit) else None, "time_limit_s"
        ),
    )


def _flat(observation: Mapping[str, Any]) -> np.ndarray:
    return np.concatenate([np.ravel(part) for part in observation.values()])
