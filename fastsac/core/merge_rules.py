"""Merge rules: how what the shards report on a named state becomes one value.

Everything here is a pure function. `fold` combines reports of the same state; it is commutative
and associative (to rounding), so reports may be combined in any order and in a tree, and it gives
the same numbers bit for bit when called with the same parts in the same order. `advance` takes
the fleet's value on. All arithmetic is float64.

`linear_ema` is exact. With q[t] = (1 - a) q[t-1] + a * sum_s c_s[t] the recursion is linear, so the
value after vector step T is (1 - a)^(T - T0) q[T0] + sum_s D_s with each shard's
D_s = sum over its window of a (1 - a)^(T - t) c_s[t]; a D_s that stands at an earlier step is
decayed to T. A shard reports D_s, never the value that was applied to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastsac.core.config import ConfigError, RuleKind

NOBODY = 2**62
"""In the place of a shard's number: no shard has decided yet."""

NO_WEIGHT = 1e-9
"""Weight that a shard's own value has in an average although nothing was counted: where nobody
counted anything, the average is the plain mean."""


@dataclass(frozen=True, kw_only=True)
class MergeRule:
    """How the reports on one named state become the fleet's value."""

    kind: RuleKind
    size: int
    """Length of the state's vector."""
    rate: float = 0.0
    """`linear_ema`: the EMA's a per vector step, in (0, 1)."""
    window: float = 0.0
    """`weighted_mean`: weight that the running mean remembers, in the unit of the reports'
    weights (for example episodes of the whole fleet)."""
    initial: float = 0.0
    """Value of every entry before the first report."""
    distribution: bool = False
    """`none`: the state is the probabilities that the shard samples its bins from; the driver
    logs how far the shards drift apart."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"{self.kind} size {self.size} is not positive")
        if self.kind == "linear_ema" and not 0 < self.rate < 1:
            raise ValueError(f"linear_ema rate {self.rate:g} is not in (0, 1)")
        if self.kind == "weighted_mean" and self.window <= 0:
            raise ValueError(f"weighted_mean window {self.window:g} is not positive")
        if self.distribution and self.kind != "none":
            raise ValueError(f"distribution is true under {self.kind}: declare its kind as none")

    def __str__(self) -> str:
        parts = [f"size {self.size}"]
        if self.kind == "linear_ema":
            parts.append(f"rate {self.rate}")
        if self.kind == "weighted_mean":
            parts.append(f"window {self.window}")
        if self.distribution:
            parts.append("distribution")
        return f"{self.kind} ({', '.join(parts)})"

    def supports(self) -> list[RuleKind]:
        """The kinds that this state's reports can be merged by.

        A shard's own value, made from its own reports under the declared rule, can be averaged,
        copied or kept. Only what is declared as a delta can be added up or decayed.
        """
        if self.distribution:
            return ["none"]
        kinds: list[RuleKind] = [self.kind, "weighted_mean", "resolve_one", "none"]
        if self.kind in ("resolve_one", "none"):
            kinds.append("max")
        return list(dict.fromkeys(kinds))


def rules_in_force(
    declared: Mapping[str, MergeRule], overrides: Mapping[str, RuleKind]
) -> dict[str, MergeRule]:
    """The environment's rules with those of the configuration in their place.

    Raises:
        ConfigError: an override of a state that the environment lacks, or whose reports cannot
            be merged so.
    """
    rules = dict(declared)
    for name, kind in overrides.items():
        if name not in rules:
            states = ", ".join(f"{n}: {rule}" for n, rule in rules.items())
            raise ConfigError(
                f"shard_state.{name}: the environment declares no state {name!r}, it declares "
                f"{states or 'none'}: leave it out"
            )
        rule = rules[name]
        if kind not in rule.supports():
            raise ConfigError(
                f"shard_state.{name}: given {kind}, but the environment declares {name!r} as "
                f"{rule}: give {' or '.join(rule.supports())}"
            )
        if kind == "weighted_mean" and kind != rule.kind:
            # averages of the shards' own values, which remember by themselves
            rules[name] = replace(rule, kind=kind, window=NO_WEIGHT)
        else:
            rules[name] = replace(rule, kind=kind)
    return rules


class Row(NamedTuple):
    """What one shard samples from."""

    shard: int
    step: int
    """Vector step that it was reported at."""
    probabilities: Tensor
    """(size,) float64"""


class Folded(NamedTuple):
    """What one or several reports say of one state."""

    value: Tensor
    """(size,) float64: D for `linear_ema`, the weighted sum for `weighted_mean`, the sum, the
    maximum, or the deciding shard's value."""
    step: int
    """Vector step that the value stands at, the newest of its reports."""
    weight: float = 1.0
    """`weighted_mean`: total weight."""
    shard: int = NOBODY
    """`resolve_one`: the shard that decides."""
    rows: tuple[Row, ...] = ()
    """`distribution`: the newest of every shard, in shard order."""


def initial(rule: MergeRule) -> Folded:
    """The fleet's value before the first report."""
    return Folded(value=torch.full((rule.size,), rule.initial, dtype=torch.float64), step=-1)


def fold(rule: MergeRule, parts: Sequence[Folded]) -> Folded:
    """One part in the place of several: commutative and associative."""
    newest = max(part.step for part in parts)
    if rule.kind == "resolve_one":
        # of one shard's values the newest
        return min(parts, key=lambda part: (part.shard, -part.step))
    if rule.kind == "none":
        latest = max(parts, key=lambda part: part.step)
        return Folded(value=latest.value, step=newest, rows=_newest_rows(parts))
    values = torch.stack([part.value for part in parts])
    if rule.kind == "max":
        return Folded(value=values.amax(0), step=newest)
    if rule.kind == "linear_ema":
        ages = torch.tensor([newest - part.step for part in parts], dtype=torch.float64)
        return Folded(value=(1 - rule.rate) ** ages @ values, step=newest)
    return Folded(value=values.sum(0), step=newest, weight=sum(part.weight for part in parts))


def advance(rule: MergeRule, fleet: Folded, told: Folded) -> Folded:
    """The fleet's value after what was told.

    A running mean moves towards the pooled mean of the reports by their weight over the window,
    at most all the way: it remembers about the last `window` units of weight of the fleet.
    """
    if rule.kind != "weighted_mean":
        return fold(rule, [fleet, told])
    if told.weight == 0:
        return fleet
    pooled = told.value / told.weight
    share = min(1.0, told.weight / rule.window)
    return Folded(value=fleet.value + share * (pooled - fleet.value), step=told.step)


def _newest_rows(parts: Sequence[Folded]) -> tuple[Row, ...]:
    rows: dict[int, Row] = {}
    for part in parts:
        for row in part.rows:
            if row.shard not in rows or row.step > rows[row.shard].step:
                rows[row.shard] = row
    return tuple(row for _, row in sorted(rows.items()))
