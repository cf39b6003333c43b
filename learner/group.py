"""The data-parallel learner group as one object."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from fastsac.core.config import Config
from fastsac.core.executor import Executor, WorkerDied
from fastsac.core.mirror import Mirror
from fastsac.core.normalizer import ObsNormalizers
from fastsac.core.policy import PolicySpec, PublishedPolicy
from fastsac.core.replay import Window
from learner.rank import LearnerRank, LearnReport


class LearnerGroup:
    """Owner of every rank's handle; publishes what the ranks have learnt."""

    def __init__(
        self,
        executor: Executor,
        config: Config,
        policy: PolicySpec,
        *,
        critic_obs_dim: int | None,
        mirror: Mirror | None,
        seeds: Sequence[np.random.SeedSequence],
        init_seed: np.random.SeedSequence,
        device: str,
    ) -> None:
        fleet = config.fleet
        self._executor = executor
        self._timeout_s = fleet.collective_timeout_s
        self._shards_per_rank = fleet.collectors_per_rank
        self._parameters: Tensor
        self._handles = [
            executor.spawn(
                LearnerRank,
                bundle=rank,
                cpus=fleet.cpus_per_rank,
                threads=fleet.threads_per_rank,
                rank=rank,
                world_size=fleet.num_ranks,
                policy=policy,
                critic_obs_dim=critic_obs_dim,
                mirror=mirror,
                algorithm=config.algorithm,
                batch_size=config.batch_size_per_rank,
                n_step=config.replay.n_step,
                seed=int(seeds[rank].generate_state(1)[0]),
                init_seed=int(init_seed.generate_state(1)[0]),
                device=device,
            )
            for rank in range(fleet.num_ranks)
        ]

    def start(self, storages_by_rank: Sequence[Sequence[Any]]) -> None:
        """Build the process group and let every rank map the replay shards of its host."""
        if len(self._handles) > 1:
            host = self._executor.host_address(bundle=0)
            leader = self._handles[0]
            [port] = self._executor.wait(
                [self._executor.call(leader, "open_store", host, self._timeout_s)]
            )
            self._call_all("join", host, port, 0, self._timeout_s)
        self._executor.wait(
            [
                self._executor.call(handle, "attach", *storages)
                for handle, storages in zip(self._handles, storages_by_rank, strict=True)
            ]
        )
        self._take_parameters()

    def storage(self, shard: int) -> bytes:
        """The pickled memory of a replay shard, as its rank maps it.

        Raises:
            WorkerDied: the rank ended too.
        """
        rank, index = divmod(shard, self._shards_per_rank)
        call = self._executor.call(self._handles[rank], "storage", index)
        [memory] = self._executor.wait([call])
        return memory

    def replace_storage(self, shard: int, storage: Any) -> None:
        """Let a rank map the pending new storage of a shard whose memory was lost."""
        rank, index = divmod(shard, self._shards_per_rank)
        call = self._executor.call(self._handles[rank], "replace_storage", index, storage)
        self._executor.wait([call])

    def update(
        self,
        num_updates: int,
        windows_by_rank: Sequence[Sequence[Window]],
        policy: Any,
        lr_scale: float,
    ) -> list[Any]:
        """Start a tick's updates on every rank; `wait` gives the reports."""
        return [
            self._executor.call(handle, "update", num_updates, windows, policy, lr_scale)
            for handle, windows in zip(self._handles, windows_by_rank, strict=True)
        ]

    def wait(self, pending: Sequence[Any]) -> list[LearnReport]:
        """Reports of a tick, in rank order."""
        reports: list[LearnReport] = self._executor.wait(pending)
        assert reports[0].actor_parameters is not None, "rank 0 reports them"
        self._parameters = reports[0].actor_parameters
        return reports

    def publish(self, version: int, normalizers: ObsNormalizers) -> PublishedPolicy:
        """The policy after the newest update, with the normaliser base that belongs to it."""
        return PublishedPolicy(
            version=version, parameters=self._parameters, normalizers=normalizers
        )

    def state_dict(self) -> dict[str, Any]:
        """The replicas are identical, so the learner is saved once and the generators per rank."""
        states = self._call_all("state_dict")
        return {
            "learner": states[0]["learner"],
            "updates": states[0]["updates"],
            "generators": {str(rank): s["generator"] for rank, s in enumerate(states)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a saved group.

        Raises:
            ValueError: saved with another number of ranks.
        """
        generators = state["generators"]
        if len(generators) != len(self._handles):
            raise ValueError(
                f"the checkpoint has {len(generators)} ranks, this run {len(self._handles)}: "
                "resume with the same fleet.num_ranks"
            )
        self._executor.wait(
            [
                self._executor.call(
                    handle,
                    "load_state_dict",
                    {
                        "learner": state["learner"],
                        "updates": state["updates"],
                        "generator": generators[str(rank)],
                    },
                )
                for rank, handle in enumerate(self._handles)
            ]
        )
        self._take_parameters()

    def close(self) -> None:
        for handle in self._handles:
            with suppress(WorkerDied):
                self._executor.wait([self._executor.call(handle, "close")])

    def _take_parameters(self) -> None:
        [self._parameters] = self._executor.wait(
            [self._executor.call(self._handles[0], "actor_parameters")]
        )

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        return self._executor.wait([self._executor.call(h, method, *args) for h in self._handles])
