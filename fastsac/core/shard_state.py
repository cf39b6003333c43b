"""Shard states: what each env shard learns about the curriculum, merged into the fleet's view.

Merge rules are pure functions of the fleet's value and the shards' reports; `ShardStateBus`
owns the values. All arithmetic is float64.

`linear_ema` is exact: with q[t] = (1 - a) q[t-1] + a * sum_s c_s[t], the recursion is linear, so
the fleet's value after step T is (1 - a)^(T - T0) q[T0] + sum_s D_s with each shard's
D_s = sum over its window of a (1 - a)^(T - t) c_s[t]. A shard reports D_s, never the value that
was applied to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

RuleKind = Literal["linear_ema", "weighted_mean", "resolve_one", "sum", "max", "none"]


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

    def __post_init__(self) -> None:
        if self.kind == "linear_ema" and not 0 < self.rate < 1:
            raise ValueError(f"linear_ema rate {self.rate:g} is not in (0, 1)")
        if self.kind == "weighted_mean" and self.window <= 0:
            raise ValueError(f"weighted_mean window {self.window:g} is not positive")


@dataclass(frozen=True, kw_only=True)
class LocalState:
    """What one shard saw of one state since its last report."""

    value: Tensor
    """(size,) float64 on the CPU: D_s for `linear_ema`, the weighted sum for `weighted_mean`,
    the value itself otherwise."""
    weight: float = 1.0
    """`weighted_mean`: total weight of the sum (for example the number of episodes)."""


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """The states of one shard over the vector steps first_step..last_step (inclusive)."""

    shard: int
    first_step: int
    last_step: int
    states: Mapping[str, LocalState]


def merge_linear_ema(
    fleet: Tensor, fleet_step: int, deltas: Sequence[tuple[int, Tensor]], rate: float
) -> tuple[Tensor, int]:
    """Fold `(last_step, D_s)` pairs into the fleet's EMA; exact for any order and any window.

    Args:
        fleet: (size,) float64, the EMA after vector step `fleet_step`.
        deltas: per report, the step it ends with and its (size,) contribution.
    Returns:
        The EMA and the step it stands at: the newest of all.
    """
    newest = max([fleet_step, *(step for step, _ in deltas)])
    merged = (1 - rate) ** (newest - fleet_step) * fleet
    for step, delta in deltas:
        merged = merged + (1 - rate) ** (newest - step) * delta
    return merged, newest


def merge_weighted_mean(
    fleet: Tensor, sums: Sequence[tuple[float, Tensor]], window: float
) -> Tensor:
    """Move the running mean towards the pooled mean of `(weight, weighted sum)` pairs.

    The pooled mean's share is its weight over `window`, at most 1, so the mean remembers about
    the last `window` units of weight of the whole fleet.
    """
    weight = sum(w for w, _ in sums)
    if weight == 0:
        return fleet
    pooled = sum((s for _, s in sums), torch.zeros_like(fleet)) / weight
    return fleet + min(1.0, weight / window) * (pooled - fleet)


class ShardStateBus:
    """Owner of the fleet's view of every shard state."""

    def __init__(self, rules: Mapping[str, MergeRule]) -> None:
        self._rules = dict(rules)
        self._values = {
            name: torch.full((rule.size,), rule.initial, dtype=torch.float64)
            for name, rule in self._rules.items()
        }
        self._step = dict.fromkeys(self._rules, -1)
        self._last_reported: dict[int, int] = {}

    def merge(self, reports: Sequence[ShardReport]) -> dict[str, Tensor]:
        """Fold reports in shard order and return the fleet's view.

        A report whose window was already merged is dropped. States under the rule `none` stay
        with their shards.

        Raises:
            ValueError: a state without a rule, or of another size than its rule says.
        """
        fresh = [r for r in reports if r.first_step > self._last_reported.get(r.shard, -1)]
        fresh.sort(key=lambda report: (report.shard, report.first_step))
        for report in fresh:
            self._check(report)
            self._last_reported[report.shard] = report.last_step
        for name, rule in self._rules.items():
            told = [(r.last_step, r.states[name]) for r in fresh if name in r.states]
            if told:
                self._merge_state(name, rule, told)
        return self.values()

    def values(self) -> dict[str, Tensor]:
        """The fleet's view: (size,) float64 tensors by state name."""
        return {n: v.clone() for n, v in self._values.items() if self._rules[n].kind != "none"}

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": {name: value.clone() for name, value in self._values.items()},
            "step": dict(self._step),
            "last_reported": {str(shard): step for shard, step in self._last_reported.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a saved view.

        Raises:
            ValueError: the saved states are not the ones of this run's environment.
        """
        saved = {name: tuple(value.shape) for name, value in state["values"].items()}
        ours = {name: (rule.size,) for name, rule in self._rules.items()}
        if saved != ours:
            raise ValueError(f"saved shard states {saved} are not the environment's {ours}")
        self._values = {name: value.clone() for name, value in state["values"].items()}
        self._step = dict(state["step"])
        self._last_reported = {int(k): v for k, v in state["last_reported"].items()}

    def _merge_state(self, name: str, rule: MergeRule, told: list[tuple[int, LocalState]]) -> None:
        fleet = self._values[name]
        if rule.kind == "linear_ema":
            deltas = [(step, local.value) for step, local in told]
            fleet, self._step[name] = merge_linear_ema(fleet, self._step[name], deltas, rule.rate)
        elif rule.kind == "weighted_mean":
            sums = [(local.weight, local.value) for _, local in told]
            fleet = merge_weighted_mean(fleet, sums, rule.window)
        elif rule.kind == "resolve_one":
            fleet = told[0][1].value.clone()
        elif rule.kind == "sum":
            fleet = sum((local.value for _, local in told), fleet)
        elif rule.kind == "max":
            fleet = torch.stack([fleet, *(local.value for _, local in told)]).amax(0)
        self._values[name] = fleet

    def _check(self, report: ShardReport) -> None:
        for name, local in report.states.items():
            rule = self._rules.get(name)
            if rule is None:
                raise ValueError(
                    f"shard {report.shard} reports state {name!r}; spec.shard_states has "
                    f"{sorted(self._rules)}: declare its merge rule there"
                )
            if tuple(local.value.shape) != (rule.size,):
                raise ValueError(
                    f"shard {report.shard} reports {name!r} of shape {tuple(local.value.shape)}; "
                    f"spec.shard_states says ({rule.size},): make them agree"
                )
