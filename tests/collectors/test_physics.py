# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""Both engines against each other, MuJoCo's own `mj_step` and closed forms."""

import ctypes
from collections.abc import Iterator, Sequence

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from collectors.physics.engine import Engine, Physics, make_physics
from collectors.physics.mujoco_physics import MujocoPhysics
from collectors.tasks.robots import Robot, load_robot
from collectors.tasks.velocity import quadruped_velocity

CPU = torch.device("cpu")
ENGINES = ("mujoco", "warp")
TIMESTEP = 0.002
MASS, GAIN, GRAVITY = 2.0, 20.0, 9.81
# A box that a spring-like servo pulls along x and that may fall onto a plane. Its four lower
# corners touch, four constraint rows each. Its mass is off the body's origin, or else C would
# count the body as simple and take its inertia from `dof_M0`, whatever `body_mass` says.
BOX = mujoco.MjModel.from_xml_string(f"""
<mujoco>
  <option timestep="{TIMESTEP}" gravity="0 0 -{GRAVITY}"/>
  <worldbody>
    <geom type="plane" size="0 0 1"/>
    <body name="box">
      <joint name="x" type="slide" axis="1 0 0"/>
      <joint name="z" type="slide" axis="0 0 1"/>
      <geom type="box" pos="0 0 0.1" size="0.1 0.1 0.1" mass="{MASS}"/>
    </body>
  </worldbody>
  <actuator><position joint="x" kp="{GAIN}"/></actuator>
  <sensor><framepos objtype="body" objname="box"/></sensor>
</mujoco>""")
RANDOMIZED = ("body_mass", "actuator_gainprm", "actuator_biasprm")
IN_THE_AIR, ON_THE_FLOOR = 4.0, 0.0


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(
    engine: Engine,
    num_envs: int,
    *,
    model: mujoco.MjModel = BOX,
    decimation: int = 1,
    max_contacts: int = 8,
    max_constraints: int = 40,
    randomized: Sequence[str] = (),
) -> Physics:
    return make_physics(
        engine,
        model,
        num_envs=num_envs,
        decimation=decimation,
        device=CPU,
        max_contacts=max_contacts,
        max_constraints=max_constraints,
        randomized=randomized,
    )


def put(physics: Physics, qpos: Tensor, qvel: Tensor) -> None:
    everything = torch.ones(len(qpos), dtype=torch.bool)
    physics.set_state(everything, qpos.to(physics.qpos.dtype), qvel.to(physics.qvel.dtype))


def put_boxes(physics: Physics, height: float, x: float = 0.0) -> None:
    n = len(physics.qpos)
    put(physics, torch.tensor([[x, height]]).repeat(n, 1), torch.zeros(n, 2))


def drive(physics: Physics, controls: Tensor) -> Tensor:
    """(num_steps, num_envs, nq + nv) states after every env step, for as many `controls`."""
    states = []
    for control in controls:
        physics.ctrl.copy_(control)
        physics.step()
        states.append(torch.cat([physics.qpos, physics.qvel], 1).double())
    return torch.stack(states)


def robot_start(robot: Robot, num_envs: int, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Start positions, start velocities and controls that differ between worlds."""
    generator = torch.Generator().manual_seed(0)

    def noise(size: int) -> Tensor:
        return 2 * torch.rand((num_envs, size), generator=generator, dtype=torch.float64) - 1

    joints = len(robot.joint_names)
    qpos = torch.tensor(robot.model.key("default").qpos).repeat(num_envs, 1)
    qpos[:, 7:] += 0.1 * noise(joints)
    actions = torch.randn((num_steps, num_envs, joints), generator=generator)
    controls = robot.default_pose + robot.action_scale * actions
    return qpos, 0.2 * noise(6 + joints), controls.double()


def make_robot(engine: Engine, robot: Robot, num_envs: int, decimation: int = 4) -> Physics:
    return make(
        engine,
        num_envs,
        model=robot.model,
        decimation=decimation,
        max_contacts=robot.max_contacts,
        max_constraints=robot.max_constraints,
    )


# The two engines


def test_engines_agree_tightly_at_first_and_by_distribution_for_100_env_steps():
    robot = load_robot("quadruped")
    qpos, qvel, controls = robot_start(robot, num_envs=256, num_steps=100)
    states = []
    for engine in ENGINES:
        physics = make_robot(engine, robot, num_envs=256)
        put(physics, qpos, qvel)
        states.append(drive(physics, controls))
        physics.check()
        physics.close()
    in_c, in_warp = states
    # Worlds differ by float32 rounding while they make the same contacts. Measured over 5 env
    # steps: at most 2e-6 in qpos (m, rad) and 7e-5 in qvel (m/s, rad/s).
    torch.testing.assert_close(in_warp[:5, :, :19], in_c[:5, :, :19], rtol=0, atol=2e-5)
    torch.testing.assert_close(in_warp[:5, :, 19:], in_c[:5, :, 19:], rtol=0, atol=7e-4)
    # After 20, a few feet have landed a physics step earlier or later; 98 % of the worlds are
    # still within 3e-6 and 1e-4.
    apart = (in_warp[19] - in_c[19]).abs()
    assert apart[:, :19].amax(1).quantile(0.95) < 3e-5
    assert apart[:, 19:].amax(1).quantile(0.95) < 1e-3
    # Single worlds part at last, as contacts are chaotic; their means do not. Measured over 100
    # env steps: at most 1e-3 m, 4e-3 rad and 5e-3 m/s. Servos 5 % stiffer make it 6e-3, 2.6e-2
    # and 6.5e-2, feet with 20 % less friction 1.3e-2, 2.4e-2 and 5.9e-2.
    mean_c, mean_warp = in_c.mean(1), in_warp.mean(1)
    for entries, tolerance in (
        (slice(2, 3), 3e-3),
        (slice(7, 19), 1.2e-2),
        (slice(19, 21), 1.5e-2),
    ):
        torch.testing.assert_close(
            mean_warp[:, entries], mean_c[:, entries], rtol=0, atol=tolerance
        )


def test_engines_agree_tightly_for_100_env_steps_without_contacts():
    controls = torch.linspace(-1, 1, 100).double()[:, None, None] * torch.tensor([1.0, -0.5, 2.0])
    states = []
    for engine in ENGINES:
        physics = make(engine, 3, decimation=4)
        put_boxes(physics, IN_THE_AIR, x=0.3)
        states.append(drive(physics, controls.transpose(1, 2)))
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=1e-4)
    assert states[0][-1, :, 1].max() < IN_THE_AIR - 3  # m: they fell


@pytest.mark.parametrize("engine", ENGINES)
def test_a_box_rests_on_the_floor_and_friction_holds_it_against_a_small_force(engine):
    """Friction coefficient 1: sliding takes a force over m g = 19.6 N, the servo pulls with 5 N."""
    physics = make(engine, 2)
    put_boxes(physics, ON_THE_FLOOR)
    last = drive(physics, torch.tensor([[0.25], [3.0]]).repeat(100, 1, 1))[-1]
    assert last[:, 1].abs().max() < 1e-3
    assert abs(last[0, 0]) < 2e-2  # soft contacts creep
    assert last[1, 0] > 0.2


# The C engine


def test_c_engine_is_a_loop_of_mj_step_with_a_cold_solver_per_env_step():
    robot = load_robot("quadruped")
    qpos, qvel, controls = robot_start(robot, num_envs=3, num_steps=30)
    physics = make_robot("mujoco", robot, num_envs=3, decimation=4)
    put(physics, qpos, qvel)
    ours = drive(physics, controls)
    theirs = np.empty_like(ours.numpy())
    for world in range(3):
        data = mujoco.MjData(robot.model)
        data.qpos[:], data.qvel[:] = qpos[world], qvel[world]
        for index, control in enumerate(controls[:, world]):
            data.ctrl[:] = control
            data.qacc_warmstart[:] = 0
            for _ in range(4):
                mujoco.mj_step(robot.model, data)
            theirs[index, world] = np.concatenate([data.qpos, data.qvel])
        assert np.array_equal(physics.sensordata[world].numpy(), data.sensordata)
    assert np.array_equal(ours.numpy(), theirs)


@pytest.mark.usefixtures("torch_threads")
def test_any_number_of_threads_gives_the_same_bits():
    robot = load_robot("quadruped")
    qpos, qvel, controls = robot_start(robot, num_envs=16, num_steps=20)
    states = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        physics = make_robot("mujoco", robot, num_envs=16)
        assert isinstance(physics, MujocoPhysics)
        assert len(physics._datas) == threads
        put(physics, qpos, qvel)
        states.append(drive(physics, controls))
        physics.close()
    assert torch.equal(states[0], states[1])


@pytest.mark.parametrize("speed", [1e12, 1e200])
def test_a_diverging_world_becomes_nan_without_a_word_instead_of_starting_afresh(
    speed, capfd, tmp_path, monkeypatch
):
    """`mj_step` would put the world back to its start, and warn on the terminal and in a file."""
    monkeypatch.chdir(tmp_path)
    physics = make("mujoco", 3)
    put_boxes(physics, IN_THE_AIR)
    physics.qvel[1, 0] = speed
    physics.step()
    state = torch.cat([physics.qpos, physics.qvel], 1)
    assert state.isfinite().all(1).tolist() == [True, False, True]
    assert capfd.readouterr().err == ""
    assert not list(tmp_path.iterdir())


# Both


@pytest.mark.parametrize("engine", ENGINES)
def test_a_world_put_into_a_new_state_forgets_that_it_was_nan(engine):
    physics = make(engine, 3)
    put_boxes(physics, ON_THE_FLOOR)
    physics.qvel[1] = float("nan")
    physics.step()
    assert physics.qvel.isfinite().all(1).tolist() == [True, False, True]
    put_boxes(physics, ON_THE_FLOOR)
    last = drive(physics, torch.full((10, 3, 1), 0.25))[-1]
    assert last.isfinite().all()
    assert torch.equal(last[0], last[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_step_is_decimation_physics_steps(engine):
    """Semi-implicit Euler in the air: z falls by g dt^2 (1 + 2 + ... + k) in k physics steps."""
    physics = make(engine, 1, decimation=5)
    put_boxes(physics, IN_THE_AIR)
    physics.step()
    assert IN_THE_AIR - float(physics.qpos[0, 1]) == pytest.approx(
        15 * GRAVITY * TIMESTEP**2, rel=2e-3
    )
    assert float(physics.qvel[0, 1]) == pytest.approx(-5 * GRAVITY * TIMESTEP, rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_sensors_are_of_the_state_that_the_last_physics_step_began_in(engine):
    physics = make(engine, 1, decimation=2)
    put_boxes(physics, IN_THE_AIR)
    physics.qvel[0, 0] = 3.0
    physics.step()
    assert float(physics.sensordata[0, 0]) == pytest.approx(3.0 * TIMESTEP)
    assert float(physics.qpos[0, 0]) == pytest.approx(2 * 3.0 * TIMESTEP, rel=1e-3)


@pytest.mark.parametrize("engine", ENGINES)
def test_set_state_puts_only_masked_worlds_and_blanks_their_sensors(engine):
    physics, twin = make(engine, 4), make(engine, 4)
    for one in (physics, twin):
        put_boxes(one, ON_THE_FLOOR)
        drive(one, torch.full((10, 4, 1), 0.5))
    mask = torch.tensor([True, False, True, False])
    new = torch.full((4, 2), 1.5, dtype=physics.qpos.dtype)
    new[~mask] = float("nan")  # rows outside are not used
    physics.set_state(mask, new, -new)
    assert torch.equal(physics.qpos[mask], new[mask])
    assert torch.equal(physics.qvel[mask], -new[mask])
    assert not physics.sensordata[mask].any()
    for name in ("qpos", "qvel", "sensordata"):
        assert getattr(physics, name)[~mask].any()
        assert torch.equal(getattr(physics, name)[~mask], getattr(twin, name)[~mask])
    # As if just made: the solver starts where a fresh engine's starts.
    fresh = make(engine, 4)
    put(fresh, torch.full((4, 2), 1.5), torch.full((4, 2), -1.5))
    controls = torch.full((10, 4, 1), 0.5)
    ours, untouched, begun = (drive(one, controls)[-1] for one in (physics, twin, fresh))
    assert torch.equal(ours[~mask], untouched[~mask])
    assert torch.equal(ours[mask], begun[mask])


@pytest.mark.parametrize("engine", ENGINES)
def test_set_model_changes_mass_and_gain_of_masked_worlds_only(engine):
    """One physics step in the air at x = 0.5 under control c: the servo's force is
    gain c - spring x, the speed force dt / mass."""
    physics = make(engine, 4, randomized=RANDOMIZED)
    put_boxes(physics, IN_THE_AIR, x=0.5)
    mass = torch.tensor(BOX.body_mass).float().repeat(4, 1)
    mass[:, 1] = torch.tensor([1.0, 3.0, 5.0, 7.0])
    gain = torch.tensor(BOX.actuator_gainprm).float().repeat(4, 1, 1)
    bias = torch.tensor(BOX.actuator_biasprm).float().repeat(4, 1, 1)
    gain[:, 0, 0] = torch.tensor([30.0, 40.0, 50.0, 60.0])
    bias[:, 0, 1] = -torch.tensor([3.0, 4.0, 5.0, 6.0])
    mask = torch.tensor([True, False, False, True])
    physics.set_model(mask, {"body_mass": mass, "actuator_gainprm": gain, "actuator_biasprm": bias})
    physics.ctrl.fill_(2.0)
    physics.step()
    force = [30 * 2.0 - 3 * 0.5, *[GAIN * (2.0 - 0.5)] * 2, 60 * 2.0 - 6 * 0.5]
    expected = [f * TIMESTEP / m for f, m in zip(force, [1.0, MASS, MASS, 7.0], strict=True)]
    assert physics.qvel[:, 0].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_restored_engine_continues_with_its_models_bit_for_bit(engine):
    physics, other = (make(engine, 3, decimation=2, randomized=RANDOMIZED) for _ in range(2))
    put_boxes(physics, ON_THE_FLOOR)
    mass = torch.tensor(BOX.body_mass).float() * torch.tensor([[0.5], [1.0], [2.0]])
    physics.set_model(torch.tensor([True, True, False]), {"body_mass": mass})
    controls = torch.full((20, 3, 1), 2.0)
    drive(physics, controls)
    state = physics.state_dict()
    assert state["model.body_mass"][:, 1].tolist() == [1.0, 2.0, 2.0]
    sensors = physics.sensordata.clone()
    saved = {name: tensor.clone() for name, tensor in state.items()}
    ours = drive(physics, controls)
    assert not torch.equal(ours[:, 0], ours[:, 1])
    assert all(torch.equal(state[name], saved[name]) for name in state)  # a copy, not a view
    other.load_state_dict(state)
    assert torch.equal(other.sensordata, sensors)
    assert torch.equal(drive(other, controls), ours)


# Room for contacts and constraints


@pytest.mark.parametrize(
    ("room", "field"),
    [
        ({"max_contacts": 2}, "env.args.max_contacts"),
        ({"max_constraints": 6}, "env.args.max_constraints"),
    ],
)
def test_lost_contacts_and_constraints_are_told_once_with_the_field_to_raise(room, field, capfd):
    physics = make("warp", 3, **room)
    put_boxes(physics, IN_THE_AIR)
    physics.step()
    physics.check()  # there is room for what does not touch
    put_boxes(physics, ON_THE_FLOOR)
    for _ in range(3):
        physics.step()
    with pytest.raises(ValueError, match=field) as told:
        physics.check()
    assert str(next(iter(room.values()))) in str(told.value)
    ctypes.CDLL(None).fflush(None)
    assert "overflow" not in "".join(capfd.readouterr()).lower()


@pytest.mark.parametrize("field", ["max_contacts", "max_constraints"])
def test_an_env_shard_reports_what_its_engine_lost(field):
    env = quadruped_velocity(num_envs=4, device=CPU, evaluation=False, physics="warp", **{field: 2})
    env.reset(0)
    for _ in range(10):
        env.step(torch.zeros(4, env.spec.action_dim))
    with pytest.raises(ValueError, match=f"raise env.args.{field}"):
        env.report_shard_state()


# Choice of the engine


def test_an_unknown_engine_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"physics is 'bullet': give 'auto', 'warp' or 'mujoco'"):
        quadruped_velocity(num_envs=1, device=CPU, evaluation=False, physics="bullet")


def test_the_c_engine_is_refused_on_a_gpu_in_one_line():
    with pytest.raises(ValueError, match="'mujoco' runs on the CPU, not on cuda") as refused:
        make_physics(
            "mujoco",
            BOX,
            num_envs=1,
            decimation=1,
            device=torch.device("cuda"),
            max_contacts=8,
            max_constraints=40,
        )
    assert "\n" not in str(refused.value)


def test_auto_is_the_c_engine_on_the_cpu():
    assert isinstance(make("auto", 1), MujocoPhysics)


def test_warp_refuses_to_have_no_room_for_constraints():
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><body><joint/><geom size='1'/></body></worldbody></mujoco>"
    )
    with pytest.raises(ValueError, match="max_constraints of at least 1"):
        make_physics(
            "warp",
            model,
            num_envs=1,
            decimation=1,
            device=torch.device("cpu"),
            max_contacts=0,
            max_constraints=0,
        )
