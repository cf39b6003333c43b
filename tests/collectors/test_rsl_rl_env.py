from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from collectors.adapters.rsl_rl_env import VecEnvShard, from_factory
from collectors.env import resolve_task
from collectors.testing import check_env_shard

CPU = torch.device("cpu")


class CountingVecEnv:
    """Observation: the env steps of the episode, and twice that for the critic. Written in place,
    as simulators do. Env 0 terminates in its second step, the others time out in their third."""

    def __init__(self, num_envs: int = 2, final_key: str | None = None) -> None:
        self.num_envs, self.num_actions, self.max_episode_length = num_envs, 1, 3
        self.device, self.step_dt = "cpu", 0.02
        self.final_key = final_key
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.int64)
        self.buffer = torch.zeros(num_envs, 1)

    def get_observations(self) -> dict[str, Tensor]:
        self.buffer.copy_(self.episode_length_buf[:, None])
        return {"policy": self.buffer, "critic": 2 * self.buffer}

    def reset(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self.episode_length_buf.zero_()
        return self.get_observations(), {}

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Any]]:
        actions.zero_()
        self.episode_length_buf += 1
        time_outs = self.episode_length_buf >= 3
        dones = time_outs.clone()
        dones[0] |= self.episode_length_buf[0] >= 2
        extras: dict[str, Any] = {"time_outs": time_outs}
        if self.final_key is not None:
            extras[self.final_key] = {k: v.clone() for k, v in self.get_observations().items()}
        self.episode_length_buf[dones] = 0
        return self.get_observations(), torch.ones(self.num_envs), dones.long(), extras


class NoTimeOuts(CountingVecEnv):
    """Says nothing about time limits."""

    def step(self, actions: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Any]]:
        return *super().step(actions)[:3], {}


def run(env: VecEnvShard, num_steps: int) -> list[Any]:
    env.reset(0)
    return [env.step(torch.ones(2, 1)) for _ in range(num_steps)]


@pytest.mark.parametrize("key", ["final_obs", "final_observation", "terminal_observation"])
def test_final_observations_come_from_extras(key):
    steps = run(VecEnvShard(CountingVecEnv(final_key=key), action_limit=1.0), 3)
    assert [s.terminated.tolist() for s in steps] == [[False] * 2, [True, False], [False] * 2]
    assert [s.truncated.tolist() for s in steps] == [[False] * 2, [False] * 2, [False, True]]
    assert [s.actor_obs[:, 0].tolist() for s in steps] == [[1, 1], [0, 2], [1, 0]]
    assert steps[1].final_actor_obs[0].item() == 2
    assert steps[2].final_actor_obs[1].item() == 3
    assert steps[2].final_critic_obs[1].item() == 6


def test_the_approximation_shows_the_observation_acted_on():
    env = VecEnvShard(CountingVecEnv(), action_limit=1.0, final_obs="last_acted_on")
    steps = run(env, 3)
    assert steps[2].truncated.tolist() == [False, True]
    assert steps[2].final_actor_obs[1].item() == 2
    assert steps[2].final_critic_obs[1].item() == 4


def test_a_truncation_without_its_final_observation_is_refused():
    env = VecEnvShard(CountingVecEnv(), action_limit=1.0)
    env.reset(0)
    env.step(torch.ones(2, 1))
    env.step(torch.ones(2, 1))  # a termination needs none
    with pytest.raises(ValueError, match=r"set env\.args\.final_obs to 'last_acted_on'"):
        env.step(torch.ones(2, 1))


def test_without_time_outs_every_done_is_a_termination():
    steps = run(VecEnvShard(NoTimeOuts(), action_limit=1.0), 3)
    assert [s.terminated.tolist() for s in steps] == [[False] * 2, [True, False], [False, True]]
    assert not any(s.truncated.any() for s in steps)


def test_the_action_is_not_written_into():
    env = VecEnvShard(CountingVecEnv(), action_limit=1.0)
    env.reset(0)
    action = torch.ones(2, 1)
    env.step(action)
    assert (action == 1).all()


def test_single_envs_cannot_be_reset_without_env_ids():
    env = VecEnvShard(CountingVecEnv(), action_limit=1.0)
    shown = env.reset(0)
    nobody = torch.zeros(2, dtype=torch.bool)
    assert torch.equal(env.reset_envs(nobody).actor_obs, shown.actor_obs)
    with pytest.raises(ValueError, match=r"CountingVecEnv.reset takes no env_ids"):
        env.reset_envs(~nobody)


class ImagesOnly(CountingVecEnv):
    def get_observations(self) -> dict[str, Tensor]:
        return {"policy": torch.zeros(2, 3, 8, 8)}


class OtherGroups(CountingVecEnv):
    def get_observations(self) -> dict[str, Tensor]:
        return {"student": torch.zeros(2, 3)}


@pytest.mark.parametrize(
    ("vec_env", "args", "message"),
    [
        (CountingVecEnv, {"action_limit": None}, "action_limit is None: give a positive number"),
        (CountingVecEnv, {"action_limit": 0.0}, "action_limit is 0.0"),
        (CountingVecEnv, {"final_obs": "guess"}, "final_obs is 'guess'"),
        (ImagesOnly, {}, "'policy' is not"),
        (OtherGroups, {}, r"groups are \['student'\]: one must be called 'actor' or 'policy'"),
    ],
)
def test_what_cannot_work_is_refused(vec_env, args, message):
    with pytest.raises(ValueError, match=message):
        VecEnvShard(vec_env(), **{"action_limit": 1.0, **args})


def test_an_environment_without_a_period_or_a_reset_is_refused():
    env = CountingVecEnv()
    del env.step_dt
    with pytest.raises(ValueError, match="has no step_dt: give control_period_s"):
        VecEnvShard(env, action_limit=1.0)
    assert VecEnvShard(env, action_limit=1.0, control_period_s=0.1).spec.control_period_s == 0.1
    with pytest.raises(ValueError, match=r"object has no reset\(\)"):
        VecEnvShard(object(), action_limit=1.0)  # pyright: ignore[reportArgumentType] (refused)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "write rsl_rl:module:function"),
        ("nowhere.at.all:make", "cannot be imported"),
        ("math:make", "cannot be imported"),
    ],
)
def test_a_factory_that_does_not_import_is_refused(path, message):
    with pytest.raises(ValueError, match=message):
        from_factory(path, num_envs=2, device=CPU, evaluation=False)


def make_mjlab_cartpole(
    *, num_envs: int, device: torch.device, evaluation: bool, episode_length_s: float
) -> Any:
    """What a user writes: mjlab's cartpole in its RSL-RL wrapper."""
    import mjlab.tasks  # noqa: F401 (registers the tasks)
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.rl import RslRlVecEnvWrapper
    from mjlab.tasks.registry import load_env_cfg

    cfg = load_env_cfg("Mjlab-Cartpole-Swingup")
    cfg.scene.num_envs = num_envs
    cfg.episode_length_s = episode_length_s
    cfg.observations["actor"].enable_corruption = not evaluation
    return RslRlVecEnvWrapper(ManagerBasedRlEnv(cfg, device=str(device)))


def test_mjlabs_wrapper_keeps_the_contract():
    pytest.importorskip("mjlab")
    pytest.importorskip("rsl_rl")
    check_env_shard(
        resolve_task(f"rsl_rl:{__name__}:make_mjlab_cartpole"),
        num_envs=3,
        num_steps=10,
        action_limit=1.0,
        final_obs="last_acted_on",
        episode_length_s=0.24,  # 5 env steps of 0.05 s, rounded up
    )


def test_mjlabs_wrapper_hands_out_no_final_observation():
    pytest.importorskip("mjlab")
    pytest.importorskip("rsl_rl")
    vec_env = make_mjlab_cartpole(num_envs=2, device=CPU, evaluation=False, episode_length_s=0.1)
    env = VecEnvShard(vec_env, action_limit=1.0)
    assert (env.spec.episode_length, env.spec.control_period_s) == (2, 0.05)
    env.reset(0)
    env.step(torch.zeros(2, 1))
    with pytest.raises(ValueError, match="truncates episodes without their final observation"):
        env.step(torch.zeros(2, 1))
