# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
import copy
import dataclasses
import importlib.util
import math

import mujoco
import numpy as np
import pytest
import torch

from collectors.env import resolve_task
from collectors.physics.mujoco_physics import MujocoPhysics
from collectors.tasks import velocity
from collectors.tasks.disturbances import MODEL_FIELDS
from collectors.tasks.mujoco_env import MujocoEnv
from collectors.tasks.robots import Robot, load_robot
from collectors.tasks.symmetry import mirror_robot
from collectors.tasks.velocity import (
    COMMAND_HIGH,
    COMMAND_LOW,
    COMMAND_START,
    COMMAND_STEPS,
    PENALTY_START,
    PUSH_SPEED,
    PUSH_STEPS,
    STANDING_SHARE,
    TRAINING_COMMAND_STEPS,
    VelocityTracking,
    quadruped_velocity,
)
from collectors.tasks.velocity_reward import footwork
from collectors.testing import check_env_shard
from fastsac.core.mirror import Reflection
from fastsac.core.shard_state import LocalState, ShardReport, ShardStateBus

CPU = torch.device("cpu")
DISTURBED = {"randomization": 1.0, "pushes": 1.0, "observation_noise": 1.0}
CALM = dict.fromkeys(DISTURBED, 0.0)
JOINTS = 12
MEASURED = [*range(9), *range(12, 12 + 2 * JOINTS)]
"""Columns of the quadruped's actor observation that a sensor would give."""


def make(num_envs: int = 4, *, evaluation: bool = False, **args) -> MujocoEnv:
    return quadruped_velocity(
        num_envs=num_envs, device=CPU, evaluation=evaluation, physics="mujoco", **args
    )


def inside(env: MujocoEnv) -> tuple[VelocityTracking, MujocoPhysics]:
    task, physics = env._task, env._physics
    assert isinstance(task, VelocityTracking)
    assert isinstance(physics, MujocoPhysics)
    return task, physics


def view(
    *, episode_length: float = 0.0, tracking: float = 0.0, penalty: float, command: float
) -> dict[str, torch.Tensor]:
    values = {
        "episode_length": episode_length,
        "tracking": tracking,
        "penalty_scale": penalty,
        "command_scale": command,
    }
    return {name: torch.tensor([value]).double() for name, value in values.items()}


def none_of(env: MujocoEnv) -> torch.Tensor:
    return torch.zeros(env.spec.num_envs, dtype=torch.bool)


def all_of(env: MujocoEnv) -> torch.Tensor:
    return ~none_of(env)


def stand(env: MujocoEnv, num_steps: int) -> list:
    action = torch.zeros((env.spec.num_envs, env.spec.action_dim))
    return [env.step(action) for _ in range(num_steps)]


def to_body(vector: np.ndarray, quat: np.ndarray) -> np.ndarray:
    """A vector of the world in the frame of a body with orientation `quat`."""
    conjugate, turned = np.empty(4), np.empty(3)
    mujoco.mju_negQuat(conjugate, quat)
    mujoco.mju_rotVecQuat(turned, vector, conjugate)
    return turned


# Contract


@pytest.mark.parametrize("args", [DISTURBED, CALM], ids=["disturbed", "calm"])
@pytest.mark.parametrize("robot", ["quadruped", "go1", "g1"])
def test_keeps_the_contract(robot: str, args: dict):
    if robot != "quadruped" and importlib.util.find_spec("mjlab") is None:
        pytest.skip("needs the robots extra")
    few = {} if robot == "quadruped" else {"episode_length": 8, "num_steps": 5}
    check_env_shard(
        resolve_task(f"{robot}-velocity"),
        **{
            "num_envs": 2,
            "episode_length": 40,
            "num_steps": 20,
            "physics": "mujoco",
            **args,
            **few,
        },
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"randomization": 2.0}, r"env\.args\.randomization is 2: .* in \[0, 1\]"),
        ({"pushes": 1.5}, r"env\.args\.pushes is 1\.5: "),
        ({"observation_noise": -1.0}, r"env\.args\.observation_noise is -1: "),
        ({"decimation": 0}, r"env\.args\.decimation is 0: give at least 1"),
        ({"episode_length": 0}, r"env\.args\.episode_length is 0: give at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(args: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make(**args)


# Observations


def test_velocities_and_gravity_are_in_the_frame_of_the_base():
    env = make(16)
    env.reset(0)
    _, physics = inside(env)
    robot = load_robot("quadruped")
    rng = np.random.default_rng(0)
    qpos = np.concatenate([rng.normal(size=(16, 7)), rng.uniform(-1, 1, (16, JOINTS))], 1)
    qpos[:, 3:7] /= np.linalg.norm(qpos[:, 3:7], axis=1, keepdims=True)
    qvel = rng.normal(size=(16, 6 + JOINTS))
    physics.set_state(all_of(env), torch.from_numpy(qpos), torch.from_numpy(qvel))
    obs = env.reset_envs(none_of(env)).actor_obs.double().numpy()

    data = mujoco.MjData(robot.model)
    for row in range(16):
        data.qpos, data.qvel = qpos[row], qvel[row]
        mujoco.mj_fwdPosition(robot.model, data)
        mujoco.mj_fwdVelocity(robot.model, data)
        twist = np.empty(6)
        base = mujoco.mjtObj.mjOBJ_XBODY
        mujoco.mj_objectVelocity(robot.model, data, base, robot.base_body, twist, 1)
        quat = qpos[row, 3:7]
        np.testing.assert_allclose(to_body(qvel[row, :3], quat), twist[3:], atol=1e-9)
        np.testing.assert_allclose(obs[row, :3], twist[3:], atol=1e-5)
        np.testing.assert_allclose(obs[row, 3:6], twist[:3], atol=1e-5)
        gravity = to_body(np.array([0.0, 0.0, -1.0]), quat)
        np.testing.assert_allclose(obs[row, 6:9], gravity, atol=1e-5)
        offset = qpos[row, 7:] - robot.default_pose.double().numpy()
        np.testing.assert_allclose(obs[row, 12 : 12 + JOINTS], offset, atol=1e-5)


def test_noise_reaches_the_actor_and_not_the_critic():
    env = make(500, observation_noise=0.5)
    env.reset(0)
    task, physics = inside(env)
    task.act(torch.zeros((500, JOINTS)))
    obs = task.observe()
    assert obs.critic_obs is not None
    torch.testing.assert_close(
        obs.critic_obs[:, 24 : 24 + JOINTS], physics.qvel[:, 6:].float(), rtol=0, atol=0
    )
    noise = obs.actor_obs - obs.critic_obs[:, : env.spec.actor_obs_dim]
    std = [0.1] * 3 + [0.2] * 3 + [0.05] * 3 + [0.01] * JOINTS + [0.5] * JOINTS
    torch.testing.assert_close(noise[:, MEASURED].std(0), 0.5 * torch.tensor(std), rtol=0.2, atol=0)
    exact = torch.ones(env.spec.actor_obs_dim, dtype=torch.bool)
    exact[MEASURED] = False
    assert not noise[:, exact].any()  # the command and the last action are known


# Reward and termination


def naive_reward(
    robot: Robot,
    qpos: np.ndarray,
    qvel: np.ndarray,
    sensordata: np.ndarray,
    command: np.ndarray,
    change: np.ndarray,
    penalty_scale: float,
) -> tuple[float, float]:
    """Reward and the footwork penalty of one world that has not fallen, in float64."""

    def sensor(foot: str, kind: str) -> np.ndarray:
        found = robot.model.sensor(f"{foot}_foot_site_{kind}")
        return sensordata[found.adr[0] : found.adr[0] + found.dim[0]]

    quat = qpos[3:7]
    vx, vy, vz = to_body(qvel[:3], quat)
    gx, gy, _ = to_body(np.array([0.0, 0.0, -1.0]), quat)
    wx, wy, wz = qvel[3:6]
    good = math.exp(-4 * ((vx - command[0]) ** 2 + (vy - command[1]) ** 2))
    good += 0.5 * math.exp(-4 * (wz - command[2]) ** 2)
    upright = 0.1 * vz**2 + 0.02 * (wx**2 + wy**2) + gx**2 + gy**2
    upright += 5 * (qpos[2] - robot.base_height) ** 2
    footwork = 0.0
    for foot in robot.foot_names:
        speed = math.hypot(*sensor(foot, "velocity")[:2])
        if sensor(foot, "force")[0] > 0:
            footwork += 0.1 * speed**2
        footwork += 20 * max(0.0, 0.06 - sensor(foot, "position")[2]) ** 2 * speed
    offset = qpos[7:] - robot.default_pose.double().numpy()
    manner = 0.02 * (change**2).sum() + 0.05 * (offset**2).sum() + footwork
    return 0.2 * (good - upright - penalty_scale * manner), footwork


@pytest.mark.parametrize("penalty_scale", [0.6, 1.0])
def test_reward_is_that_of_a_naive_loop(penalty_scale: float):
    env = make(6, episode_length=25)
    env.apply_shard_state(view(penalty=penalty_scale, command=1.0))
    obs = env.reset(3).actor_obs
    _, physics = inside(env)
    robot = load_robot("quadruped")
    generator = torch.Generator().manual_seed(0)
    last = torch.zeros((6, JOINTS))
    compared, footwork = 0, 0.0
    for _ in range(30):
        commands = obs[:, 9:12].double().numpy()
        unit = 2 * torch.rand((6, JOINTS), generator=generator) - 1
        action = 0.5 * unit * env.spec.action_high
        step = env.step(action)
        done = step.terminated | step.truncated
        for row in range(6):
            if step.terminated[row]:
                assert step.reward[row] == -1
            elif not done[row]:
                expected, feet = naive_reward(
                    robot,
                    physics.qpos[row].numpy(),
                    physics.qvel[row].numpy(),
                    physics.sensordata[row].numpy(),
                    commands[row],
                    (action - last)[row].double().numpy(),
                    penalty_scale,
                )
                assert float(step.reward[row]) == pytest.approx(expected, rel=1e-4, abs=1e-5)
                compared, footwork = compared + 1, footwork + feet
        last = action.masked_fill(done[:, None], 0)
        obs = step.actor_obs
    assert compared > 60
    assert footwork > 1


def test_tilting_over_60_degrees_or_sinking_terminates_and_never_truncates():
    env = make(8, decimation=1)
    env.reset(0)
    _, physics = inside(env)
    robot = load_robot("quadruped")
    tilts = [59.0, 61.0, -59.0, -61.0, 120.0, 0.0, 0.0, 0.0]
    heights = [1.0] * 5 + [robot.fall_height - 0.04, robot.fall_height + 0.04, robot.base_height]
    qpos = torch.zeros((8, 7 + JOINTS))
    qpos[:, 7:] = robot.default_pose
    qpos[:, 2] = torch.tensor(heights)
    half = torch.deg2rad(torch.tensor(tilts)) / 2
    qpos[:, 3], qpos[::2, 4], qpos[1::2, 5] = half.cos(), half[::2].sin(), half[1::2].sin()
    fallen = torch.tensor([False, True, False, True, True, True, False, False])
    for last in (False, True):
        physics.set_state(all_of(env), qpos, torch.zeros((8, 6 + JOINTS)))
        env._ages.fill_(env.spec.episode_length - 1 if last else 0)
        (step,) = stand(env, 1)
        assert torch.equal(step.terminated, fallen)
        assert torch.equal(step.truncated, ~fallen if last else none_of(env))
        assert (step.reward[fallen] == -1).all()
        assert (step.reward[~fallen] > -1).all()
        assert torch.equal(step.info["fallen"], fallen.float())


# Commands


@pytest.mark.parametrize(
    ("evaluation", "stays"), [(False, TRAINING_COMMAND_STEPS), (True, COMMAND_STEPS)]
)
def test_a_command_stays_for_command_steps_and_is_then_redrawn(evaluation: bool, stays: int):
    env = make(8, evaluation=evaluation, decimation=1, curriculum=False)
    first = env.reset(0).actor_obs[:, 9:12].clone()
    task, _ = inside(env)
    env._ages.zero_()
    for step in stand(env, 3):
        assert torch.equal(step.actor_obs[:, 9:12], first)
    assert task.memory["steps"].tolist() == [3] * 8
    task.memory["steps"][:4] = stays - 3
    before, last, due, after = (step.actor_obs[:, 9:12].clone() for step in stand(env, 4))
    assert torch.equal(before, first)
    assert torch.equal(last, first)
    assert (due[:4] != first[:4]).any(1).all()
    assert torch.equal(due[4:], first[4:])
    assert torch.equal(after, due)


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("scale", [0.5, 0.8])
def test_commands_fill_the_range_that_the_fleet_allows(scale: float, evaluation: bool):
    n = 4000
    env = make(n, evaluation=evaluation)
    env.apply_shard_state(view(penalty=PENALTY_START, command=scale))
    command = env.reset(0).actor_obs[:, 9:12]
    used = 1.0 if evaluation else scale
    low, high = used * torch.tensor(COMMAND_LOW), used * torch.tensor(COMMAND_HIGH)
    assert (command >= low).all()
    assert (command <= high).all()
    torch.testing.assert_close(command.amin(0), low, rtol=0.02, atol=0)
    torch.testing.assert_close(command.amax(0), high, rtol=0.02, atol=0)
    standing = (command == 0).all(1)
    assert torch.equal(standing, (command == 0).any(1))
    # Five standard deviations of a binomial count.
    spread = 5 * math.sqrt(STANDING_SHARE * (1 - STANDING_SHARE) / n)
    assert float(standing.float().mean()) == pytest.approx(STANDING_SHARE, abs=spread)


def test_without_curriculum_commands_are_whole_from_the_start():
    env = make(4000, curriculum=False)
    command = env.reset(0).actor_obs[:, 9:12]
    torch.testing.assert_close(command.amax(0), torch.tensor(COMMAND_HIGH), rtol=0.02, atol=0)
    assert env.spec.shard_states == {}
    assert env.report_shard_state() == {}


# Disturbances


def test_pushes_change_the_horizontal_velocity_of_the_base_alone():
    n, times, scale = 200, 100, 0.6
    env = make(n, pushes=scale)
    env.reset(0)
    task, physics = inside(env)
    pushed, largest = 0, torch.zeros(2).double()
    for _ in range(times):
        qpos, qvel = physics.qpos.clone(), physics.qvel.clone()
        task.act(torch.zeros((n, JOINTS)))
        assert torch.equal(physics.qpos, qpos)
        assert torch.equal(physics.qvel[:, 2:], qvel[:, 2:])
        change = physics.qvel[:, :2] - qvel[:, :2]
        assert torch.equal((change != 0).all(1), (change != 0).any(1))
        pushed += int((change != 0).any(1).sum())
        largest = torch.maximum(largest, change.abs().amax(0))
    expected = n * times / PUSH_STEPS
    assert pushed == pytest.approx(expected, abs=5 * math.sqrt(expected))
    assert (largest <= scale * PUSH_SPEED + 1e-6).all()
    assert (largest > 0.8 * scale * PUSH_SPEED).all()


def test_evaluation_is_not_disturbed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(velocity, "PUSH_STEPS", 1)
    env = make(4, evaluation=True, **DISTURBED)
    env.apply_shard_state(view(penalty=PENALTY_START, command=COMMAND_START))
    env.reset(0)
    task, physics = inside(env)
    qvel = physics.qvel.clone()
    task.act(torch.zeros((4, JOINTS)))
    assert torch.equal(physics.qvel, qvel)
    obs = task.observe()
    assert obs.critic_obs is not None
    assert torch.equal(obs.actor_obs, obs.critic_obs[:, : env.spec.actor_obs_dim])
    assert task.simulation.randomized == ()
    assert all(
        np.array_equal(model.body_mass, task.simulation.model.body_mass)
        for model in physics._models
    )


def test_a_new_episode_draws_a_new_model_in_its_world_alone():
    env = make(64, randomization=0.5)
    env.reset(0)
    _, physics = inside(env)
    robot = load_robot("quadruped")
    base, foot = robot.base_body, robot.foot_geoms[0]

    def ratios() -> np.ndarray:
        """(64, 3) of mass, foot friction and gain to the nominal model's."""
        nominal = robot.model
        return np.array(
            [
                [
                    model.body_mass[base] / nominal.body_mass[base],
                    model.geom_friction[foot, 0] / nominal.geom_friction[foot, 0],
                    model.actuator_gainprm[0, 0] / nominal.actuator_gainprm[0, 0],
                ]
                for model in physics._models
            ]
        )

    first = ratios()
    half_spread = 0.5 * np.array([0.2, 0.4, 0.1])
    assert (abs(first - 1) <= half_spread + 1e-6).all()
    assert (abs(first - 1).max(0) > 0.8 * half_spread).all()
    assert all(len(set(column)) == 64 for column in first.T)
    again = torch.arange(64) % 3 == 0
    env.reset_envs(again)
    changed = ratios() != first
    assert (changed == again.numpy()[:, None]).all()


def test_a_drawn_model_is_consistent():
    env = make(4, randomization=1.0)
    env.reset(0)
    robot = load_robot("quadruped")
    base, feet = robot.base_body, list(robot.foot_geoms)
    for model in inside(env)[1]._models:
        expected = copy.copy(robot.model)
        ratio = model.body_mass[base] / expected.body_mass[base]
        expected.body_mass[base] *= ratio
        expected.body_inertia[base] *= ratio
        mujoco.mj_setConst(expected, mujoco.MjData(expected))
        friction = model.geom_friction[feet[0], 0] / expected.geom_friction[feet[0], 0]
        expected.geom_friction[feet, 0] *= friction
        gain = model.actuator_gainprm[0, 0] / expected.actuator_gainprm[0, 0]
        expected.actuator_gainprm[:, 0] *= gain
        expected.actuator_biasprm[:, 1] *= gain  # the damping in [:, 2] stays
        for name in MODEL_FIELDS:
            np.testing.assert_allclose(
                getattr(model, name), getattr(expected, name), rtol=1e-5, err_msg=name
            )


# Curriculum


def experience(
    env: MujocoEnv, *, num_steps: int, tracking: float, episodes: int, lasted: float
) -> None:
    """As if `num_steps` vector steps had been tracked so well and `episodes` lasted so long, as
    a share of the time limit."""
    task, _ = inside(env)
    steps = num_steps * env.spec.num_envs
    task.memory["tracked"] += torch.tensor([tracking * steps, steps])
    task.memory["lasted"] += torch.tensor([episodes, episodes * lasted * env.spec.episode_length])


def scales(report) -> tuple[float, float]:
    return float(report["penalty_scale"].value), float(report["command_scale"].value)


def test_a_report_tells_of_episodes_and_tracking_since_the_last():
    env = make(4, episode_length=6)
    env.reset(0)
    age, episodes, lasted = torch.zeros(4), 0, 0.0
    for _ in range(2):
        tracking = 0.0
        episodes, lasted = 0, 0.0
        for step in stand(env, 9):
            error = step.info["velocity_error"].double()
            tracking += float((-(error**2) / 0.25).exp().sum())
            age += 1
            done = step.terminated | step.truncated
            episodes, lasted = episodes + int(done.sum()), lasted + float(age[done].sum())
            age[done] = 0
        report = env.report_shard_state()
        assert report["tracking"].weight == 36
        assert float(report["tracking"].value) == pytest.approx(tracking, rel=1e-5)
        assert report["episode_length"].weight == episodes > 0
        assert float(report["episode_length"].value) == lasted > 0


def test_scales_grow_with_success_stay_between_and_shrink_with_failure():
    env = make(4)
    env.reset(0)
    bus = ShardStateBus(env.spec.shard_states)
    assert scales({n: LocalState(value=v) for n, v in bus.values().items()}) == (0.3, 0.5)
    penalty, command, mean_length, mean_tracking = 0.3, 0.5, 0.0, 0.0
    phases = [(1.0, 0.9, 250), (0.3, 0.6, 250), (0.02, 0.1, 400)]
    ends = []
    tick = 0
    for lasted, tracking, ticks in phases:
        for _ in range(ticks):
            fleet = bus.values()
            env.apply_shard_state(fleet)
            experience(env, num_steps=50, tracking=tracking, episodes=2, lasted=lasted)
            states = env.report_shard_state()
            bus.merge([ShardReport(shard=0, first_step=tick, last_step=tick + 49, states=states)])
            tick += 50
            # The rules again: 0.2 % per vector step, thresholds 15 / 50 % and 0.5 / 0.75.
            growth, decay = 1.002**50, 0.998**50
            penalty *= growth if mean_length > 0.5 else decay if mean_length < 0.15 else 1
            command *= growth if mean_tracking > 0.75 else decay if mean_tracking < 0.5 else 1
            penalty, command = min(max(penalty, 0.3), 1.0), min(max(command, 0.5), 1.0)
            mean_length += 2 / 64 * (lasted - mean_length)
            mean_tracking += 200 / 16_000 * (tracking - mean_tracking)
            assert scales(states) == pytest.approx((penalty, command), rel=1e-9)
        ends.append(scales(states))
    assert ends == [(1.0, 1.0), (1.0, 1.0), (PENALTY_START, COMMAND_START)]


def test_shards_with_different_experience_compute_the_same_scales():
    good, bad = make(4), make(4)
    bus = ShardStateBus(good.spec.shard_states)
    fleet = view(episode_length=700, tracking=0.3, penalty=0.5, command=0.9)
    reports = []
    for shard, (env, quality) in enumerate([(good, 1.0), (bad, 0.1)]):
        env.reset(shard)
        env.apply_shard_state(fleet)
        experience(env, num_steps=20, tracking=quality, episodes=8, lasted=quality)
        states = env.report_shard_state()
        assert scales(states) == pytest.approx((0.5 * 1.002**20, 0.9 * 0.998**20))
        reports.append(ShardReport(shard=shard, first_step=0, last_step=19, states=states))
    assert scales(reports[0].states) == scales(reports[1].states)
    merged = bus.merge(reports)
    assert float(merged["tracking"]) == pytest.approx(160 / 16_000 * 0.55)
    assert float(merged["episode_length"]) == pytest.approx(
        16 / 64 * 0.55 * good.spec.episode_length
    )


def test_a_restored_shard_reports_the_scales_of_the_saved_one():
    env, other = make(4, episode_length=20), make(4, episode_length=20)
    env.reset(0)
    env.apply_shard_state(view(episode_length=15, tracking=0.3, penalty=0.5, command=0.9))
    stand(env, 6)
    other.load_state_dict(env.state_dict())
    for shard in (env, other):
        stand(shard, 4)
    saved, restored = env.report_shard_state(), other.report_shard_state()
    assert scales(saved) == pytest.approx((0.5 * 1.002**10, 0.9 * 0.998**10))
    assert {n: (s.value.tolist(), s.weight) for n, s in saved.items()} == {
        n: (s.value.tolist(), s.weight) for n, s in restored.items()
    }


# Symmetry


def seen_in_a_mirror(env: MujocoEnv) -> None:
    """Turn the second world into the mirror image of the first, command and all."""
    task, physics = inside(env)
    mirror = env.spec.mirror
    assert mirror is not None
    sides = Reflection.join([Reflection.of_signs(1, -1, 1, 1, -1, 1, -1), mirror.action])
    speeds = Reflection.join([Reflection.of_signs(1, -1, 1, -1, 1, -1), mirror.action])
    qpos, qvel = physics.qpos.float(), physics.qvel.float()
    qpos[1], qvel[1] = sides(qpos[0]), speeds(qvel[0])
    physics.set_state(all_of(env), qpos, qvel)
    task._command[1] = Reflection.of_signs(1, -1, -1)(task._command[0])
    task._view = None


@pytest.mark.parametrize(("robot", "near"), [("quadruped", 1e-3), ("go1", 0.06), ("g1", 0.06)])
def test_the_mirror_image_of_a_motion_is_a_motion_with_the_same_rewards(robot: str, near: float):
    if robot != "quadruped" and importlib.util.find_spec("mjlab") is None:
        pytest.skip("needs the robots extra")
    env = resolve_task(f"{robot}-velocity")(
        num_envs=2, device=CPU, evaluation=False, physics="mujoco"
    )
    assert isinstance(env, MujocoEnv)
    env.reset(3)
    seen_in_a_mirror(env)
    mirror = env.spec.mirror
    assert mirror is not None
    assert mirror.action is not None
    assert mirror.critic_obs is not None
    generator = torch.Generator().manual_seed(5)
    for count in range(12):
        action = 0.3 * torch.randn((2, env.spec.action_dim), generator=generator)
        action[1] = mirror.action(action[0])
        step = env.step(action)
        torch.testing.assert_close(step.reward[1], step.reward[0], atol=1e-2, rtol=0)
        if count < 4:  # until the robots' own small differences change the moment of a contact
            actor, critic = step.final_actor_obs, step.final_critic_obs
            assert critic is not None
            torch.testing.assert_close(mirror.actor_obs(actor[0]), actor[1], atol=near, rtol=0)
            torch.testing.assert_close(mirror.critic_obs(critic[0]), critic[1], atol=near, rtol=0)
    env.close()


def test_a_robot_whose_sides_differ_has_no_mirror():
    robot = load_robot("quadruped")
    lame = robot.default_pose.clone()
    lame[1] += 0.1
    assert mirror_robot(dataclasses.replace(robot, default_pose=lame)) is None
    model = copy.copy(robot.model)
    model.body("RL_thigh").pos[0] += 0.01
    assert mirror_robot(dataclasses.replace(robot, model=model)) is None
    assert mirror_robot(robot) is not None


def test_a_foot_that_stays_up_or_down_is_late_where_the_robot_shall_move():
    env = make(2)
    env.reset(1)
    task, _ = inside(env)
    task._command[0] = torch.tensor([0.5, 0.0, 0.0])
    task._command[1] = 0.0
    task._view = None
    stand(env, 1)
    task.memory["phase_s"].fill_(0.0)
    before = footwork(task._look(), task.memory["phase_s"], task._command)
    task.memory["phase_s"].copy_(torch.tensor([[0.3, 0.5, 0.7, 9.0]] * 2))
    late = footwork(task._look(), task.memory["phase_s"], task._command) - before
    assert late.tolist() == pytest.approx([0.0 + 0.1 + 0.3 + 0.4, 0.0], abs=1e-6)


def test_phases_are_timed_per_foot_from_its_last_change_of_contact():
    env = make(1)
    env.reset(1)
    task, _ = inside(env)
    expected, contact = torch.zeros(4), torch.zeros(4)
    generator = torch.Generator().manual_seed(2)
    for _ in range(40):
        step = env.step(0.8 * torch.randn((1, 12), generator=generator))
        if step.terminated or step.truncated:
            expected, contact = torch.zeros(4), torch.zeros(4)
            continue
        now = task._look().foot_contact[0]
        for foot in range(4):
            expected[foot] = expected[foot] + 0.02 if now[foot] == contact[foot] else 0.0
        contact = now.clone()
        torch.testing.assert_close(task.memory["phase_s"][0], expected)
    assert expected.unique().numel() > 1
