"""The fleet's collectors as one object: start, collect a tick, evaluate, close."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from collectors.collector import Collector, CollectorSeeds, CollectReport, EpisodeReport
from collectors.env import EnvFactory
from fastsac.core.config import Config
from fastsac.core.executor import Executor, WorkerDied
from fastsac.core.policy import PolicySpec
from fastsac.core.replay import Window, sample_window

T = TypeVar("T")


class CollectorGroup:
    """Owner of every shard's handle, in shard order; knows which vector steps are readable."""

    def __init__(
        self,
        executor: Executor,
        config: Config,
        env: EnvFactory | str,
        policy: PolicySpec,
        *,
        seeds: Sequence[np.random.SeedSequence],
        device: str,
        run_id: str,
    ) -> None:
        fleet, replay = config.fleet, config.replay
        self._executor = executor
        self._vector_steps_per_tick = config.algorithm.vector_steps_per_tick
        self._steps_ahead = self._vector_steps_per_tick if fleet.schedule == "overlap" else 0
        self._capacity = replay.steps_per_env
        self._num_envs_per_shard = config.num_envs_per_shard
        self._shards_per_rank = fleet.collectors_per_rank
        self._rows_written = [0] * fleet.num_shards
        self._states: dict[str, Any] = {}
        """Newest state known of every shard, by its number."""
        self.acted_version = 0
        """Oldest policy version among those that wrote the newest rows."""
        self._handles = [
            executor.spawn(
                Collector,
                bundle=shard // fleet.collectors_per_rank,
                cpus=fleet.cpus_per_collector,
                threads=fleet.threads_per_collector,
                shard=shard,
                env=env,
                env_args=config.env.args_of(shard),
                num_envs=config.num_envs_per_shard,
                num_evaluation_envs=config.evaluation.num_episodes // fleet.num_shards,
                policy=policy,
                replay_capacity=replay.steps_per_env,
                final_slots=config.final_slots_per_shard,
                replay_dir=replay.dir,
                replay_name=f"fastsac-{run_id}-shard{shard}",
                seeds=_collector_seeds(seeds[shard]),
                device=device,
                rule_overrides=config.shard_state,
            )
            for shard in range(fleet.num_shards)
        ]

    def start(self, first_step: int, fleet_state: Mapping[str, Tensor]) -> list[list[Any]]:
        """Make every replay shard and reset every environment, under the fleet's view.

        Returns:
            Per rank, the pending `ReplayStorage` of each of its shards. Only that rank may
            resolve them: the memory is mapped where they are unpickled.
        """
        self._executor.wait(
            [self._executor.call(h, "start", first_step, fleet_state) for h in self._handles]
        )
        self.state_dict()  # a shard may die before the first checkpoint
        return self._by_rank([self._executor.call(h, "storage") for h in self._handles])

    def collect(self, policy: Any, fleet_state: Mapping[str, Tensor]) -> list[Any]:
        """Start one tick on every shard with a published policy; `wait` gives the reports."""
        steps = self._vector_steps_per_tick
        return [
            self._executor.call(
                handle,
                "collect",
                policy,
                fleet_state,
                steps,
                sample_window(rows, self._capacity, steps).low,
            )
            for handle, rows in zip(self._handles, self._rows_written, strict=True)
        ]

    def wait(self, pending: Sequence[Any]) -> list[CollectReport]:
        """Reports of a tick, in shard order."""
        reports: list[CollectReport] = self._executor.wait(pending)
        self._rows_written = [report.rows_written for report in reports]
        self.acted_version = min(report.policy_version for report in reports)
        return reports

    @property
    def rows_written(self) -> int:
        """Vector steps that every replay shard has received."""
        return min(self._rows_written)

    def windows(self) -> list[list[Window]]:
        """Per rank and shard, the vector steps that may be sampled during the coming tick."""
        windows = [
            sample_window(rows, self._capacity, self._steps_ahead) for rows in self._rows_written
        ]
        return self._by_rank(windows)

    @property
    def readable_transitions(self) -> int:
        """Transitions that every rank may sample from during the coming tick, at least."""
        steps = min(
            sum(window.high - window.low for window in windows) for windows in self.windows()
        )
        return steps * self._num_envs_per_shard

    @property
    def fill(self) -> float:
        """Share of the replay that holds transitions."""
        filled = sum(min(rows, self._capacity) for rows in self._rows_written)
        return filled / (self._capacity * len(self._rows_written))

    def evaluate(self, policy: Any, seed: int) -> EpisodeReport:
        """Deterministic episodes on every shard's evaluation environments, in shard order."""
        pending = [self._executor.call(h, "evaluate", policy, seed) for h in self._handles]
        parts: list[EpisodeReport] = self._executor.wait(pending)
        return EpisodeReport(
            returns=torch.cat([part.returns for part in parts]),
            lengths=torch.cat([part.lengths for part in parts]),
            terminated=torch.cat([part.terminated for part in parts]),
            info={name: torch.cat([part.info[name] for part in parts]) for name in parts[0].info},
        )

    def state_dict(self) -> dict[str, Any]:
        pending = [self._executor.call(h, "state_dict") for h in self._handles]
        self._states = {str(n): state for n, state in enumerate(self._executor.wait(pending))}
        return dict(self._states)

    def salvage(self) -> dict[str, Any]:
        """As `state_dict`, with the state last known of a shard whose process died."""
        for shard, handle in enumerate(self._handles):
            with suppress(WorkerDied):
                pending = self._executor.call(handle, "state_dict")
                [self._states[str(shard)]] = self._executor.wait([pending])
        return dict(self._states)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take saved shards.

        Raises:
            ValueError: saved with another number of collectors.
        """
        if len(state) != len(self._handles):
            raise ValueError(
                f"the checkpoint has {len(state)} collectors, this run {len(self._handles)}: "
                "resume with the same fleet.num_ranks and fleet.collectors_per_rank"
            )
        self._executor.wait(
            [
                self._executor.call(handle, "load_state_dict", state[str(shard)])
                for shard, handle in enumerate(self._handles)
            ]
        )

    def close(self) -> None:
        for handle in self._handles:
            with suppress(WorkerDied):
                self._executor.wait([self._executor.call(handle, "close")])

    def _by_rank(self, shards: list[T]) -> list[list[T]]:
        size = self._shards_per_rank
        return [shards[start : start + size] for start in range(0, len(shards), size)]


def _collector_seeds(sequence: np.random.SeedSequence) -> CollectorSeeds:
    actions, env = sequence.generate_state(2)
    return CollectorSeeds(actions=int(actions), env=int(env))
