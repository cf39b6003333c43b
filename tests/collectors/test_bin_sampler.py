import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from collectors.curriculum.bin_sampler import (
    FAILURES,
    SAMPLING,
    BinSampler,
    Form,
    Sampling,
    bin_of,
    bin_probabilities,
    decaying_kernel,
    first_frames,
    num_bins,
)
from fastsac.core.shard_state import ShardReport, ShardStateBus

CPU = torch.device("cpu")
FRAMES, FPS, BINS = 475, 50.0, 10
FORMS: tuple[Form, ...] = ("mixture", "additive")
failure_rates = st.lists(
    st.floats(0, 100).map(lambda rate: 0.0 if rate < 1e-6 else rate), min_size=1, max_size=30
)


def make(num_frames: int = FRAMES, **sampling) -> BinSampler:
    sampler = BinSampler(Sampling(**sampling), num_frames=num_frames, fps=FPS)
    sampler.allocate(CPU)
    return sampler


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def unit(n: int, seed: int = 0) -> torch.Tensor:
    return torch.rand((n, 2), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Bins


@pytest.mark.parametrize(
    ("frames", "fps", "bins"), [(2, 50, 1), (49, 50, 1), (50, 50, 2), (475, 50, 10), (500, 50, 11)]
)
def test_a_clip_has_a_bin_per_second_and_one_more(frames: int, fps: float, bins: int):
    assert num_bins(frames, fps) == bins


@given(num_frames=st.integers(2, 3000), fps=st.floats(2, 200))
@settings(max_examples=50)
def test_bins_are_those_of_a_naive_loop_and_first_frames_their_borders(num_frames: int, fps: float):
    bins = num_bins(num_frames, fps)
    naive = [min(max(k * bins // num_frames, 0), bins - 1) for k in range(num_frames)]
    assert bin_of(torch.arange(num_frames), num_frames, bins).tolist() == naive
    first = first_frames(num_frames, bins).tolist()
    assert first == [naive.index(b) for b in range(bins)] + [num_frames]


# Probabilities


def naive_probabilities(q: list[float], form: str, eps: float, size: int, decay: float) -> list:
    """The bins' probabilities in plain loops."""
    bins = len(q)
    weights = [decay**i for i in range(size)]
    weights = [w / sum(weights) for w in weights]

    def convolved(values: list[float]) -> list[float]:
        padded = values + [values[-1]] * (size - 1)
        return [sum(weights[i] * padded[b + i] for i in range(size)) for b in range(bins)]

    if form == "additive":
        raised = convolved([value + eps / bins for value in q])
        return [value / sum(raised) for value in raised]
    raised = convolved(q)
    if sum(raised) == 0:
        return [1 / bins] * bins
    return [(1 - eps) * value / sum(raised) + eps / bins for value in raised]


@pytest.mark.parametrize("form", FORMS)
@given(
    failures=failure_rates,
    eps=st.floats(0.01, 1),
    size=st.integers(1, 6),
    decay=st.floats(0.1, 1),
)
@settings(max_examples=50)
def test_probabilities_are_those_of_naive_loops(
    form: Form, failures: list[float], eps: float, size: int, decay: float
):
    kernel = decaying_kernel(size, decay)
    p = bin_probabilities(f64(*failures), form=form, exploration=eps, kernel=kernel)
    np.testing.assert_allclose(
        p, naive_probabilities(failures, form, eps, size, decay), rtol=1e-9, atol=1e-15
    )
    assert float(p.sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 4])
def test_bins_are_alike_while_nothing_has_failed(form: Form, size: int):
    sampler = make(form=form, kernel_size=size)
    torch.testing.assert_close(
        sampler.probabilities(), torch.full((BINS,), 1 / BINS, dtype=torch.float64)
    )


@given(failures=failure_rates, fleet=st.floats(1, 1e4))
def test_a_mixture_explores_alike_in_fleets_of_any_size(failures: list[float], fleet: float):
    q, one = f64(*failures), decaying_kernel(1, 0.8)
    small, large = (
        bin_probabilities(scale * q, form="mixture", exploration=0.1, kernel=one)
        for scale in (1.0, fleet)
    )
    torch.testing.assert_close(small, large, rtol=1e-9, atol=0)
    assert float(small.min()) >= 0.1 / len(failures) * (1 - 1e-9)


@pytest.mark.parametrize("total", [1.0, 10.0, 100.0])
def test_an_additive_floor_shrinks_as_failures_grow(total: float):
    failures = total * f64(0, 0.25, 0.75, 0)
    p = bin_probabilities(
        failures, form="additive", exploration=0.1, kernel=decaying_kernel(1, 0.8)
    )
    share = 0.1 / (total + 0.1)  # 9 %, 1 %, 0.1 %
    torch.testing.assert_close(p[[0, 3]], f64(share / 4, share / 4))


def test_a_failure_makes_the_bins_before_it_likelier():
    kernel = decaying_kernel(3, 0.5)  # 4/7, 2/7, 1/7
    p = bin_probabilities(f64(0, 0, 0, 7, 0), form="mixture", exploration=0.5, kernel=kernel)
    torch.testing.assert_close(p, 0.5 * f64(0, 1, 2, 4, 0) / 7 + 0.1)
    last = bin_probabilities(f64(0, 0, 0, 0, 7), form="mixture", exploration=0.5, kernel=kernel)
    torch.testing.assert_close(last, 0.5 * f64(0, 0, 1, 3, 7) / 11 + 0.1)


# Draws


@pytest.mark.parametrize("form", FORMS)
def test_bins_are_drawn_by_their_probabilities_and_their_frames_alike(form: Form):
    sampler = make(form=form, kernel_size=2)
    sampler.apply(f64(0, 3, 0, 0, 1, 0, 0, 0.5, 0, 2))
    n = 40_000
    frames = sampler.draw(unit(n))
    drawn = torch.bincount(bin_of(frames, FRAMES, BINS), minlength=BINS).numpy()
    expected = naive_probabilities([0, 3, 0, 0, 1, 0, 0, 0.5, 0, 2], form, 0.1, 2, 0.8)
    assert chisquare(drawn, n * np.array(expected)).pvalue > 1e-3
    for bin_, last in ((1, FRAMES), (9, FRAMES - 1)):  # the clip's last frame starts nothing
        own = [k for k in range(last) if k * BINS // FRAMES == bin_]
        counts = np.array([int((frames == k).sum()) for k in own])
        assert counts.sum() == drawn[bin_]
        assert chisquare(counts).pvalue > 1e-3


def test_uniform_sampling_draws_every_frame_but_the_last_alike():
    sampler = make(num_frames=70, sampling="uniform")
    sampler.apply(f64(5, 0))
    counts = torch.bincount(sampler.draw(unit(30_000)), minlength=70).numpy()
    assert counts[69] == 0
    assert chisquare(counts[:69]).pvalue > 1e-3
    torch.testing.assert_close(sampler.probabilities(), f64(35 / 69, 34 / 69))


def test_sampling_from_the_start_always_gives_the_first_frame():
    sampler = make(sampling="start")
    sampler.apply(torch.ones(BINS, dtype=torch.float64))
    assert not sampler.draw(unit(100)).any()
    assert sampler.report()[SAMPLING].value.tolist() == [1.0] + [0.0] * (BINS - 1)


def test_the_smallest_and_the_largest_number_give_the_first_and_the_last_possible_frame():
    sampler = make(initial_bins=(3, 5), initial_steps=1)
    ends = f64(0, 0, 1 - 2**-53, 1 - 2**-53).reshape(2, 2)
    first = first_frames(FRAMES, BINS).tolist()
    assert sampler.draw(ends).tolist() == [first[3], first[6] - 1]
    sampler.count(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool))
    assert sampler.draw(ends).tolist() == [0, FRAMES - 2]


def test_initial_bins_hold_during_the_initial_steps_only():
    sampler = make(initial_bins=(2, 3), initial_steps=2)
    sampler.apply(f64(0, 0, 1, 3, 0, 0, 0, 0, 0, 4))
    nobody = torch.zeros(1, dtype=torch.bool)
    chances = f64(*naive_probabilities([0, 0, 1, 3, 0, 0, 0, 0, 0, 4], "mixture", 0.1, 1, 0.8))
    confined = torch.zeros(BINS, dtype=torch.float64)
    confined[2:4] = chances[2:4] / chances[2:4].sum()
    for expected in (confined, confined, chances):
        torch.testing.assert_close(sampler.report()[SAMPLING].value, expected)
        drawn = torch.bincount(bin_of(sampler.draw(unit(20_000)), FRAMES, BINS), minlength=BINS)
        possible = expected > 0
        assert not drawn[~possible].any()
        assert chisquare(drawn[possible], 20_000 * expected[possible]).pvalue > 1e-3
        sampler.count(torch.zeros(1, dtype=torch.int64), nobody)


# Counting


def random_failures(steps: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randint(0, FRAMES, (steps, 16), generator=generator)
    return frames, torch.rand((steps, 16), generator=generator) < 0.2


def test_a_report_is_the_decayed_sum_of_failures_of_a_naive_loop():
    sampler = make(rate=0.03)
    frames, failed = random_failures(60, seed=1)
    for first, last in ((0, 25), (25, 25), (25, 60)):
        naive, number = [0.0] * BINS, 0
        for t in range(first, last):
            sampler.count(frames[t], failed[t])
            for env in range(16):
                if failed[t, env]:
                    bin_ = int(frames[t, env]) * BINS // FRAMES
                    naive[bin_] += 0.03 * 0.97 ** (last - 1 - t)
                    number += 1
        report = sampler.report()
        np.testing.assert_allclose(report[FAILURES].value, naive, rtol=1e-12, atol=1e-18)
        assert report[FAILURES].weight == number
        assert report[FAILURES].value.dtype == torch.float64


def test_the_fleet_of_two_shards_has_the_average_of_one_pool():
    shards = [make(rate=0.01), make(rate=0.01)]
    bus = ShardStateBus(shards[0].shard_states)
    streams = [random_failures(90, seed) for seed in (2, 3)]
    pooled = [0.0] * BINS
    for t in range(90):
        pooled = [0.99 * q for q in pooled]
        for frames, failed in streams:
            for frame in frames[t][failed[t]].tolist():
                pooled[frame * BINS // FRAMES] += 0.01
    fleet = {}
    for first, last in ((0, 29), (30, 49), (50, 89)):
        for sampler, (frames, failed) in zip(shards, streams, strict=True):
            for t in range(first, last + 1):
                sampler.count(frames[t], failed[t])
        reports = [
            ShardReport(shard=n, first_step=first, last_step=last, states=sampler.report())
            for n, sampler in enumerate(shards)
        ]
        fleet = bus.merge(reports)
        for sampler in shards:
            sampler.apply(fleet[FAILURES])
    np.testing.assert_allclose(fleet[FAILURES], pooled, rtol=1e-10)
    expected = naive_probabilities(pooled, "mixture", 0.1, 1, 0.8)
    for sampler in shards:
        np.testing.assert_allclose(sampler.report()[SAMPLING].value, expected, rtol=1e-10)


def test_failures_told_before_allocation_are_used():
    sampler = BinSampler(Sampling(exploration=0.01), num_frames=FRAMES, fps=FPS)
    sampler.apply(f64(*[0] * 4, 1, *[0] * 5))
    sampler.allocate(CPU)
    drawn = bin_of(sampler.draw(unit(1000)), FRAMES, BINS)
    assert int((drawn == 4).sum()) > 950


# Refusals


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"sampling": "best"}, r"env\.args\.sampling is 'best': give adaptive or uniform or start"),
        ({"form": "sum"}, r"env\.args\.form is 'sum': give mixture or additive"),
        ({"rate": 1.0}, r"env\.args\.rate is 1: give a number in \(0, 1\)"),
        ({"exploration": 0.0}, r"env\.args\.exploration is 0: "),
        ({"kernel_size": 0}, r"env\.args\.kernel_size is 0: give a number of at least 1"),
        ({"kernel_decay": 1.5}, r"env\.args\.kernel_decay is 1\.5: "),
        ({"initial_steps": -1}, r"env\.args\.initial_steps is -1: give a number of at least 0"),
        (
            {"initial_bins": (0, 3)},
            r"initial_bins is \[0, 3\] for initial_steps of 0: give initial",
        ),
        ({"initial_bins": (4, 10), "initial_steps": 5}, r"initial_bins is \[4, 10\]: .* 0 to 9"),
        ({"initial_bins": (4, 3), "initial_steps": 5}, r"initial_bins is \[4, 3\]: "),
        ({"initial_bins": (4,), "initial_steps": 5}, r"initial_bins is \[4\]: "),
    ],
)
def test_values_that_are_not_allowed_are_refused(sampling: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make(**sampling)


@pytest.mark.parametrize("frames", [0, 1])
def test_a_clip_without_a_frame_to_start_from_is_refused(frames: int):
    with pytest.raises(ValueError, match=rf"motion of {frames} frames at 50 Hz is too short"):
        make(num_frames=frames)
