# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
import threading
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch
import warp as wp

import collectors.tasks.cartpole
from collectors.env import resolve_task
from collectors.physics import warp_physics
from collectors.physics.engine import Physics
from collectors.physics.warp_physics import WarpPhysics
from collectors.tasks.cartpole import SUCCESS, cartpole_swingup, swingup_reward
from collectors.tasks.mujoco_env import MujocoEnv
from fastsac.core.shard_state import ShardReport, ShardStateBus
from oracles import cartpole as oracle

CPU = torch.device("cpu")
MODEL_FILE = str(Path(collectors.tasks.cartpole.__file__).with_name("cartpole.xml"))
both_engines = pytest.mark.parametrize("engine", ["mujoco", "warp"])


def make(num_envs: int = 4, *, evaluation: bool = False, **args) -> MujocoEnv:
    return cartpole_swingup(num_envs=num_envs, device=CPU, evaluation=evaluation, **args)


def make_physics(
    num_envs: int, decimation: int = 1, model: mujoco.MjModel | None = None
) -> WarpPhysics:
    return WarpPhysics(
        model or mujoco.MjModel.from_xml_path(MODEL_FILE),
        num_envs=num_envs,
        decimation=decimation,
        max_contacts=0,
        max_constraints=1,
        device=CPU,
    )


def put(physics: Physics, qpos: list, qvel: list) -> None:
    everything = torch.ones(len(physics.qpos), dtype=torch.bool)
    physics.set_state(everything, torch.tensor(qpos), torch.tensor(qvel))


def push(env: MujocoEnv, num_steps: int, force: float = 0.0) -> list:
    action = torch.full((env.spec.num_envs, 1), force)
    return [env.step(action) for _ in range(num_steps)]


def angles(obs: torch.Tensor) -> torch.Tensor:
    return torch.atan2(obs[:, 2], obs[:, 1])


# Physics


def test_warp_agrees_with_mujoco_c_in_float64_off_and_on_the_rail_ends():
    model = mujoco.MjModel.from_xml_path(MODEL_FILE)
    starts = [[0.0, 3.0], [1.5, 0.3], [-1.7, -2.0], [0.4, 1.5]]
    speeds = [[0.0, 0.0], [1.5, 2.0], [-2.0, 0.5], [0.3, -4.0]]
    controls = 2 * np.random.default_rng(0).random((100, 4, 1)) - 1
    physics = make_physics(4)
    put(physics, starts, speeds)
    theirs = []
    for world in range(4):
        data = mujoco.MjData(model)
        data.qpos[:], data.qvel[:] = starts[world], speeds[world]
        theirs.append([])
        for control in controls[:, world]:
            data.ctrl[:] = control
            mujoco.mj_step(model, data)
            theirs[-1].append(np.concatenate([data.qpos, data.qvel]))
    ours = []
    for control in controls:
        physics.ctrl.copy_(torch.tensor(control))
        physics.step()
        ours.append(torch.cat([physics.qpos, physics.qvel], 1).clone())
    assert np.abs(np.array(theirs)[:, :, 0]).max() > 1.8
    # float32 rounding of 100 steps; no world swings through a chaotic passage in this second
    np.testing.assert_allclose(torch.stack(ours, 1), theirs, atol=2e-4)


def test_captured_steps_equal_launched_steps_bit_for_bit():
    captured, launched = make_physics(3, decimation=2), make_physics(3, decimation=2)
    for physics in (captured, launched):
        put(physics, [[0.0, 3.0], [1.5, 0.3], [-1.7, -2.0]], [[0.0, 0.0], [1.5, 2.0], [-2.0, 0.5]])
        physics.ctrl.fill_(0.5)
    for _ in range(50):
        captured.step()
        with wp.ScopedDevice("cpu"):
            launched._launch_steps()
        assert torch.equal(captured.qpos, launched.qpos)
        assert torch.equal(captured.qvel, launched.qvel)


def test_step_is_decimation_physics_steps():
    twice, once = make_physics(1, decimation=2), make_physics(1)
    for physics in (twice, once):
        put(physics, [[0.1, 2.0]], [[0.2, -1.0]])
        physics.ctrl.fill_(0.3)
    twice.step()
    once.step()
    once.step()
    assert torch.equal(twice.qpos, once.qpos)


def test_worlds_start_at_rest_although_kernels_were_tried_on_them():
    model = mujoco.MjModel.from_xml_path(MODEL_FILE)
    model.opt.gravity[0] = 1.0  # the upright pole would fall
    physics = make_physics(2, model=model)
    assert not physics.qpos.any()
    assert not physics.qvel.any()
    physics.step()
    assert physics.qvel.all()


def test_accelerations_at_a_horizontal_pole_are_the_textbooks():
    """The cart's is F / (M + m); the pole's m g l / (I + m l^2) about its hinge, with a capsule's
    I of a cylinder and two half spheres about the middle."""
    physics = make_physics(1)
    put(physics, [[0.0, np.pi / 2]], [[0.0, 0.0]])
    physics.ctrl.fill_(1.0)
    physics.step()
    cart, pole = (physics.qvel[0] / 0.01).tolist()
    mass, length, radius = 0.1, 1.0, 0.045
    cylinder = mass / (1 + 4 / 3 * radius / length)
    inertia = cylinder * (length**2 / 12 + radius**2 / 4) + (mass - cylinder) * (
        2 / 5 * radius**2 + length**2 / 4 + 3 / 8 * length * radius
    )
    assert cart == pytest.approx(10 / 1.1, rel=1e-4)
    assert pole == pytest.approx(
        mass * 9.81 * length / 2 / (inertia + mass * length**2 / 4), rel=1e-4
    )


def test_free_pole_keeps_its_energy():
    model = mujoco.MjModel.from_xml_path(MODEL_FILE)
    model.opt.enableflags |= mujoco.mjtEnableBit.mjENBL_ENERGY
    data = mujoco.MjData(model)

    def energy(physics: WarpPhysics) -> float:
        data.qpos[:], data.qvel[:] = physics.qpos[0], physics.qvel[0]
        mujoco.mj_forward(model, data)
        return float(data.energy.sum())

    physics = make_physics(1)
    put(physics, [[0.0, 2.0]], [[0.0, 0.0]])
    before = energy(physics)
    for _ in range(300):
        physics.step()
    # m g l = 0.1 * 9.81 * 1 is the energy between hanging and upright
    assert energy(physics) == pytest.approx(before, abs=0.02 * 0.98)


@both_engines
def test_rail_holds_a_cart_that_pushes_outwards(engine):
    env = make(1, evaluation=True, physics=engine)
    env.reset(0)
    positions = torch.stack([step.final_actor_obs[0, 0] for step in push(env, 200, force=1.0)])
    assert positions.max() > 1.8
    assert positions.max() < 2.1
    assert positions[-1] == pytest.approx(1.8, abs=0.2)


def test_set_state_heals_a_broken_world_and_leaves_the_others_alone():
    physics, untouched = make_physics(2), make_physics(2)
    for each in (physics, untouched):
        put(each, [[0.0, 3.0], [0.1, 0.2]], [[0.0, 0.0], [0.0, 0.0]])
    physics.qpos[0] = torch.nan
    for each in (physics, untouched):
        each.step()
        each.step()
    assert not physics.qvel[0].isfinite().any()
    start = [[0.0, 3.0], [9.0, 9.0]]
    for each in (physics, untouched):
        each.set_state(torch.tensor([True, False]), torch.tensor(start), torch.zeros(2, 2))
        each.step()
    assert torch.equal(physics.qpos, untouched.qpos)
    assert torch.equal(physics.qvel, untouched.qvel)


def test_kernels_are_compiled_by_one_process_and_announced_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(wp.config, "kernel_cache_dir", str(tmp_path))
    model, device = mujoco.MjModel.from_xml_path(MODEL_FILE), wp.get_device("cpu")
    inside, seen = [], []

    def start() -> None:
        with warp_physics._kernels_compiled_once(model, device):
            inside.append(1)
            seen.append(len(inside))
            threading.Event().wait(0.05)
            inside.pop()

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1]
    assert [record.message for record in caplog.records] == [
        "compiling MuJoCo-Warp kernels, once per machine, about 30 s"
    ]


def test_interrupted_compilation_is_announced_again(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(wp.config, "kernel_cache_dir", str(tmp_path))
    model, device = mujoco.MjModel.from_xml_path(MODEL_FILE), wp.get_device("cpu")
    for _ in range(2):
        with (
            pytest.raises(KeyboardInterrupt),
            warp_physics._kernels_compiled_once(model, device),
        ):
            raise KeyboardInterrupt
    assert len(caplog.records) == 2


# Reward and observation


def test_reward_equals_dm_controls_formula():
    rng = np.random.default_rng(1)
    rows = rng.uniform([-2, -4, -8, -1], [2, 4, 8, 1], (200, 4))
    rows[:4] = [[0, 0, 0, 0], [2, 0, 0, 0], [0, 0, 5, 0], [0, np.pi, 0, 1]]
    x, angle, speed, control = torch.tensor(rows, dtype=torch.float32).T
    obs = torch.stack([x, angle.cos(), angle.sin(), torch.zeros(200), speed], 1)
    expected = [oracle.swingup_reward(*row) for row in rows]
    assert expected[:3] == pytest.approx([1, 0.55, 0.55])
    np.testing.assert_allclose(swingup_reward(obs, control[:, None]), expected, atol=1e-6)


@both_engines
def test_reward_is_of_the_state_after_the_step_and_the_action_held(engine):
    env = make(3, evaluation=True, physics=engine)
    env.reset(0)
    assert env._physics is not None
    put(env._physics, [[0.0, 0.0], [1.0, 0.5], [-0.5, -1.0]], [[0.0, 0.0], [1.0, 1.0], [0.0, 3.0]])
    action = torch.tensor([[1.0], [0.0], [-0.5]])
    step = env.step(action)
    obs = step.final_actor_obs.double()
    expected = [
        oracle.swingup_reward(
            float(obs[i, 0]),
            float(torch.atan2(obs[i, 2], obs[i, 1])),
            float(obs[i, 4]),
            float(action[i, 0]),
        )
        for i in range(3)
    ]
    np.testing.assert_allclose(step.reward, expected, atol=1e-6)


@both_engines
def test_observation_is_position_cos_sin_and_the_two_velocities(engine):
    env = make(1, physics=engine)
    env.reset(0)
    assert env._physics is not None
    put(env._physics, [[0.3, np.pi / 6]], [[0.5, -2.0]])
    obs = env.reset_envs(torch.tensor([False])).actor_obs[0]
    assert obs.tolist() == pytest.approx([0.3, 3**0.5 / 2, 0.5, 0.5, -2.0])


def test_control_period_is_decimation_physics_steps():
    assert make().spec.control_period_s == pytest.approx(0.02)
    assert make(decimation=5).spec.control_period_s == pytest.approx(0.05)


# Episodes


def test_evaluation_starts_every_episode_hanging_at_age_0():
    env = make(64, evaluation=True, episode_length=5)
    obs = env.reset(0).actor_obs
    env.apply_shard_state({SUCCESS: torch.zeros(1, dtype=torch.float64)})
    for _ in range(2):
        assert (angles(obs).abs() > np.pi - 0.011).all()
        steps = push(env, 5)
        assert not torch.stack([step.truncated for step in steps[:4]]).any()
        assert steps[4].truncated.all()
        obs = steps[4].actor_obs


def test_training_spreads_the_ages_of_first_episodes_only():
    env = make(1000, episode_length=10)
    env.reset(0)
    ends = torch.stack([step.truncated for step in push(env, 20)])
    assert (ends[:10].sum(0) == 1).all()
    assert torch.equal(ends[:10], ends[10:])
    # 1000 envs over 10 steps: 100 each, 5 standard deviations of sqrt(1000 * 0.1 * 0.9)
    assert (ends[:10].sum(1) - 100).abs().max() < 48


def test_easy_starts_fade_with_the_fleets_success():
    everything = torch.ones(4000, dtype=torch.bool)
    for success, share in [(0.0, 0.5), (0.6, 0.2), (1.0, 0.0)]:
        env = make(4000)
        env.reset(0)
        env.apply_shard_state({SUCCESS: torch.tensor([success], dtype=torch.float64)})
        angle = angles(env.reset_envs(everything).actor_obs).abs()
        # an easy start is uniform over the circle, so it almost never is within 0.011 of hanging
        easy = (angle < np.pi - 0.011).double().mean()
        assert easy == pytest.approx(share, abs=0.04)
        assert (angle < np.pi / 2).double().mean() == pytest.approx(share / 2, abs=0.04)


def test_report_sums_mean_rewards_of_whole_hanging_episodes():
    env = make(6, episode_length=4, easy_start_share=0.5)
    env.reset(3)
    whole = (env._ages == 0) & ~env._task.memory["easy"]
    total, episodes, returns = 0.0, 0, np.zeros(6)
    for _ in range(40):
        (step,) = push(env, 1, force=0.3)
        returns += step.reward.double().numpy()
        hanging = (angles(step.actor_obs).abs() > np.pi - 0.011).numpy()
        for i in step.truncated.nonzero().flatten().tolist():
            if whole[i]:
                total, episodes = total + returns[i] / 4, episodes + 1
            returns[i], whole[i] = 0.0, bool(hanging[i])
    report = env.report_shard_state()[SUCCESS]
    assert 5 < episodes < 60
    assert report.weight == episodes
    assert report.value.item() == pytest.approx(total)
    assert env.report_shard_state()[SUCCESS].weight == 0


def test_first_episodes_of_spread_age_and_easy_starts_are_not_reported():
    env = make(64, episode_length=8, easy_start_share=1.0)
    env.reset(0)
    push(env, 40)
    assert env.report_shard_state()[SUCCESS].weight == 0
    env = make(64, episode_length=8, easy_start_share=0.0)
    env.reset(0)
    young = int((env._ages == 0).sum())
    push(env, 8)
    assert env.report_shard_state()[SUCCESS].weight == young


@both_engines
def test_broken_episode_does_not_reach_the_report(engine):
    env = make(2, evaluation=True, episode_length=3, physics=engine)
    env.reset(0)
    assert env._physics is not None
    env._physics.qpos[0] = torch.nan
    steps = push(env, 3)
    assert steps[-1].actor_obs.isfinite().all()
    report = env.report_shard_state()[SUCCESS]
    assert report.weight == 1
    assert report.value.isfinite().all()


def test_reports_of_two_shards_become_the_fleets_mean():
    bus = ShardStateBus(make().spec.shard_states)
    reports, totals = [], torch.zeros(2, dtype=torch.float64)
    for shard in range(2):
        env = make(50, evaluation=True, episode_length=5)
        env.reset(shard)
        push(env, 5 * (1 + shard), force=float(shard))
        states = dict(env.report_shard_state())
        totals += torch.tensor([states[SUCCESS].value.item(), states[SUCCESS].weight])
        reports.append(ShardReport(shard=shard, first_step=0, last_step=9, states=states))
    assert totals[1] == 150
    assert bus.merge(reports)[SUCCESS].item() == pytest.approx(float(totals[0] / totals[1]))


@both_engines
def test_saved_shard_continues_bit_for_bit_on_the_rail_end_and_at_starts(engine):
    args = {"episode_length": 60, "physics": engine}
    env = make(64, **args)
    env.reset(0)
    push(env, 40, force=1.0)
    env.apply_shard_state({SUCCESS: torch.tensor([0.7], dtype=torch.float64)})
    other = make(64, **args)
    other.load_state_dict(env.state_dict())
    for ours, theirs in zip(push(env, 70, force=1.0), push(other, 70, force=1.0), strict=True):
        assert torch.equal(ours.actor_obs, theirs.actor_obs)
        assert torch.equal(ours.truncated, theirs.truncated)
    reports = [shard.report_shard_state()[SUCCESS] for shard in (env, other)]
    assert reports[0].weight == reports[1].weight > 0
    assert torch.equal(reports[0].value, reports[1].value)


# Arguments


def test_task_name_leads_here():
    assert resolve_task("cartpole-swingup") is cartpole_swingup


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"decimation": 0}, "decimation is 0"),
        ({"easy_start_share": 1.5}, "easy_start_share is 1.5"),
        ({"physics": "bullet"}, "physics is 'bullet'"),
    ],
)
def test_arguments_outside_their_range_are_refused(args, message):
    with pytest.raises(ValueError, match=message):
        make(**args)


def test_unknown_argument_is_a_type_error():
    with pytest.raises(TypeError, match="easy_start"):
        make(easy_start=0.5)


def test_construction_does_not_start_the_simulator():
    assert make()._physics is None
