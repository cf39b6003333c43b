# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
import copy
import functools
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import small_config
from scipy.spatial.transform import Rotation
from torch import Tensor

from collectors.curriculum.bin_sampler import FAILURES, SAMPLING, bin_of
from collectors.env import resolve_task
from collectors.physics.mujoco_physics import MujocoPhysics
from collectors.tasks.kinematics import Bodies
from collectors.tasks.mujoco_env import MujocoEnv
from collectors.tasks.wbt import (
    JOINT_NOISE,
    POSE_NOISE,
    TWIST_NOISE,
    WholeBodyTracking,
    humanoid_wbt,
)
from collectors.tasks.wbt_reward import MAX_REWARD, compare, failed, likeness
from collectors.tasks.wbt_robots import load_tracking_robot
from collectors.testing import check_env_shard
from fastsac.metrics import read_metrics
from fastsac.trainer import train
from oracles.tracking import Frames, body_frames, reward_per_second, save_motion, swaying_motion

CPU = torch.device("cpu")
FRAMES = 120
BINS = 3
ROBOTS = ["humanoid", "g1"]


@functools.cache
def arrays_of(name: str, num_frames: int = FRAMES) -> dict[str, np.ndarray]:
    robot = load_tracking_robot(name)
    return swaying_motion(
        robot.model,
        tuple(robot.body_names),
        tuple(robot.joint_names),
        robot.default_pose.double().numpy(),
        num_frames=num_frames,
        fps=1 / (robot.decimation * robot.timestep),
    )


@pytest.fixture(scope="module")
def motion(tmp_path_factory) -> str:
    """File of a clip of FRAMES frames, in BINS bins, for the humanoid."""
    return save_motion(tmp_path_factory.mktemp("motion") / "sway.npz", arrays_of("humanoid"))


@pytest.fixture
def make(motion: str):
    def build(num_envs: int = 4, *, evaluation: bool = False, **args) -> MujocoEnv:
        args = {"motion": motion, "physics": "mujoco", **args}
        return humanoid_wbt(num_envs=num_envs, device=CPU, evaluation=evaluation, **args)

    return build


def inside(env: MujocoEnv) -> tuple[WholeBodyTracking, MujocoPhysics]:
    task, physics = env._task, env._physics
    assert isinstance(task, WholeBodyTracking)
    assert isinstance(physics, MujocoPhysics)
    return task, physics


def all_of(env: MujocoEnv) -> Tensor:
    return torch.ones(env.spec.num_envs, dtype=torch.bool)


def idle(env: MujocoEnv) -> Tensor:
    return torch.zeros((env.spec.num_envs, env.spec.action_dim))


def reference_state(frames: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(n, nq) and (n, nv) of the humanoid at frames of the clip."""
    robot, clip = load_tracking_robot("humanoid"), arrays_of("humanoid")
    base = robot.body_names.index(robot.model.body(1).name)
    quat = clip["body_quat_w"][frames, base]
    turning = Rotation.from_quat(np.roll(quat, -1, axis=1)).inv()
    qpos = [clip["body_pos_w"][frames, base], quat, clip["joint_pos"][frames]]
    qvel = [
        clip["body_lin_vel_w"][frames, base],
        turning.apply(clip["body_ang_vel_w"][frames, base]),
        clip["joint_vel"][frames],
    ]
    return np.concatenate(qpos, 1), np.concatenate(qvel, 1)


def reference_bodies(frame: int) -> Frames:
    clip = arrays_of("humanoid")
    quats = np.roll(clip["body_quat_w"][frame], -1, axis=1)
    return Frames(
        position=clip["body_pos_w"][frame],
        rotation=[Rotation.from_quat(quat) for quat in quats],
        velocity=clip["body_lin_vel_w"][frame],
        turning=clip["body_ang_vel_w"][frame],
    )


def put(env: MujocoEnv, frames: list[int], qpos: np.ndarray, qvel: np.ndarray) -> None:
    """Put the worlds into states, and the clip at frames, of which the next step is judged."""
    task, physics = inside(env)
    task.memory["frame"].copy_(torch.tensor(frames))
    physics.set_state(all_of(env), torch.from_numpy(qpos), torch.from_numpy(qvel))
    task._bodies = None


def random_states(n: int, seed: int, spread: float) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Frames of the clip, and states that are off by `spread`."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(1, FRAMES, n).tolist()
    qpos, qvel = reference_state(frames)
    qpos += spread * rng.normal(size=qpos.shape)
    qpos[:, 3:7] /= np.linalg.norm(qpos[:, 3:7], axis=1, keepdims=True)
    return frames, qpos, qvel + spread * rng.normal(size=qvel.shape)


# Contract


@pytest.mark.parametrize("name", ROBOTS)
def test_keeps_the_contract(name: str, tmp_path):
    if name != "humanoid" and importlib.util.find_spec("mjlab") is None:
        pytest.skip("needs the robots extra")
    path = save_motion(tmp_path / "short.npz", arrays_of(name, 30))
    few = {} if name == "humanoid" else {"num_steps": 5}
    check_env_shard(
        resolve_task(f"{name}-wbt"),
        **{"num_envs": 2, "num_steps": 20, "motion": path, "physics": "mujoco", **few},
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"start_noise": 2.0}, r"env\.args\.start_noise is 2: give a scale in \[0, 1\]"),
        ({"episode_length": 0}, r"env\.args\.episode_length is 0: give at least 1"),
        ({"decimation": 0}, r"env\.args\.decimation is 0: give at least 1"),
        ({"evaluation_start": "end"}, r"evaluation_start is 'end': give uniform or start"),
        ({"initial_bins": [2, 3], "initial_steps": 9}, r"initial_bins is \[2, 3\]: .* 0 to 2"),
    ],
)
def test_values_that_are_not_allowed_are_refused(make, args: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make(**args)


def test_a_robot_without_a_clip_of_its_own_asks_for_one():
    if importlib.util.find_spec("mjlab") is None:
        pytest.skip("needs the robots extra")
    with pytest.raises(ValueError, match=r"g1-wbt comes without a motion: set env\.args\.motion"):
        resolve_task("g1-wbt")(num_envs=1, device=CPU, evaluation=False)


# Reward


@pytest.mark.parametrize("spread", [0.05, 0.2, 0.5])
def test_reward_is_that_of_a_naive_loop(make, spread: float):
    n = 12
    env = make(n)
    env.reset(0)
    task, _ = inside(env)
    robot = load_tracking_robot("humanoid")
    frames, qpos, qvel = random_states(n, seed=1, spread=spread)
    generator = torch.Generator().manual_seed(0)
    last, action = torch.rand((2, n, len(robot.joint_names)), generator=generator)
    task.memory["action"].copy_(last)
    task.act(action)
    put(env, frames, qpos, qvel)
    reward = task.outcome(action).reward
    limits = robot.model.jnt_range[1:]
    for row in range(n):
        expected = reward_per_second(
            body_frames(robot.model, tuple(robot.body_names), qpos[row], qvel[row]),
            reference_bodies(frames[row]),
            robot.body_names.index(robot.anchor),
            (action - last)[row].double().numpy(),
            qpos[row, 7:],
            limits,
        )
        assert float(reward[row]) == pytest.approx(0.02 * expected, rel=1e-4, abs=1e-6)
    if spread == 0.5:
        assert (qpos[:, 7:] > limits[:, 1]).any()  # or the penalty would be 0 everywhere


def test_playing_the_motion_back_earns_the_most_and_never_terminates(make):
    env = make(FRAMES - 1)
    env.reset(0)
    task, _ = inside(env)
    frames = list(range(1, FRAMES))
    task.act(idle(env))
    put(env, frames, *reference_state(frames))
    outcome = task.outcome(idle(env))
    torch.testing.assert_close(
        outcome.reward, torch.full((FRAMES - 1,), 0.02 * MAX_REWARD), rtol=1e-4, atol=0
    )
    assert MAX_REWARD == 5
    assert not outcome.terminated.any()
    assert outcome.truncated is not None
    assert outcome.truncated.tolist() == [False] * (FRAMES - 2) + [True]


def bodies_at(frame: int, n: int) -> Bodies:
    """`n` worlds that are all at a frame of the clip."""
    frames = reference_bodies(frame)
    rotation = np.stack([r.as_matrix() for r in frames.rotation])
    parts = (frames.position, rotation, frames.velocity, frames.turning)
    return Bodies(*(torch.tensor(np.stack([part] * n)) for part in parts))


def test_a_robot_elsewhere_that_faces_elsewhere_loses_only_what_the_anchor_earns():
    motion = bodies_at(40, 2)
    turn = torch.tensor(Rotation.from_euler("z", [[0.0], [3.0]]).as_matrix())[:, None]
    far = torch.tensor([[[3.0, -5.0, 0.0]]])
    robot = Bodies(
        (turn @ motion.position[..., None]).squeeze(-1) + far,
        turn @ motion.rotation,
        motion.velocity,
        motion.turning,
    )
    errors = compare(robot, motion, 1)
    torch.testing.assert_close(
        likeness(errors), torch.tensor([4.5, 4.0]).double(), rtol=0, atol=1e-9
    )


# Termination


@pytest.mark.parametrize(("sign", "axis"), [(1, "y"), (-1, "x")])
def test_height_and_tilt_of_the_anchor_and_heights_of_end_effectors_terminate(sign: int, axis: str):
    robot = load_tracking_robot("humanoid")
    anchor = robot.body_names.index(robot.anchor)
    ends = torch.tensor([robot.body_names.index(name) for name in robot.end_effectors])
    other = next(k for k in range(len(robot.body_names)) if k != anchor and k not in ends.tolist())
    motion = bodies_at(10, 7)
    motion.rotation[:, anchor] = torch.eye(3, dtype=torch.float64)
    # cos 78 degrees is 0.208, cos 79 degrees 0.191: the vertical part is off by 0.8 in between
    tilts = Rotation.from_euler(axis, [[78], [79]], degrees=True).as_matrix()
    robot_ = copy.deepcopy(motion)
    robot_.position[0, anchor, 2] += sign * 0.249
    robot_.position[1, anchor, 2] += sign * 0.251
    robot_.rotation[2:4, anchor] = torch.tensor(tilts)
    robot_.position[4, ends[0], 2] += sign * 0.249
    robot_.position[5, ends[-1], 2] += sign * 0.251
    robot_.position[6, other, 2] += sign * 0.5
    expected = [False, True, False, True, False, True, False]
    assert failed(compare(robot_, motion, anchor), ends).tolist() == expected


def test_a_fall_ends_the_episode_without_a_truncation_also_at_the_end_of_the_clip(make):
    env = make(4, decimation=4)
    env.reset(0)
    task, _ = inside(env)
    frames = [50, 50, FRAMES - 2, FRAMES - 2]
    qpos, qvel = reference_state(frames)
    qpos[[1, 3], 2] -= 0.4
    put(env, frames, qpos, qvel)
    env._ages.zero_()
    step = env.step(idle(env))
    assert step.terminated.tolist() == [False, True, False, True]
    assert step.truncated.tolist() == [False, False, True, False]
    assert step.info["failed"].tolist() == [0, 1, 0, 1]
    assert task.memory["frame"][0] == 51


# Phase


def test_the_end_of_the_clip_truncates_and_shows_its_last_frame(make):
    env = make(2, start_noise=0.0)
    env.reset(0)
    task, _ = inside(env)
    env._ages.zero_()
    put(env, [FRAMES - 3] * 2, *reference_state([FRAMES - 3] * 2))
    joints = env.spec.action_dim
    clip = torch.tensor(arrays_of("humanoid")["joint_pos"]).float()
    step = env.step(idle(env))
    assert not step.truncated.any()
    torch.testing.assert_close(step.actor_obs[:, :joints], clip[[FRAMES - 1] * 2])
    step = env.step(idle(env))
    assert step.truncated.all()
    torch.testing.assert_close(step.final_actor_obs[:, :joints], clip[[FRAMES - 1] * 2])
    begun = task.memory["frame"]
    torch.testing.assert_close(step.actor_obs[:, :joints], clip[begun + 1])
    offset = step.actor_obs[:, 2 * joints + 15 : 3 * joints + 15]
    pose = load_tracking_robot("humanoid").default_pose
    torch.testing.assert_close(offset, clip[begun] - pose, rtol=0, atol=1e-6)


def test_an_episode_of_the_longest_length_is_truncated_before_the_end_of_the_clip(make):
    env = make(2, episode_length=3)
    env.reset(0)
    env._ages.zero_()
    put(env, [20, 21], *reference_state([20, 21]))
    steps = [env.step(idle(env)).truncated.tolist() for _ in range(3)]
    assert steps == [[False] * 2, [False] * 2, [True] * 2]
    assert (env.spec.episode_length, make(evaluation=True).spec.episode_length) == (3, FRAMES - 1)


# Observation


def test_observations_are_those_of_a_naive_loop(make):
    n = 6
    env = make(n)
    env.reset(0)
    task, _ = inside(env)
    robot, clip = load_tracking_robot("humanoid"), arrays_of("humanoid")
    anchor, base = (
        robot.body_names.index(name) for name in (robot.anchor, robot.model.body(1).name)
    )
    frames, qpos, qvel = random_states(n, seed=2, spread=0.3)
    action = torch.rand((n, env.spec.action_dim), generator=torch.Generator().manual_seed(0))
    task.act(action)
    put(env, frames, qpos, qvel)
    observation = task.observe()
    for row, frame in enumerate(frames):
        ahead = min(frame + 1, FRAMES - 1)
        seen = body_frames(robot.model, tuple(robot.body_names), qpos[row], qvel[row])
        aim = reference_bodies(ahead)
        to_anchor, to_base = seen.rotation[anchor].inv(), seen.rotation[base].inv()

        def columns(rotation: Rotation) -> np.ndarray:
            return rotation.as_matrix()[:, :2].flatten()

        actor = [
            clip["joint_pos"][ahead],
            clip["joint_vel"][ahead],
            to_anchor.apply(aim.position[anchor] - seen.position[anchor]),
            columns(to_anchor * aim.rotation[anchor]),
            to_base.apply(seen.velocity[base]),
            to_base.apply(seen.turning[base]),
            qpos[row, 7:] - robot.default_pose.double().numpy(),
            qvel[row, 6:],
            action[row].double().numpy(),
        ]
        critic = [
            *actor,
            to_anchor.apply(seen.position - seen.position[anchor]).flatten(),
            *(columns(to_anchor * rotation) for rotation in seen.rotation),
        ]
        np.testing.assert_allclose(observation.actor_obs[row], np.concatenate(actor), atol=2e-5)
        assert observation.critic_obs is not None
        np.testing.assert_allclose(observation.critic_obs[row], np.concatenate(critic), atol=2e-5)


# Starts


def test_without_noise_an_episode_starts_in_the_state_of_its_frame(make):
    env = make(32, start_noise=0.0)
    env.reset(0)
    task, physics = inside(env)
    qpos, qvel = reference_state(task.memory["frame"].tolist())
    np.testing.assert_allclose(physics.qpos, qpos, atol=1e-6)
    np.testing.assert_allclose(physics.qvel, qvel, atol=1e-6)
    assert len(set(task.memory["frame"].tolist())) > 20


def test_noise_of_starts_fills_its_ranges_and_stays_within_joint_limits(make):
    n, scale = 4000, 0.5
    env = make(n, start_noise=scale)
    env.reset(0)
    task, physics = inside(env)
    qpos, qvel = reference_state(task.memory["frame"].tolist())
    turn = Rotation.from_quat(np.roll(physics.qpos[:, 3:7].numpy(), -1, axis=1))
    aim = Rotation.from_quat(np.roll(qpos[:, 3:7], -1, axis=1))
    spin = turn.apply(physics.qvel[:, 3:6].numpy()) - aim.apply(qvel[:, 3:6])
    moved = [
        physics.qpos[:, :3].numpy() - qpos[:, :3],
        (turn * aim.inv()).as_rotvec(),
        physics.qvel[:, :3].numpy() - qvel[:, :3],
        spin,
    ]
    half = np.abs(np.concatenate(moved, 1)).max(0)
    widths = scale * np.array([*POSE_NOISE, *TWIST_NOISE])
    np.testing.assert_allclose(half, widths, rtol=0.01)
    bend = physics.qpos[:, 7:].numpy() - qpos[:, 7:]
    assert np.abs(bend).max() == pytest.approx(scale * JOINT_NOISE, rel=0.01)
    low, high = load_tracking_robot("humanoid").model.jnt_range[1:].T
    assert (physics.qpos[:, 7:].numpy() >= low - 1e-6).all()
    assert (physics.qpos[:, 7:].numpy() <= high + 1e-6).all()
    np.testing.assert_allclose(physics.qvel[:, 6:], qvel[:, 6:], atol=1e-6)


def test_a_motion_beyond_the_joint_limits_starts_at_them(make, tmp_path):
    low, high = load_tracking_robot("humanoid").model.jnt_range[1:].T
    arrays = dict(arrays_of("humanoid", 30))
    arrays["joint_pos"] = np.where(np.arange(30)[:, None] % 2, low - 0.1, high + 0.1)
    env = make(20, motion=save_motion(tmp_path / "wide.npz", arrays), start_noise=0.0)
    env.reset(0)
    task, physics = inside(env)
    odd = task.memory["frame"].numpy()[:, None] % 2
    np.testing.assert_allclose(physics.qpos[:, 7:], np.where(odd, low, high), atol=1e-6)


def test_episodes_start_where_the_fleet_fails(make):
    env = make(2000)
    env.apply_shard_state({FAILURES: torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64)})
    env.reset(0)
    task, _ = inside(env)
    starts = torch.bincount(bin_of(task.memory["frame"], FRAMES, BINS), minlength=BINS)
    share = 0.9 + 0.1 / 3
    spread = 5 * (share * (1 - share) / 2000) ** 0.5
    assert float(starts[2]) / 2000 == pytest.approx(share, abs=spread)
    assert env.report_shard_state()[SAMPLING].value.tolist() == pytest.approx(
        [0.1 / 3, 0.1 / 3, share]
    )


def test_evaluations_start_all_over_the_clip_and_without_noise(make):
    env, twin = make(7, evaluation=True), make(7, evaluation=True)
    env.reset(5)
    twin.reset(5)
    task, physics = inside(env)
    starts = task.memory["frame"].tolist()
    assert [start * 7 // (FRAMES - 1) for start in starts] == list(range(7))
    assert starts == inside(twin)[0].memory["frame"].tolist()
    np.testing.assert_allclose(physics.qpos, reference_state(starts)[0], atol=1e-6)
    first = make(3, evaluation=True, evaluation_start="start")
    first.reset(5)
    assert inside(first)[0].memory["frame"].tolist() == [0, 0, 0]


# Failures


def test_failures_are_counted_in_the_bin_of_the_frame_where_they_happen(make):
    env = make(5, rate=0.1, start_noise=0.0)
    env.reset(0)
    env._ages.zero_()
    # The next frames are 40 and 39, on both sides of the border of bins 0 and 1.
    frames = [39, 39, 38, 90, FRAMES - 2]
    qpos, qvel = reference_state(frames)
    qpos[:3, 2] -= 0.4
    put(env, frames, qpos, qvel)
    env.step(idle(env))
    report = env.report_shard_state()[FAILURES]
    assert report.value.tolist() == pytest.approx([0.1, 0.2, 0.0])
    assert report.weight == 3
    put(env, frames, qpos, qvel)
    env.step(idle(env))
    put(env, [50] * 5, *reference_state([50] * 5))
    env.step(idle(env))
    assert env.report_shard_state()[FAILURES].value.tolist() == pytest.approx([0.09, 0.18, 0.0])


def test_survival_of_an_evaluation_is_the_share_of_the_clip_that_an_episode_lasts(make):
    env = make(6, evaluation=True)
    obs = env.reset(1).actor_obs
    task, _ = inside(env)
    starts = task.memory["frame"].tolist()
    generator = torch.Generator().manual_seed(0)
    survived = torch.zeros(6, dtype=torch.float64)
    length, running = torch.zeros(6), all_of(env)
    for _ in range(env.spec.episode_length):
        step = env.step(0.3 * torch.randn((6, env.spec.action_dim), generator=generator))
        survived += step.info["clip_survived"] * running
        length += running
        assert step.info["start_frame"][running].tolist() == [
            starts[n] for n in running.nonzero().flatten()
        ]
        running = running & ~(step.terminated | step.truncated)
    assert not running.any()
    assert obs.isfinite().all()
    lasted = [float(n) / (FRAMES - 1 - start) for n, start in zip(length, starts, strict=True)]
    assert (survived / length).tolist() == pytest.approx(lasted)
    assert min(lasted) < 1


# Fleet


def drifts(motion: str, folder: Path, rule: str) -> list[float]:
    """Total variation of two shards' sampling from the fleet's, in each of four ticks. In two of
    them, one shard's episodes start in the first bin and the other's in the last."""
    ticks, vector_steps, num_envs = 4, 20, 32
    config = small_config(
        folder,
        total_env_steps=ticks * vector_steps * num_envs,
        env={
            "task": "humanoid-wbt",
            "num_envs": num_envs,
            "args": {"motion": motion, "rate": 0.1, "initial_steps": 2 * vector_steps},
            "shard_args": [{"initial_bins": [0, 0]}, {"initial_bins": [2, 2]}],
        },
        algorithm={"weight_publish_interval": 2 * vector_steps},
        replay={"steps_per_env": 60},
        log={"interval_env_steps": vector_steps * num_envs},
        shard_state={FAILURES: rule},
    )
    records = read_metrics(Path(train(config, runtime="inline").run_dir))
    return [record["curriculum/sampling/tv_mean"] for record in records]


def test_shards_that_start_unequal_drift_apart_unless_they_share_failures(motion, tmp_path):
    alone = drifts(motion, tmp_path / "alone", "none")
    shared = drifts(motion, tmp_path / "shared", "linear_ema")
    # Each shard has one bin to itself; a report after the last such vector step tells of the next.
    assert alone[0] == shared[0] == 0.5
    assert min(alone[1:]) > 0.05
    assert max(shared[1:]) < 1e-12


# State


def test_a_restored_shard_continues_with_the_same_sampler_bit_for_bit(make):
    args = {"initial_bins": [0, 1], "initial_steps": 60, "kernel_size": 2}
    env, twin = make(8, **args), make(8, **args)
    env.reset(0)
    env.apply_shard_state({FAILURES: torch.tensor([0.1, 0.7, 0.3], dtype=torch.float64)})
    generator = torch.Generator().manual_seed(0)
    actions = torch.randn((100, 8, env.spec.action_dim), generator=generator)
    for action in actions[:40]:
        env.step(action)
    state = copy.deepcopy(env.state_dict())
    twin.reset(1)
    twin.load_state_dict(state)
    for action in actions[40:]:
        one, other = env.step(action), twin.step(action)
        assert torch.equal(one.actor_obs, other.actor_obs)
        assert torch.equal(inside(env)[0].memory["frame"], inside(twin)[0].memory["frame"])
    reports = env.report_shard_state(), twin.report_shard_state()
    assert float(reports[0][FAILURES].weight) > 10
    for name in (FAILURES, SAMPLING):
        assert torch.equal(reports[0][name].value, reports[1][name].value)


def test_both_engines_agree_in_the_first_env_steps(make):
    n = 3
    envs = [make(n, physics=engine, start_noise=0.3) for engine in ("mujoco", "warp")]
    observations = [env.reset(0) for env in envs]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        action = 0.2 * torch.randn((n, envs[0].spec.action_dim), generator=generator)
        steps = [env.step(action) for env in envs]
        torch.testing.assert_close(steps[0].actor_obs, steps[1].actor_obs, rtol=0, atol=5e-3)
        torch.testing.assert_close(steps[0].reward, steps[1].reward, rtol=0, atol=1e-4)
        assert torch.equal(steps[0].terminated, steps[1].terminated)
    torch.testing.assert_close(observations[0].actor_obs, observations[1].actor_obs)
