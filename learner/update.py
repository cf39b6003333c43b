"""One FastSAC update: critic, temperature, sometimes the actor, target networks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastsac.core.config import AlgorithmConfig
from fastsac.core.networks import CriticEnsemble, support
from fastsac.core.policy import PolicySpec
from fastsac.core.transition import Batch
from learner.flat import FlatParameters
from learner.losses import actor_loss, alpha_loss, critic_loss, critic_targets


class Noise(NamedTuple):
    """Standard normal noise of one update, each (batch, action_dim)."""

    next: Tensor
    """For the next actions of the critics' targets."""
    actor: Tensor
    """For the actions of the actor loss."""


class Learner:
    """Networks, optimisers and temperature of one replica."""

    def __init__(
        self,
        *,
        policy: PolicySpec,
        critic_obs_dim: int | None,
        algorithm: AlgorithmConfig,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        a = self._algorithm = algorithm
        action_dim = policy.action_low.numel()
        self.actor = policy.make_actor(generator).to(device)
        self.critic = CriticEnsemble(
            policy.obs_dim if critic_obs_dim is None else critic_obs_dim,
            action_dim,
            num_q=a.num_q,
            hidden=a.critic_hidden,
            num_atoms=a.num_atoms,
            generator=generator,
        ).to(device)
        self.target = copy.deepcopy(self.critic)
        temperature = nn.ParameterList([torch.tensor(a.alpha_init, device=device).log()])
        self.log_alpha: Tensor = temperature[0]
        self.flat_actor = FlatParameters(self.actor)
        self.flat_critic = FlatParameters(self.critic)
        self.flat_target = FlatParameters(self.target)
        self.flat_alpha = FlatParameters(temperature)
        self.optimizers = {
            "actor": self._adamw(self.flat_actor, a.weight_decay),
            "critic": self._adamw(self.flat_critic, a.weight_decay),
            "alpha": self._adamw(self.flat_alpha, 0.0),
        }
        self.scale_learning_rates(1.0)
        self._target_entropy = -action_dim * a.target_entropy_ratio
        self._support = support(a.v_min, a.v_max, a.num_atoms).to(device)

    def update(
        self,
        batch: Batch,
        noise: Noise,
        *,
        update_actor: bool,
        average: Callable[[Tensor], None],
    ) -> dict[str, Tensor]:
        """Update on one batch of normalised observations.

        Args:
            average: replaces a flat gradient by its mean over the ranks, in place.

        Returns:
            0-dim tensors on the device, by the names of `learner/` metrics.
        """
        a = self._algorithm
        targets, next_log_prob = critic_targets(
            self.actor,
            self.target,
            self.alpha,
            batch,
            noise.next,
            self._support,
            a.critic_target,
        )
        loss, q = critic_loss(self.critic, targets, batch, self._support)
        critic_norm = self._step("critic", self.flat_critic, loss, average, a.max_grad_norm)

        temperature_loss = alpha_loss(self.log_alpha, next_log_prob, self._target_entropy)
        alpha_norm = self._step("alpha", self.flat_alpha, temperature_loss, average, 0.0)
        metrics = {
            "critic_loss": loss.detach(),
            "critic_grad_norm": critic_norm,
            "q_mean": q.mean(),
            "q_min": q.min(),
            "q_max": q.max(),
            "alpha_loss": temperature_loss.detach(),
            "alpha_grad_norm": alpha_norm,
            "alpha": self.alpha,
            "entropy": -next_log_prob.mean(),
        }
        if update_actor:
            metrics |= self._update_actor(batch, noise.actor, average)
        self.flat_target.move_towards(self.flat_critic, a.tau)
        return metrics

    def scale_learning_rates(self, scale: float) -> None:
        """Set all learning rates to `scale` times the configured ones."""
        a = self._algorithm
        rates = {"actor": a.actor_lr, "critic": a.critic_lr, "alpha": a.alpha_lr}
        for name, optimizer in self.optimizers.items():
            optimizer.param_groups[0]["lr"] = scale * rates[name]

    @property
    def alpha(self) -> Tensor:
        """Temperature, 0-dim."""
        return self.log_alpha.detach().exp()

    def actor_parameters(self) -> Tensor:
        """A copy of the actor's parameters, (num_parameters,)."""
        return self.flat_actor.values.detach().clone()

    def tensors(self) -> list[Tensor]:
        """Every tensor that the next update reads, the same on all ranks."""
        return list(_leaves(self._state()))

    def state_dict(self) -> dict[str, Any]:
        """Flat parameters and AdamW moments by network."""
        return _clone(self._state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a saved state.

        Raises:
            ValueError: saved with networks of other sizes.
        """
        for ours, saved in zip(_leaves(self._state()), _leaves(state), strict=True):
            if ours.shape != saved.shape:
                raise ValueError(
                    f"the checkpoint's networks have {saved.numel()} parameters where this "
                    f"configuration gives {ours.numel()}: use the run's own config.yaml"
                )
            ours.copy_(saved)

    def _update_actor(
        self, batch: Batch, noise: Tensor, average: Callable[[Tensor], None]
    ) -> dict[str, Tensor]:
        a = self._algorithm
        self.critic.requires_grad_(False)
        loss, sample = actor_loss(self.actor, self.critic, self.alpha, batch, noise, self._support)
        norm = self._step("actor", self.flat_actor, loss, average, a.max_grad_norm)
        self.critic.requires_grad_(True)
        return {
            "actor_loss": loss.detach(),
            "actor_grad_norm": norm,
            "action_std": sample.log_std.detach().exp().mean(),
        }

    def _step(
        self,
        name: str,
        flat: FlatParameters,
        loss: Tensor,
        average: Callable[[Tensor], None],
        max_grad_norm: float,
    ) -> Tensor:
        """Gradient, mean over the ranks, clip, step; returns the norm before clipping."""
        flat.gradient.zero_()
        loss.backward()
        average(flat.gradient)
        norm = flat.clip_gradient(max_grad_norm)
        self.optimizers[name].step()
        return norm

    def _adamw(self, flat: FlatParameters, weight_decay: float) -> torch.optim.AdamW:
        """Fused AdamW whose moments exist from the start, so that they can be broadcast."""
        optimizer = torch.optim.AdamW(
            [flat.values],
            betas=self._algorithm.betas,
            weight_decay=weight_decay,
            fused=True,
        )
        optimizer.state[flat.values] = {
            "step": torch.zeros((), device=flat.values.device),
            "exp_avg": torch.zeros_like(flat.gradient),
            "exp_avg_sq": torch.zeros_like(flat.gradient),
        }
        return optimizer

    def _state(self) -> dict[str, Any]:
        flats = {"actor": self.flat_actor, "critic": self.flat_critic, "alpha": self.flat_alpha}
        moments = {n: dict(self.optimizers[n].state[flat.values]) for n, flat in flats.items()}
        return {
            "actor": self.flat_actor.values.detach(),
            "critic": self.flat_critic.values.detach(),
            "target": self.flat_target.values.detach(),
            "log_alpha": self.flat_alpha.values.detach(),
            "moments": moments,
        }


def all_finite(state: Mapping[str, Any]) -> bool:
    """Whether a learner's saved state can be learnt from."""
    return all(bool(tensor.isfinite().all()) for tensor in _leaves(state))


def _leaves(tree: Mapping[str, Any]) -> Iterator[Tensor]:
    """Tensors of a nested mapping, in the order of the sorted keys."""
    for key in sorted(tree):
        value = tree[key]
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _leaves(value)


def _clone(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else _clone(v) for k, v in tree.items()}
