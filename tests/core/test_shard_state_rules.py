"""Rules that a configuration puts in the place of an environment's: each against a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastsac.core.config import ConfigError, RuleKind, parse_config
from fastsac.core.merge_rules import MergeRule, rules_in_force
from fastsac.core.own_state import OwnStates
from fastsac.core.shard_state import LocalState, ShardReport, ShardStateBus

RATE = 0.1
TICK = 3
DECLARED = {"failures": MergeRule(kind="linear_ema", size=1, rate=RATE)}

Counts = list[list[list[int]]]
"""By shard, tick and vector step."""


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ema_delta(counts: list[int]) -> LocalState:
    """What an environment reports that declares a `linear_ema`, whichever rule is in force."""
    value = 0.0
    for count in counts:
        value = (1 - RATE) * value + RATE * count
    return LocalState(value=f64(value), weight=sum(counts))


def run_fleet(kind: RuleKind, counts: Counts, resume_at: int = -1) -> list[float]:
    """The value that every shard is given after all ticks, through the bus."""
    overrides: Mapping[str, RuleKind] = {"failures": kind}
    shards = [OwnStates(DECLARED, overrides) for _ in counts]
    bus = ShardStateBus(rules_in_force(DECLARED, overrides))
    for tick in range(len(counts[0])):
        if tick == resume_at:
            saved, shards = shards, [OwnStates(DECLARED, overrides) for _ in counts]
            for old, new in zip(saved, shards, strict=True):
                new.load_state_dict(old.state_dict())
        reports = []
        for shard, own in enumerate(shards):
            own.view(bus.values())
            states = own.report({"failures": ema_delta(counts[shard][tick])}, TICK)
            first = tick * TICK
            reports.append(
                ShardReport(
                    shard=shard,
                    first_step=first,
                    last_step=first + TICK - 1,
                    states=states,
                    rules=own.rule_texts,
                )
            )
        bus.merge(reports)
    return [own.view(bus.values())["failures"].item() for own in shards]


def loop(counts: Counts, sync: Callable[[list[float], list[int]], list[float]]) -> list[float]:
    """Every shard's own EMA, step by step; `sync` gives all of them after every tick."""
    own = [0.0] * len(counts)
    for tick in range(len(counts[0])):
        for shard in range(len(counts)):
            for count in counts[shard][tick]:
                own[shard] = (1 - RATE) * own[shard] + RATE * count
        own = sync(own, [sum(ticks[tick]) for ticks in counts])
    return own


def keep_own(own: list[float], failures: list[int]) -> list[float]:
    return own


def copy_lowest(own: list[float], failures: list[int]) -> list[float]:
    return [own[0]] * len(own)


def average(own: list[float], failures: list[int]) -> list[float]:
    weights = failures if sum(failures) else [1] * len(own)
    mean = sum(w * q for w, q in zip(weights, own, strict=True)) / sum(weights)
    return [mean] * len(own)


@st.composite
def all_counts(draw: Callable) -> Counts:
    shards, ticks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    # whole ticks without any failure are as likely as busy ones
    tick = st.just([0] * TICK) | st.lists(st.integers(0, 5), min_size=TICK, max_size=TICK)
    life = st.lists(tick, min_size=ticks, max_size=ticks)
    return draw(st.lists(life, min_size=shards, max_size=shards))


@settings(max_examples=100, deadline=None)
@given(counts=all_counts(), resume_at=st.integers(-1, 3))
@pytest.mark.parametrize(
    ("kind", "sync"),
    [("none", keep_own), ("resolve_one", copy_lowest), ("weighted_mean", average)],
)
def test_an_overridden_ema_is_every_shards_own_synchronised_so(
    kind: RuleKind,
    sync: Callable[[list[float], list[int]], list[float]],
    counts: Counts,
    resume_at: int,
) -> None:
    given_to_shards = run_fleet(kind, counts, resume_at)
    assert given_to_shards == pytest.approx(loop(counts, sync), rel=1e-6, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(counts=all_counts())
def test_the_declared_ema_is_the_pooled_one(counts: Counts) -> None:
    together = [
        [[sum(steps) for steps in zip(*tick, strict=True)] for tick in zip(*counts, strict=True)]
    ]
    [pooled] = loop(together, keep_own)
    assert run_fleet("linear_ema", counts) == pytest.approx([pooled] * len(counts), rel=1e-12)


def test_an_ema_forgets_also_in_a_window_that_nothing_is_told_of() -> None:
    own = OwnStates(DECLARED, {"failures": "none"})
    own.report({"failures": LocalState(value=f64(2.0), weight=1.0)}, 1)
    reported = own.report({}, 5)
    assert reported["failures"].value.item() == pytest.approx(2.0 * 0.9**5)
    assert own.view({})["failures"].item() == pytest.approx(2.0 * 0.9**5)


def test_without_overrides_reports_and_view_pass_as_they_are() -> None:
    own = OwnStates(DECLARED, {})
    states, fleet = {"failures": ema_delta([1, 2, 3])}, {"failures": f64(7.0)}
    assert own.report(states, TICK) == states
    assert own.view(fleet) == fleet
    assert own.state_dict() == {}


def test_own_value_of_other_rules() -> None:
    declared = {
        "mean": MergeRule(kind="weighted_mean", size=1, window=4.0),
        "total": MergeRule(kind="sum", size=1),
        "scale": MergeRule(kind="resolve_one", size=1, initial=0.5),
        "level": MergeRule(kind="none", size=1),
    }
    own = OwnStates(declared, {"mean": "none", "total": "none", "scale": "none", "level": "max"})
    assert {name: v.item() for name, v in own.view({}).items()} == {
        "mean": 0.0,
        "total": 0.0,
        "scale": 0.5,
        "level": 0.0,
    }
    for _ in range(2):
        own.report(
            {
                "mean": LocalState(value=f64(12.0), weight=2.0),  # mean 6, half of the window
                "total": LocalState(value=f64(3.0)),
                "scale": LocalState(value=f64(0.75)),
                "level": LocalState(value=f64(-2.0)),
            },
            TICK,
        )
    assert {name: v.item() for name, v in own.view({"level": f64(9.0)}).items()} == {
        "mean": 4.5,
        "total": 6.0,
        "scale": 0.75,
        "level": 9.0,
    }


def refusal(declared: Mapping[str, MergeRule], overrides: Mapping[str, RuleKind]) -> str:
    with pytest.raises(ConfigError) as caught:
        rules_in_force(declared, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_override_that_reports_cannot_support_names_state_and_declaration() -> None:
    mean = {"length": MergeRule(kind="weighted_mean", size=1, window=9.0)}
    assert refusal(mean, {"length": "linear_ema"}) == (
        "shard_state.length: given linear_ema, but the environment declares 'length' as "
        "weighted_mean (size 1, window 9.0): give weighted_mean or resolve_one or none"
    )
    for kind in ("sum", "max"):
        assert "linear_ema (size 1, rate 0.1): give" in refusal(DECLARED, {"failures": kind})
    told = {"sampling": MergeRule(kind="none", size=5, distribution=True)}
    assert "'sampling' as none (size 5, distribution): give none" in refusal(
        told, {"sampling": "resolve_one"}
    )


def test_an_override_of_a_state_that_is_not_there_names_those_that_are() -> None:
    assert refusal(DECLARED, {"failure": "none"}) == (
        "shard_state.failure: the environment declares no state 'failure', it declares failures: "
        "linear_ema (size 1, rate 0.1): leave it out"
    )
    assert "it declares none: leave it out" in refusal({}, {"failures": "none"})


def test_a_rule_that_nobody_knows_is_refused_with_those_that_are() -> None:
    fields = {"name": "n", "total_env_steps": 10**6, "env": {"task": "t", "num_envs": 64}}
    with pytest.raises(
        ConfigError, match=r"shard_state.s: given 'average', should be 'linear_ema'"
    ):
        parse_config({**fields, "shard_state": {"s": "average"}})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"kind": "linear_ema", "size": 1}, r"linear_ema rate 0 is not in \(0, 1\)"),
        ({"kind": "weighted_mean", "size": 1}, "weighted_mean window 0 is not positive"),
        ({"kind": "sum", "size": 0}, "sum size 0 is not positive"),
        ({"kind": "sum", "size": 2, "distribution": True}, "distribution is true under sum"),
    ],
)
def test_a_rule_that_says_too_little_is_refused(rule: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MergeRule(**rule)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("other", (1.0,), r"'other' is reported, spec.shard_states has \['failures', 'sampling'\]"),
        ("failures", (1.0, 2.0), r"'failures' is reported with shape \(2,\).* says \(1,\)"),
        ("failures", (math.nan,), "'failures' has 1 entries that are not finite"),
        ("sampling", (0.5, 0.4), "'sampling' is declared a distribution.* add up to 0.9"),
        ("sampling", (1.5, -0.5), "add up to 1, the lowest is -0.5"),
        ("sampling", (0.0, 0.0), "add up to 0"),
    ],
)
def test_what_an_environment_may_not_report_is_named(
    name: str, values: tuple[float, ...], message: str
) -> None:
    declared = {**DECLARED, "sampling": MergeRule(kind="none", size=2, distribution=True)}
    with pytest.raises(ValueError, match=message):
        OwnStates(declared, {}).report({name: LocalState(value=f64(*values))}, TICK)
