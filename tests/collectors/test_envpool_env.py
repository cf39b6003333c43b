"""The EnvPool adapter against pools of one env stepped by hand."""

from __future__ import annotations

from typing import Any

import envpool
import numpy as np
import pytest
import torch
from torch import Tensor

from collectors.adapters._vector import child_seeds
from collectors.adapters.envpool_env import EnvpoolShard
from collectors.env import resolve_task
from collectors.testing import check_env_shard

CPU = torch.device("cpu")
NUM_ENVS = 3
SEED = 11


def make(task_id: str, **args: Any) -> EnvpoolShard:
    return EnvpoolShard(task_id, num_envs=NUM_ENVS, device=CPU, evaluation=False, **args)


def single(task_id: str, seed: int, limit: int) -> Any:
    return envpool.make(
        task_id, env_type="gymnasium", num_envs=1, env_seed=[seed], max_episode_steps=limit
    )


def random_actions(shard: EnvpoolShard, num_steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    low, high = shard.spec.action_low, shard.spec.action_high
    unit = torch.rand((num_steps, NUM_ENVS, low.numel()), generator=generator)
    return list(low + unit * (high - low))


@pytest.mark.parametrize(("task_id", "limit"), [("Pendulum-v1", 200), ("Hopper-v5", 60)])
def test_contract_is_kept(task_id: str, limit: int) -> None:
    notes = check_env_shard(resolve_task(f"envpool:{task_id}"), episode_length=limit)
    assert notes == ["state_dict is not implemented: a resumed run starts fresh episodes"]


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("task_id", "limit"), [("Pendulum-v1", 7), ("Hopper-v5", 25)])
def test_stream_equals_that_of_single_pools_stepped_by_hand(
    task_id: str, limit: int, num_threads: int
) -> None:
    shard = make(task_id, episode_length=limit, num_threads=num_threads)
    singles = [single(task_id, seed, limit) for seed in child_seeds(SEED, NUM_ENVS)]
    start = shard.reset(SEED).actor_obs
    for row, pool in zip(start, singles, strict=True):
        assert torch.equal(row, torch.as_tensor(pool.reset()[0][0]).float())
    kinds = set()
    for action in random_actions(shard, 80):
        step = shard.step(action)
        for row, pool in enumerate(singles):
            wide = action[[row]].numpy().astype(pool.single_action_space.dtype)
            obs, reward, terminated, truncated, _ = pool.step(wide)
            assert step.reward[row] == np.float32(reward[0])
            assert bool(step.terminated[row]) == terminated[0]
            assert bool(step.truncated[row]) == (truncated[0] and not terminated[0])
            if terminated[0] or truncated[0]:
                kinds.add("terminated" if terminated[0] else "truncated")
                assert torch.equal(step.final_actor_obs[row], torch.as_tensor(obs[0]).float())
                # EnvPool's own autoreset: this step begins the next episode, its action is ignored.
                obs, *_ = pool.step(wide)
            assert torch.equal(step.actor_obs[row], torch.as_tensor(obs[0]).float())
    assert kinds == ({"truncated"} if task_id == "Pendulum-v1" else {"terminated", "truncated"})
    shard.close()


def test_reset_envs_starts_the_next_episode_of_exactly_those_envs() -> None:
    shard = make("Pendulum-v1")
    shard.reset(SEED)
    shown = shard.step(torch.zeros(NUM_ENVS, 1)).actor_obs.clone()
    obs = shard.reset_envs(torch.tensor([True, False, True])).actor_obs
    for row in (0, 2):
        pool = single("Pendulum-v1", child_seeds(SEED, NUM_ENVS)[row], 200)
        pool.reset()
        assert torch.equal(obs[row], torch.as_tensor(pool.reset()[0][0]))
    assert torch.equal(obs[1], shown[1])


def test_spec_tells_sizes_and_time_limit() -> None:
    spec = make("Hopper-v5", control_period_s=0.008).spec
    assert (spec.actor_obs_dim, spec.action_dim, spec.episode_length) == (11, 3, 1000)
    assert spec.control_period_s == 0.008
    assert make("Pendulum-v1").spec.action_high.item() == 2
    assert make("Pendulum-v1", episode_length=9).spec.episode_length == 9


@pytest.mark.parametrize(
    ("task_id", "args", "parts"),
    [
        ("HalfChetah-v5", {}, ["'envpool:HalfChetah-v5'", "HalfCheetah-v5"]),
        ("CartPole-v1", {}, ["Discrete(2)", "only continuous ones (Box)"]),
        ("HopperHop-v1", {}, ["Dict(", "only a Box"]),
        ("Pendulum-v1", {"episode_length": 0}, ["time limit of 0", "at least 1"]),
        ("Pendulum-v1", {"num_threads": 0}, ["num_threads is 0", "env.args.num_threads"]),
    ],
)
def test_bad_input_is_refused_in_one_line(task_id: str, args: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the parts are looked for below)
        make(task_id, **args)
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == []


def test_close_before_reset_is_fine() -> None:
    make("Pendulum-v1").close()
