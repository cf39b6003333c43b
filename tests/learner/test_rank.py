import math
import multiprocessing as mp
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_workers import (
    ACTION_DIM,
    BATCH_SIZE,
    CRITIC_OBS_DIM,
    OBS_DIM,
    Generation,
    make_batch,
    make_rank,
    run_rank,
    tiny_policy,
    train,
    use_plain_sgd,
)
from torch import Tensor

from fastsac.core.metrics import Mean, final_value, metric
from fastsac.core.mirror import Mirror, Reflection
from fastsac.core.normalizer import Normalizer, ObsNormalizers
from fastsac.core.policy import PublishedPolicy
from fastsac.core.replay import ReplayLayout, ReplayStorage, ReplayWriter, Window
from learner.rank import LearnerRank, normalize

PROCESS_TIMEOUT_S = 90.0
SGD_LR = 0.05
FLAT = {n: f"flat_{n}" for n in ("actor", "critic", "target")} | {"log_alpha": "flat_alpha"}
NETWORKS = tuple(FLAT)


@cache
def groups() -> dict[Generation, list[dict[str, np.ndarray]]]:
    """What the ranks of every generation ended with; rank r starts from init seed r."""
    generations = [(world_size, lr) for world_size in (1, 2, 4) for lr in (SGD_LR, None)]
    context = mp.get_context("spawn")
    ports, results = context.Queue(), context.Queue()
    processes = [
        context.Process(target=run_rank, args=(rank, generations, ports, results))
        for rank in range(4)
    ]
    for process in processes:
        process.start()
    ended: dict[Generation, dict[int, dict[str, np.ndarray]]] = {g: {} for g in generations}
    try:
        for _ in range(sum(world_size for world_size, _ in generations)):
            rank, generation, arrays = results.get(timeout=PROCESS_TIMEOUT_S)
            assert not isinstance(generation, str), f"rank {rank}: {generation}"
            ended[generation][rank] = arrays
        for process in processes:
            process.join(PROCESS_TIMEOUT_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
    return {g: [ranks[i] for i in range(g[0])] for g, ranks in ended.items()}


@cache
def alone(sgd_lr: float | None) -> dict[str, Tensor]:
    """One rank on the whole batches."""
    rank = make_rank()
    if sgd_lr is not None:
        use_plain_sgd(rank, sgd_lr)
    return train(rank, 0, 1)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_on_slices_equal_one_rank_on_the_whole_batch(world_size):
    ranks, expected = groups()[world_size, SGD_LR], alone(SGD_LR)
    for name in NETWORKS:
        ours = torch.from_numpy(ranks[0][name])
        torch.testing.assert_close(ours, expected[name], rtol=0, atol=1e-6)
        assert not torch.equal(expected[name], getattr(make_rank()._learner, FLAT[name]).values)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_losses_of_ranks_under_adamw_equal_those_of_one_rank(world_size):
    losses = np.mean([arrays["losses"] for arrays in groups()[world_size, None]], axis=0)
    np.testing.assert_allclose(losses, alone(None)["losses"].numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("sgd_lr", [SGD_LR, None])
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_stay_identical_bit_for_bit(world_size, sgd_lr):
    first, *others = groups()[world_size, sgd_lr]
    for other in others:
        for name in NETWORKS:
            np.testing.assert_array_equal(first[name], other[name])
        assert (first["losses"] != other["losses"]).any(), "each rank has a slice of its own"


def test_a_rank_that_joins_takes_the_parameters_of_rank_zero():
    first, second = groups()[2, None]
    own = [
        torch.cat([t.flatten() for t in make_rank(init_seed=i)._learner.tensors()]) for i in (0, 1)
    ]
    assert not torch.equal(own[0], own[1])
    np.testing.assert_array_equal(first["joined"], own[0].numpy())
    np.testing.assert_array_equal(second["joined"], own[0].numpy())


@pytest.fixture
def storage(tmp_path):
    """A shard of 3 envs and 20 vector steps of random transitions."""
    layout = ReplayLayout(
        capacity=30,
        num_envs=3,
        actor_obs_dim=OBS_DIM,
        critic_obs_dim=CRITIC_OBS_DIM,
        action_dim=ACTION_DIM,
        final_slots=8,
    )
    shard = ReplayStorage.allocate(layout, torch.device("cpu"), str(tmp_path), "shard")
    writer, generator = ReplayWriter(shard), torch.Generator().manual_seed(0)

    def draw(dim: int) -> Tensor:
        return 2 + 3 * torch.randn(3, dim, generator=generator)

    writer.start(draw(OBS_DIM), draw(CRITIC_OBS_DIM))
    for number in range(20):
        writer.append(
            action=draw(ACTION_DIM),
            reward=draw(1)[:, 0],
            terminated=torch.tensor([number % 7 == 6, False, False]),
            truncated=torch.tensor([False, number % 9 == 8, False]),
            valid=torch.ones(3, dtype=torch.bool),
            final_actor_obs=draw(OBS_DIM),
            final_critic_obs=draw(CRITIC_OBS_DIM),
            actor_obs=draw(OBS_DIM),
            critic_obs=draw(CRITIC_OBS_DIM),
            oldest_readable=0,
        )
    yield shard
    shard.close()


def published(shift: float = 2.0) -> PublishedPolicy:
    def normalizer(dim: int) -> Normalizer:
        return Normalizer(torch.full((dim,), shift), torch.full((dim,), 3.0))

    normalizers = ObsNormalizers(normalizer(OBS_DIM), normalizer(CRITIC_OBS_DIM))
    parameters = torch.nn.utils.parameters_to_vector(tiny_policy().make_actor().parameters())
    return PublishedPolicy(version=0, parameters=parameters.detach(), normalizers=normalizers)


def attached(storage: ReplayStorage, **arguments: Any) -> LearnerRank:
    rank = make_rank(**arguments)
    rank.attach(storage)
    return rank


def test_reported_metrics_are_declared_and_reduced_as_declared(storage):
    rank = attached(storage, policy_frequency=2)
    report = rank.update(4, [Window(0, 20)], published())
    assert report.updates == 4
    assert {"learner/critic_loss", "learner/actor_loss", "replay/reward_min"} <= set(report.metrics)
    for name, value in report.metrics.items():
        pools = metric(name).reduction == "mean"
        assert isinstance(value, Mean) == pools, name
        assert math.isfinite(final_value(value)), name
    critic, actor = report.metrics["learner/critic_loss"], report.metrics["learner/actor_loss"]
    assert isinstance(critic, Mean)
    assert isinstance(actor, Mean)
    assert (critic.count, actor.count) == (4, 2)
    rewards = storage.reward[:20]
    assert report.metrics["replay/reward_min"] == rewards.min()
    assert report.metrics["replay/reward_max"] == rewards.max()


def test_the_actor_moves_in_every_fourth_update_across_calls(storage):
    rank, moved = attached(storage, policy_frequency=4), []
    for _ in range(9):
        before = rank.actor_parameters()
        rank.update(1, [Window(0, 20)], published())
        moved.append(not torch.equal(before, rank.actor_parameters()))
    assert moved == [False, False, False, True, False, False, False, True, False]


def test_learning_rates_are_scaled_as_told(storage):
    whole, halved = (
        attached(storage),
        attached(storage, critic_lr=1.5e-4, actor_lr=1.5e-4, alpha_lr=1.5e-4),
    )
    whole.update(4, [Window(0, 20)], published(), 0.5)
    halved.update(4, [Window(0, 20)], published())
    for name in ("flat_actor", "flat_critic", "flat_target"):
        ours, theirs = (getattr(rank._learner, name).values for rank in (whole, halved))
        assert torch.equal(ours, theirs)
    before = whole._learner.flat_critic.values.detach().clone()
    whole.update(4, [Window(0, 20)], published(), 0.0)
    assert torch.equal(whole._learner.flat_critic.values, before)


def test_only_rank_zero_reports_parameters_and_a_tick_without_updates_is_fine(storage):
    report = attached(storage).update(0, [Window(0, 20)], published())
    assert report.updates == 0
    assert set(report.metrics) == {"time/learn"}
    assert report.actor_parameters is not None
    other = attached(storage, rank=1)
    assert other.update(0, [Window(0, 20)], published()).actor_parameters is None


def test_batches_are_normalised_as_the_published_policy_is(storage):
    seen = []
    rank = attached(storage)
    learn = rank._learner.update

    def spy(batch, *arguments, **keywords):
        seen.append(batch)
        return learn(batch, *arguments, **keywords)

    rank._learner.update = spy
    for shift in (2.0, 5.0):
        rank.update(1, [Window(0, 20)], published(shift))
    raw = {tuple(row) for row in storage.actor_obs[:20].flatten(0, 1).round(decimals=3).tolist()}
    for batch, shift in zip(seen, (2.0, 5.0), strict=True):
        back = (batch.obs * 3 + shift).round(decimals=3)
        assert sum(tuple(row) in raw for row in back.tolist()) > 0.9 * len(back)


def test_normalize_standardises_what_actor_and_critic_see_each_with_its_own():
    batch, _ = make_batch(0)
    actor = Normalizer(torch.arange(4.0), torch.full((4,), 2.0))
    critic = Normalizer(torch.full((6,), -1.0), torch.full((6,), 4.0))
    both = normalize(batch, ObsNormalizers(actor, critic))
    torch.testing.assert_close(both.obs, (batch.obs - torch.arange(4.0)) / 2)
    torch.testing.assert_close(both.next_obs, (batch.next_obs - torch.arange(4.0)) / 2)
    torch.testing.assert_close(both.critic_obs, (batch.critic_obs + 1) / 4)
    torch.testing.assert_close(both.next_critic_obs, (batch.next_critic_obs + 1) / 4)
    for name in ("action", "reward", "terminated", "discount"):
        assert getattr(both, name) is getattr(batch, name)
    shared = normalize(batch, ObsNormalizers(actor, None))
    assert shared.critic_obs is shared.obs
    assert shared.next_critic_obs is shared.next_obs


def test_a_saved_rank_repeats_bit_for_bit(storage, tmp_path: Path):
    rank, windows = attached(storage), [Window(0, 20)]
    rank.update(3, windows, published())
    torch.save(rank.state_dict(), tmp_path / "rank.pt")
    resumed = attached(storage, seed=77, init_seed=78)
    resumed.load_state_dict(torch.load(tmp_path / "rank.pt"))
    reports = [r.update(6, windows, published()) for r in (rank, resumed)]
    assert all(map(torch.equal, rank._learner.tensors(), resumed._learner.tensors()))
    one, other = ({k: v for k, v in r.metrics.items() if k != "time/learn"} for r in reports)
    assert one == other
    assert torch.equal(rank.state_dict()["generator"], resumed.state_dict()["generator"])


def test_a_rank_with_a_mirror_turns_half_of_the_rows():
    mirror = Mirror(
        actor_obs=Reflection.of_signs(*[-1] * OBS_DIM),
        critic_obs=Reflection.of_signs(*[-1] * CRITIC_OBS_DIM),
        action=Reflection.of_signs(*[-1] * ACTION_DIM),
    )
    batch = make_batch(1)[0]
    seen = make_rank(mirror=mirror)._reflect(batch)
    turned = (seen.obs == -batch.obs).all(1)
    assert torch.equal((seen.obs == batch.obs).all(1), ~turned)
    assert torch.equal((seen.action == -batch.action).all(1), turned)
    assert torch.equal((seen.next_critic_obs == -batch.next_critic_obs).all(1), turned)
    assert abs(int(turned.sum()) - BATCH_SIZE / 2) <= 4 * math.sqrt(BATCH_SIZE) / 2
    again = make_rank(mirror=mirror)._reflect(batch)
    assert torch.equal(again.obs, seen.obs)
    assert make_rank()._reflect(batch) is batch
