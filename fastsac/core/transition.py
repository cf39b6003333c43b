"""What the learner trains on."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Transitions, possibly n-step, as the losses read them. All share one device.

    `critic_obs` and `next_critic_obs` are the same tensors as `obs` and `next_obs` when the
    critic sees what the actor sees.
    """

    obs: Tensor
    """(batch, actor_obs_dim)"""
    critic_obs: Tensor
    """(batch, critic_obs_dim)"""
    action: Tensor
    """(batch, action_dim), as the environment received it."""
    reward: Tensor
    """(batch,), discounted sum of the window's rewards."""
    next_obs: Tensor
    """(batch, actor_obs_dim), the true observation after the window's last env step."""
    next_critic_obs: Tensor
    """(batch, critic_obs_dim)"""
    terminated: Tensor
    """(batch,) bool: the MDP ended at the window's last env step, so there is no bootstrap."""
    discount: Tensor
    """(batch,), gamma ** (number of rewards summed)."""


def concatenate(batches: list[Batch]) -> Batch:
    """Stack batches along their first axis, keeping `critic_obs` shared where it was."""
    columns = {
        field.name: torch.cat([getattr(batch, field.name) for batch in batches])
        for field in fields(Batch)
    }
    if batches[0].critic_obs is batches[0].obs:
        columns["critic_obs"], columns["next_critic_obs"] = columns["obs"], columns["next_obs"]
    return Batch(**columns)
