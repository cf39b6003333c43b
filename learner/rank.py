"""A learner rank: a replica of the networks that trains on the replay shards of its host."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch documents them under torch.distributed, where it forgets to export them
from torch._C._distributed_c10d import PrefixStore, TCPStore

from fastsac.core.config import AlgorithmConfig
from fastsac.core.metrics import Mean, MetricValue, final_value, metric
from fastsac.core.mirror import Mirror, mirror_rows
from fastsac.core.normalizer import ObsNormalizers
from fastsac.core.policy import PolicySpec, PublishedPolicy
from fastsac.core.replay import ReplaySampler, ReplayStorage, Window
from fastsac.core.transition import Batch
from learner.update import Learner, Noise


@dataclass(frozen=True, kw_only=True)
class LearnReport:
    """What one rank tells the driver about the updates of a tick."""

    updates: int
    actor_parameters: Tensor | None
    """(num_parameters,) on the CPU; from rank 0 only, because all ranks hold the same."""
    finite: bool
    """Whether the metrics and the parameters are."""
    metrics: Mapping[str, MetricValue]


class LearnerRank:
    """Samples, computes local gradients, averages them over the ranks, steps."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        policy: PolicySpec,
        critic_obs_dim: int | None,
        mirror: Mirror | None,
        algorithm: AlgorithmConfig,
        batch_size: int,
        n_step: int,
        seed: int,
        init_seed: int,
        device: str,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._device = torch.device(device)
        self._algorithm = algorithm
        self._batch_size = batch_size
        self._n_step = n_step
        self._action_dim = policy.action_low.numel()
        self._mirror = None if mirror is None else mirror.to(self._device)
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._learner = Learner(
            policy=policy,
            critic_obs_dim=critic_obs_dim,
            algorithm=algorithm,
            device=self._device,
            generator=torch.Generator().manual_seed(init_seed),
        )
        self._updates = 0
        self._storages: tuple[ReplayStorage, ...] = ()

    def open_store(self, host: str, timeout_s: float) -> int:
        """Serve the group's rendezvous on `host` (rank 0 only); returns the port."""
        self._store = TCPStore(
            host,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        return self._store.port

    def join(self, host: str, port: int, generation: int, timeout_s: float) -> None:
        """Enter the process group and take rank 0's parameters and moments.

        Args:
            generation: number of times that the group was built, so that a rebuilt group never
                reads the rendezvous of the one before it.
        """
        timeout = timedelta(seconds=timeout_s)
        store = self._store if self._rank == 0 else TCPStore(host, port, timeout=timeout)
        dist.init_process_group(
            "nccl" if self._device.type == "cuda" else "gloo",
            store=PrefixStore(f"generation{generation}", store),
            rank=self._rank,
            world_size=self._world_size,
            timeout=timeout,
        )
        for tensor in self._learner.tensors():
            dist.broadcast(tensor, src=0)

    def attach(self, *storages: ReplayStorage) -> None:
        """Sample from these replay shards, in shard order."""
        self._storages = storages
        self._sampler = ReplaySampler(storages, self._n_step, self._algorithm.gamma)

    def storage(self, index: int) -> bytes:
        """The pickled memory of a replay shard, which outlives its collector here."""
        return pickle.dumps(self._storages[index])

    def replace_storage(self, index: int, storage: ReplayStorage) -> None:
        """Sample from another replay shard in the place of one whose memory is lost."""
        self._storages[index].close()
        self.attach(*self._storages[:index], storage, *self._storages[index + 1 :])

    def update(
        self,
        num_updates: int,
        windows: Sequence[Window],
        policy: PublishedPolicy,
        lr_scale: float = 1.0,
    ) -> LearnReport:
        """Do `num_updates` updates on batches from `windows`, normalised as `policy` is, with the
        configured learning rates times `lr_scale`."""
        started = time.perf_counter()
        self._learner.scale_learning_rates(lr_scale)
        normalizers = policy.normalizers.to(self._device)
        tally = _Tally()
        if num_updates:
            indices = self._sampler.draw(windows, num_updates, self._batch_size, self._generator)
            for row in indices:
                batch = self._reflect(self._sampler.gather(row))
                tally.add(self._update(normalize(batch, normalizers)))
        parameters = self.actor_parameters() if self._rank == 0 else None
        metrics = tally.take()
        finite = all(math.isfinite(final_value(value)) for value in metrics.values())
        if parameters is not None:
            finite = finite and bool(parameters.isfinite().all())
        metrics["time/learn"] = time.perf_counter() - started
        return LearnReport(
            updates=num_updates, actor_parameters=parameters, finite=finite, metrics=metrics
        )

    def actor_parameters(self) -> Tensor:
        """(num_parameters,) on the CPU, to publish."""
        return self._learner.actor_parameters().cpu()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update reads, the replay aside."""
        return {
            "learner": self._learner.state_dict(),
            "updates": self._updates,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._learner.load_state_dict(state["learner"])
        self._updates = state["updates"]
        self._generator.set_state(state["generator"])

    def close(self) -> None:
        """Leave the process group, and give back the replay memory of collectors that died."""
        for storage in self._storages:
            storage.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _reflect(self, batch: Batch) -> Batch:
        """Mirror a random half of the rows, if the learner uses the environment's symmetry."""
        if self._mirror is None:
            return batch
        coin = torch.rand(self._batch_size, generator=self._generator, device=self._device)
        return mirror_rows(batch, coin < 0.5, self._mirror)

    def _update(self, batch: Batch) -> dict[str, Tensor]:
        self._updates += 1
        shape = (self._batch_size, self._action_dim)
        noise = Noise(
            next=torch.randn(shape, generator=self._generator, device=self._device),
            actor=torch.randn(shape, generator=self._generator, device=self._device),
        )
        values = self._learner.update(
            batch,
            noise,
            update_actor=self._updates % self._algorithm.policy_frequency == 0,
            average=self._average,
        )
        values["reward_mean"] = batch.reward.mean()
        values["reward_min"], values["reward_max"] = batch.reward.aminmax()
        return values

    def _average(self, gradient: Tensor) -> None:
        """Mean over the ranks, in place; alone, there is nothing to do."""
        if self._world_size > 1:
            dist.all_reduce(gradient)
            gradient /= self._world_size


def normalize(batch: Batch, normalizers: ObsNormalizers) -> Batch:
    """`batch` with standardised observations."""
    obs, next_obs = normalizers.actor(batch.obs), normalizers.actor(batch.next_obs)
    critic_obs, next_critic_obs = obs, next_obs
    if normalizers.critic is not None:
        critic_obs = normalizers.critic(batch.critic_obs)
        next_critic_obs = normalizers.critic(batch.next_critic_obs)
    return Batch(
        obs=obs,
        critic_obs=critic_obs,
        action=batch.action,
        reward=batch.reward,
        next_obs=next_obs,
        next_critic_obs=next_critic_obs,
        terminated=batch.terminated,
        discount=batch.discount,
    )


class _Tally:
    """A tick's update metrics; they stay on the device until `take`."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)

    def take(self) -> dict[str, MetricValue]:
        """One value per metric, by the reduction that it declares; one transfer for all."""
        names = list(self._values)
        if not names:
            return {}
        counts = [len(values) for values in self._values.values()]
        flat = torch.stack([v.detach() for values in self._values.values() for v in values])
        metrics: dict[str, MetricValue] = {}
        numbers = iter(flat.tolist())
        for short, count in zip(names, counts, strict=True):
            values = [next(numbers) for _ in range(count)]
            name = f"replay/{short}" if short.startswith("reward") else f"learner/{short}"
            reduction = metric(name).reduction
            if reduction == "mean":
                metrics[name] = Mean(sum(values), len(values))
            elif reduction == "min":
                metrics[name] = min(values)
            elif reduction == "max":
                metrics[name] = max(values)
            else:
                metrics[name] = values[-1]
        return metrics
