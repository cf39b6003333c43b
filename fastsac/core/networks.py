"""The actor and the critic ensemble of FastSAC (Seo et al. 2025, arXiv 2512.01996)."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ActionSample(NamedTuple):
    """Actions drawn from a squashed Gaussian, and where they came from."""

    action: Tensor
    """(batch, action_dim)"""
    log_prob: Tensor
    """(batch,)"""
    mean: Tensor
    """(batch, action_dim), before tanh"""
    log_std: Tensor
    """(batch, action_dim), before tanh"""


class Actor(nn.Module):
    """Squashed Gaussian policy: Linear-LayerNorm-SiLU of widths h, h/2, h/4 and two heads.

    The heads start at zero, so that the first actions are centred and of one spread.
    """

    scale: Tensor
    bias: Tensor

    def __init__(
        self,
        obs_dim: int,
        action_low: Tensor,
        action_high: Tensor,
        *,
        hidden: int,
        log_std_min: float,
        log_std_max: float,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        widths = [obs_dim, hidden, hidden // 2, hidden // 4]
        action_dim = action_low.numel()
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layers += [_linear(fan_in, fan_out, generator), nn.LayerNorm(fan_out), nn.SiLU()]
        self.trunk = nn.Sequential(*layers)
        self.mean = nn.Linear(widths[-1], action_dim)
        self.log_std = nn.Linear(widths[-1], action_dim)
        for head in (self.mean, self.log_std):
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)
        self._log_std_min, self._log_std_max = log_std_min, log_std_max
        self.register_buffer("scale", (action_high - action_low) / 2)
        self.register_buffer("bias", (action_high + action_low) / 2)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation before tanh, each (batch, action_dim)."""
        features = self.trunk(obs)
        low, high = self._log_std_min, self._log_std_max
        log_std = low + (high - low) / 2 * (self.log_std(features).tanh() + 1)
        return self.mean(features), log_std

    def squash(self, u: Tensor) -> Tensor:
        """Actions within the bounds for unbounded `u`, (batch, action_dim)."""
        return u.tanh() * self.scale + self.bias

    def sample(self, obs: Tensor, noise: Tensor) -> ActionSample:
        """Actions for standard normal `noise`, (batch, action_dim), differentiable.

        log pi = sum_j log N(u_j) - log(1 - tanh(u_j)^2) - log scale_j, where
        log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2 u)) holds at any u.
        """
        mean, log_std = self(obs)
        u = mean + log_std.exp() * noise
        log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - u - F.softplus(-2 * u)) + self.scale.log()
        return ActionSample(self.squash(u), (log_normal - log_slope).sum(-1), mean, log_std)

    def mode(self, obs: Tensor) -> Tensor:
        """Deterministic actions, (batch, action_dim)."""
        return self.squash(self.mean(self.trunk(obs)))


class CriticEnsemble(nn.Module):
    """`num_q` C51 critics with stacked weights, evaluated as one batched network."""

    def __init__(
        self,
        critic_obs_dim: int,
        action_dim: int,
        *,
        num_q: int,
        hidden: int,
        num_atoms: int,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        widths = [critic_obs_dim + action_dim, hidden, hidden // 2, hidden // 4, num_atoms]
        layers = [
            _StackedLinear(num_q, fan_in, fan_out, generator)
            for fan_in, fan_out in pairwise(widths)
        ]
        self.linears = nn.ModuleList(layers)
        self.norms = nn.ModuleList(_StackedLayerNorm(num_q, width) for width in widths[1:-1])

    def forward(self, critic_obs: Tensor, action: Tensor) -> Tensor:
        """Logits of the value distributions, (num_q, batch, num_atoms)."""
        x = torch.cat([critic_obs, action], -1)
        first, *hidden = self.linears
        x = first(x)
        for norm, linear in zip(self.norms, hidden, strict=True):
            x = linear(F.silu(norm(x)))
        return x


def support(v_min: float, v_max: float, num_atoms: int) -> Tensor:
    """Returns that the atoms stand for, (num_atoms,)."""
    return torch.linspace(v_min, v_max, num_atoms)


class _StackedLinear(nn.Module):
    """`num_q` linear layers side by side."""

    def __init__(
        self, num_q: int, fan_in: int, fan_out: int, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_q, fan_out, fan_in))
        self.bias = nn.Parameter(torch.empty(num_q, 1, fan_out))
        _uniform_init(self.weight, self.bias, fan_in, generator)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, fan_in), shared by all, or (num_q, batch, fan_in) -> (num_q, batch, fan_out)"""
        x = x.expand(self.weight.shape[0], -1, -1)
        return torch.baddbmm(self.bias, x, self.weight.transpose(1, 2))


class _StackedLayerNorm(nn.Module):
    """`num_q` layer normalisations side by side."""

    def __init__(self, num_q: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_q, 1, width))
        self.bias = nn.Parameter(torch.zeros(num_q, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, F.layer_norm(x, x.shape[-1:]), self.weight)


def _linear(fan_in: int, fan_out: int, generator: torch.Generator | None) -> nn.Linear:
    layer = nn.Linear(fan_in, fan_out)
    _uniform_init(layer.weight, layer.bias, fan_in, generator)
    return layer


def _uniform_init(
    weight: Tensor, bias: Tensor, fan_in: int, generator: torch.Generator | None
) -> None:
    """`nn.Linear`'s own initialisation, from `generator`."""
    bound = 1 / math.sqrt(fan_in)
    nn.init.uniform_(weight, -bound, bound, generator=generator)
    nn.init.uniform_(bias, -bound, bound, generator=generator)
