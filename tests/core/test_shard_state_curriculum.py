"""Drift and sampling metrics against SciPy and against values known by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy

from fastsac.core.curriculum import curriculum_metrics, sampling_metrics
from fastsac.core.metrics import CURRICULUM, metric


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1000), shards=st.integers(1, 6), bins=st.integers(2, 9))
def test_drift_and_entropy_are_those_of_scipy(seed: int, shards: int, bins: int) -> None:
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, 4, size=(shards, bins)) + np.eye(shards, bins)
    p = (counts + (counts.sum(1, keepdims=True) == 0)) / counts.sum(1, keepdims=True).clip(min=1)
    p /= p.sum(1, keepdims=True)
    fleet = np.sum(p, axis=0) / shards
    variation = [
        max(abs(sum((row - fleet)[i] for i in set_)) for set_ in _subsets(bins)) for row in p
    ]
    # scipy's jensenshannon takes the root of a rounded divergence, which can be below 0
    middles = [(row + fleet) / 2 for row in p]
    divergence = [
        (entropy(row, middle, base=2) + entropy(fleet, middle, base=2)) / 2
        for row, middle in zip(p, middles, strict=True)
    ]
    distance = np.sqrt(np.maximum(divergence, 0))
    metrics = sampling_metrics(torch.from_numpy(p))
    assert fleet[int(metrics.pop("top_bin"))] == pytest.approx(fleet.max())  # one of equals
    assert metrics == {
        "tv_mean": pytest.approx(np.mean(variation), abs=1e-12),
        "tv_max": pytest.approx(max(variation), abs=1e-12),
        "js_mean": pytest.approx(np.mean(distance), abs=1e-7),
        "js_max": pytest.approx(max(distance), abs=1e-7),
        "entropy": pytest.approx(entropy(fleet) / math.log(bins)),
        "top_probability": pytest.approx(fleet.max()),
    }


def _subsets(bins: int) -> list[list[int]]:
    """All events: the total variation is the largest difference of their probabilities."""
    return [[i for i in range(bins) if chosen >> i & 1] for chosen in range(2**bins)]


def test_two_shards_that_share_nothing() -> None:
    metrics = sampling_metrics(torch.eye(2, dtype=torch.float64))
    # to the mean (1/2, 1/2): TV 1/2, and JS^2 = (log2(4/3) + (log2(2/3) + log2(2)) / 2) / 2 bits
    distance = math.sqrt((math.log2(4 / 3) + (math.log2(2 / 3) + math.log2(2)) / 2) / 2)
    assert metrics["tv_mean"] == metrics["tv_max"] == 0.5
    assert metrics["js_mean"] == pytest.approx(distance)
    assert metrics["entropy"] == pytest.approx(1.0)


def test_uniform_shards_before_any_failure_give_numbers() -> None:
    uniform = torch.full((3, 4), 0.25, dtype=torch.float64)
    assert sampling_metrics(uniform) == {
        "tv_mean": 0.0,
        "tv_max": 0.0,
        "js_mean": 0.0,
        "js_max": 0.0,
        "entropy": 1.0,
        "top_bin": 0.0,
        "top_probability": 0.25,
    }
    assert sampling_metrics(torch.ones(2, 1, dtype=torch.float64))["entropy"] == 1.0
    certain = sampling_metrics(torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64))
    assert (certain["entropy"], certain["top_bin"], certain["js_max"]) == (0.0, 1.0, 0.0)


def test_every_metric_is_named_after_its_state_and_declared() -> None:
    metrics = curriculum_metrics({"sampling": torch.eye(3, dtype=torch.float64)})
    assert sorted(metrics) == sorted(f"curriculum/sampling/{name}" for name in CURRICULUM)
    for name in metrics:
        assert metric(name).reduction == "driver"
        assert metric(name).meaning
    assert curriculum_metrics({}) == {}
