"""The policy as it travels: published by the learner group, acted with by the collectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from fastsac.core.networks import Actor
from fastsac.core.normalizer import Normalizer, ObsNormalizers


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """Sizes and bounds that make an actor network."""

    obs_dim: int
    action_low: Tensor
    """(action_dim,) on the CPU"""
    action_high: Tensor
    """(action_dim,) on the CPU"""
    hidden: int
    log_std_min: float
    log_std_max: float

    def make_actor(self, generator: torch.Generator | None = None) -> Actor:
        return Actor(
            self.obs_dim,
            self.action_low,
            self.action_high,
            hidden=self.hidden,
            log_std_min=self.log_std_min,
            log_std_max=self.log_std_max,
            generator=generator,
        )


@dataclass(frozen=True, kw_only=True)
class PublishedPolicy:
    """One version: parameters and the normaliser base that belong together. All on the CPU."""

    version: int
    """Updates done when it was published."""
    parameters: Tensor
    """(num_parameters,) float32, the actor's in the order of `Actor.parameters()`."""
    normalizers: ObsNormalizers


class Policy:
    """Acts on raw observations with the published version that it was given last."""

    def __init__(self, spec: PolicySpec, device: torch.device) -> None:
        self._actor = spec.make_actor().to(device).requires_grad_(False)
        self._normalizer = Normalizer.identity(spec.obs_dim).to(device)
        self._device = device
        self.version = -1

    def load(self, published: PublishedPolicy) -> None:
        vector_to_parameters(published.parameters.to(self._device), self._actor.parameters())
        self._normalizer = published.normalizers.actor.to(self._device)
        self.version = published.version

    @torch.no_grad()
    def sample(self, obs: Tensor, generator: torch.Generator) -> Tensor:
        """Actions (num_envs, action_dim) drawn for raw observations (num_envs, obs_dim)."""
        mean, log_std = self._actor(self._normalizer(obs))
        noise = torch.randn(mean.shape, generator=generator, device=mean.device)
        return self._actor.squash(mean + log_std.exp() * noise)

    @torch.no_grad()
    def mode(self, obs: Tensor) -> Tensor:
        """Deterministic actions (num_envs, action_dim) for raw observations."""
        return self._actor.mode(self._normalizer(obs))
