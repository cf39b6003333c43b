"""Small configurations and runs that several tests share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fastsac.checkpoint import load_checkpoint, newest_checkpoint
from fastsac.core.config import Config, parse_config
from fastsac.core.metrics import METRICS
from fastsac.metrics import read_metrics


def small_config(run_root: Path, **sections: Any) -> Config:
    """A run of seconds; `algorithm={"tau": 0.1}` and the like override single fields."""
    fields: dict[str, Any] = {
        "name": "small",
        "total_env_steps": 640,
        "env": {"task": "probes:ConstantReward", "num_envs": 16},
        "fleet": {"collectors_per_rank": 2, "device": "cpu"},
        "replay": {"steps_per_env": 30},
        "algorithm": {
            "batch_size": 32,
            "updates_per_vector_step": 2,
            "weight_publish_interval": 4,
            "learning_starts": 4,
            "actor_hidden": 16,
            "critic_hidden": 16,
            "num_atoms": 21,
        },
        "evaluation": {"num_episodes": 4},
        "log": {"dir": str(run_root), "tensorboard": False},
    }
    for name, values in sections.items():
        fields[name] = fields.get(name, {}) | values if isinstance(values, dict) else values
    return parse_config(fields)


def counted_metrics(run_dir: Path) -> list[dict[str, float]]:
    """The records of a run without what the wall clock decides."""
    return [
        {k: v for k, v in record.items() if k not in METRICS or not METRICS[k].wall}
        for record in read_metrics(run_dir)
    ]


def saved_state(run_dir: Path) -> dict[str, Any]:
    """The newest checkpoint of a run."""
    checkpoint = newest_checkpoint(run_dir)
    assert checkpoint is not None
    return load_checkpoint(checkpoint)


def assert_same_tree(one: Any, other: Any) -> None:
    """Equal bit for bit, tensors included; wall time aside."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one.keys() - {"wall_s"}:
            assert_same_tree(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other
