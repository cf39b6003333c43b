"""Evaluating a finished or running run from its checkpoint, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collectors.collector import run_episodes
from collectors.env import EnvSpec
from collectors.guard import make_env
from fastsac.core.config import AlgorithmConfig
from fastsac.core.normalizer import FleetNormalizer
from fastsac.core.policy import Policy, PolicySpec, PublishedPolicy
from fastsac.run import open_run


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Episodes of the deterministic policy of one checkpoint."""

    returns: Tensor
    """(num_episodes,) float64, undiscounted"""
    lengths: Tensor
    """(num_episodes,) int64, env steps"""
    terminated: Tensor
    """(num_episodes,) bool: ended before the time limit"""
    info: Mapping[str, Tensor]
    """(num_episodes,) float64 means over the episode's env steps of what the env reports"""
    policy_version: int
    """Updates done."""
    env_steps: int
    """Fleet-wide env steps of training."""


def policy_spec(spec: EnvSpec, algorithm: AlgorithmConfig) -> PolicySpec:
    """The actor that an environment and a configuration ask for."""
    return PolicySpec(
        obs_dim=spec.actor_obs_dim,
        action_low=spec.action_low,
        action_high=spec.action_high,
        hidden=algorithm.actor_hidden,
        log_std_min=algorithm.log_std_min,
        log_std_max=algorithm.log_std_max,
    )


def saved_policy(state: Mapping[str, Any], spec: EnvSpec, algorithm: AlgorithmConfig) -> Policy:
    """The policy of a checkpoint's state, with the normaliser that belongs to it, on the CPU."""
    normalizer = FleetNormalizer(
        spec.actor_obs_dim, spec.critic_obs_dim, enabled=algorithm.normalize_observations
    )
    normalizer.load_state_dict(state["normalizer"])
    policy = Policy(policy_spec(spec, algorithm), torch.device("cpu"))
    policy.load(
        PublishedPolicy(
            version=state["progress"]["updates"],
            parameters=state["learners"]["learner"]["actor"],
            normalizers=normalizer.published(),
        )
    )
    return policy


def evaluate_run(run_dir: Path, *, num_episodes: int, seed: int) -> EvaluationResult:
    """One deterministic episode in each of `num_episodes` environments.

    Raises:
        ValueError: the folder holds no run, or no whole checkpoint.
    """
    config, state = open_run(run_dir)
    env = make_env(
        config.env.task,
        num_envs=num_episodes,
        device=torch.device("cpu"),
        evaluation=True,
        args=config.env.args,
    )
    policy = saved_policy(state, env.spec, config.algorithm)
    report = run_episodes(env, policy, seed)
    env.close()
    return EvaluationResult(
        returns=report.returns,
        lengths=report.lengths,
        terminated=report.terminated,
        info=report.info,
        policy_version=state["progress"]["updates"],
        env_steps=state["progress"]["env_steps"],
    )
