"""Observation statistics: counted as deltas by the collectors, merged once for the fleet.

Moments are float64 (count, mean, M2) and merge by the formula of Chan, Golub and LeVeque (1979).
Only deltas that started at zero are merged, so no observation is counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

STD_OFFSET = 1e-2
"""Added to the standard deviation, so that constant features do not blow up; the value that
RSL-RL and holosoma use."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of a stream of vectors."""

    count: int
    mean: Tensor
    """(dim,) float64"""
    m2: Tensor
    """(dim,) float64"""

    @classmethod
    def zero(cls, dim: int, device: torch.device | str = "cpu") -> Moments:
        zeros = torch.zeros(dim, dtype=torch.float64, device=device)
        return cls(0, zeros, zeros.clone())

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        """Moments of the rows of `values`, (count, dim)."""
        values = values.to(torch.float64)
        mean = values.mean(0)
        return cls(values.shape[0], mean, (values - mean).square().sum(0))

    def cpu(self) -> Moments:
        return Moments(self.count, self.mean.cpu(), self.m2.cpu())

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Moments:
        return cls(state["count"], state["mean"], state["m2"])


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Moments of both streams together."""
    if a.count == 0 or b.count == 0:
        return b if a.count == 0 else a
    count = a.count + b.count
    delta = b.mean - a.mean
    mean = a.mean + delta * (b.count / count)
    m2 = a.m2 + b.m2 + delta.square() * (a.count * b.count / count)
    return Moments(count, mean, m2)


@dataclass(frozen=True)
class Normalizer:
    """(x - mean) / scale, frozen with the policy version that it was published with."""

    mean: Tensor
    """(dim,) float32"""
    scale: Tensor
    """(dim,) float32, standard deviation plus `STD_OFFSET`; 1 before anything was seen."""

    @classmethod
    def identity(cls, dim: int) -> Normalizer:
        return cls(torch.zeros(dim), torch.ones(dim))

    @classmethod
    def from_moments(cls, moments: Moments) -> Normalizer:
        if moments.count == 0:
            return cls.identity(moments.mean.numel())
        std = (moments.m2 / moments.count).sqrt()
        return cls(moments.mean.float(), (std + STD_OFFSET).float())

    def __call__(self, values: Tensor) -> Tensor:
        return (values - self.mean) / self.scale

    def to(self, device: torch.device) -> Normalizer:
        return Normalizer(self.mean.to(device), self.scale.to(device))


@dataclass(frozen=True)
class ObsMoments:
    """Moments of what the actor sees and, where it is separate, of what the critic sees."""

    actor: Moments
    critic: Moments | None

    def cpu(self) -> ObsMoments:
        return ObsMoments(self.actor.cpu(), None if self.critic is None else self.critic.cpu())


@dataclass(frozen=True)
class ObsNormalizers:
    """Normalisers of one policy version; `critic` is None when the critic sees the actor's."""

    actor: Normalizer
    critic: Normalizer | None

    def to(self, device: torch.device) -> ObsNormalizers:
        critic = None if self.critic is None else self.critic.to(device)
        return ObsNormalizers(self.actor.to(device), critic)


class FleetNormalizer:
    """Owner of the fleet-wide base that is published with every policy version."""

    def __init__(self, actor_obs_dim: int, critic_obs_dim: int | None, *, enabled: bool) -> None:
        critic = None if critic_obs_dim is None else Moments.zero(critic_obs_dim)
        self._base = ObsMoments(Moments.zero(actor_obs_dim), critic)
        self._enabled = enabled

    @property
    def moments(self) -> ObsMoments:
        return self._base

    def merge(self, deltas: Sequence[ObsMoments]) -> None:
        """Fold the shards' deltas, in shard order."""
        actor = reduce(merge_moments, [delta.actor for delta in deltas], self._base.actor)
        critic = self._base.critic
        for delta in deltas:
            if critic is not None and delta.critic is not None:
                critic = merge_moments(critic, delta.critic)
        self._base = ObsMoments(actor, critic)

    def published(self) -> ObsNormalizers:
        """Normalisers of the base as it stands; identities when normalisation is off."""
        make = Normalizer.from_moments if self._enabled else _identity_of
        critic = None if self._base.critic is None else make(self._base.critic)
        return ObsNormalizers(make(self._base.actor), critic)

    def state_dict(self) -> dict[str, Any]:
        state = {"actor": self._base.actor.state_dict()}
        if self._base.critic is not None:
            state["critic"] = self._base.critic.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        critic = Moments.from_state_dict(state["critic"]) if "critic" in state else None
        self._base = ObsMoments(Moments.from_state_dict(state["actor"]), critic)


def _identity_of(moments: Moments) -> Normalizer:
    return Normalizer.identity(moments.mean.numel())
