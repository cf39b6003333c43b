# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
import importlib.util
import math
import re
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

import collectors.tasks.robots
from collectors.physics.warp_physics import WarpPhysics
from collectors.tasks.robots import Robot, load_robot

XML = Path(collectors.tasks.robots.__file__).with_name("quadruped.xml").read_text()
HOME = '<keyframe><key name="home" qpos="0 0 0.3 1 0 0 0 {}"/></keyframe>'.format(
    " ".join(["0.1 0.8 -1.5"] * 4)
)
MENAGERIE_XML = XML.replace("</mujoco>", f"{HOME}</mujoco>")
NEEDS_MJLAB = pytest.mark.skipif(
    importlib.util.find_spec("mjlab") is None, reason="needs the robots extra"
)
ROBOTS = [
    "quadruped",
    pytest.param("go1", marks=NEEDS_MJLAB),
    pytest.param("g1", marks=NEEDS_MJLAB),
]


@pytest.fixture
def menagerie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Menagerie checkout."""
    monkeypatch.setenv("MENAGERIE_ROOT", str(tmp_path))
    return tmp_path


def add(root: Path, name: str, **files: str) -> None:
    (root / name).mkdir()
    for stem, text in files.items():
        (root / name / f"{stem}.xml").write_text(text)


def start(robot: Robot) -> mujoco.MjData:
    """The default pose with the feet on the floor, servos holding it."""
    data = mujoco.MjData(robot.model)
    data.qpos[:] = [0, 0, robot.base_height, 1, 0, 0, 0, *robot.default_pose.tolist()]
    data.ctrl[:] = robot.default_pose.numpy()
    return data


def lean(data: mujoco.MjData) -> float:
    """Angle of the base's z axis to the vertical, rad."""
    return math.acos(data.body(1).xmat[8])


@pytest.mark.parametrize("name", ["quadruped", pytest.param("go1", marks=NEEDS_MJLAB)])
def test_stands_still_for_5_s_in_the_default_pose(name: str) -> None:
    robot = load_robot(name)
    data = start(robot)
    for _ in range(round(5 / robot.timestep)):
        mujoco.mj_step(robot.model, data)
        assert data.qpos[2] > 0.85 * robot.base_height
        assert lean(data) < 0.15
    assert np.abs(data.qvel).max() < 0.01
    assert np.abs(data.qpos[7:] - robot.default_pose.numpy()).max() < 0.3
    assert np.linalg.norm(data.qpos[:2]) < 0.1


@NEEDS_MJLAB
def test_g1_stays_up_for_1_s_without_balancing() -> None:
    robot = load_robot("g1")
    data = start(robot)
    for _ in range(round(1 / robot.timestep)):
        mujoco.mj_step(robot.model, data)
        assert data.qpos[2] > 0.85 * robot.base_height
        assert lean(data) < 0.4


@pytest.mark.parametrize("name", ROBOTS)
def test_feet_just_touch_the_floor_at_the_base_height(name: str) -> None:
    robot = load_robot(name)
    data = start(robot)
    mujoco.mj_forward(robot.model, data)
    floor = robot.model.geom("floor").id
    gaps = [
        mujoco.mj_geomDistance(robot.model, data, floor, geom, 1.0, None)
        for geom in robot.foot_geoms
    ]
    assert min(gaps) == pytest.approx(0.0, abs=1e-6)
    assert max(gaps) < 0.01
    assert robot.fall_height < 0.6 * robot.base_height


@pytest.mark.parametrize("name", ROBOTS)
def test_joints_follow_a_free_base_in_the_order_of_the_actuators(name: str) -> None:
    robot = load_robot(name)
    model = robot.model
    assert model.jnt_type.tolist() == [mujoco.mjtJoint.mjJNT_FREE] + [
        mujoco.mjtJoint.mjJNT_HINGE
    ] * len(robot.joint_names)
    assert [model.joint(i + 1).name for i in range(model.nu)] == list(robot.joint_names)
    assert model.actuator_trnid[:, 0].tolist() == list(range(1, model.njnt))
    assert model.jnt_limited[1:].all()
    assert model.na == 0
    assert model.opt.timestep == robot.timestep
    # A position servo without joint damping pulls with kp * (target - angle), here below its limit.
    data = start(robot)
    mujoco.mj_forward(model, data)
    data.ctrl[:] += 1e-3 * np.arange(1, model.nu + 1)
    mujoco.mj_forward(model, data)
    pull = model.actuator_gainprm[:, 0] * 1e-3 * np.arange(1, model.nu + 1)
    np.testing.assert_allclose(data.qfrc_actuator[6:], pull, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ROBOTS)
def test_models_are_mesh_free_and_collide_only_with_the_floor(name: str) -> None:
    model = load_robot(name).model
    assert model.nmesh == 0
    assert model.nbuffer < 200_000
    floor = model.geom("floor").id
    touching = [g for g in range(model.ngeom) if g != floor and model.geom_conaffinity[g]]
    assert (model.geom_contype[np.arange(model.ngeom) != floor] == 0).all()
    assert set(load_robot(name).foot_geoms) < set(touching)


@pytest.mark.parametrize(
    ("name", "mass", "joints", "feet", "foot_geoms"),
    [
        # 5.6 + 0.3 + 0.4 + 2 * 0.005 kg of trunk, four legs of 0.5 + 0.7 + 0.17 + 0.05 kg
        ("quadruped", 11.99, 12, ("FL", "FR", "RL", "RR"), 4),
        # 5.204 kg of trunk, four legs of 0.68 + 1.009 + 0.195862 kg
        pytest.param("go1", 12.743448, 12, ("FR", "FL", "RR", "RL"), 4, marks=NEEDS_MJLAB),
        # the sum of the masses in g1.xml
        pytest.param("g1", 33.341142, 29, ("left", "right"), 4, marks=NEEDS_MJLAB),
    ],
)
def test_masses_and_parts(
    name: str, mass: float, joints: int, feet: tuple[str, ...], foot_geoms: int
) -> None:
    robot = load_robot(name)
    assert robot.model.body_subtreemass[0] == pytest.approx(mass, abs=1e-6)
    assert len(robot.joint_names) == joints
    assert robot.foot_names == feet
    assert len(robot.foot_geoms) == foot_geoms
    assert robot.model.body_parentid[robot.base_body] == 0
    assert robot.model.nsensordata == 7 * len(feet)
    for values in (robot.default_pose, robot.action_low, robot.action_high, robot.action_scale):
        assert values.shape == (joints,)
        assert values.dtype == torch.float32


def test_action_bounds_reach_every_limit_of_the_quadruped() -> None:
    robot = load_robot("quadruped")
    # Farther limit from the default, over 0.5 rad per unit: abduction 0 in +-0.85,
    # hip 0.85 in [-0.7, 2.6], knee -1.7 in [-2.7, -0.6].
    expected = torch.tensor([0.85 / 0.5, 1.75 / 0.5, 1.1 / 0.5] * 4)
    torch.testing.assert_close(robot.action_high, expected)
    torch.testing.assert_close(robot.action_low, -expected)


@NEEDS_MJLAB
def test_action_bounds_of_the_go1() -> None:
    robot = load_robot("go1")
    # FR hip 0.1 in +-0.863, thigh 0.9 in [-0.686, 4.501], calf -1.8 in [-2.818, -0.888].
    expected = torch.tensor([0.963 / 0.5, 3.601 / 0.5, 1.018 / 0.5])
    torch.testing.assert_close(robot.action_high[:3], expected)


@NEEDS_MJLAB
def test_go1_and_g1_have_the_numbers_of_mjlab() -> None:
    from mjlab.asset_zoo.robots.unitree_g1 import g1_constants
    from mjlab.asset_zoo.robots.unitree_go1 import go1_constants

    for name, articulation, initial in (
        ("go1", go1_constants.GO1_ARTICULATION, go1_constants.INIT_STATE),
        ("g1", g1_constants.G1_ARTICULATION, g1_constants.KNEES_BENT_KEYFRAME),
    ):
        robot = load_robot(name)
        model = robot.model
        assert initial.joint_pos is not None
        for i, joint in enumerate(robot.joint_names):
            (motor,) = [m for m in articulation.actuators if _matches(m.target_names_expr, joint)]
            assert model.dof_armature[6 + i] == pytest.approx(motor.armature)
            angles = [
                angle for pattern, angle in initial.joint_pos.items() if _matches((pattern,), joint)
            ]
            assert robot.default_pose[i].item() == pytest.approx(sum(angles))
            if name == "go1":
                continue
            assert model.actuator_gainprm[i, 0] == pytest.approx(motor.stiffness)
            assert model.actuator_biasprm[i, 2] == pytest.approx(-motor.damping)
            assert model.actuator_forcerange[i, 1] == pytest.approx(motor.effort_limit)
            scale = 0.25 * motor.effort_limit / motor.stiffness
            assert robot.action_scale[i].item() == pytest.approx(scale)


def _matches(patterns: tuple[str, ...], joint: str) -> bool:
    return any(re.fullmatch(pattern, joint) for pattern in patterns)


@pytest.mark.parametrize("name", ROBOTS)
def test_sensors_are_positions_then_velocities_then_forces_of_the_feet(name: str) -> None:
    robot = load_robot(name)
    data = start(robot)
    model = robot.model
    settle = round(0.5 / robot.timestep)
    for _ in range(settle):
        mujoco.mj_step(model, data)
    data.qvel[:] += np.linspace(-0.1, 0.1, model.nv)
    mujoco.mj_forward(model, data)
    feet = len(robot.foot_names)
    positions = data.sensordata[: 3 * feet].reshape(feet, 3)
    velocities = data.sensordata[3 * feet : 6 * feet].reshape(feet, 3)
    forces = data.sensordata[6 * feet :]

    by_foot = np.array(robot.foot_geoms).reshape(feet, -1)
    assert positions == pytest.approx(data.geom_xpos[by_foot].mean(axis=1), abs=2e-3)

    later = mujoco.MjData(model)
    later.qpos[:] = data.qpos
    mujoco.mj_integratePos(model, later.qpos, data.qvel, 1e-6)
    mujoco.mj_forward(model, later)
    moved = later.sensordata[: 3 * feet].reshape(feet, 3) - positions
    np.testing.assert_allclose(velocities, moved / 1e-6, atol=1e-4)

    expected = np.zeros(feet)
    for i, contact in enumerate(data.contact):
        force = np.zeros(6)
        mujoco.mj_contactForce(model, data, i, force)
        expected[(by_foot == contact.geom[1]).any(axis=1)] += force[0]
    assert (expected > 1.0).all()
    np.testing.assert_allclose(forces, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ROBOTS)
def test_random_play_stays_within_the_room_for_contacts(name: str) -> None:
    robot = load_robot(name)
    model = robot.model
    rng = np.random.default_rng(0)
    scale, bound = robot.action_scale.numpy(), robot.action_high.numpy()
    contacts = rows = 0
    for _ in range(4):
        data = start(robot)
        for _ in range(100):
            action = rng.uniform(-bound, bound)
            data.ctrl[:] = robot.default_pose.numpy() + scale * action
            for _ in range(4):
                mujoco.mj_step(model, data)
                contacts, rows = max(contacts, data.ncon), max(rows, data.nefc)
    assert 0 < contacts <= robot.max_contacts
    assert 0 < rows <= robot.max_constraints


def test_warp_stands_like_the_c_engine() -> None:
    robot = load_robot("quadruped")
    physics = WarpPhysics(
        robot.model,
        num_envs=2,
        decimation=4,
        max_contacts=robot.max_contacts,
        max_constraints=robot.max_constraints,
        device=torch.device("cpu"),
    )
    data = start(robot)
    # Rounding to float32 shall not decide whether feet that just touch are in contact.
    data.qpos[2] -= 1e-3
    qpos = torch.tensor(data.qpos, dtype=torch.float32).expand(2, -1)
    physics.set_state(torch.ones(2, dtype=torch.bool), qpos, torch.zeros(2, robot.model.nv))
    physics.ctrl[:] = robot.default_pose
    for _ in range(5):
        physics.step()
        mujoco.mj_step(robot.model, data, 4)
    physics.check()
    np.testing.assert_allclose(physics.qpos[1].numpy(), data.qpos, atol=1e-3)
    np.testing.assert_allclose(physics.sensordata[1].numpy(), data.sensordata, atol=2.0)
    np.testing.assert_allclose(physics.sensordata[1, :12].numpy(), data.sensordata[:12], atol=1e-3)
    physics.close()


def test_a_menagerie_robot_stands_in_its_home_pose(menagerie: Path) -> None:
    add(
        menagerie,
        "acme_rover",
        rover=MENAGERIE_XML,
        rover_mjx=MENAGERIE_XML,
        scene="<mujoco/>",
        scene_mjx="<mujoco/>",
    )
    robot = load_robot("acme_rover")
    assert robot.default_pose.tolist() == pytest.approx([0.1, 0.8, -1.5] * 4)
    assert len(robot.foot_names) == 4
    assert robot.model.geom(robot.foot_geoms[3]).name == "RR_foot"
    assert robot.model.body_subtreemass[0] == pytest.approx(11.99)
    # Gains grow with the mass, from those of the quadruped of 12 kg.
    assert robot.model.actuator_gainprm[:, 0] == pytest.approx(35 * 11.99 / 12)
    data = start(robot)
    mujoco.mj_step(robot.model, data, 400)
    assert data.qpos[2] > 0.8 * robot.base_height


TETRAHEDRON = "v 0 0 0\nv .1 0 0\nv 0 .1 0\nv 0 0 .1\nf 1 3 2\nf 1 2 4\nf 1 4 3\nf 2 3 4\n"


def test_a_menagerie_robot_loses_its_meshes_but_not_their_mass(menagerie: Path) -> None:
    mesh = '<asset><mesh name="shell" file="shell.obj"/></asset><worldbody>'
    shell = '<geom type="mesh" mesh="shell" mass="2" contype="0" conaffinity="0"/>'
    xml = MENAGERIE_XML.replace("<worldbody>", mesh).replace('<geom name="head"', f"{shell}\\g", 1)
    xml = xml.replace("\\g", '<geom name="head"')
    # The collider of a Menagerie foot often has no name that says so: spheres at leg ends count.
    xml = xml.replace("_foot", "_ball").replace("foot", "ball")
    add(menagerie, "acme_rover", rover=xml)
    (menagerie / "acme_rover" / "shell.obj").write_text(TETRAHEDRON)
    robot = load_robot("acme_rover")
    whole = mujoco.MjModel.from_xml_path(str(menagerie / "acme_rover" / "rover.xml"))
    assert robot.model.nmesh == 0
    assert robot.model.body_subtreemass[0] == pytest.approx(13.99)
    np.testing.assert_allclose(robot.model.body_inertia, whole.body_inertia)
    np.testing.assert_allclose(robot.model.body_ipos, whole.body_ipos)
    assert [robot.model.geom(g).name for g in robot.foot_geoms] == [
        f"{leg}_ball" for leg in ("FL", "FR", "RL", "RR")
    ]


def test_without_mjlab_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"'go1' needs the robots extra: pip install 'fastsac\["):
        load_robot("go1")


def test_an_unknown_robot_without_menagerie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MENAGERIE_ROOT", raising=False)
    with pytest.raises(ValueError, match=r"'quadrupet' \(did you mean quadruped\?\).*MENAGERIE_RO"):
        load_robot("quadrupet")


def test_menagerie_faults_are_said_in_one_line(
    menagerie: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(menagerie, "acme_arm", arm=MENAGERIE_XML.replace('<freejoint name="base"/>', ""))
    add(menagerie, "acme_empty")
    add(menagerie, "acme_two", one=XML, other=XML)
    add(menagerie, "acme_poseless", poseless=XML)
    add(
        menagerie,
        "acme_footless",
        footless=MENAGERIE_XML.replace("_foot", "_tip")
        .replace('"foot"', '"tip"')
        .replace('"sphere" pos="0 0 -0.2"', '"ellipsoid" pos="0 0 -0.2"'),
    )
    add(
        menagerie,
        "acme_loose",
        loose=MENAGERIE_XML.replace('axis="1 0 0" range="-0.85 0.85"', 'axis="1 0 0"'),
    )
    faults = {
        "acme_arn": r"unknown robot 'acme_arn' \(did you mean acme_arm",
        "acme_arm": "no floating base",
        "acme_empty": "must hold one robot xml, found none",
        "acme_two": "must hold one robot xml, found one.xml, other.xml",
        "acme_poseless": "no keyframe",
        "acme_footless": "no feet",
        "acme_loose": "joint 'FL_abduction' is not a hinge with a range",
    }
    for name, message in faults.items():
        with pytest.raises(ValueError, match=message) as caught:
            load_robot(name)
        assert "\n" not in str(caught.value)
    monkeypatch.setenv("MENAGERIE_ROOT", str(menagerie / "nowhere"))
    with pytest.raises(ValueError, match="nowhere, which is not a folder"):
        load_robot("acme_arm")
