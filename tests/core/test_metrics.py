from __future__ import annotations

import math
from typing import get_args

import pytest

from fastsac.core.metrics import (
    METRICS,
    Mean,
    MetricValue,
    Reduction,
    TickReduction,
    final_value,
    metric,
    reduce_over_fleet,
    reduce_over_ticks,
)


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_declares_reductions_unit_and_meaning(name: str) -> None:
    declared = metric(name)
    assert declared.reduction in get_args(Reduction)
    assert declared.over_ticks in (None, *get_args(TickReduction))
    assert declared.unit
    assert declared.meaning


def test_times_per_tick_are_averaged_over_ticks_and_nothing_else_of_the_clock_is() -> None:
    for name, declared in METRICS.items():
        if declared.wall:
            averaged = declared.over_ticks == "mean"
            assert averaged == (declared.unit == "s/tick"), name


def test_unknown_metric_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match="metric 'learner/speed' is not declared: add it to METRICS"):
        metric("learner/speed")
    with pytest.raises(KeyError, match="learner/speed"):
        reduce_over_fleet([{"learner/speed": 1.0}])


def test_environment_and_shard_state_metrics_need_no_declaration() -> None:
    assert metric("env/height").reduction == "mean"
    assert metric("shard_state/difficulty").reduction == "driver"


def test_fleet_reduction_pools_means_and_follows_each_declaration() -> None:
    shards: list[dict[str, MetricValue]] = [
        {"train/return": Mean(30.0, 3), "train/episodes": 3, "replay/reward_min": -1.0},
        {"train/return": Mean(0.0, 0), "train/episodes": 0, "replay/reward_min": -2.0},
        {"train/return": Mean(50.0, 1), "train/episodes": 1, "time/collect": 0.5},
        {"replay/reward_max": 4.0, "env/height": 1.0, "time/collect": 0.25},
        {"replay/reward_max": 5.0, "env/height": 2.0, "learner/alpha": 0.1},
    ]
    assert reduce_over_fleet(shards) == {
        "train/return": Mean(80.0, 4),  # not the mean 30 of the shards' means 10 and 50
        "train/episodes": 4,
        "replay/reward_min": -2.0,
        "replay/reward_max": 5.0,
        "time/collect": 0.5,
        "env/height": Mean(3.0, 2),
        "learner/alpha": 0.1,
    }


def test_ranks_that_should_agree_and_do_not_are_caught() -> None:
    assert reduce_over_fleet([{"learner/alpha": 0.1}, {"learner/alpha": 0.1}]) == {
        "learner/alpha": 0.1
    }
    with pytest.raises(AssertionError, match="learner/alpha differs between ranks"):
        reduce_over_fleet([{"learner/alpha": 0.1}, {"learner/alpha": 0.2}])
    diverged = reduce_over_fleet([{"learner/alpha": math.nan}, {"learner/alpha": math.nan}])
    assert math.isnan(final_value(diverged["learner/alpha"]))
    with pytest.raises(AssertionError, match="differs"):
        reduce_over_fleet([{"learner/alpha": math.nan}, {"learner/alpha": 0.1}])


def test_tick_reduction_averages_times_adds_counts_and_keeps_the_newest_state() -> None:
    ticks: list[dict[str, MetricValue]] = [
        {"time/collect": 1.0, "train/episodes": 2, "learner/alpha": 0.5, "learner/q_max": 3.0},
        {"time/collect": 3.0, "train/episodes": 1, "learner/alpha": 0.25, "learner/q_max": 2.0},
        {"time/collect": 8.0, "replay/fill": 0.5, "fleet/staleness": 4.0},
        {"replay/fill": 0.75, "fleet/staleness": 8.0},
    ]
    reduced = {n: final_value(v) for n, v in reduce_over_ticks(ticks).items()}
    assert reduced == {
        "time/collect": 4.0,
        "train/episodes": 3,
        "learner/alpha": 0.25,
        "learner/q_max": 3.0,
        "replay/fill": 0.75,
        "fleet/staleness": 6.0,
    }


def test_ticks_reduce_one_by_one_as_they_do_at_once() -> None:
    ticks: list[dict[str, MetricValue]] = [
        {name: float(tick + len(name)) for name in METRICS} for tick in range(4)
    ]
    one_by_one: dict[str, MetricValue] = {}
    for tick in ticks:
        one_by_one = reduce_over_ticks([one_by_one, tick])
    assert one_by_one == reduce_over_ticks(ticks)


def test_mean_over_nothing_is_nan() -> None:
    assert math.isnan(final_value(Mean(0.0, 0)))
    assert final_value(Mean(3.0, 2)) == 1.5
