"""Left-right symmetry: how the vectors of an environment look in a mirror."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastsac.core.transition import Batch


@dataclass(frozen=True)
class Reflection:
    """A signed permutation that is its own inverse: y[i] = sign[i] * x[index[i]]."""

    index: Tensor
    """(dim,) int64"""
    sign: Tensor
    """(dim,) float32, 1 or -1"""

    def __post_init__(self) -> None:
        everything = torch.arange(len(self.index), device=self.index.device)
        if (
            self.index.shape != self.sign.shape
            or not torch.equal(self.index.sort().values, everything)
            or not torch.equal(self.index[self.index], everything)
            or not torch.equal(self.sign * self.sign[self.index], torch.ones_like(self.sign))
        ):
            raise ValueError(
                f"index {self.index.tolist()} with signs {self.sign.tolist()} is no reflection: "
                "give a signed permutation that, done twice, changes nothing"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Mirror the last axis of `x`, (..., dim)."""
        return x[..., self.index] * self.sign

    @classmethod
    def of_signs(cls, *signs: float) -> Reflection:
        """Every entry stays in its place: (1, -1, 1) for a vector, (-1, 1, -1) for an axis."""
        return cls(torch.arange(len(signs)), torch.tensor(signs))

    @classmethod
    def join(cls, parts: Sequence[Reflection]) -> Reflection:
        """The reflection of vectors that lie one after the other."""
        starts = torch.tensor([0, *(len(part.index) for part in parts)]).cumsum(0).tolist()
        index = [start + part.index for start, part in zip(starts, parts, strict=False)]
        return cls(torch.cat(index), torch.cat([part.sign for part in parts]))

    def to(self, device: torch.device) -> Reflection:
        return Reflection(self.index.to(device), self.sign.to(device))


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """How an environment looks in a mirror: mirrored actions in a mirrored state lead to the
    mirrored next state, with the same reward."""

    actor_obs: Reflection
    critic_obs: Reflection | None = None
    """None when the critic sees the actor's observation."""
    action: Reflection

    def to(self, device: torch.device) -> Mirror:
        critic_obs = self.critic_obs
        return Mirror(
            actor_obs=self.actor_obs.to(device),
            critic_obs=None if critic_obs is None else critic_obs.to(device),
            action=self.action.to(device),
        )


def mirror_rows(batch: Batch, chosen: Tensor, mirror: Mirror) -> Batch:
    """`batch` with the rows `chosen`, (batch,) bool, seen in the mirror.

    Data augmentation by symmetry, as for locomotion in Mittal et al. 2024 (arXiv 2403.04359);
    here a random half is mirrored in place of doubling the batch.
    """
    rows = chosen[:, None]

    def some(reflection: Reflection, x: Tensor) -> Tensor:
        return torch.where(rows, reflection(x), x)

    obs, next_obs = some(mirror.actor_obs, batch.obs), some(mirror.actor_obs, batch.next_obs)
    critic_obs, next_critic_obs = obs, next_obs
    if mirror.critic_obs is not None:
        critic_obs = some(mirror.critic_obs, batch.critic_obs)
        next_critic_obs = some(mirror.critic_obs, batch.next_critic_obs)
    return replace(
        batch,
        obs=obs,
        critic_obs=critic_obs,
        action=some(mirror.action, batch.action),
        next_obs=next_obs,
        next_critic_obs=next_critic_obs,
    )
