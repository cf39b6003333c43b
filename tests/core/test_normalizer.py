import numpy as np
import pytest
import torch

from fastsac.core.normalizer import (
    STD_OFFSET,
    FleetNormalizer,
    Moments,
    ObsMoments,
    merge_moments,
)

TICKS = 7


def observations(num_shards: int, *, sigmas_apart: float = 0.0) -> list[list[np.ndarray]]:
    """Per tick and shard, (count, 3) float32 observations; counts differ between shards."""
    rng = np.random.default_rng(num_shards)
    counts = rng.integers(1, 40, size=(TICKS, num_shards))
    return [
        [
            (sigmas_apart * shard + rng.normal(size=(count, 3)) * [1.0, 10.0, 0.1]).astype("f4")
            for shard, count in enumerate(row)
        ]
        for row in counts
    ]


@pytest.mark.parametrize("num_shards", [1, 2, 5])
@pytest.mark.parametrize("sigmas_apart", [0.0, 5.0, 1000.0])
def test_fleet_base_equals_numpy_over_everything_seen(num_shards, sigmas_apart):
    ticks = observations(num_shards, sigmas_apart=sigmas_apart)
    fleet = FleetNormalizer(3, None, enabled=True)
    for shards in ticks:
        fleet.merge([ObsMoments(Moments.of(torch.from_numpy(x)), None) for x in shards])
    everything = np.concatenate([x for shards in ticks for x in shards]).astype("f8")
    moments = fleet.moments.actor
    assert moments.count == len(everything)
    np.testing.assert_allclose(moments.mean.numpy(), everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(
        moments.m2.numpy() / moments.count, everything.var(0), rtol=1e-9, atol=1e-15
    )


def test_delta_of_a_tick_is_the_merge_of_its_vector_steps():
    steps = [torch.randn(8, 3, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    delta = Moments.zero(3)
    for obs in steps:
        delta = merge_moments(delta, Moments.of(obs))
    whole = Moments.of(torch.cat(steps))
    assert delta.count == whole.count
    torch.testing.assert_close(delta.mean, whole.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(delta.m2, whole.m2, rtol=1e-12, atol=1e-12)


def test_published_normalizer_standardises_and_keeps_constants_finite():
    obs = torch.tensor([[1.0, 7.0], [3.0, 7.0]])
    fleet = FleetNormalizer(2, None, enabled=True)
    fleet.merge([ObsMoments(Moments.of(obs), None)])
    out = fleet.published().actor(obs)
    expected = torch.tensor([[-1 / (1 + STD_OFFSET), 0.0], [1 / (1 + STD_OFFSET), 0.0]])
    torch.testing.assert_close(out, expected)


def test_identity_before_anything_was_seen_and_when_disabled():
    obs = torch.randn(4, 2)
    fresh = FleetNormalizer(2, None, enabled=True)
    disabled = FleetNormalizer(2, None, enabled=False)
    disabled.merge([ObsMoments(Moments.of(obs), None)])
    assert torch.equal(fresh.published().actor(obs), obs)
    assert torch.equal(disabled.published().actor(obs), obs)


def test_critic_has_its_own_base():
    actor, critic = torch.randn(6, 2), 5 + torch.randn(6, 4)
    fleet = FleetNormalizer(2, 4, enabled=True)
    fleet.merge([ObsMoments(Moments.of(actor), Moments.of(critic))])
    published = fleet.published().critic
    assert published is not None
    torch.testing.assert_close(published.mean, critic.mean(0), rtol=1e-5, atol=1e-6)


def test_saved_base_goes_on_exactly():
    first, second = (torch.randn(9, 2) for _ in range(2))
    one = FleetNormalizer(2, None, enabled=True)
    one.merge([ObsMoments(Moments.of(first), None)])
    other = FleetNormalizer(2, None, enabled=True)
    other.load_state_dict(one.state_dict())
    for fleet in (one, other):
        fleet.merge([ObsMoments(Moments.of(second), None)])
    assert torch.equal(one.moments.actor.mean, other.moments.actor.mean)
    assert torch.equal(one.moments.actor.m2, other.moments.actor.m2)
