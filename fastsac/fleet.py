"""All the parts of a run as one object: its collectors, its learners, and what they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from collectors.env import EnvFactory, EnvSpec
from collectors.group import CollectorGroup
from collectors.guard import make_env, task_name
from fastsac.core.config import Config, ConfigError
from fastsac.core.executor import Executor
from fastsac.core.merge_rules import rules_in_force
from fastsac.core.normalizer import FleetNormalizer
from fastsac.core.progress import Progress
from fastsac.core.shard_state import ShardStateBus
from fastsac.evaluation import policy_spec
from learner.group import LearnerGroup


@dataclass
class Fleet:
    """All that a run's future depends on."""

    collectors: CollectorGroup
    learners: LearnerGroup
    bus: ShardStateBus
    normalizer: FleetNormalizer
    progress: Progress

    def start(self, state: dict[str, Any] | None) -> None:
        """Take a saved state, make the replay shards, reset the environments, let the ranks meet
        and map.

        Raises:
            EnvError: an environment fails in its first reset.
            WorkerDied: a process ended.
        """
        if state is not None:
            self.load_state_dict(state)
        storages = self.collectors.start(self.progress.vector_steps, self.bus.values())
        self.learners.start(storages)

    def state_dict(self) -> dict[str, Any]:
        return self._state_dict(self.learners.state_dict(), self.collectors.state_dict())

    def salvage(self) -> dict[str, Any]:
        """State after a tick that failed: the counts of the last whole one, but its updates."""
        collectors, learners = self.collectors.salvage(), self.learners.state_dict()
        self.progress.updates = learners["updates"]
        return self._state_dict(learners, collectors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.progress = Progress.from_state_dict(state["progress"])
        self.learners.load_state_dict(state["learners"])
        self.collectors.load_state_dict(state["collectors"])
        self.bus.load_state_dict(state["bus"])
        self.normalizer.load_state_dict(state["normalizer"])

    def _state_dict(self, learners: dict[str, Any], collectors: dict[str, Any]) -> dict[str, Any]:
        return {
            "progress": self.progress.state_dict(),
            "learners": learners,
            "collectors": collectors,
            "bus": self.bus.state_dict(),
            "normalizer": self.normalizer.state_dict(),
        }


@dataclass(frozen=True)
class Seeds:
    """Children of one seed sequence: no two ranks or shards share a stream."""

    init: np.random.SeedSequence
    evaluation: np.random.SeedSequence
    ranks: list[np.random.SeedSequence]
    shards: list[np.random.SeedSequence]


def fleet_seeds(config: Config) -> Seeds:
    init, evaluation, ranks, shards = np.random.SeedSequence(config.seed).spawn(4)
    fleet = config.fleet
    return Seeds(init, evaluation, ranks.spawn(fleet.num_ranks), shards.spawn(fleet.num_shards))


def make_fleet(
    executor: Executor,
    config: Config,
    env: EnvFactory | str,
    spec: EnvSpec,
    device: str,
    run_id: str,
) -> Fleet:
    seeds = fleet_seeds(config)
    policy = policy_spec(spec, config.algorithm)
    learners = LearnerGroup(
        executor,
        config,
        policy,
        critic_obs_dim=spec.critic_obs_dim,
        mirror=spec.mirror if config.algorithm.symmetry else None,
        seeds=seeds.ranks,
        init_seed=seeds.init,
        device=device,
    )
    collectors = CollectorGroup(
        executor,
        config,
        env,
        policy,
        seeds=seeds.shards,
        device=device,
        run_id=run_id,
        keeper=learners,
    )
    normalizer = FleetNormalizer(
        spec.actor_obs_dim,
        spec.critic_obs_dim,
        enabled=config.algorithm.normalize_observations,
    )
    bus = ShardStateBus(rules_in_force(spec.shard_states, config.shard_state))
    return Fleet(collectors, learners, bus, normalizer, Progress())


def env_spec(config: Config, env: EnvFactory | str | None) -> EnvSpec:
    """Build one shard's environments here, only to know their spec before anything starts.

    The one for evaluations is built too: that it cannot be must not come out after training.
    """
    task, shards = env or config.env.task, config.fleet.num_shards
    probes = {False: config.num_envs_per_shard, True: config.evaluation.num_episodes // shards}
    specs: list[EnvSpec] = []
    for evaluation, num_envs in probes.items():
        probe = make_env(
            task,
            num_envs=num_envs,
            device=torch.device("cpu"),
            evaluation=evaluation,
            args=config.env.args,
        )
        specs.append(probe.spec)
        probe.close()
    rules_in_force(specs[0].shard_states, config.shard_state)  # or it is refused here
    if config.algorithm.symmetry and specs[0].mirror is None:
        raise ConfigError(
            f"algorithm.symmetry is true, but {task_name(task)} has no left-right symmetry: "
            "set it to false, or give the environment a spec.mirror"
        )
    return specs[0]
