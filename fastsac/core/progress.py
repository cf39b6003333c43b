"""Counts that decide what the loop does next."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """How far a run is, fleet-wide. The update-to-data ratio is kept by counting, never by time."""

    env_steps: int = 0
    """Transitions collected."""
    vector_steps: int = 0
    """Vector steps of every shard."""
    updates: int = 0
    """Updates done; also the newest policy version."""
    ticks: int = 0
    """Ticks done."""
    samples: int = 0
    """Transitions drawn from the replay."""
    nonfinite: int = 0
    """Transitions dropped because a value was not finite."""

    wall_s: float = 0.0
    """Training time, s."""

    def count(
        self, *, env_steps: int, vector_steps: int, updates: int, samples: int, nonfinite: int
    ) -> None:
        """Add one tick."""
        self.env_steps += env_steps
        self.vector_steps += vector_steps
        self.updates += updates
        self.samples += samples
        self.nonfinite += nonfinite
        self.ticks += 1

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Progress:
        return cls(**state)


def updates_owed(
    *,
    rows_written: int,
    readable_transitions: int,
    batch_size_per_rank: int,
    learning_starts: int,
    updates_per_tick: int,
) -> int:
    """Updates of the coming tick: none before there is enough to learn from, then all of them.

    Args:
        rows_written: vector steps that every replay shard has received.
        readable_transitions: transitions that every rank may sample from.
        learning_starts: vector steps before the first update.
    """
    ready = rows_written >= learning_starts and readable_transitions >= batch_size_per_rank
    return updates_per_tick if ready else 0


def cosine_decay(done: float, final_ratio: float) -> float:
    """Factor of the learning rates: from 1 to `final_ratio` along half a cosine (Loshchilov and
    Hutter 2017, arXiv 1608.03983, without restarts).

    Args:
        done: share of the run's env steps, in [0, 1].
    """
    return final_ratio + (1 - final_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
