"""Shard states: what each env shard learns about the curriculum, merged into the fleet's view.

A shard reports what it saw in a window of vector steps; `ShardStateBus` owns the fleet's values
and folds every window into them exactly once, in whatever order the reports come.
`combine_reports` makes one report of several, so that a host can speak for its shards. The rules
themselves are in `fastsac/core/merge_rules.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastsac.core.merge_rules import NOBODY, Folded, MergeRule, Row, advance, fold, initial

Spans = Mapping[int, tuple[tuple[int, int], ...]]
"""By shard, the disjoint ranges (first, last) of vector steps that were merged, ascending."""


@dataclass(frozen=True, kw_only=True)
class LocalState:
    """What one shard saw of one state since its last report."""

    value: Tensor
    """(size,) float64 on the CPU: D_s for `linear_ema`, the weighted sum for `weighted_mean`,
    the change for `sum`, the value itself otherwise."""
    weight: float = 1.0
    """`weighted_mean`: total weight of the sum (for example the number of episodes). For other
    rules, the weight of this shard's own value where a configuration asks for averages."""


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """The states of one shard over the vector steps first_step..last_step (inclusive)."""

    shard: int
    first_step: int
    last_step: int
    states: Mapping[str, LocalState]
    rules: Mapping[str, str] = field(default_factory=dict)
    """Rules that the shard reports by, as texts (quick to send and to compare), as far as it says
    so."""


class Window(NamedTuple):
    """Vector steps of one shard, both ends inclusive."""

    shard: int
    first_step: int
    last_step: int


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """Reports of several shards, combined."""

    windows: tuple[Window, ...]
    states: Mapping[str, Folded]
    rules: Mapping[str, str]


Report = ShardReport | HostReport


def combine_reports(reports: Sequence[Report], rules: Mapping[str, MergeRule]) -> HostReport:
    """One report that says what several say; associative, so it can be done in a tree.

    A report among them that repeats another is left out.

    Raises:
        ValueError: as `ShardStateBus.merge`.
    """
    fresh, _ = _select_fresh(reports, {})
    windows = tuple(sorted(window for report in fresh for window in _windows(report)))
    return HostReport(windows=windows, states=_fold_states(fresh, rules), rules=rule_texts(rules))


def rule_texts(rules: Mapping[str, MergeRule]) -> dict[str, str]:
    """Rules as reports tell them."""
    return {name: str(rule) for name, rule in rules.items()}


class ShardStateBus:
    """Owner of the fleet's view of every shard state."""

    def __init__(self, rules: Mapping[str, MergeRule]) -> None:
        self._rules = dict(rules)
        self._fleet = {name: initial(rule) for name, rule in self._rules.items()}
        self._merged: Spans = {}

    def merge(self, reports: Sequence[Report]) -> dict[str, Tensor]:
        """Fold reports, in shard order, and return the fleet's view.

        A report whose windows were all merged before is dropped. A late one is folded, at its
        own age. `resolve_one` keeps listening to the lowest shard that ever reported, also while
        it is slow. States under the rule `none` stay with their shards. A refused call changes
        nothing.

        Raises:
            ValueError: a state without a rule, of another size or under another rule than the
                bus has; a window that was merged in part.
        """
        fresh, merged = _select_fresh(reports, self._merged)
        told = _fold_states(fresh, self._rules)
        for name, folded in told.items():
            self._fleet[name] = advance(self._rules[name], self._fleet[name], folded)
        self._merged = merged
        return self.values()

    def forget(self, shard: int) -> None:
        """A shard is gone: it decides nothing any more, and its distribution is no one's.

        What it added to sums, means and EMAs stays, and fades as they forget.
        """
        for name, fleet in self._fleet.items():
            rows = tuple(row for row in fleet.rows if row.shard != shard)
            decides = NOBODY if fleet.shard == shard else fleet.shard
            self._fleet[name] = fleet._replace(rows=rows, shard=decides)

    def values(self) -> dict[str, Tensor]:
        """The fleet's view: (size,) float64 tensors by state name."""
        shared = [name for name, rule in self._rules.items() if rule.kind != "none"]
        return {name: self._fleet[name].value.clone() for name in shared}

    def distributions(self) -> dict[str, Tensor]:
        """What the shards sample from: (shards that reported, size) by state, in shard order."""
        return {
            name: torch.stack([row.probabilities for row in fleet.rows])
            for name, fleet in self._fleet.items()
            if fleet.rows
        }

    def bins(self) -> dict[str, Tensor]:
        """What is worth a picture, (size,) by state: the fleet's value of every state of several
        entries, and the mean of what the shards sample from."""
        merged = {n: value for n, value in self.values().items() if value.numel() > 1}
        return merged | {n: rows.mean(0) for n, rows in self.distributions().items()}

    def state_dict(self) -> dict[str, Any]:
        """Everything but the distributions, which every shard reports anew."""
        return {
            "rules": {name: asdict(rule) for name, rule in self._rules.items()},
            "values": {name: fleet.value.clone() for name, fleet in self._fleet.items()},
            "steps": {name: fleet.step for name, fleet in self._fleet.items()},
            "deciding": {name: fleet.shard for name, fleet in self._fleet.items()},
            "merged": {str(s): [list(span) for span in spans] for s, spans in self._merged.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a saved view.

        Raises:
            ValueError: the saved states or their rules are not the ones of this run.
        """
        saved = {name: MergeRule(**fields) for name, fields in state["rules"].items()}
        for name in [*saved, *self._rules]:
            if saved.get(name) != self._rules.get(name):
                raise ValueError(
                    f"saved shard state {name!r} is {saved.get(name, 'absent')}, this run's is "
                    f"{self._rules.get(name, 'absent')}: resume with the environment and the "
                    "shard_state section that the run began with"
                )
        self._fleet = {
            name: Folded(
                value=state["values"][name].clone(),
                step=state["steps"][name],
                shard=state["deciding"][name],
            )
            for name in self._rules
        }
        self._merged = {
            int(shard): tuple((first, last) for first, last in spans)
            for shard, spans in state["merged"].items()
        }


def _windows(report: Report) -> tuple[Window, ...]:
    if isinstance(report, HostReport):
        return report.windows
    return (Window(report.shard, report.first_step, report.last_step),)


def _select_fresh(reports: Sequence[Report], merged: Spans) -> tuple[list[Report], Spans]:
    """The reports that tell something new, in shard order, and all that is then merged.

    Raises:
        ValueError: a window, or a combined report, that was merged in part.
    """
    fresh: list[Report] = []
    spans = dict(merged)
    in_order = sorted(((_windows(r), r) for r in reports), key=lambda pair: pair[0])
    for windows, report in in_order:
        known = [window for window in windows if _is_merged(window, spans)]
        if len(known) == len(windows):
            continue
        if known:
            raise ValueError(
                f"a combined report repeats {_told(known[0])} beside what is new: combine the "
                "same reports again, or give them one by one"
            )
        for window in windows:
            spans[window.shard] = _insert(spans.get(window.shard, ()), window)
        fresh.append(report)
    return fresh, spans


def _is_merged(window: Window, spans: Spans) -> bool:
    """Whether all of a window was merged.

    Raises:
        ValueError: some of it was.
    """
    for first, last in spans.get(window.shard, ()):
        if first <= window.first_step and window.last_step <= last:
            return True
        if first <= window.last_step and window.first_step <= last:
            overlap = Window(
                window.shard, max(first, window.first_step), min(last, window.last_step)
            )
            raise ValueError(
                f"{_told(window)} were reported, {_told(overlap)} were merged before: report "
                "every vector step once"
            )
    return False


def _insert(spans: tuple[tuple[int, int], ...], window: Window) -> tuple[tuple[int, int], ...]:
    """Ranges with one more, that touches none; neighbours become one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted([*spans, window[1:]]):
        if joined and joined[-1][1] + 1 == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return tuple(joined)


def _told(window: Window) -> str:
    return f"vector steps {window.first_step} to {window.last_step} of shard {window.shard}"


def _fold_states(reports: Sequence[Report], rules: Mapping[str, MergeRule]) -> dict[str, Folded]:
    """Every state that the reports tell of, folded in their order."""
    texts = rule_texts(rules)
    for report in reports:
        _check(report, rules, texts)
    parts = {
        name: [_part(report, name, rule) for report in reports if name in report.states]
        for name, rule in rules.items()
    }
    return {name: fold(rules[name], told) for name, told in parts.items() if told}


def _part(report: Report, name: str, rule: MergeRule) -> Folded:
    if isinstance(report, HostReport):
        return report.states[name]
    local, shard, step = report.states[name], report.shard, report.last_step
    rows = (Row(shard, step, local.value),) if rule.distribution else ()
    return Folded(local.value, step, local.weight, shard, rows)


def _check(report: Report, rules: Mapping[str, MergeRule], texts: Mapping[str, str]) -> None:
    """Refuse what the rules do not say.

    Raises:
        ValueError: names both sides.
    """
    for name, told in report.states.items():
        rule = rules.get(name)
        if rule is None:
            raise ValueError(
                f"{_who(report)} reports state {name!r}; spec.shard_states has {sorted(rules)}: "
                "declare its merge rule there"
            )
        if told.value.shape != (rule.size,):
            raise ValueError(
                f"{_who(report)} reports {name!r} of shape {tuple(told.value.shape)}; the fleet "
                f"has ({rule.size},): a state keeps its size during a run"
            )
        theirs = report.rules.get(name, texts[name])
        if theirs != texts[name]:
            raise ValueError(
                f"{_who(report)} reports {name!r} as {theirs}; the fleet has {rule}: a state keeps "
                "its rule during a run, and every shard has the same one"
            )


def _who(report: Report) -> str:
    shards = sorted({window.shard for window in _windows(report)})
    return f"shard {shards[0]}" if len(shards) == 1 else f"a host of {len(shards)} shards"
