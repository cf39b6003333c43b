"""A collector: one env shard, the replay shard it writes, and the policy it acts with."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectors.env import EnvFactory, EnvShard, Observation, Step
from collectors.guard import BrokenContract, check_observation, check_step, env_errors, make_env
from fastsac.core.config import RuleKind
from fastsac.core.metrics import Mean, MetricValue
from fastsac.core.normalizer import Moments, ObsMoments, merge_moments
from fastsac.core.own_state import OwnStates
from fastsac.core.policy import Policy, PolicySpec, PublishedPolicy
from fastsac.core.replay import ReplayLayout, ReplayStorage, ReplayWriter
from fastsac.core.shard_state import ShardReport

MAX_DUMPS_PER_TICK = 4
"""Non-finite transitions whose values are kept for inspection, per shard and tick."""


@dataclass(frozen=True, kw_only=True)
class CollectorSeeds:
    """Seeds of one shard's random streams; no two shards share one."""

    actions: int
    env: int


@dataclass(frozen=True, kw_only=True)
class CollectReport:
    """What one shard tells the driver about a tick. Tensors are on the CPU."""

    shard: int
    policy_version: int
    """Version that acted."""
    rows_written: int
    """Vector steps in the replay shard since it was made."""
    moments: ObsMoments
    """Of the observations acted on in this tick."""
    shard_state: ShardReport
    nonfinite: int
    """Transitions dropped in this tick."""
    dumps: list[dict[str, np.ndarray]]
    """Some of the dropped transitions."""
    metrics: Mapping[str, MetricValue]


@dataclass(frozen=True, kw_only=True)
class EpisodeReport:
    """Episodes of one evaluation, one per evaluation environment."""

    returns: Tensor
    """(num_episodes,) float64, undiscounted"""
    lengths: Tensor
    """(num_episodes,) int64, env steps"""
    terminated: Tensor
    """(num_episodes,) bool: ended before the time limit"""
    info: Mapping[str, Tensor]
    """(num_episodes,) float64 means over the episode's env steps of what the env reports"""


@dataclass
class _EpisodeStats:
    """Running returns and the tick's finished episodes, on the shard's device."""

    returns: Tensor
    lengths: Tensor
    finished: Tensor = field(init=False)
    """(3,) float64: sum of returns, sum of lengths, episodes"""

    def __post_init__(self) -> None:
        self.finished = torch.zeros(3, dtype=torch.float64, device=self.returns.device)

    @classmethod
    def zero(cls, num_envs: int, device: torch.device) -> _EpisodeStats:
        zeros = torch.zeros(num_envs, dtype=torch.float64, device=device)
        return cls(zeros, zeros.clone())

    def count(self, step: Step, dropped: Tensor) -> None:
        """Add one vector step; episodes of `dropped` envs (num_envs,) are forgotten."""
        self.returns += step.reward
        self.lengths += 1
        ended = (step.terminated | step.truncated) & ~dropped
        values = torch.stack([self.returns, self.lengths, torch.ones_like(self.returns)])
        self.finished += torch.where(ended, values, 0).sum(1)
        self.returns.masked_fill_(ended | dropped, 0)
        self.lengths.masked_fill_(ended | dropped, 0)

    def take(self) -> dict[str, MetricValue]:
        """Metrics of the episodes finished since the last call."""
        returns, lengths, episodes = self.finished.tolist()
        self.finished.zero_()
        return {
            "train/return": Mean(returns, episodes),
            "train/episode_length": Mean(lengths, episodes),
            "train/episodes": episodes,
        }


class Collector:
    """Advances its environments tick by tick with the published policy and records them."""

    def __init__(
        self,
        *,
        shard: int,
        env: EnvFactory | str,
        env_args: Mapping[str, Any],
        num_envs: int,
        num_evaluation_envs: int,
        policy: PolicySpec,
        replay_capacity: int,
        final_slots: int,
        replay_dir: str,
        replay_name: str,
        seeds: CollectorSeeds,
        device: str,
        rule_overrides: Mapping[str, RuleKind] = MappingProxyType({}),
    ) -> None:
        self._shard = shard
        self._device = torch.device(device)
        self._task = env
        self._env_args = dict(env_args)
        self._env = self._make_env(num_envs, evaluation=False)
        self._evaluation_env: EnvShard | None = None
        self._num_evaluation_envs = num_evaluation_envs
        self._policy = Policy(policy, self._device)
        spec = self._env.spec
        self._own_states = OwnStates(spec.shard_states, rule_overrides)
        self._layout = ReplayLayout(
            capacity=replay_capacity,
            num_envs=num_envs,
            actor_obs_dim=spec.actor_obs_dim,
            critic_obs_dim=spec.critic_obs_dim,
            action_dim=spec.action_dim,
            final_slots=final_slots,
        )
        self._replay_place = (replay_dir, replay_name)
        self._env_seed = seeds.env
        self._generator = torch.Generator(self._device).manual_seed(seeds.actions)
        self._episodes = _EpisodeStats.zero(num_envs, self._device)
        self._reported_step = -1
        self._step_checked = False

    def start(
        self, first_step: int, fleet_state: Mapping[str, Tensor], memory: bytes | None = None
    ) -> int:
        """Make the replay shard, or take over one, and reset the environments.

        Args:
            first_step: vector steps of the run so far; a resumed run's episodes differ from its
                first ones.
            fleet_state: the fleet's view of every shard state, for the first resets.
            memory: the pickled `ReplayStorage` of a collector that ended.

        Returns:
            Vector steps in the replay shard.

        Raises:
            EnvError: the environment fails in its reset, or breaks the contract there.
        """
        self._storage = self._make_storage() if memory is None else pickle.loads(memory)
        self._storage.own()
        self._writer = ReplayWriter(self._storage)
        seed = np.random.SeedSequence([self._env_seed, first_step]).generate_state(1)[0]
        with env_errors(self._shard, "apply_shard_state"):
            self._env.apply_shard_state(self._own_states.view(fleet_state))
        with env_errors(self._shard, "reset"):
            self._observation = self._env.reset(int(seed))
            check_observation(self._observation, self._env.spec, self._device, "reset")
            _check_finite_start(self._observation)
        self._writer.start(self._observation.actor_obs, self._observation.critic_obs)
        self.report_from(first_step)
        return self._storage.rows_written

    def report_from(self, first_step: int) -> None:
        """The next tick's shard states begin at this vector step of the run."""
        self._reported_step = first_step - 1

    def storage(self) -> ReplayStorage:
        """The replay shard's memory; unpickling it in another process maps it there."""
        return self._storage

    def collect(
        self,
        policy: PublishedPolicy,
        fleet_state: Mapping[str, Tensor],
        num_vector_steps: int,
        oldest_readable: int,
    ) -> CollectReport:
        """Advance every environment `num_vector_steps` times.

        Args:
            fleet_state: the fleet's view of every shard state, float64 on the CPU.
            oldest_readable: lowest vector step of the replay shard that a rank may read meanwhile.

        Raises:
            EnvError: the environment fails, or its first step breaks the contract.
        """
        started = time.perf_counter()
        self._policy.load(policy)
        with env_errors(self._shard, "apply_shard_state"):
            self._env.apply_shard_state(self._own_states.view(fleet_state))
        moments = self._zero_moments()
        lost_finals = torch.zeros((), dtype=torch.int64, device=self._device)
        dropped = torch.zeros((), dtype=torch.int64, device=self._device)
        info: dict[str, Tensor] = {}
        dumps: list[dict[str, np.ndarray]] = []
        for _ in range(num_vector_steps):
            moments = _count_observations(moments, self._observation)
            action = self._policy.sample(self._observation.actor_obs, self._generator)
            step = self._step(action)
            bad = ~_finite(step)
            if bool(bad.any()):
                dumps += self._dump(action, step, bad)
                step = self._restart(step, bad)
                dropped += bad.sum()
            lost_finals += self._writer.append(
                action=action,
                reward=step.reward,
                terminated=step.terminated,
                truncated=step.truncated,
                valid=~bad,
                final_actor_obs=step.final_actor_obs,
                final_critic_obs=step.final_critic_obs,
                actor_obs=step.actor_obs,
                critic_obs=step.critic_obs,
                oldest_readable=oldest_readable,
            )
            self._episodes.count(step, bad)
            for name, values in step.info.items():
                info[name] = info.get(name, torch.zeros((), device=self._device)) + values.mean()
            self._observation = Observation(step.actor_obs, step.critic_obs)
        nonfinite = int(dropped)
        metrics = self._episodes.take()
        metrics |= {f"env/{name}": float(v) / num_vector_steps for name, v in info.items()}
        metrics |= {"train/nonfinite": nonfinite, "train/lost_finals": int(lost_finals)}
        shard_state = self._report_shard_state(num_vector_steps)
        metrics["time/collect"] = time.perf_counter() - started
        return CollectReport(
            shard=self._shard,
            policy_version=policy.version,
            rows_written=self._storage.rows_written,
            moments=moments.cpu(),
            shard_state=shard_state,
            nonfinite=nonfinite,
            dumps=dumps[:MAX_DUMPS_PER_TICK],
            metrics=metrics,
        )

    def evaluate(self, policy: PublishedPolicy, seed: int) -> EpisodeReport:
        """One episode per evaluation environment with the deterministic policy.

        Training environments, generators and statistics are left as they are.
        """
        if self._evaluation_env is None:
            self._evaluation_env = self._make_env(self._num_evaluation_envs, evaluation=True)
        self._policy.load(policy)
        with env_errors(self._shard, "an evaluation"):
            return run_episodes(self._evaluation_env, self._policy, seed + self._shard)

    def state_dict(self) -> dict[str, Any]:
        """What decides this shard's future actions; replay and environment start afresh."""
        return {
            "generator": self._generator.get_state(),
            "own_states": self._own_states.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])
        self._own_states.load_state_dict(state["own_states"])

    def _make_storage(self) -> ReplayStorage:
        directory, name = self._replay_place
        return ReplayStorage.allocate(self._layout, self._device, directory, name)

    def close(self) -> None:
        """Free the replay shard's memory and the environments."""
        if hasattr(self, "_storage"):
            self._storage.close()
        self._env.close()
        if self._evaluation_env is not None:
            self._evaluation_env.close()

    def _make_env(self, num_envs: int, *, evaluation: bool) -> EnvShard:
        return make_env(
            self._task,
            num_envs=num_envs,
            device=self._device,
            evaluation=evaluation,
            args=self._env_args,
        )

    def _step(self, action: Tensor) -> Step:
        """One vector step; the first one is held to the contract, later ones are trusted."""
        with env_errors(self._shard, "step"):
            step = self._env.step(action)
            if not self._step_checked:
                check_step(step, self._env.spec, self._device)
                self._step_checked = True
            return step

    def _zero_moments(self) -> ObsMoments:
        spec = self._env.spec
        critic = spec.critic_obs_dim
        return ObsMoments(
            Moments.zero(spec.actor_obs_dim, self._device),
            None if critic is None else Moments.zero(critic, self._device),
        )

    def _report_shard_state(self, num_vector_steps: int) -> ShardReport:
        first = self._reported_step + 1
        self._reported_step += num_vector_steps
        with env_errors(self._shard, "report_shard_state"):
            seen = self._env.report_shard_state()
            states = self._own_states.report(seen, num_vector_steps)
        return ShardReport(
            shard=self._shard,
            first_step=first,
            last_step=self._reported_step,
            states=states,
            rules=self._own_states.rule_texts,
        )

    def _restart(self, step: Step, bad: Tensor) -> Step:
        """`step` with fresh episodes where `bad`: no reward, no done, a reset's observation."""
        with env_errors(self._shard, "reset_envs"):
            observation = self._env.reset_envs(bad)
            check_observation(observation, self._env.spec, self._device, "reset_envs")
            _check_finite_start(observation)
        return replace(
            step,
            actor_obs=observation.actor_obs,
            critic_obs=observation.critic_obs,
            reward=step.reward.masked_fill(bad, 0),
            terminated=step.terminated & ~bad,
            truncated=step.truncated & ~bad,
        )

    def _dump(self, action: Tensor, step: Step, bad: Tensor) -> list[dict[str, np.ndarray]]:
        """Values around the first few non-finite transitions, for inspection."""
        columns = {
            "obs": self._writer.current_actor_obs,
            "action": action,
            "reward": step.reward,
            "next_obs": step.actor_obs,
            "final_obs": step.final_actor_obs,
        }
        rows = bad.nonzero().flatten()[:MAX_DUMPS_PER_TICK].tolist()
        return [
            {"env": np.array(row), **{k: v[row].cpu().numpy() for k, v in columns.items()}}
            for row in rows
        ]


def run_episodes(env: EnvShard, policy: Policy, seed: int) -> EpisodeReport:
    """The first episode of every environment after `reset(seed)`, deterministic actions."""
    spec = env.spec
    obs = env.reset(seed).actor_obs
    returns = torch.zeros(spec.num_envs, dtype=torch.float64, device=obs.device)
    lengths = torch.zeros(spec.num_envs, dtype=torch.int64, device=obs.device)
    terminated = torch.zeros(spec.num_envs, dtype=torch.bool, device=obs.device)
    running = torch.ones(spec.num_envs, dtype=torch.bool, device=obs.device)
    info: dict[str, Tensor] = {}
    for _ in range(spec.episode_length):
        step = env.step(policy.mode(obs))
        returns += torch.where(running, step.reward, 0).double()
        lengths += running
        terminated |= running & step.terminated
        for name, values in step.info.items():
            seen = torch.where(running, values, 0).double()
            info[name] = info.get(name, torch.zeros_like(returns)) + seen
        running &= ~(step.terminated | step.truncated)
        if not bool(running.any()):
            break
        obs = step.actor_obs
    return EpisodeReport(
        returns=returns.cpu(),
        lengths=lengths.cpu(),
        terminated=terminated.cpu(),
        info={name: (total / lengths).cpu() for name, total in info.items()},
    )


def _finite(step: Step) -> Tensor:
    """(num_envs,) whether all that a transition would store is finite."""
    finite = step.reward.isfinite() & step.actor_obs.isfinite().all(1)
    finite &= ~step.truncated | step.final_actor_obs.isfinite().all(1)
    if step.critic_obs is not None and step.final_critic_obs is not None:
        finite &= step.critic_obs.isfinite().all(1)
        finite &= ~step.truncated | step.final_critic_obs.isfinite().all(1)
    return finite


def _check_finite_start(observation: Observation) -> None:
    parts = [p for p in (observation.actor_obs, observation.critic_obs) if p is not None]
    if not all(bool(part.isfinite().all()) for part in parts):
        raise BrokenContract("observations right after a reset are not finite")


def _count_observations(moments: ObsMoments, observation: Observation) -> ObsMoments:
    actor = merge_moments(moments.actor, Moments.of(observation.actor_obs))
    critic = moments.critic
    if critic is not None and observation.critic_obs is not None:
        critic = merge_moments(critic, Moments.of(observation.critic_obs))
    return ObsMoments(actor, critic)
