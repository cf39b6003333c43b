"""The bus against one pooled fleet, counted step by step in a plain loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsac.core.merge_rules import MergeRule
from fastsac.core.shard_state import (
    LocalState,
    Report,
    ShardReport,
    ShardStateBus,
    combine_reports,
)

RATE = 0.1
EMA = MergeRule(kind="linear_ema", size=1, rate=RATE)
SUM = MergeRule(kind="sum", size=1)
RULES = {
    "ema": replace(EMA, size=2, initial=0.5),
    "sum": replace(SUM, size=2),
    "max": MergeRule(kind="max", size=2),
    "one": MergeRule(kind="resolve_one", size=2),
    "own": MergeRule(kind="none", size=2, distribution=True),
}


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def report(shard: int, first: int, last: int, **states: LocalState) -> ShardReport:
    return ShardReport(shard=shard, first_step=first, last_step=last, states=states)


def told(shard: int, first: int, last: int, *value: float, weight: float = 1.0) -> ShardReport:
    return report(shard, first, last, s=LocalState(value=f64(*value), weight=weight))


def delta(counts: list[float]) -> float:
    """D_s of one window: sum of a (1 - a)^(T - t) c[t]."""
    newest = len(counts) - 1
    return sum(RATE * (1 - RATE) ** (newest - t) * c for t, c in enumerate(counts))


@dataclass
class Life:
    """What one shard counts, two bins per vector step, and the windows that it reports."""

    shard: int
    first_step: int
    counts: list[tuple[float, float]]
    lengths: list[int]

    def reports(self) -> list[ShardReport]:
        reports, start = [], 0
        for length in self.lengths:
            seen = self.counts[start : start + length]
            bins = [[counts[b] for counts in seen] for b in range(2)]
            values = {
                "ema": [delta(counts) for counts in bins],
                "sum": [sum(counts) for counts in bins],
                "max": [max(counts) for counts in bins],
                "one": list(seen[-1]),
                "own": list(seen[-1]),
            }
            states = {name: LocalState(value=f64(*value)) for name, value in values.items()}
            first = self.first_step + start
            reports.append(report(self.shard, first, first + length - 1, **states))
            start += length
        return reports


@st.composite
def lives(draw: Any) -> list[Life]:
    """Shards that join late, die early and report windows of unequal lengths."""
    fleet = []
    for shard in draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)):
        lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        count = st.integers(0, 6).map(float)
        steps = st.lists(st.tuples(count, count), min_size=sum(lengths), max_size=sum(lengths))
        fleet.append(Life(shard, draw(st.integers(0, 6)), draw(steps), lengths))
    return fleet


@st.composite
def deliveries(draw: Any, fleet: list[Life]) -> list[list[Report]]:
    """All reports in any order, some combined in a tree, some given twice, in several calls."""
    parts: list[Report] = draw(st.permutations([r for life in fleet for r in life.reports()]))
    for _ in range(draw(st.integers(0, 3))):
        size = draw(st.integers(1, len(parts)))
        parts = [*parts[size:], combine_reports(parts[:size], RULES)]
    repeated = draw(st.lists(st.sampled_from(parts), max_size=3))
    calls: list[list[Report]] = [[]]
    for part in [*parts, *repeated]:
        if draw(st.booleans()):
            calls.append([])
        calls[-1].append(part)
    return calls


def pooled(fleet: list[Life]) -> dict[str, list[float]]:
    """What one fleet sees that counts all shards together, one vector step after the other."""
    newest = max(life.first_step + len(life.counts) for life in fleet)
    ema, total, highest = [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]
    for t in range(newest):
        for b in range(2):
            seen = [
                life.counts[t - life.first_step][b]
                for life in fleet
                if 0 <= t - life.first_step < len(life.counts)
            ]
            ema[b] = (1 - RATE) * ema[b] + RATE * sum(seen)
            total[b] += sum(seen)
            highest[b] = max([highest[b], *seen])
    lowest = min(fleet, key=lambda life: life.shard)
    return {"ema": ema, "sum": total, "max": highest, "one": list(lowest.counts[-1])}


@settings(max_examples=300, deadline=None)
@given(data=st.data(), fleet=lives())
def test_any_fleet_in_any_order_equals_one_pooled_fleet(data: Any, fleet: list[Life]) -> None:
    bus = ShardStateBus(RULES)
    for reports in data.draw(deliveries(fleet)):
        bus.merge(reports)
    expected = pooled(fleet)
    assert {name: value.tolist() for name, value in bus.values().items()} == {
        "ema": pytest.approx(expected["ema"], rel=1e-12),
        "sum": expected["sum"],
        "max": expected["max"],
        "one": expected["one"],
    }
    newest = [list(life.counts[-1]) for life in sorted(fleet, key=lambda life: life.shard)]
    assert bus.distributions()["own"].tolist() == newest


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    counted=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=8),
)
def test_weighted_mean_of_a_tree_equals_the_pooled_one(
    data: Any, counted: list[tuple[int, int]]
) -> None:
    rules = {"s": MergeRule(kind="weighted_mean", size=1, window=20.0, initial=3.0)}
    reports: list[Report] = [
        told(shard, 0, 3, float(mean * weight), weight=weight)
        for shard, (weight, mean) in enumerate(counted)
    ]
    parts = data.draw(st.permutations(reports))
    for _ in range(data.draw(st.integers(0, 3))):
        size = data.draw(st.integers(1, len(parts)))
        parts = [*parts[size:], combine_reports(parts[:size], rules)]
    values = ShardStateBus(rules).merge(parts)
    weight = sum(w for w, _ in counted)
    mean = sum(w * m for w, m in counted) / weight if weight else 0.0
    expected = 3.0 + min(1.0, weight / 20.0) * (mean - 3.0)
    assert values["s"].item() == pytest.approx(expected, rel=1e-12)


def test_equal_reports_in_another_order_give_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(1)
    rules = {"s": replace(EMA, size=50)}
    reports = [
        told(shard, 0, shard, *torch.rand(50, generator=generator).tolist()) for shard in range(9)
    ]
    one = ShardStateBus(rules).merge(reports)["s"]
    assert torch.equal(one, ShardStateBus(rules).merge(reports[::-1])["s"])


def test_a_dead_shard_decays_out_and_a_slow_one_counts_in_full_when_it_reports() -> None:
    bus = ShardStateBus({"s": EMA})
    bus.merge([told(0, 0, 9, 0.0), told(1, 0, 9, 8.0)])
    assert bus.merge([told(0, 10, 19, 0.0)])["s"].item() == pytest.approx(8 * 0.9**10)
    # 4 at the end of step 19, told when the fleet stands at step 29
    assert bus.merge([told(0, 20, 29, 0.0), told(1, 10, 19, 4.0)])["s"].item() == pytest.approx(
        8 * 0.9**20 + 4 * 0.9**10
    )


def test_weighted_mean_pools_by_weight_and_forgets_beyond_its_window() -> None:
    # pooled mean (2 + 9) / (1 + 3) = 2.75 moves the mean by 4 / 8 of the way from 0
    bus = ShardStateBus({"s": MergeRule(kind="weighted_mean", size=1, window=8.0)})
    first = bus.merge([told(0, 0, 0, 2.0, weight=1), told(1, 0, 0, 9.0, weight=3)])
    assert first["s"].item() == pytest.approx(1.375)
    assert bus.merge([told(0, 1, 1, 50.0, weight=10)])["s"].item() == pytest.approx(5.0)
    assert bus.merge([told(0, 2, 2, 0.0, weight=0)])["s"].item() == pytest.approx(5.0)


def test_the_lowest_shard_decides_while_it_lives_also_when_it_is_slow() -> None:
    bus = ShardStateBus({"s": MergeRule(kind="resolve_one", size=1)})
    assert bus.merge([told(2, 0, 0, 2.0), told(1, 0, 0, 1.0)])["s"].item() == 1.0
    assert bus.merge([told(2, 1, 1, 20.0)])["s"].item() == 1.0
    bus.forget(1)
    assert bus.values()["s"].item() == 1.0  # until somebody else tells
    assert bus.merge([told(2, 2, 2, 200.0)])["s"].item() == 200.0


def test_a_gone_shard_is_no_part_of_the_distributions() -> None:
    bus = ShardStateBus({"s": MergeRule(kind="none", size=2, distribution=True)})
    assert bus.merge([told(0, 0, 0, 1.0, 0.0), told(1, 0, 0, 0.25, 0.75)]) == {}
    assert bus.bins()["s"].tolist() == [0.625, 0.375]
    bus.forget(0)
    assert bus.distributions()["s"].tolist() == [[0.25, 0.75]]
    assert bus.bins()["s"].tolist() == [0.25, 0.75]


def test_none_stays_with_its_shard_and_only_vectors_are_bins() -> None:
    rules = {"s": MergeRule(kind="none", size=1), "one": SUM, "two": replace(SUM, size=2)}
    bus = ShardStateBus(rules)
    assert list(bus.merge([told(0, 0, 0, 1.0)])) == ["one", "two"]
    assert bus.distributions() == {}
    assert list(bus.bins()) == ["two"]


@pytest.mark.parametrize("first_and_last", [(2, 5), (4, 9), (0, 9), (-3, 0)])
def test_a_window_that_was_merged_in_part_is_refused_and_changes_nothing(
    first_and_last: tuple[int, int],
) -> None:
    first, last = first_and_last
    bus = ShardStateBus({"s": SUM})
    bus.merge([told(3, 0, 4, 1.0)])
    overlap = f"steps {max(first, 0)} to {min(last, 4)} of shard 3 were merged before"
    with pytest.raises(ValueError, match=f"steps {first} to {last} of shard 3.*{overlap}"):
        bus.merge([told(0, 0, 4, 10.0), told(3, first, last, 1.0)])
    assert bus.values()["s"].item() == 1.0
    assert bus.merge([told(0, 0, 4, 10.0)])["s"].item() == 11.0


def test_a_combined_report_that_is_known_in_part_is_refused() -> None:
    bus = ShardStateBus({"s": SUM})
    known, fresh = told(0, 0, 4, 1.0), told(1, 0, 4, 2.0)
    bus.merge([known])
    with pytest.raises(ValueError, match="repeats vector steps 0 to 4 of shard 0 beside what is"):
        bus.merge([combine_reports([known, fresh], {"s": SUM})])
    assert bus.merge([known, fresh])["s"].item() == 3.0


def test_a_state_that_changes_its_size_or_its_rule_is_refused_with_both_sides() -> None:
    bus = ShardStateBus({"s": replace(EMA, size=2)})
    bus.merge([told(0, 0, 0, 1.0, 1.0)])
    with pytest.raises(ValueError, match=r"shard 0 reports 's' of shape \(1,\).* fleet has \(2,\)"):
        bus.merge([told(0, 1, 1, 1.0)])
    other = replace(told(0, 1, 1, 1.0, 1.0), rules={"s": str(replace(EMA, size=2, rate=0.25))})
    with pytest.raises(
        ValueError,
        match=r"linear_ema \(size 2, rate 0.25\); the fleet has linear_ema \(size 2, rate 0.1\)",
    ):
        bus.merge([other])
    combined = combine_reports([told(0, 1, 1, 1.0, 1.0)], {"s": replace(SUM, size=2)})
    with pytest.raises(ValueError, match=r"as sum \(size 2\); the fleet has linear_ema"):
        bus.merge([combined])
    with pytest.raises(ValueError, match=r"state 't'; spec.shard_states has \['s'\]"):
        bus.merge([report(0, 1, 1, t=LocalState(value=f64(1.0)))])


@settings(max_examples=50, deadline=None)
@given(data=st.data(), fleet=lives())
def test_a_saved_bus_goes_on_bit_for_bit_and_remembers_what_it_merged(
    data: Any, fleet: list[Life]
) -> None:
    calls = data.draw(deliveries(fleet))
    one, other = ShardStateBus(RULES), ShardStateBus(RULES)
    cut = data.draw(st.integers(0, len(calls)))
    for reports in calls[:cut]:
        one.merge(reports)
    other.load_state_dict(one.state_dict())
    for reports in calls[:cut]:
        other.merge(reports)  # all of them repeats
    for reports in calls[cut:]:
        one.merge(reports)
        other.merge(reports)
    for name, value in one.values().items():
        assert torch.equal(value, other.values()[name])


def test_a_bus_of_other_states_or_rules_is_not_loaded() -> None:
    saved = ShardStateBus({"s": EMA}).state_dict()
    with pytest.raises(ValueError, match=r"'s' is linear_ema \(size 1, rate 0.1\).*is absent"):
        ShardStateBus({}).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"'t' is absent, this run's is sum \(size 1\)"):
        ShardStateBus({"s": EMA, "t": SUM}).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"rate 0.1\), this run's is .*rate 0.2\): resume with"):
        ShardStateBus({"s": replace(EMA, rate=0.2)}).load_state_dict(saved)
