"""The Gymnasium adapter against single environments stepped by hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from torch import Tensor

from collectors.adapters._vector import child_seeds
from collectors.adapters.gymnasium_env import GymnasiumShard
from collectors.env import resolve_task
from collectors.testing import check_env_shard

CPU = torch.device("cpu")
NUM_ENVS = 3
SEED = 11
MODES = ["next_step", "same_step"]
ID = "FastsacTest-v0"


class Counting(gymnasium.Env):
    """Shows its age in a (2, 3) observation, drives at 50 Hz, ends at `end`."""

    def __init__(self, end: int = 4, **replaced: Any) -> None:
        self.metadata = {"render_fps": 50}
        self.observation_space = spaces.Box(-np.inf, np.inf, (2, 3), np.float64)
        self.action_space = spaces.Box(-1, 1, (2, 2), np.float32)
        self.end = end
        self.fault = replaced.pop("fault", None)
        for name, value in replaced.items():
            setattr(self, name, value)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if self.fault == "reset":
            raise RuntimeError("cable unplugged")
        self.age = 0
        self.start = self.np_random.random()
        return self.show(), {}

    def step(self, action: np.ndarray) -> Any:
        if self.fault == "step":
            raise RuntimeError("cable unplugged")
        assert action.shape == (2, 2)
        self.age += 1
        return self.show(), float(action.sum()), self.age >= self.end, False, {}

    def show(self) -> np.ndarray:
        return self.start + self.age + np.arange(6.0).reshape(2, 3)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gymnasium.register(ID, Counting, disable_env_checker=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    del gymnasium.registry[ID]


def make(task: Any, num_envs: int = NUM_ENVS, **args: Any) -> GymnasiumShard:
    return GymnasiumShard(task, num_envs=num_envs, device=CPU, evaluation=False, **args)


def random_actions(shard: GymnasiumShard, num_steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    low, high = shard.spec.action_low, shard.spec.action_high
    unit = torch.rand((num_steps, shard.spec.num_envs, low.numel()), generator=generator)
    return list(low + unit * (high - low))


def record(shard: GymnasiumShard, num_steps: int) -> list[Tensor]:
    """Everything the steps show; final observations of done envs only."""
    shown = [shard.reset(SEED).actor_obs]
    for action in random_actions(shard, num_steps):
        step = shard.step(action)
        done = step.terminated | step.truncated
        shown += [step.actor_obs, step.reward, step.terminated, step.truncated]
        shown.append(step.final_actor_obs[done])
    shard.close()
    return shown


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def refusal(task: Any, **args: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the caller looks at the message)
        make(task, **args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("task", "limit"), [("Pendulum-v1", 200), ("Hopper-v5", 60)])
def test_contract_is_kept(task: str, limit: int, mode: str) -> None:
    factory = resolve_task(f"gymnasium:{task}")
    notes = check_env_shard(factory, episode_length=limit, autoreset_mode=mode)
    assert notes == ["state_dict is not implemented: a resumed run starts fresh episodes"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("task", "limit"), [("Pendulum-v1", 7), ("Hopper-v5", 25)])
def test_stream_equals_that_of_single_envs_stepped_by_hand(
    task: str, limit: int, mode: str
) -> None:
    shard = make(task, episode_length=limit, autoreset_mode=mode)
    singles = [gymnasium.make(task, max_episode_steps=limit) for _ in range(NUM_ENVS)]
    start = shard.reset(SEED).actor_obs
    kinds = set()
    for single, seed, row in zip(singles, child_seeds(SEED, NUM_ENVS), start, strict=True):
        assert torch.equal(row, torch.as_tensor(single.reset(seed=seed)[0]).float())
    for action in random_actions(shard, 80):
        step = shard.step(action)
        for row, single in enumerate(singles):
            obs, reward, terminated, truncated, _ = single.step(action[row].numpy())
            assert step.reward[row] == np.float32(reward)
            assert bool(step.terminated[row]) == terminated
            assert bool(step.truncated[row]) == (truncated and not terminated)
            if terminated or truncated:
                kinds.add("terminated" if terminated else "truncated")
                assert torch.equal(step.final_actor_obs[row], torch.as_tensor(obs).float())
                obs, _ = single.reset()
            assert torch.equal(step.actor_obs[row], torch.as_tensor(obs).float())
    assert kinds == ({"truncated"} if task == "Pendulum-v1" else {"terminated", "truncated"})


def test_autoreset_modes_agree_bit_for_bit() -> None:
    streams = [record(make("Hopper-v5", autoreset_mode=mode), 120) for mode in MODES]
    assert len(streams[0][5::5]) == 120
    assert sum(len(final) for final in streams[0][5::5]) > NUM_ENVS
    assert_same(*streams)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_vector_env_of_ones_own_gives_the_same_stream(mode: AutoresetMode) -> None:
    own = SyncVectorEnv([lambda: gymnasium.make("Hopper-v5")] * NUM_ENVS, autoreset_mode=mode)
    assert_same(record(make(own, episode_length=1000), 120), record(make("Hopper-v5"), 120))


def test_terminated_together_with_truncated_counts_as_terminated() -> None:
    shard = make(ID, episode_length=4)
    shard.reset(SEED)
    for age in range(1, 9):
        step = shard.step(torch.zeros(NUM_ENVS, 4))
        assert step.terminated.tolist() == [age % 4 == 0] * NUM_ENVS
        assert not step.truncated.any()


def test_observations_of_any_shape_are_flattened_to_float32() -> None:
    shard = make(ID, episode_length=9, autoreset_mode="same_step")
    start = shard.reset(SEED).actor_obs
    assert start.dtype == torch.float32
    torch.testing.assert_close(start - start[:, :1], torch.arange(6.0).expand(NUM_ENVS, 6))
    for _ in range(4):
        step = shard.step(torch.ones(NUM_ENVS, 4))
    assert step.reward.tolist() == [4.0] * NUM_ENVS
    torch.testing.assert_close(step.final_actor_obs, start + 4)
    assert bool((step.actor_obs[:, 0] < 1).all())


@pytest.mark.parametrize("mode", MODES)
def test_reset_envs_starts_the_next_episode_of_exactly_those_envs(mode: str) -> None:
    shard = make("Pendulum-v1", autoreset_mode=mode)
    shard.reset(SEED)
    shown = shard.step(torch.zeros(NUM_ENVS, 1)).actor_obs.clone()
    obs = shard.reset_envs(torch.tensor([False, True, False])).actor_obs
    single = gymnasium.make("Pendulum-v1")
    single.reset(seed=child_seeds(SEED, NUM_ENVS)[1])
    assert torch.equal(obs[1], torch.as_tensor(single.reset()[0]))
    assert torch.equal(obs[::2], shown[::2])


def test_seeds_differ_between_envs_and_shards() -> None:
    shards = [child_seeds(seed, 64) for seed in (0, 1, 2)]
    assert len({seed for seeds in shards for seed in seeds}) == 3 * 64
    assert child_seeds(1, 8) == shards[1][:8]


def test_control_period_comes_from_dt_or_the_render_rate_or_is_a_second() -> None:
    assert make("Pendulum-v1").spec.control_period_s == 0.05
    assert make("Hopper-v5").spec.control_period_s == pytest.approx(0.008)
    assert make(ID, episode_length=4).spec.control_period_s == 0.02
    assert make(ID, episode_length=4, metadata={}).spec.control_period_s == 1.0


def test_spec_tells_sizes_and_time_limit() -> None:
    spec = make("Pendulum-v1").spec
    assert (spec.actor_obs_dim, spec.action_dim, spec.episode_length) == (3, 1, 200)
    assert (spec.action_low.item(), spec.action_high.item()) == (-2, 2)
    assert make("Pendulum-v1", episode_length=9).spec.episode_length == 9


@pytest.mark.parametrize(
    ("task", "args", "parts"),
    [
        ("Pendulm-v1", {}, ["'gymnasium:Pendulm-v1'", "Pendulum-v1"]),
        ("CartPole-v1", {}, ["Discrete(2)", "only continuous ones (Box)"]),
        (ID, {}, ["time limit of None", "env.args.episode_length"]),
        ("Pendulum-v1", {"episode_length": 0}, ["time limit of 0", "at least 1"]),
        ("Pendulum-v1", {"autoreset_mode": "disabled"}, ["'disabled'", "next_step or same_step"]),
        (
            ID,
            {"action_space": spaces.Box(-np.inf, np.inf, (1,), np.float32), "episode_length": 4},
            ["[-inf] to [inf]", "only finite ones"],
        ),
        (
            ID,
            {"observation_space": spaces.Box(-1, 1, (0,), np.float32), "episode_length": 4},
            ["(0,)", "at least one element"],
        ),
        (
            ID,
            {"observation_space": spaces.Dict(), "episode_length": 4},
            ["Dict()", "FlattenObservation"],
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(
    task: str, args: dict[str, Any], parts: list[str]
) -> None:
    message = refusal(task, **args)
    assert [part for part in parts if part not in message] == []


def test_a_vector_env_of_another_size_is_refused() -> None:
    own = SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * 2)
    assert "has 2 envs where 3 are asked for" in refusal(own, episode_length=200)


def test_a_vector_env_already_made_takes_no_arguments() -> None:
    own = SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * NUM_ENVS)
    assert "takes no arguments ['g']" in refusal(own, episode_length=200, g=1.0)


def test_a_vector_env_that_does_not_say_how_it_resets_is_refused() -> None:
    own = SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * NUM_ENVS)
    del own.metadata["autoreset_mode"]
    assert "metadata['autoreset_mode']" in refusal(own, episode_length=200)


def test_a_vector_env_of_another_kind_is_seeded_with_one_number() -> None:
    seeds = []

    class Foreign(VectorWrapper):
        unwrapped: Any = property(lambda self: self)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            seeds.append(seed)
            return super().reset(seed=seed, options=options)

    inner = SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * NUM_ENVS)
    make(Foreign(inner), episode_length=200).reset(SEED)
    assert seeds == child_seeds(SEED, 1)


def test_a_vector_env_that_ignores_the_reset_mask_is_refused() -> None:
    class Deaf(SyncVectorEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return super().reset(seed=seed)

    shard = make(Deaf([lambda: gymnasium.make("Pendulum-v1")] * NUM_ENVS), episode_length=200)
    shard.reset(SEED)
    with pytest.raises(ValueError, match="must reset only the envs of the mask"):
        shard.reset_envs(torch.tensor([True, False, False]))


def test_construction_makes_no_vector_env_and_close_before_reset_is_fine() -> None:
    shard = make("Pendulum-v1", num_envs=10**9)
    assert shard.spec.num_envs == 10**9
    shard.close()


def test_an_env_that_raises_is_not_silenced() -> None:
    with pytest.raises(RuntimeError, match="cable unplugged"):
        make(ID, episode_length=4, fault="reset").reset(SEED)
    shard = make(ID, episode_length=4, fault="step")
    shard.reset(SEED)
    with pytest.raises(RuntimeError, match="cable unplugged"):
        shard.step(torch.zeros(NUM_ENVS, 4))


def test_saving_is_refused_in_one_sentence() -> None:
    with pytest.raises(NotImplementedError, match="a resumed run starts fresh episodes"):
        make("Pendulum-v1").state_dict()
