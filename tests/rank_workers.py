"""Learner ranks as processes of their own; what they run, and what they are given."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import fields
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastsac.core.config import AlgorithmConfig
from fastsac.core.mirror import Mirror
from fastsac.core.policy import PolicySpec
from fastsac.core.transition import Batch
from learner.rank import LearnerRank
from learner.update import Noise

ACTION_DIM, OBS_DIM, CRITIC_OBS_DIM = 2, 4, 6
BATCH_SIZE = 64
NUM_UPDATES = 20
TIMEOUT_S = 60.0

Generation = tuple[int, float | None]
"""World size, and the learning rate of plain SGD in AdamW's place."""
Outcome = tuple[int, Generation | str, dict[str, np.ndarray]]
"""Rank, the generation or a traceback, what the rank ended with."""


def tiny_policy(obs_dim: int = OBS_DIM) -> PolicySpec:
    return PolicySpec(
        obs_dim=obs_dim,
        action_low=torch.tensor([-1.0, -2.0]),
        action_high=torch.tensor([1.0, 3.0]),
        hidden=16,
        log_std_min=-5.0,
        log_std_max=0.0,
    )


def tiny_algorithm(**fields: Any) -> AlgorithmConfig:
    sizes = {"actor_hidden": 16, "critic_hidden": 16, "num_atoms": 11, "v_min": -5.0, "v_max": 5.0}
    return AlgorithmConfig(**{**sizes, "alpha_init": 0.1, "batch_size": BATCH_SIZE, **fields})


def make_rank(
    rank: int = 0,
    world_size: int = 1,
    *,
    seed: int = 5,
    init_seed: int = 0,
    mirror: Mirror | None = None,
    **algorithm: Any,
) -> LearnerRank:
    return LearnerRank(
        rank=rank,
        world_size=world_size,
        policy=tiny_policy(),
        critic_obs_dim=CRITIC_OBS_DIM,
        mirror=mirror,
        algorithm=tiny_algorithm(**algorithm),
        batch_size=BATCH_SIZE // world_size,
        n_step=1,
        seed=seed,
        init_seed=init_seed,
        device="cpu",
    )


def make_batch(seed: int, size: int = BATCH_SIZE) -> tuple[Batch, Noise]:
    """The batch and noise of one update; a fifth of the rows is terminated."""
    g = torch.Generator().manual_seed(seed)
    batch = Batch(
        obs=torch.randn(size, OBS_DIM, generator=g),
        critic_obs=torch.randn(size, CRITIC_OBS_DIM, generator=g),
        action=torch.randn(size, ACTION_DIM, generator=g),
        reward=torch.randn(size, generator=g),
        next_obs=torch.randn(size, OBS_DIM, generator=g),
        next_critic_obs=torch.randn(size, CRITIC_OBS_DIM, generator=g),
        terminated=torch.rand(size, generator=g) < 0.2,
        discount=torch.full((size,), 0.97),
    )
    eps = torch.randn(2, size, ACTION_DIM, generator=g)
    return batch, Noise(next=eps[0], actor=eps[1])


def slice_of(batch: Batch, noise: Noise, part: slice) -> tuple[Batch, Noise]:
    columns = {field.name: getattr(batch, field.name)[part] for field in fields(Batch)}
    return Batch(**columns), Noise(noise.next[part], noise.actor[part])


def use_plain_sgd(rank: LearnerRank, lr: float) -> None:
    """AdamW's first steps turn rounding into steps of lr; SGD keeps rounding small."""
    learner = rank._learner
    for name, flat in [
        ("actor", learner.flat_actor),
        ("critic", learner.flat_critic),
        ("alpha", learner.flat_alpha),
    ]:
        learner.optimizers[name] = torch.optim.SGD([flat.values], lr)  # pyright: ignore[reportArgumentType]


def train(rank: LearnerRank, index: int, world_size: int) -> dict[str, Tensor]:
    """This rank's slices of `NUM_UPDATES` batches; the actor moves in every second update."""
    share = BATCH_SIZE // world_size
    losses = []
    for number in range(NUM_UPDATES):
        part = slice(index * share, (index + 1) * share)
        batch, noise = slice_of(*make_batch(number), part)
        values = rank._learner.update(
            batch, noise, update_actor=number % 2 == 1, average=rank._average
        )
        losses.append(torch.stack([values["critic_loss"], values["alpha_loss"]]))
    learner = rank._learner
    return {
        "losses": torch.stack(losses),
        "actor": learner.flat_actor.values.detach(),
        "critic": learner.flat_critic.values.detach(),
        "target": learner.flat_target.values.detach(),
        "log_alpha": learner.flat_alpha.values.detach(),
    }


def run_rank(
    index: int, generations: Sequence[Generation], ports: Queue[int], results: Queue[Outcome]
) -> None:
    """Body of a rank's process: it takes part in every generation that has a rank `index`.

    One process for all of them, because starting it costs more than its training.
    """
    torch.set_num_threads(1)
    leader: LearnerRank | None = None
    port = 0
    try:
        for number, (world_size, sgd_lr) in enumerate(generations):
            if index >= world_size:
                continue
            rank = make_rank(index, world_size, init_seed=index)
            if index == 0 and leader is None:
                port = rank.open_store("127.0.0.1", TIMEOUT_S)
                leader = rank
                for _ in range(1, max(size for size, _ in generations)):
                    ports.put(port)
            elif leader is not None:
                rank._store = leader._store
            elif port == 0:
                port = ports.get(timeout=TIMEOUT_S)
            rank.join("127.0.0.1", port, number, TIMEOUT_S)
            joined = torch.cat([tensor.flatten() for tensor in rank._learner.tensors()])
            if sgd_lr is not None:
                use_plain_sgd(rank, sgd_lr)
            trained = {"joined": joined, **train(rank, index, world_size)}
            arrays = {name: tensor.numpy() for name, tensor in trained.items()}
            results.put((index, (world_size, sgd_lr), arrays))
            rank.close()
    except BaseException:
        results.put((index, traceback.format_exc(), {}))
        raise
