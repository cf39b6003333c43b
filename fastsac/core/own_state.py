"""A shard's own side of the bus: so that an environment need not know which rule is in force.

An environment reports by the rules that it declares and uses the view that it is given. Where the
configuration asks for another rule, the shard's own value (its own EMA from its own deltas) is kept
here. It is reported in the form of the rule in force, replaced by what the fleet makes of it, and,
under `none`, it is what the environment is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastsac.core.config import RuleKind
from fastsac.core.merge_rules import NO_WEIGHT, Folded, MergeRule, advance, initial, rules_in_force
from fastsac.core.shard_state import LocalState, rule_texts

TOLERANCE = 1e-6
"""How far from 1 the probabilities of a distribution may add up."""


class OwnStates:
    """Owner of one shard's own value of every state whose rule the configuration overrides."""

    def __init__(
        self, declared: Mapping[str, MergeRule], overrides: Mapping[str, RuleKind]
    ) -> None:
        """Raises ConfigError as `rules_in_force` does."""
        self.rules = rules_in_force(declared, overrides)
        """The rules in force, by state."""
        self.rule_texts = rule_texts(self.rules)
        self._declared = dict(declared)
        self._values = {
            name: initial(rule).value
            for name, rule in declared.items()
            if self.rules[name].kind != rule.kind
        }

    def view(self, fleet_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the environment is given: the fleet's view, and this shard's own values where the
        fleet has none. The fleet's values take the place of the own ones."""
        for name in self._values:
            if name in fleet_state:
                self._values[name] = fleet_state[name].clone()
        return {**fleet_state, **{name: value.clone() for name, value in self._values.items()}}

    def report(
        self, states: Mapping[str, LocalState], num_vector_steps: int
    ) -> dict[str, LocalState]:
        """An environment's report in the form of the rules in force.

        Args:
            num_vector_steps: length of the window that was seen.

        Raises:
            ValueError: a state that is not declared or has another size, a value that is not
                finite, or a distribution that is none.
        """
        for name, local in states.items():
            if name not in self._declared:
                raise ValueError(
                    f"state {name!r} is reported, spec.shard_states has "
                    f"{sorted(self._declared)}: declare its merge rule there"
                )
            _check(name, local, self._declared[name])
        reported = dict(states)
        for name, value in self._values.items():
            rule = self._declared[name]
            nothing = LocalState(value=torch.zeros_like(value), weight=0.0)
            if name not in states and rule.kind != "linear_ema":
                continue  # an EMA forgets also when nothing is told
            local = states.get(name, nothing)
            told = Folded(value=local.value, step=num_vector_steps, weight=local.weight, shard=0)
            own = self._values[name] = advance(rule, Folded(value=value, step=0), told).value
            reported[name] = LocalState(value=own.clone())
            if self.rules[name].kind == "weighted_mean":
                weight = local.weight + NO_WEIGHT
                reported[name] = LocalState(value=weight * own, weight=weight)
        return reported

    def state_dict(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self._values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values = {name: state[name].clone() for name in self._values}


def _check(name: str, local: LocalState, rule: MergeRule) -> None:
    if tuple(local.value.shape) != (rule.size,):
        raise ValueError(
            f"state {name!r} is reported with shape {tuple(local.value.shape)}, "
            f"spec.shard_states says ({rule.size},): make them agree"
        )
    if not bool(local.value.isfinite().all()):
        bad = int((~local.value.isfinite()).sum())
        raise ValueError(f"state {name!r} has {bad} entries that are not finite: report numbers")
    if not rule.distribution:
        return
    total, lowest = float(local.value.sum()), float(local.value.min())
    if lowest < 0 or abs(total - 1) > TOLERANCE:
        raise ValueError(
            f"state {name!r} is declared a distribution, its entries add up to {total:g}, the "
            f"lowest is {lowest:g}: report probabilities, that add up to 1"
        )
