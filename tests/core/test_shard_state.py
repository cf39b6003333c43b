import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsac.core.shard_state import LocalState, MergeRule, ShardReport, ShardStateBus

RATE = 0.1


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def report(shard: int, first: int, last: int, **states: LocalState) -> ShardReport:
    return ShardReport(shard=shard, first_step=first, last_step=last, states=states)


def merged(rule: MergeRule, *reports: ShardReport) -> torch.Tensor:
    bus = ShardStateBus({"s": rule})
    for part in reports:
        bus.merge([part])
    return bus.values()["s"]


def delta(contributions: list[float]) -> LocalState:
    """D_s of one window: sum of a (1 - a)^(T - t) c[t]."""
    newest = len(contributions) - 1
    return LocalState(
        value=f64(sum(RATE * (1 - RATE) ** (newest - t) * c for t, c in enumerate(contributions)))
    )


@settings(max_examples=50, deadline=None)
@given(data=st.data(), num_shards=st.integers(1, 5), num_ticks=st.integers(1, 4))
def test_linear_ema_equals_one_pooled_fleet(data, num_shards, num_ticks):
    steps_per_tick = 3
    num_steps = steps_per_tick * num_ticks
    counts = data.draw(
        st.lists(
            st.lists(st.floats(0, 10), min_size=num_steps, max_size=num_steps),
            min_size=num_shards,
            max_size=num_shards,
        )
    )
    pooled = 0.0
    for t in range(num_steps):
        pooled = (1 - RATE) * pooled + RATE * sum(shard[t] for shard in counts)

    bus = ShardStateBus({"s": MergeRule(kind="linear_ema", size=1, rate=RATE)})
    for first in range(0, num_steps, steps_per_tick):
        last = first + steps_per_tick - 1
        reports = [
            report(shard, first, last, s=delta(counts[shard][first : last + 1]))
            for shard in range(num_shards)
        ]
        bus.merge(data.draw(st.permutations(reports)))
    assert bus.values()["s"].item() == pytest.approx(pooled, rel=1e-12, abs=1e-12)


def test_a_late_report_still_folds_exactly():
    rule = MergeRule(kind="linear_ema", size=1, rate=RATE)
    bus = ShardStateBus({"s": rule})
    bus.merge([report(0, 0, 1, s=delta([1.0, 2.0]))])
    bus.merge([report(0, 2, 3, s=delta([3.0, 4.0])), report(1, 0, 1, s=delta([5.0, 6.0]))])
    bus.merge([report(1, 2, 3, s=delta([7.0, 8.0]))])
    pooled = 0.0
    for t in range(4):
        pooled = (1 - RATE) * pooled + RATE * ((1 + t) + (5 + t))
    assert bus.values()["s"].item() == pytest.approx(pooled, rel=1e-12)


def test_a_repeated_report_is_dropped():
    rule = MergeRule(kind="sum", size=1)
    first = report(0, 0, 3, s=LocalState(value=f64(2.0)))
    assert merged(rule, first, first).item() == 2.0


def test_weighted_mean_pools_by_weight_and_forgets_beyond_its_window():
    rule = MergeRule(kind="weighted_mean", size=1, window=8.0)
    # pooled mean (2 + 9) / (1 + 3) = 2.75 moves the mean by 4 / 8 of the way from 0
    bus = ShardStateBus({"s": rule})
    bus.merge(
        [
            report(0, 0, 0, s=LocalState(value=f64(2.0), weight=1)),
            report(1, 0, 0, s=LocalState(value=f64(9.0), weight=3)),
        ]
    )
    assert bus.values()["s"].item() == pytest.approx(1.375)
    bus.merge([report(0, 1, 1, s=LocalState(value=f64(50.0), weight=10))])
    assert bus.values()["s"].item() == pytest.approx(5.0)
    bus.merge([report(0, 2, 2, s=LocalState(value=f64(0.0), weight=0))])
    assert bus.values()["s"].item() == pytest.approx(5.0)


def test_resolve_one_takes_the_lowest_live_shard():
    bus = ShardStateBus({"s": MergeRule(kind="resolve_one", size=1)})
    bus.merge([report(s, 0, 0, s=LocalState(value=f64(float(s)))) for s in (2, 1)])
    assert bus.values()["s"].item() == 1.0


def test_sum_and_max_accumulate_over_shards_and_ticks():
    reports = [report(s, 0, 0, s=LocalState(value=f64(v))) for s, v in enumerate((3.0, 5.0))]
    later = report(0, 1, 1, s=LocalState(value=f64(4.0)))
    assert merged(MergeRule(kind="sum", size=1), *reports, later).item() == 12.0
    assert merged(MergeRule(kind="max", size=1), *reports, later).item() == 5.0


def test_none_stays_with_its_shard():
    bus = ShardStateBus({"s": MergeRule(kind="none", size=1)})
    assert bus.merge([report(0, 0, 0, s=LocalState(value=f64(1.0)))]) == {}


def test_unknown_state_and_wrong_size_are_refused():
    bus = ShardStateBus({"s": MergeRule(kind="sum", size=2)})
    with pytest.raises(ValueError, match=r"state 't'.*has \['s'\]"):
        bus.merge([report(0, 0, 0, t=LocalState(value=f64(1.0)))])
    with pytest.raises(ValueError, match=r"shape \(1,\).*says \(2,\)"):
        bus.merge([report(0, 0, 0, s=LocalState(value=f64(1.0)))])


def test_saved_bus_goes_on_exactly_and_remembers_what_it_merged():
    rules = {"s": MergeRule(kind="linear_ema", size=1, rate=RATE)}
    one, other = ShardStateBus(rules), ShardStateBus(rules)
    first, second = report(0, 0, 1, s=delta([1.0, 2.0])), report(0, 2, 3, s=delta([3.0, 4.0]))
    one.merge([first])
    other.load_state_dict(one.state_dict())
    one.merge([second])
    other.merge([first, second])
    assert torch.equal(one.values()["s"], other.values()["s"])
    with pytest.raises(ValueError, match="saved shard states"):
        ShardStateBus({"t": rules["s"]}).load_state_dict(one.state_dict())
