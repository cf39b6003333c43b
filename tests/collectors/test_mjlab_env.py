# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import counted_metrics, small_config
from torch import Tensor

pytest.importorskip("mjlab")

import mujoco
from mjlab.asset_zoo.robots import get_g1_robot_cfg
from mjlab.entity import Entity

from collectors.adapters.mjlab_env import MjlabShard
from collectors.env import Step, resolve_task
from collectors.testing import check_env_shard
from fastsac.core.shard_state import ShardReport, ShardStateBus
from fastsac.trainer import train

CARTPOLE = "Mjlab-Cartpole-Swingup"
GO1 = "Mjlab-Velocity-Flat-Unitree-Go1"
TRACKING = "Mjlab-Tracking-Flat-Unitree-G1"
CPU = torch.device("cpu")


def make(task_id: str, *, evaluation: bool = False, num_envs: int = 3, **args: Any) -> MjlabShard:
    return MjlabShard(task_id, num_envs=num_envs, device=CPU, evaluation=evaluation, **args)


def inside(env: MjlabShard) -> Any:
    """mjlab's own environment."""
    assert env._env is not None
    return env._env


def actions_for(env: MjlabShard, num_steps: int, seed: int = 0) -> Tensor:
    """(num_steps, num_envs, action_dim) uniform within the bounds."""
    shape = (num_steps, env.spec.num_envs, env.spec.action_dim)
    unit = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return env.spec.action_low + unit * (env.spec.action_high - env.spec.action_low)


@pytest.fixture(scope="session")
def motion_file(tmp_path_factory) -> str:
    """Three seconds of a G1 standing in its default pose, 50 Hz."""
    model: Any = Entity(get_g1_robot_cfg()).spec.compile()
    data: Any = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, 0)
    mujoco.mj_forward(model, data)
    frames, bodies, joints = 150, model.nbody - 1, model.nq - 7
    path: Path = tmp_path_factory.mktemp("motion") / "stand.npz"
    np.savez(
        path,
        fps=50,
        joint_pos=np.tile(data.qpos[7:], (frames, 1)),
        joint_vel=np.zeros((frames, joints)),
        body_pos_w=np.tile(data.xpos[1:], (frames, 1, 1)),
        body_quat_w=np.tile(data.xquat[1:], (frames, 1, 1)),
        body_lin_vel_w=np.zeros((frames, bodies, 3)),
        body_ang_vel_w=np.zeros((frames, bodies, 3)),
    )
    return str(path)


def test_cartpole_keeps_the_contract():
    notes = check_env_shard(
        resolve_task(f"mjlab:{CARTPOLE}"),
        num_envs=3,
        num_steps=12,
        episode_length=8,
        action_limit=1.0,
    )
    assert notes == ["state_dict is not implemented: a resumed run starts fresh episodes"]


def test_go1_keeps_the_contract():
    check_env_shard(resolve_task(f"mjlab:{GO1}"), num_envs=2, num_steps=6, episode_length=5)


def test_tracking_keeps_the_contract(motion_file):
    check_env_shard(
        resolve_task(f"mjlab:{TRACKING}"),
        num_envs=2,
        num_steps=6,
        episode_length=5,
        motion_file=motion_file,
    )


def first_end(env: MjlabShard, actions: Tensor) -> tuple[int, Step]:
    for index, action in enumerate(actions):
        step = env.step(action)
        if bool((step.terminated | step.truncated).any()):
            return index, step
    raise AssertionError("no episode ended")


@pytest.mark.parametrize("task_id", [CARTPOLE, GO1, TRACKING])
def test_the_final_observation_is_what_an_env_that_goes_on_shows(task_id, motion_file):
    """The twin's time limit is far away; noise, commands and physics are otherwise the same."""
    args: dict[str, Any] = {"action_limit": 0.1}
    if task_id == TRACKING:
        args["motion_file"] = motion_file
    env, twin = make(task_id, episode_length=4, **args), make(task_id, episode_length=10**6, **args)
    starts = env.reset(3).actor_obs, twin.reset(3).actor_obs
    assert torch.equal(*starts)
    actions = actions_for(env, 4)
    index, step = first_end(env, actions)
    twin_steps = [twin.step(action) for action in actions[: index + 1]]
    ended = step.truncated
    assert not step.terminated.any()
    assert not any((s.terminated | s.truncated).any() for s in twin_steps)
    assert step.final_critic_obs is not None
    assert twin_steps[-1].critic_obs is not None
    assert step.critic_obs is not None
    assert torch.equal(step.final_actor_obs, twin_steps[-1].actor_obs)
    assert torch.equal(step.final_critic_obs, twin_steps[-1].critic_obs)
    assert torch.equal(step.reward, twin_steps[-1].reward)
    assert torch.equal(step.actor_obs[~ended], step.final_actor_obs[~ended])
    assert not torch.equal(step.actor_obs[ended], step.final_actor_obs[ended])
    assert not torch.equal(step.critic_obs[ended], step.final_critic_obs[ended])


def test_the_global_generators_are_left_alone_and_do_not_matter():
    env, twin = make(CARTPOLE, action_limit=1.0), make(CARTPOLE, action_limit=1.0)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (the global generator is under test)
    expected = torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    obs = env.reset(1).actor_obs
    obs = env.step(actions_for(env, 1)[0]).actor_obs
    assert (torch.rand(1), random.random(), np.random.rand()) == expected  # noqa: NPY002
    twin.reset(1)
    torch.manual_seed(5)
    assert torch.equal(twin.step(actions_for(env, 1)[0]).actor_obs, obs)


def test_go1_bounds_reach_the_farther_joint_limit():
    env = make(GO1)
    env.reset(0)
    robot = inside(env).scene["robot"]
    term: Any = inside(env).action_manager.get_term("joint_pos")
    limits, default = robot.data.joint_pos_limits[0], robot.data.default_joint_pos[0]
    for column, joint in enumerate(term.target_ids.tolist()):
        high = float(env.spec.action_high[column])
        reach = high * float(term.scale[0, column])
        low_end, high_end = (float(v) for v in limits[joint])
        start = float(default[joint])
        assert reach == pytest.approx(max(start - low_end, high_end - start))
        assert float(env.spec.action_low[column]) == -high
    assert make(GO1, action_limit=0.5).spec.action_high.tolist() == [0.5] * 12


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make("Mjlab-Velocity-Flat-Go1"), r"nearest are .*Velocity-Flat-Unitree-Go1"),
        (lambda: make(CARTPOLE).spec, "JointEffortAction.* set env.args.action_limit"),
        (lambda: make(CARTPOLE, action_limit=-1.0), "action_limit is -1.0"),
        (lambda: make(CARTPOLE, episode_length=0), "episode_length is 0"),
        (lambda: make(TRACKING), r"set env.args.motion_file \(npz\)"),
        (lambda: make(TRACKING, motion_file="none.npz"), "'none.npz' does not exist"),
        (lambda: make(GO1, motion_file="none.npz"), "tracks no motion: drop motion_file"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(call: Callable[[], object], message):
    with pytest.raises(ValueError, match=message) as refusal:
        call()
    assert "\n" not in str(refusal.value)


def test_a_motion_of_another_robot_is_refused(motion_file, tmp_path):
    with np.load(motion_file) as motion:
        arrays = dict(motion)
    arrays["joint_pos"] = arrays["joint_pos"][:, :23]
    np.savez(tmp_path / "other.npz", **arrays)
    with pytest.raises(ValueError, match=r"has 23 joints where the robot of .* has 29"):
        _ = make(TRACKING, motion_file=str(tmp_path / "other.npz")).spec
    del arrays["body_pos_w"]
    np.savez(tmp_path / "partial.npz", **arrays)
    with pytest.raises(ValueError, match=r"lacks \['body_pos_w'\]"):
        make(TRACKING, motion_file=str(tmp_path / "partial.npz"))


def test_failures_are_reported_as_deltas_of_the_fleets_ema(motion_file):
    """Oracle: a plain loop over two shards' failures, one EMA for both."""
    shards = [make(TRACKING, num_envs=4, motion_file=motion_file) for _ in range(2)]
    rule = shards[0].spec.shard_states["motion_failures"]
    bus = ShardStateBus({"motion_failures": rule})
    assert (rule.kind, rule.size, rule.rate) == ("linear_ema", 4, 0.001)
    for seed, shard in enumerate(shards):
        shard.reset(seed)
        # Every env fails in every other step.
        config = inside(shard).termination_manager.get_term_cfg("anchor_pos")
        config.params["threshold"] = 1e9
    expected = np.zeros(rule.size)
    for tick in range(3):
        for when in range(2):
            counts = np.zeros(rule.size)
            for shard in shards:
                terminations = inside(shard).termination_manager
                terminations.get_term_cfg("anchor_pos").params["threshold"] = (1e9, -1.0)[when]
                command: Any = inside(shard).command_manager.get_term("motion")
                frames = command.time_steps.tolist()
                step = shard.step(torch.zeros(4, shard.spec.action_dim))
                assert bool(step.terminated.all()) or when == 0
                for frame, failed in zip(frames, step.terminated.tolist(), strict=True):
                    counts[min(frame * 4 // 150, 3)] += failed
            expected = (1 - rule.rate) * expected + rule.rate * counts
        reports = [
            ShardReport(
                shard=index,
                first_step=2 * tick,
                last_step=2 * tick + 1,
                states={"motion_failures": shard.report_shard_state()["motion_failures"]},
            )
            for index, shard in enumerate(shards)
        ]
        fleet = bus.merge(reports)
        np.testing.assert_allclose(fleet["motion_failures"].numpy(), expected, rtol=1e-12)
        for shard in shards:
            shard.apply_shard_state(fleet)
    assert expected.sum() > 0


def test_resets_sample_frames_by_the_fleets_failures(motion_file):
    env = make(TRACKING, num_envs=4, motion_file=motion_file)
    env.apply_shard_state({"motion_failures": torch.tensor([0, 0, 1e6, 0]).double()})
    for again in range(2):
        env.reset(again)
        command: Any = inside(env).command_manager.get_term("motion")
        # The third quarter of 149 frames, and one frame on.
        assert ((command.time_steps >= 74) & (command.time_steps <= 112)).all()
    env.apply_shard_state({"motion_failures": torch.tensor([1e6, 0, 0, 0]).double()})
    env.reset_envs(torch.ones(4, dtype=torch.bool))
    assert (command.time_steps <= 38).all()
    assert not env.report_shard_state()["motion_failures"].value.any()


def test_stages_follow_the_fleets_step_counter():
    env = make(GO1, num_envs=2)
    assert env.spec.shard_states["vector_steps"].kind == "max"
    env.reset(0)
    env.step(actions_for(env, 1)[0] * 0.01)
    assert env.report_shard_state()["vector_steps"].value.tolist() == [1.0]
    ranges = inside(env).command_manager.get_term("twist").cfg.ranges
    stages = inside(env).curriculum_manager.get_term_cfg("command_vel").params["velocity_stages"]
    before = ranges.lin_vel_x
    env.apply_shard_state({"vector_steps": torch.tensor([float(stages[-1]["step"])]).double()})
    env.reset_envs(torch.tensor([True, False]))
    assert ranges.lin_vel_x == stages[-1]["lin_vel_x"] != before
    env.step(actions_for(env, 1)[0] * 0.01)
    assert env.report_shard_state()["vector_steps"].value.tolist() == [stages[-1]["step"] + 1]


def test_evaluation_has_a_time_limit_and_no_noise():
    env = make(GO1, evaluation=True, num_envs=2)
    assert env.spec.episode_length == 1000
    env.reset(0)
    assert inside(env).max_episode_length == 1000
    assert (inside(env).episode_length_buf == 0).all()
    assert not any(group.enable_corruption for group in inside(env).cfg.observations.values())


def test_training_runs(tmp_path):
    config = small_config(
        tmp_path,
        total_env_steps=128,
        env={
            "task": f"mjlab:{CARTPOLE}",
            "num_envs": 4,
            "args": {"action_limit": 1.0, "episode_length": 6},
        },
        evaluation={"num_episodes": 2},
    )
    records = counted_metrics(train(config, runtime="inline").run_dir)
    assert records[-1]["env_steps"] == 128
    assert records[-1]["eval/episode_length"] == 6.0
    assert all(r["train/nonfinite"] == 0 for r in records)
    assert any("learner/critic_loss" in r for r in records)
    assert "env/reward_smooth_reward" in records[-1]
