"""Every metric of a run, with its unit and how values of several shards or ranks become one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Reduction = Literal["mean", "sum", "min", "max", "same", "driver"]
"""`mean`: pooled, sum of totals over sum of counts; `same`: identical on every rank, which is
asserted; `driver`: there is one value, the driver's own."""

TickReduction = Literal["mean", "sum", "min", "max", "newest"]


class Mean(NamedTuple):
    """A mean that pools: total and count of one shard or rank."""

    total: float
    count: float


MetricValue = float | Mean


@dataclass(frozen=True)
class Metric:
    """Declaration of one metric."""

    reduction: Reduction
    """Over shards and ranks."""
    unit: str
    meaning: str
    over_ticks: TickReduction | None = None
    """Over the ticks of a record; None when it follows from `reduction`: the same one, and the
    newest value for `same` and `driver`."""
    wall: bool = False
    """Measured by the wall clock, so it differs between otherwise identical runs."""


METRICS: dict[str, Metric] = {
    # finished episodes since the last record, over all shards
    "train/return": Metric("mean", "reward", "undiscounted return of finished episodes"),
    "train/episode_length": Metric("mean", "env steps", "length of finished episodes"),
    "train/episodes": Metric("sum", "episodes", "episodes finished since the last record"),
    "train/nonfinite": Metric("sum", "transitions", "dropped: non-finite reward or observation"),
    "train/lost_finals": Metric("sum", "transitions", "never sampled: side ring was full"),
    "eval/return": Metric("mean", "reward", "undiscounted return, deterministic policy"),
    "eval/return_min": Metric("min", "reward", "lowest episode of the evaluation"),
    "eval/episode_length": Metric("mean", "env steps", "length of evaluation episodes"),
    "eval/survival": Metric("mean", "1", "share of evaluation episodes that never terminated"),
    # learner, means over the updates since the last record
    "learner/critic_loss": Metric("mean", "nats", "cross entropy, summed over critics"),
    "learner/actor_loss": Metric("mean", "reward", "alpha log pi - Q"),
    "learner/alpha_loss": Metric("mean", "nats", "temperature loss"),
    "learner/lr_scale": Metric("driver", "1", "learning rates over the configured ones"),
    "learner/alpha": Metric("same", "reward/nat", "temperature"),
    "learner/entropy": Metric("mean", "nats", "-log pi of sampled actions"),
    "learner/action_std": Metric("mean", "1", "standard deviation before tanh"),
    "learner/q_mean": Metric("mean", "reward", "Q of replayed actions, mean over critics"),
    "learner/q_min": Metric("min", "reward", "lowest Q of replayed actions"),
    "learner/q_max": Metric("max", "reward", "highest Q of replayed actions"),
    "learner/critic_grad_norm": Metric("same", "1", "after the all-reduce, before clipping"),
    "learner/actor_grad_norm": Metric("same", "1", "after the all-reduce, before clipping"),
    "learner/alpha_grad_norm": Metric("same", "1", "after the all-reduce"),
    "replay/reward_mean": Metric("mean", "reward", "reward of sampled transitions"),
    "replay/reward_min": Metric("min", "reward", "lowest sampled reward"),
    "replay/reward_max": Metric("max", "reward", "highest sampled reward"),
    "replay/fill": Metric("driver", "1", "share of the replay that holds transitions"),
    # the fleet's counts
    "fleet/env_steps": Metric("driver", "env steps", "transitions collected, fleet-wide"),
    "fleet/updates": Metric("driver", "updates", "updates done"),
    "fleet/ticks": Metric("driver", "ticks", "ticks done"),
    "fleet/utd": Metric("driver", "1", "updates / transitions inserted, since the last record"),
    "fleet/replay_ratio": Metric("driver", "1", "samples drawn / transitions inserted, likewise"),
    "fleet/policy_version": Metric("driver", "updates", "newest published version"),
    "fleet/staleness": Metric("driver", "updates", "newest version - version that acted", "mean"),
    "fleet/collectors": Metric("driver", "collectors", "that finished the newest tick"),
    "fleet/collector_restarts": Metric("driver", "restarts", "of all collectors, in this process"),
    "fleet/lost_env_steps": Metric("driver", "env steps", "not collected, as shards were down"),
    "fleet/normalizer_count": Metric("driver", "observations", "observations in the base"),
    # wall clock
    "time/wall": Metric("driver", "s", "since the start of training", wall=True),
    "time/env_steps_per_s": Metric("driver", "1/s", "env steps, since the last record", wall=True),
    "time/updates_per_s": Metric("driver", "1/s", "updates, since the last record", wall=True),
    "time/collect": Metric("max", "s/tick", "collecting, slowest shard", "mean", wall=True),
    "time/learn": Metric("max", "s/tick", "learning, slowest rank", "mean", wall=True),
    "time/merge": Metric("driver", "s/tick", "merging reports in the driver", "mean", wall=True),
    "time/publish": Metric("driver", "s/tick", "publishing weights", "mean", wall=True),
    "time/tick": Metric("driver", "s/tick", "whole tick", "mean", wall=True),
    "time/wait": Metric("driver", "s/tick", "tick beyond the slower side", "mean", wall=True),
    "time/evaluate": Metric("driver", "s", "the last evaluation", wall=True),
}
"""Names under `env/` and `eval/env/` (an environment's own), `shard_state/` (the fleet's view)
and `curriculum/STATE/` (what the shards sample from) come beside these: the first pool as means
over shards, the others are the driver's value."""

CURRICULUM = {
    "tv_mean": "total variation of a shard's distribution to the fleet's, mean over shards",
    "tv_max": "likewise, the shard that is farthest",
    "js_mean": "Jensen-Shannon distance (root of bits) likewise, mean over shards",
    "js_max": "likewise, the shard that is farthest",
    "entropy": "entropy of the fleet's distribution / ln(bins), 1 if uniform",
    "top_bin": "likeliest bin of the fleet's distribution",
    "top_probability": "its probability",
}
"""Metrics under `curriculum/STATE/`, for every state that is a distribution."""


def metric(name: str) -> Metric:
    """The declaration of `name`.

    Raises:
        KeyError: nobody declared it.
    """
    if name.startswith(("env/", "eval/env/")):
        return Metric("mean", "", "reported by the environment, mean over envs and steps")
    if name.startswith("shard_state/"):
        return Metric("driver", "", "the fleet's view of a shard state, mean over its entries")
    if name.startswith("curriculum/"):
        return Metric("driver", "", CURRICULUM[name.rpartition("/")[2]])
    if name not in METRICS:
        raise KeyError(f"metric {name!r} is not declared: add it to METRICS")
    return METRICS[name]


def reduce_over_fleet(parts: Sequence[Mapping[str, MetricValue]]) -> dict[str, MetricValue]:
    """One value per metric from the values of several shards or ranks, in their order.

    Means stay `Mean`, so that the ticks of a record can still be pooled.
    """
    reduced: dict[str, MetricValue] = {}
    for name, values in _by_name(parts).items():
        reduction = metric(name).reduction
        if reduction in ("same", "driver"):
            distinct = {repr(final_value(value)) for value in values}  # NaN equals NaN as text
            assert len(distinct) == 1, f"{name} differs between ranks: {values}"
            reduced[name] = values[0]
        else:
            reduced[name] = _reduce(reduction, values)
    return reduced


def reduce_over_ticks(ticks: Sequence[Mapping[str, MetricValue]]) -> dict[str, MetricValue]:
    """One value per metric from the fleet's values of several ticks, in their order.

    The result can take the place of its ticks in a later call.
    """
    reduced: dict[str, MetricValue] = {}
    for name, values in _by_name(ticks).items():
        declared = metric(name)
        reduction = declared.over_ticks or declared.reduction
        if reduction in ("same", "driver", "newest"):
            reduced[name] = values[-1]
        else:
            reduced[name] = _reduce(reduction, values)
    return reduced


def final_value(value: MetricValue) -> float:
    """The number to show; NaN for a mean over nothing."""
    if isinstance(value, Mean):
        return value.total / value.count if value.count else math.nan
    return float(value)


def _by_name(parts: Sequence[Mapping[str, MetricValue]]) -> dict[str, list[MetricValue]]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: [part[name] for part in parts if name in part] for name in names}


def _reduce(reduction: str, values: Sequence[MetricValue]) -> MetricValue:
    if reduction == "mean":
        means = [value if isinstance(value, Mean) else Mean(value, 1.0) for value in values]
        return Mean(sum(m.total for m in means), sum(m.count for m in means))
    numbers = [final_value(value) for value in values]
    if reduction == "sum":
        return sum(numbers)
    return min(numbers) if reduction == "min" else max(numbers)
