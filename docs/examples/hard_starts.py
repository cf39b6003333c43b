"""A curriculum of your own that the whole fleet shares: start more often where robots fail.

The point mass of `point_mass.py` starts in one of eight bins of positions. Every shard counts its
failures by bin; the fleet merges them exactly, and every shard samples by the fleet's counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from collectors.env import Observation, Step
from docs.examples.point_mass import PointMass
from fastsac.core.merge_rules import MergeRule
from fastsac.core.shard_state import LocalState

BINS = 8
RATE = 0.01
"""The moving average's a, per vector step."""
EXPLORATION = 0.2
"""Share of the starts that are drawn from all bins alike."""


class HardStarts(PointMass):
    """Episodes start at |position| < 1.9 m, in the bins where the fleet fails."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        states = {
            "failures": MergeRule(kind="linear_ema", size=BINS, rate=RATE),
            "sampling": MergeRule(kind="none", size=BINS, distribution=True),
        }
        self.spec = replace(self.spec, shard_states=states)
        self._fleet_failures = torch.zeros(BINS, dtype=torch.float64)
        self._seen = torch.zeros(BINS, dtype=torch.float64)
        self._failed = 0.0

    def reset(self, seed: int) -> Observation:
        self._bin = torch.zeros(self.spec.num_envs, dtype=torch.int64, device=self._device)
        return super().reset(seed)

    def reset_envs(self, mask: Tensor) -> Observation:
        super().reset_envs(mask)
        chances = self.probabilities().to(self._device)
        drawn = torch.multinomial(chances, len(mask), True, generator=self._generator)
        within = torch.rand(len(mask), generator=self._generator, device=self._device)
        position = 1.9 * (2 * (drawn + within) / BINS - 1)
        self._bin = torch.where(mask, drawn, self._bin)
        self._state[:, 0] = torch.where(mask, position, self._state[:, 0])
        return Observation(self._state)

    def step(self, action: Tensor) -> Step:
        started = self._bin
        step = super().step(action)
        counts = torch.bincount(started[step.terminated].cpu(), minlength=BINS).double()
        # D = sum over the window of a (1 - a)^(T - t) c[t], one vector step at a time
        self._seen = (1 - RATE) * self._seen + RATE * counts
        self._failed += float(counts.sum())
        return step

    def probabilities(self) -> Tensor:
        """Of the bins, (BINS,) float64."""
        uniform, total = torch.full((BINS,), 1 / BINS), self._fleet_failures.sum()
        hard = self._fleet_failures / total if total > 0 else uniform.double()
        return (1 - EXPLORATION) * hard + EXPLORATION * uniform

    def report_shard_state(self) -> Mapping[str, LocalState]:
        """What was seen since the last report, never what was applied."""
        seen, self._seen = self._seen, torch.zeros(BINS, dtype=torch.float64)
        failed, self._failed = self._failed, 0.0
        return {
            "failures": LocalState(value=seen, weight=failed),
            "sampling": LocalState(value=self.probabilities()),
        }

    def apply_shard_state(self, state: Mapping[str, Tensor]) -> None:
        """Take the fleet's failures per vector step; used at following resets."""
        self._fleet_failures = state["failures"].clone()

    def state_dict(self) -> dict[str, Any]:
        own = {"bin": self._bin, "seen": self._seen, "failures": self._fleet_failures}
        return super().state_dict() | {n: t.clone() for n, t in own.items()} | {"f": self._failed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._bin, self._seen = state["bin"].clone(), state["seen"].clone()
        self._fleet_failures, self._failed = state["failures"].clone(), state["f"]
