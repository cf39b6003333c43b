"""How far the shards' curricula drift apart, and what the fleet samples: pure functions of the
probabilities that every shard samples its bins from."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def sampling_metrics(shards: Tensor) -> dict[str, float]:
    """Drift between shards, and entropy and top of the fleet's mean distribution.

    Args:
        shards: (num_shards, num_bins) float64 probabilities.
    Returns:
        `tv_mean`, `tv_max`: mean and maximum over shards of the total variation to the fleet's
        mean, 0 to 1. `js_mean`, `js_max`: likewise of the Jensen-Shannon distance (Endres and
        Schindelin 2003: the root of the divergence, in bits), 0 to 1. `entropy`: of the fleet's
        mean over ln num_bins, 1 if uniform. `top_bin` and its `top_probability`.
    """
    fleet = shards.mean(0)
    variation = (shards - fleet).abs().sum(1) / 2
    middle = (shards + fleet) / 2
    divergence = (_relative_entropy(shards, middle) + _relative_entropy(fleet, middle)) / 2
    distance = (divergence.clamp(min=0) / math.log(2)).sqrt()
    bins = fleet.numel()
    nats = max(0.0, -float(torch.xlogy(fleet, fleet).sum()))  # or a certain one would give -0
    entropy = nats / math.log(bins) if bins > 1 else 1.0
    top = int(fleet.argmax())
    return {
        "tv_mean": float(variation.mean()),
        "tv_max": float(variation.max()),
        "js_mean": float(distance.mean()),
        "js_max": float(distance.max()),
        "entropy": entropy,
        "top_bin": float(top),
        "top_probability": float(fleet[top]),
    }


def curriculum_metrics(distributions: Mapping[str, Tensor]) -> dict[str, float]:
    """`sampling_metrics` of every distribution, named `curriculum/STATE/METRIC`."""
    return {
        f"curriculum/{state}/{name}": value
        for state, shards in distributions.items()
        for name, value in sampling_metrics(shards).items()
    }


def _relative_entropy(p: Tensor, q: Tensor) -> Tensor:
    """(num_shards,) sum of p ln(p / q), nats; an entry of p that is 0 adds nothing."""
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)
