"""Probe environments: one-dimensional problems whose Q and optimal action are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from collectors.env import EnvSpec, Observation, Step
from fastsac.core.shard_state import LocalState


class Probe:
    """Episodes of `episode_length` env steps; the observation is (start state, age), with the
    age counted round, so that a truncated episode's final observation is one that occurs.

    Subclasses say the reward and whether the end of an episode is a termination.
    """

    episode_length = 1
    terminates = True

    def __init__(self, *, num_envs: int, device: torch.device, evaluation: bool) -> None:
        del device, evaluation
        bound = torch.ones(1)
        self.spec = EnvSpec(
            num_envs=num_envs,
            actor_obs_dim=2,
            action_low=-bound,
            action_high=bound,
            control_period_s=1.0,
            episode_length=self.episode_length,
        )

    def reward(self, start: Tensor, age: Tensor, action: Tensor) -> Tensor:
        raise NotImplementedError

    def ends(self, start: Tensor) -> Tensor:
        """(num_envs,) bool: the episode's end is a termination."""
        return torch.full_like(start, self.terminates, dtype=torch.bool)

    def reset(self, seed: int) -> Observation:
        self._generator = torch.Generator().manual_seed(seed)
        self._start = torch.zeros(self.spec.num_envs)
        self._age = torch.zeros(self.spec.num_envs)
        return self.reset_envs(torch.ones(self.spec.num_envs, dtype=torch.bool))

    def reset_envs(self, mask: Tensor) -> Observation:
        coins = torch.randint(0, 2, self._start.shape, generator=self._generator)
        self._start = torch.where(mask, coins - 0.5, self._start)
        self._age = torch.where(mask, 0.0, self._age)
        return self._observe()

    def step(self, action: Tensor) -> Step:
        reward = self.reward(self._start, self._age, action[:, 0])
        self._age = self._age + 1
        final = self._observe().actor_obs
        done = self._age >= self.episode_length
        ends = self.ends(self._start)
        return Step(
            actor_obs=self.reset_envs(done).actor_obs,
            critic_obs=None,
            reward=reward,
            terminated=done & ends,
            truncated=done & ~ends,
            final_actor_obs=final,
            final_critic_obs=None,
        )

    def report_shard_state(self) -> Mapping[str, LocalState]:
        return {}

    def apply_shard_state(self, state: Mapping[str, Tensor]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"start": self._start, "age": self._age, "rng": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start, self._age = state["start"], state["age"]
        self._generator.set_state(state["rng"])

    def close(self) -> None:
        pass

    def _observe(self) -> Observation:
        return Observation(torch.stack([self._start, self._age % self.episode_length], 1))


class ConstantReward(Probe):
    """Reward 1 for ever (time limits only): Q = 1 / (1 - gamma)."""

    episode_length = 2
    terminates = False

    def reward(self, start: Tensor, age: Tensor, action: Tensor) -> Tensor:
        return torch.ones_like(start)


class DelayedReward(Probe):
    """Reward 1 on the second and last env step: Q is gamma, then 1."""

    episode_length = 2

    def reward(self, start: Tensor, age: Tensor, action: Tensor) -> Tensor:
        return age


class TerminatedOrTruncated(Probe):
    """Reward 1 in both env steps, then truncated for start -0.5, terminated for start 0.5.

    From start -0.5 the rewards never end: Q = 1 / (1 - gamma). From start 0.5 they do:
    Q = 1 + gamma, then 1. The observation after the reset, a coin toss, would mix the two.
    """

    episode_length = 2

    def reward(self, start: Tensor, age: Tensor, action: Tensor) -> Tensor:
        return torch.ones_like(start)

    def ends(self, start: Tensor) -> Tensor:
        return start > 0


class MatchObservation(Probe):
    """Reward -(action - start)^2 in one env step: the best action is the observation."""

    def reward(self, start: Tensor, age: Tensor, action: Tensor) -> Tensor:
        return -((action - start) ** 2)


class BreaksSometimes(ConstantReward):
    """Every seventh env step of env 0 has a NaN reward."""

    def reset(self, seed: int) -> Observation:
        self._calls = 0
        return super().reset(seed)

    def reward(self, start: Tensor, age: Tensor, action: Tensor) -> Tensor:
        self._calls += 1
        reward = torch.ones_like(start)
        reward[0] = torch.nan if self._calls % 7 == 0 else 1.0
        return reward


class AlwaysBroken(ConstantReward):
    """Every reward is infinite."""

    def reward(self, start: Tensor, age: Tensor, action: Tensor) -> Tensor:
        return torch.full_like(start, torch.inf)
