# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
import math

import mujoco
import numpy as np
import pytest
import torch

from collectors.env import resolve_task
from collectors.tasks import planar
from collectors.tasks.mujoco_env import MujocoEnv
from collectors.testing import check_env_shard
from oracles.cartpole import gaussian_tolerance

CPU = torch.device("cpu")
ROBOTS = ["hopper-hop", "walker-run", "cheetah-run"]
every_task = pytest.mark.parametrize("task", ["pendulum-swingup", *ROBOTS])
every_robot = pytest.mark.parametrize("task", ROBOTS)


def make(task: str, num_envs: int = 1, **args) -> MujocoEnv:
    env = resolve_task(task)(num_envs=num_envs, device=CPU, evaluation=True, **args)
    assert isinstance(env, MujocoEnv)
    return env


def step_from(env: MujocoEnv, qpos: list, qvel: list) -> float:
    """Reward of one env step without action from a hand-made state."""
    env.reset(0)
    assert env._physics is not None
    env._physics.set_state(torch.tensor([True]), torch.tensor([qpos]), torch.tensor([qvel]))
    return float(env.step(torch.zeros(1, env.spec.action_dim)).reward)


def f32(*values: float) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value], dtype=torch.float32) for value in values)


def linear_tolerance(x: float, bound: float) -> float:
    """dm_control's `rewards.tolerance` with bounds (bound, inf), margin `bound`, value 0 at the
    margin and a linear sigmoid."""
    if x >= bound:
        return 1.0
    distance = (bound - x) / bound
    return 1 - distance if distance < 1 else 0.0


@every_task
def test_task_keeps_the_contract(task):
    assert check_env_shard(resolve_task(task), num_steps=20, episode_length=40) == []


@every_task
def test_unknown_argument_is_a_type_error(task):
    with pytest.raises(TypeError, match="gravity"):
        make(task, gravity=1.0)


@every_task
def test_control_period_is_20_ms_and_episodes_last_20_s(task):
    spec = make(task).spec
    assert spec.control_period_s == pytest.approx(0.02)
    assert spec.episode_length == 1000


# Rewards


def test_pendulum_earns_1_upright_at_rest_and_0_hanging():
    env = make("pendulum-swingup")
    assert step_from(env, [0.0], [0.0]) == pytest.approx(1, abs=1e-6)
    assert step_from(env, [math.pi], [0.0]) == pytest.approx(0, abs=1e-6)
    assert step_from(env, [math.pi], [4.0]) < 0.01
    # a speed of 5 rad/s is worth (1 + 0.1) / 2
    assert float(planar.swingup_reward(*f32(1, 5))) == pytest.approx(0.55)
    assert float(planar.swingup_reward(*f32(0, 0))) == pytest.approx(0.5)


def test_walker_earns_1_upright_at_full_speed_a_sixth_at_rest_and_little_lying():
    env = make("walker-run")
    upright = [0.0, 1.5, 0.0, *[0.0] * 6]  # off the floor, which would slow it
    lying = [0.0, 0.1, math.pi / 2, *[0.0] * 6]
    assert step_from(env, upright, [8.5, *[0.0] * 8]) == pytest.approx(1, abs=0.001)
    assert step_from(env, upright, [0.0] * 9) == pytest.approx(1 / 6, abs=0.001)
    assert step_from(env, upright, [-8.0, *[0.0] * 8]) == pytest.approx(1 / 6, abs=0.001)
    # pitch alone earns (1 + 0) / 2 / 4 of a sixth
    assert step_from(env, lying, [0.0] * 9) == pytest.approx(1 / 48, abs=0.003)
    assert float(planar.walk_reward(*f32(0, -1, 0))) < 1e-4


def test_hopper_earns_only_standing_and_in_proportion_to_its_speed():
    env = make("hopper-hop")
    upright, folded = [0.0, 1.5, *[0.0] * 5], [0.0, 1.5, 0.0, 0.0, 2.4, -2.4, 0.0]
    assert step_from(env, upright, [1.0, *[0.0] * 6]) == pytest.approx(0.5, abs=0.01)
    assert step_from(env, upright, [2.5, *[0.0] * 6]) == 1
    assert step_from(env, upright, [-1.0, *[0.0] * 6]) == 0
    assert step_from(env, folded, [2.5, *[0.0] * 6]) == 0


def test_cheetah_earns_its_speed_over_10():
    env = make("cheetah-run")
    pose = [0.0, 1.5, *[0.0] * 7]
    assert step_from(env, pose, [5.0, *[0.0] * 8]) == pytest.approx(0.5, abs=0.01)
    assert step_from(env, pose, [12.0, *[0.0] * 8]) == 1
    assert step_from(env, pose, [-3.0, *[0.0] * 8]) == 0


def test_rewards_equal_the_suites_formulas():
    rng = np.random.default_rng(1)
    rows = rng.uniform([0, -1, -3], [2, 1, 12], (200, 3))
    for height, upright, speed in rows:
        walk = (3 * gaussian_tolerance(max(1.2 - height, 0), margin=0.6) + (1 + upright) / 2) / 4
        walk *= (5 * linear_tolerance(speed, 8) + 1) / 6
        hop = float(height >= 0.6) * linear_tolerance(speed, 2)
        swing = (1 + upright) / 2 * (1 + gaussian_tolerance(speed, margin=5)) / 2
        ours = [
            planar.walk_reward(*f32(height, upright, speed)),
            planar.hop_reward(*f32(height, speed)),
            planar.swingup_reward(*f32(upright, speed)),
            planar.ramp(*f32(speed), target=10.0),
        ]
        expected = [walk, hop, swing, linear_tolerance(speed, 10)]
        np.testing.assert_allclose(torch.cat(ours), expected, atol=1e-6)


# Starts


@every_robot
def test_lowest_point_of_a_start_is_1_cm_above_the_floor(task):
    env = make(task, num_envs=200)
    env.reset(0)
    assert env._physics is not None
    model = env._task.simulation.model
    data = mujoco.MjData(model)
    for qpos in env._physics.qpos.numpy():
        data.qpos[:] = qpos
        mujoco.mj_forward(model, data)
        assert data.ncon == 0
        half_z = model.geom_size[1:, 1] * np.abs(data.geom_xmat[1:, 8])
        lowest = (data.geom_xpos[1:, 2] - half_z - model.geom_size[1:, 0]).min()
        assert lowest == pytest.approx(0.01, abs=1e-5)
        data.qpos[1] -= 0.02
        mujoco.mj_forward(model, data)
        assert data.ncon > 0


@every_robot
def test_starts_differ_are_at_rest_and_keep_the_joint_limits(task):
    env = make(task, num_envs=500)
    env.reset(0)
    assert env._physics is not None
    low, high = torch.tensor(env._task.simulation.model.jnt_range[3:]).unbind(1)
    joints = env._physics.qpos[:, 3:]
    assert not env._physics.qvel.any()
    # 500 uniform draws: within 3% of either end, but for one in millions
    share = (joints - low) / (high - low)
    assert share.min() > -1e-6
    assert share.max() < 1 + 1e-6
    assert share.amin(0).max() < 0.03
    assert share.amax(0).min() > 0.97


@every_robot
def test_observation_is_the_pose_without_x_the_velocities_and_log_touch(task):
    env = make(task, num_envs=2)
    env.reset(0)
    physics = env._physics
    assert physics is not None
    action = torch.zeros(2, env.spec.action_dim)
    touched = False
    for _ in range(100):
        obs = env.step(action).actor_obs
        num_touches = env.spec.actor_obs_dim - 2 * physics.qpos.shape[1]
        pitch = physics.qpos[:, 2]
        touch = physics.sensordata[:, -num_touches:]
        pose = [physics.qpos[:, 1], pitch.cos(), pitch.sin(), *physics.qpos[:, 3:].T]
        expected = torch.stack([*pose, *physics.qvel.T, *(1 + touch).log().T], 1)
        np.testing.assert_allclose(obs, expected, rtol=1e-5, atol=1e-5)
        touched |= bool(touch.any())
    assert touched


# Engines


def trajectories(
    task: str, num_envs: int, num_steps: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(num_steps, num_envs, ...) of qpos, and of the reward, with Warp and with C: from the same
    starts with the same actions."""
    generator = torch.Generator().manual_seed(0)
    poses, rewards = [], []
    for engine in ("warp", "mujoco"):
        env = make(task, num_envs, physics=engine)
        env.reset(0)
        assert env._physics is not None
        generator.manual_seed(0)
        pose, reward = [], []
        for _ in range(num_steps):
            action = 2 * torch.rand(num_envs, env.spec.action_dim, generator=generator) - 1
            reward.append(env.step(action).reward.double())
            pose.append(env._physics.qpos.double().clone())
        env.report_shard_state()  # refuses lost contacts
        env.close()
        poses.append(torch.stack(pose))
        rewards.append(torch.stack(reward))
    return poses, rewards


def test_warp_agrees_with_mujoco_c_on_the_pendulum():
    (warp, c), rewards = trajectories("pendulum-swingup", 8, 100)
    assert (c[-1] - c[0]).abs().min() > 0.01
    np.testing.assert_allclose(warp, c, rtol=0, atol=1e-3)
    np.testing.assert_allclose(*rewards, rtol=0, atol=1e-3)


def test_warp_agrees_with_mujoco_c_on_the_mean_walker():
    (warp, c), rewards = trajectories("walker-run", 256, 30)
    # measured: means 1e-6 apart, single envs 2e-4, while the mean height falls by decimetres
    assert c[0, :, 1].mean() - c[-1, :, 1].mean() > 0.1
    np.testing.assert_allclose(warp.mean(1), c.mean(1), rtol=0, atol=2e-5)
    np.testing.assert_allclose(rewards[0].mean(1), rewards[1].mean(1), rtol=0, atol=1e-6)
