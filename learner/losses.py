"""The losses of FastSAC with a C51 critic, as pure functions.

Sources: SAC, Haarnoja et al. 2018; C51, Bellemare et al. 2017; FastSAC, Seo et al. 2025.
Observations are normalised already. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsac.core.networks import ActionSample, Actor, CriticEnsemble
from fastsac.core.transition import Batch

LARGEST_OBS = 1e6
"""In standard deviations; beyond it, a terminated row's next observation is not looked at."""

CriticTarget = Literal["each", "min", "mean"]


def project(probabilities: Tensor, target_atoms: Tensor, support: Tensor) -> Tensor:
    """Distributions on shifted atoms, projected onto the support; mass is kept.

    Each shifted atom's mass goes to its two neighbours in proportion to its closeness.

    Args:
        probabilities: (num_q, batch, atoms)
        target_atoms: (batch, atoms), clipped to the support's ends here.
        support: (atoms,), evenly spaced.
    Returns:
        (num_q, batch, atoms)
    """
    num_atoms = support.numel()
    spacing = (support[-1] - support[0]) / (num_atoms - 1)
    position = ((target_atoms - support[0]) / spacing).clamp(0, num_atoms - 1)
    # a floor of at most num_atoms - 2 leaves an upper neighbour to every atom, so that one which
    # lands exactly on the support keeps its mass
    lower = position.floor().clamp(max=num_atoms - 2)
    upper_share = position - lower
    # NaN is no index; it goes on in the masses, to the loss
    index = lower.nan_to_num(0.0).long().expand_as(probabilities)
    to_upper = probabilities * upper_share
    projected = torch.zeros_like(probabilities)
    projected.scatter_add_(-1, index, probabilities - to_upper)
    return projected.scatter_add_(-1, index + 1, to_upper)


@torch.no_grad()
def critic_targets(
    actor: Actor,
    target_critic: CriticEnsemble,
    alpha: Tensor,
    batch: Batch,
    noise: Tensor,
    support: Tensor,
    critic_target: CriticTarget,
) -> tuple[Tensor, Tensor]:
    """Target distributions (num_q, batch, atoms) and log pi of the next actions (batch,).

    z' = r + discount * (z - alpha log pi(a'|s')), without the bootstrap where terminated. What
    `next_obs` holds there does not matter to the targets, were it NaN.
    """
    next_obs = _without_absurd(batch.next_obs, batch.terminated)
    next_critic_obs = next_obs
    if batch.next_critic_obs is not batch.next_obs:
        next_critic_obs = _without_absurd(batch.next_critic_obs, batch.terminated)
    sample = actor.sample(next_obs, noise)
    probabilities = target_critic(next_critic_obs, sample.action).softmax(-1)
    entropy_bonus = (alpha * sample.log_prob)[:, None]
    bootstrap = batch.discount[:, None] * (support - entropy_bonus)
    bootstrap = torch.where(batch.terminated[:, None], 0, bootstrap)
    targets = project(probabilities, batch.reward[:, None] + bootstrap, support)
    if critic_target == "min":
        lowest = (targets @ support).argmin(0)
        chosen = targets[lowest, torch.arange(targets.shape[1], device=targets.device)]
        targets = chosen.expand_as(targets)
    elif critic_target == "mean":
        targets = targets.mean(0, keepdim=True).expand_as(targets)
    return targets, sample.log_prob


def critic_loss(
    critic: CriticEnsemble, targets: Tensor, batch: Batch, support: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross entropy, mean over the batch, summed over the critics; and Q (num_q, batch)."""
    log_probabilities = critic(batch.critic_obs, batch.action).log_softmax(-1)
    loss = -(targets * log_probabilities).sum() / targets.shape[1]
    return loss, log_probabilities.detach().exp() @ support


def alpha_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """-alpha * mean(log pi + target entropy): raises alpha while the entropy is too low.

    Args:
        log_prob: (batch,), detached.
    """
    return -log_alpha.exp() * (log_prob.mean() + target_entropy)


def actor_loss(
    actor: Actor,
    critic: CriticEnsemble,
    alpha: Tensor,
    batch: Batch,
    noise: Tensor,
    support: Tensor,
) -> tuple[Tensor, ActionSample]:
    """mean(alpha log pi - Q), Q averaged over the critics, whose gradients are the caller's."""
    sample = actor.sample(batch.obs, noise)
    probabilities = F.softmax(critic(batch.critic_obs, sample.action), -1)
    q = (probabilities @ support).mean(0)
    return (alpha * sample.log_prob - q).mean(), sample


def _without_absurd(obs: Tensor, terminated: Tensor) -> Tensor:
    """`obs` with zeros for NaN and for what would overflow the networks, in terminated rows."""
    return torch.where(terminated[:, None] & ~(obs.abs() < LARGEST_OBS), 0, obs)
