"""The fleet's collectors as one object: start, collect a tick, evaluate, close."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from collectors.collector import Collector, CollectorSeeds, CollectReport, EpisodeReport
from collectors.env import EnvFactory
from collectors.shard import LEAST_DEADLINE_S, Shard
from fastsac.core.config import Config
from fastsac.core.executor import Executor, WorkerDied, WorkerHung
from fastsac.core.policy import PolicySpec
from fastsac.core.replay import Window, sample_window

T = TypeVar("T")


class ReplayKeeper(Protocol):
    """Who maps every replay shard too, so that its memory outlives a collector on CPU."""

    def storage(self, shard: int) -> bytes:
        """The pickled `ReplayStorage` of a shard."""
        ...

    def replace_storage(self, shard: int, storage: Any) -> None:
        """Take a pending new `ReplayStorage` in the place of one that is lost."""
        ...


class CollectorGroup:
    """Owner of every shard, in shard order; knows which vector steps are readable.

    A shard that fails is restarted while the others go on, see `Shard`. What it had committed
    stays in its replay shard, and is counted when it joins again.
    """

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
        keeper: ReplayKeeper,
    ) -> None:
        fleet, replay = config.fleet, config.replay
        self._executor = executor
        self._keeper = keeper
        self._memory_survives = device == "cpu"
        self._vector_steps_per_tick = config.algorithm.vector_steps_per_tick
        self._steps_ahead = self._vector_steps_per_tick if fleet.schedule == "overlap" else 0
        self._capacity = replay.steps_per_env
        self._num_envs_per_shard = config.num_envs_per_shard
        self._shards_per_rank = fleet.collectors_per_rank
        self._vector_steps = 0
        self._fleet_state: Mapping[str, Tensor] = {}
        self._failures: list[Exception] = []
        self._states: dict[str, Any] = {}
        """Newest state known of every shard, by its number."""
        self.acted_version = 0
        """Oldest policy version among those that wrote the newest rows."""
        self.inserted = 0
        """Transitions that came into the replay with the newest tick."""
        self._total_inserted = self._total_owed = 0

        def spawn(shard: int, restarts: int) -> Any:
            return executor.spawn(
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
                replay_name=f"fastsac-{run_id}-shard{shard}-{restarts}",
                seeds=_collector_seeds(seeds[shard], restarts, self._vector_steps),
                device=device,
                rule_overrides=config.shard_state,
            )

        self._shards = [
            Shard(
                number,
                executor,
                partial(spawn, number),
                max_restarts=fleet.collector_restarts,
            )
            for number in range(fleet.num_shards)
        ]

    def start(self, first_step: int, fleet_state: Mapping[str, Tensor]) -> list[list[Any]]:
        """Make every replay shard and reset every environment, under the fleet's view.

        Returns:
            Per rank, the pending `ReplayStorage` of each of its shards. Only that rank may
            resolve them: the memory is mapped where they are unpickled.
        """
        self._vector_steps, self._fleet_state = first_step, fleet_state
        started = [shard.call("start", first_step, fleet_state) for shard in self._shards]
        for shard, rows in zip(self._shards, self._executor.wait(started), strict=True):
            shard.count_rows(rows)
        self.state_dict()  # a shard may die before the first checkpoint
        return self._by_rank([shard.call("storage") for shard in self._shards])

    def collect(self, policy: Any, fleet_state: Mapping[str, Tensor]) -> dict[int, Any]:
        """Start one tick with a published policy on every shard that is up, at least one; `wait`
        gives the reports.

        Raises:
            EnvError, WorkerDied: a shard failed more often than it may be restarted.
        """
        self._fleet_state = fleet_state
        self.inserted = 0
        self._restart(wait=False)
        while not any(shard.up for shard in self._shards):
            self._restart(wait=True)
        return {s.number: self._collect(s, policy) for s in self._shards if s.up}

    def _collect(self, shard: Shard, policy: Any) -> Any:
        if shard.joining:  # the fleet went on meanwhile
            shard.call("report_from", self._vector_steps)
            shard.joining = False
        steps = self._vector_steps_per_tick
        oldest_readable = sample_window(shard.rows_written, self._capacity, steps).low
        return shard.call("collect", policy, self._fleet_state, steps, oldest_readable)

    def wait(self, pending: Mapping[int, Any]) -> list[CollectReport]:
        """Reports of a tick, in shard order, without those of shards that failed in it.

        Raises:
            EnvError, WorkerDied: a shard failed more often than it may be restarted.
        """
        shards = [self._shards[number] for number in pending]
        outcomes = self._outcomes(shards, "collect", list(pending.values()))
        self._vector_steps += self._vector_steps_per_tick
        owed = len(self._shards) * self._vector_steps_per_tick
        self._total_owed += owed * self._num_envs_per_shard
        reports: list[CollectReport] = []
        for shard, outcome in zip(shards, outcomes, strict=True):
            if not isinstance(outcome, Exception):
                reports.append(outcome)
                self._count_rows(shard.count(outcome))
        self._fail(shards, outcomes)
        if reports:
            self.acted_version = min(report.policy_version for report in reports)
        return reports

    @property
    def restarts(self) -> int:
        """Of all shards, since this group was made."""
        return sum(shard.restarts for shard in self._shards)

    @property
    def lost_env_steps(self) -> int:
        """Env steps that shards should have collected while they were down."""
        return self._total_owed - self._total_inserted

    def take_failures(self) -> list[Exception]:
        """What shards were restarted for since the last call."""
        failures, self._failures = self._failures, []
        return failures

    @property
    def rows_written(self) -> int:
        """Vector steps that every replay shard has received."""
        return min(shard.rows_written for shard in self._shards)

    def windows(self) -> list[list[Window]]:
        """Per rank and shard, the vector steps that may be sampled during the coming tick."""
        return self._by_rank([self._window(shard) for shard in self._shards])

    def _window(self, shard: Shard) -> Window:
        """A shard that is down may have written up to a tick of rows that are not known yet, and
        its next process replaces what follows its newest row."""
        rows = shard.rows_written
        if shard.up:
            return sample_window(rows, self._capacity, self._steps_ahead)
        if not self._memory_survives:
            return Window(rows, rows)
        low, high = sample_window(rows, self._capacity, self._vector_steps_per_tick)
        return Window(low, max(low, high - 1))

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
        filled = sum(min(shard.rows_written, self._capacity) for shard in self._shards)
        return filled / (self._capacity * len(self._shards))

    def evaluate(self, policy: Any, seed: int) -> EpisodeReport:
        """Deterministic episodes on every shard's evaluation environments, in shard order.

        Raises:
            EnvError, WorkerDied: a shard failed more often than it may be restarted.
        """
        parts: list[EpisodeReport] = self._call_all("evaluate", policy, seed)
        return EpisodeReport(
            returns=torch.cat([part.returns for part in parts]),
            lengths=torch.cat([part.lengths for part in parts]),
            terminated=torch.cat([part.terminated for part in parts]),
            info={name: torch.cat([part.info[name] for part in parts]) for name in parts[0].info},
        )

    def state_dict(self) -> dict[str, Any]:
        states = self._call_all("state_dict")
        self._states = {str(n): state for n, state in enumerate(states)}
        return dict(self._states)

    def salvage(self) -> dict[str, Any]:
        """As `state_dict`, with the state last known of a shard that fails."""
        shards = [shard for shard in self._shards if shard.up]
        pending = [shard.call("state_dict") for shard in shards]
        for shard, outcome in zip(
            shards, self._outcomes(shards, "state_dict", pending), strict=True
        ):
            if not isinstance(outcome, Exception):
                self._states[str(shard.number)] = outcome
        return dict(self._states)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take saved shards.

        Raises:
            ValueError: saved with another number of collectors.
        """
        if len(state) != len(self._shards):
            raise ValueError(
                f"the checkpoint has {len(state)} collectors, this run {len(self._shards)}: "
                "resume with the same fleet.num_ranks and fleet.collectors_per_rank"
            )
        self._executor.wait(
            [shard.call("load_state_dict", state[str(shard.number)]) for shard in self._shards]
        )

    def close(self) -> None:
        pending = [shard.call("close") for shard in self._shards if shard.up]
        self._executor.outcomes(pending, [LEAST_DEADLINE_S] * len(pending))

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Results of every shard, in shard order, from those that fail after a restart."""
        results: dict[int, Any] = {}
        while missing := [s for s in self._shards if s.number not in results]:
            self._restart(wait=True)
            started = time.monotonic()
            pending = [shard.call(method, *args) for shard in missing]
            outcomes = self._outcomes(missing, method, pending)
            for shard, outcome in zip(missing, outcomes, strict=True):
                if not isinstance(outcome, Exception):
                    results[shard.number] = outcome
                    shard.deadline(method).count(time.monotonic() - started)
            self._fail(missing, outcomes)
        return [results[shard.number] for shard in self._shards]

    def _outcomes(self, shards: Sequence[Shard], method: str, pending: Sequence[Any]) -> list[Any]:
        """Results, or what took their place. Deadlines pass in two halves, so that one in which
        the whole machine was asleep ends no process."""
        halves_s = [shard.deadline(method).seconds / 2 for shard in shards]
        outcomes = self._executor.outcomes(pending, halves_s)
        late = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, WorkerHung)]
        again = self._executor.outcomes([pending[n] for n in late], [halves_s[n] for n in late])
        for n, outcome in zip(late, again, strict=True):
            outcomes[n] = outcome
        return outcomes

    def _fail(self, shards: Iterable[Shard], outcomes: Iterable[Any]) -> None:
        for shard, outcome in zip(shards, outcomes, strict=True):
            if isinstance(outcome, Exception):
                shard.fail(outcome)
                self._failures.append(outcome)

    def _restart(self, *, wait: bool) -> None:
        """Bring shards that failed a step further, or all the way."""
        for shard in self._shards:
            if shard.up:
                continue
            memory = partial(self._memory, shard.number)
            rows = shard.restart(self._vector_steps, self._fleet_state, memory, wait=wait)
            if rows is None:
                continue
            if shard.memory_is_new:
                shard.rows_written = 0
                self._keeper.replace_storage(shard.number, shard.call("storage"))
            self._count_rows(shard.count_rows(rows))

    def _memory(self, shard: int) -> bytes | None:
        """The replay shard of a collector that ended, if its memory did not end with it."""
        if not self._memory_survives:
            return None
        try:
            return self._keeper.storage(shard)
        except WorkerDied:
            return None

    def _count_rows(self, rows: int) -> None:
        self.inserted += rows * self._num_envs_per_shard
        self._total_inserted += rows * self._num_envs_per_shard

    def _by_rank(self, shards: list[T]) -> list[list[T]]:
        size = self._shards_per_rank
        return [shards[start : start + size] for start in range(0, len(shards), size)]


def _collector_seeds(
    sequence: np.random.SeedSequence, restarts: int, vector_steps: int
) -> CollectorSeeds:
    """A restarted shard draws from streams of its own, also after a resume."""
    if restarts:
        key = (*sequence.spawn_key, restarts, vector_steps)
        sequence = np.random.SeedSequence(sequence.entropy, spawn_key=key)
    actions, env = sequence.generate_state(2)
    return CollectorSeeds(actions=int(actions), env=int(env))
