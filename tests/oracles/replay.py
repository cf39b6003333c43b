"""Replay as a plain list of transitions that forgets nothing: slow, and obvious."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Transition:
    """One environment's share of a vector step; `next_obs` is the true one, never a reset's."""

    obs: tuple[float, ...]
    critic_obs: tuple[float, ...]
    action: tuple[float, ...]
    reward: float
    next_obs: tuple[float, ...]
    next_critic_obs: tuple[float, ...]
    terminated: bool
    truncated: bool
    valid: bool


@dataclass(frozen=True, kw_only=True)
class NStepTransition:
    first: Transition
    last: Transition
    reward: float
    discount: float


class ReplayOracle:
    """One shard: `rows[t][env]`, and the vector steps whose final observations are kept."""

    def __init__(self, final_slots: int) -> None:
        self.rows: list[list[Transition]] = []
        self._final_slots = final_slots
        self._kept: list[int] = []

    def append(self, row: list[Transition], oldest_readable: int) -> int:
        """Add a vector step; returns how many transitions lost their final observation."""
        self._kept = [t for t in self._kept if t >= oldest_readable]
        lost, stored = 0, []
        for transition in row:
            if transition.truncated and transition.valid:
                if len(self._kept) < self._final_slots:
                    self._kept.append(len(self.rows))
                else:
                    lost += 1
                    transition = replace(transition, valid=False)
            stored.append(transition)
        self.rows.append(stored)
        return lost

    def sampleable(self, low: int, high: int) -> list[tuple[int, int]]:
        """(t, env) of each valid transition in low <= t < high."""
        return [
            (t, env)
            for t in range(low, high)
            for env, transition in enumerate(self.rows[t])
            if transition.valid
        ]

    def n_step(self, t: int, env: int, n: int, gamma: float, newest: int) -> NStepTransition:
        """The window that starts at (t, env), when `newest` is the last readable vector step."""
        window = [self.rows[t][env]]
        while len(window) < n and t + len(window) <= newest:
            following = self.rows[t + len(window)][env]
            if window[-1].terminated or window[-1].truncated or not following.valid:
                break
            window.append(following)
        return NStepTransition(
            first=window[0],
            last=window[-1],
            reward=sum(gamma**i * transition.reward for i, transition in enumerate(window)),
            discount=gamma ** len(window),
        )
