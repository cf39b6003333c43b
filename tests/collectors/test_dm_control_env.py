"""The DeepMind Control adapter against suite environments stepped by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from dm_control import suite
from dm_control.suite import hopper
from torch import Tensor

from collectors.adapters._vector import child_seeds
from collectors.adapters.dm_control_env import DmControlShard
from collectors.env import resolve_task
from collectors.testing import check_env_shard

CPU = torch.device("cpu")
NUM_ENVS = 2
SEED = 11


def make(task_id: str, **args: Any) -> DmControlShard:
    return DmControlShard(task_id, num_envs=NUM_ENVS, device=CPU, evaluation=False, **args)


def random_actions(shard: DmControlShard, num_steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    low, high = shard.spec.action_low, shard.spec.action_high
    unit = torch.rand((num_steps, NUM_ENVS, low.numel()), generator=generator)
    return list(low + unit * (high - low))


def flat(observation: dict[str, Any]) -> Tensor:
    return torch.tensor([x for part in observation.values() for x in np.ravel(part)]).float()


def fall_early(self: hopper.Hopper, physics: Any) -> float | None:
    """Terminates an episode once the torso is low; the suite's hopper never terminates."""
    return 0.0 if physics.named.data.xpos["torso", "z"] < 0.9 else None


@pytest.mark.parametrize("task_id", ["pendulum-swingup", "hopper-hop"])
def test_contract_is_kept(task_id: str) -> None:
    notes = check_env_shard(
        resolve_task(f"dm_control:{task_id}"), num_envs=2, time_limit_s=1.0, num_steps=60
    )
    assert notes == ["state_dict is not implemented: a resumed run starts fresh episodes"]


@pytest.mark.parametrize("task_id", ["pendulum-swingup", "hopper-hop"])
def test_stream_equals_that_of_suite_envs_stepped_by_hand(
    task_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper.Hopper, "get_termination", fall_early)
    shard = make(task_id, time_limit_s=0.6)
    singles = [
        suite.load(*task_id.split("-"), task_kwargs={"random": seed, "time_limit": 0.6})
        for seed in child_seeds(SEED, NUM_ENVS)
    ]
    start = shard.reset(SEED).actor_obs
    for row, env in zip(start, singles, strict=True):
        assert torch.equal(row, flat(env.reset().observation))
    kinds = set()
    for action in random_actions(shard, 100):
        step = shard.step(action)
        for row, env in enumerate(singles):
            truth = env.step(action[row].numpy())
            assert step.reward[row] == np.float32(truth.reward)
            assert bool(step.terminated[row]) == (truth.last() and truth.discount == 0)
            assert bool(step.truncated[row]) == (truth.last() and truth.discount == 1)
            if truth.last():
                kinds.add("terminated" if truth.discount == 0 else "truncated")
                assert torch.equal(step.final_actor_obs[row], flat(truth.observation))
                truth = env.reset()
            assert torch.equal(step.actor_obs[row], flat(truth.observation))
    assert ("terminated" if task_id == "hopper-hop" else "truncated") in kinds
    shard.close()


def test_reset_envs_starts_the_next_episode_of_exactly_those_envs() -> None:
    shard = make("pendulum-swingup")
    shard.reset(SEED)
    shown = shard.step(torch.ones(NUM_ENVS, 1)).actor_obs.clone()
    obs = shard.reset_envs(torch.tensor([False, True])).actor_obs
    seed = child_seeds(SEED, NUM_ENVS)[1]
    env = suite.load("pendulum", "swingup", task_kwargs={"random": seed})
    env.reset()
    assert torch.equal(obs[1], flat(env.reset().observation))
    assert torch.equal(obs[0], shown[0])


def test_spec_tells_sizes_time_limit_and_control_period() -> None:
    spec = make("cartpole-swingup").spec
    assert (spec.actor_obs_dim, spec.action_dim, spec.episode_length) == (5, 1, 1000)
    assert (spec.action_low.item(), spec.action_high.item()) == (-1, 1)
    assert spec.control_period_s == pytest.approx(0.01)
    assert make("cartpole-swingup", time_limit_s=0.055).spec.episode_length == 6


def test_domains_with_underscores_are_split_at_the_hyphen() -> None:
    assert make("ball_in_cup-catch").spec.actor_obs_dim == 8


@pytest.mark.parametrize(
    ("task_id", "args", "parts"),
    [
        ("cartpole-swing", {}, ["'dm_control:cartpole-swing'", "cartpole-swingup"]),
        ("cartpol-balance", {}, ["'dm_control:cartpol-balance'", "cartpole-balance"]),
        ("cartpole", {}, ["'dm_control:cartpole'", "nearest are cartpole-"]),
        ("lqr-lqr_2_1", {}, ["[-inf] to [inf]", "only finite ones"]),
        ("pendulum-swingup", {"time_limit_s": float("inf")}, ["env.args.time_limit_s"]),
    ],
)
def test_bad_input_is_refused_in_one_line(task_id: str, args: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the parts are looked for below)
        make(task_id, **args)
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


def test_physics_that_diverges_is_not_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(self: Any, physics: Any) -> float:
        raise RuntimeError("mjWARN_BADQACC")

    shard = make("hopper-hop")
    shard.reset(SEED)
    monkeypatch.setattr(hopper.Hopper, "get_reward", diverge)
    with pytest.raises(RuntimeError, match="mjWARN_BADQACC"):
        shard.step(torch.zeros(NUM_ENVS, 4))
