# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""Legged robots on a plane, made small for fast simulation: no meshes, few contacts, servos and
foot sensors added. `quadruped` ships with the package; others come from where they are installed.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np
import torch
from torch import Tensor

TIMESTEP = 0.005
"""s, of every robot, as in mjlab's velocity tasks."""
SITE_MARGIN = 0.005
"""m by which a foot's site is larger than the foot, so that it encloses the contacts."""
CONTACTS = {
    mujoco.mjtGeom.mjGEOM_SPHERE: 1,
    mujoco.mjtGeom.mjGEOM_CAPSULE: 2,
    mujoco.mjtGeom.mjGEOM_BOX: 8,
}
"""The most contacts of a geom with a plane that either engine makes; 4 for the other types."""


@dataclass(frozen=True, kw_only=True)
class Robot:
    """A legged robot standing on a plane, ready to be simulated.

    `model`: geom `floor`, a free base first, then one limited hinge and one position actuator per
    joint, in the same order. `sensordata` is, for F feet in the order of `foot_names`,
    [3F | 3F | F]: positions (m) and velocities (m/s) of the feet's centres in the world, and the
    normal forces on the feet (N). Only the feet, the base and a few other geoms touch the floor,
    nothing else collides. Keyframe `default` is the start state.
    """

    name: str
    model: mujoco.MjModel
    joint_names: tuple[str, ...]
    default_pose: Tensor
    """(num_joints,) float32, rad"""
    base_height: float
    """m, of the base in the default pose with the lowest foot just touching the floor"""
    fall_height: float
    """m, a base below it has fallen"""
    action_low: Tensor
    """(num_joints,) float32, minus `action_high`"""
    action_high: Tensor
    """(num_joints,) float32, see `action_bound`"""
    action_scale: Tensor
    """(num_joints,) float32, rad per unit of action: target = default + scale * action"""
    foot_names: tuple[str, ...]
    timestep: float
    """s"""
    max_contacts: int
    """MuJoCo-Warp's room for contacts: as many as the model's geoms can have with the floor."""
    max_constraints: int
    """MuJoCo-Warp's room for constraint rows: those of all contacts and joint limits at once."""
    base_body: int
    """body id of the base"""
    foot_geoms: tuple[int, ...]
    """geom ids of the feet, whose own friction holds whatever the floor's"""


@dataclass(frozen=True, kw_only=True)
class Servo:
    """A position servo for the joints whose whole name matches `joints`."""

    joints: str
    stiffness: float
    """N m / rad"""
    damping: float
    """N m s / rad"""
    effort: float
    """N m, largest torque"""
    action_scale: float
    """rad per unit of action"""
    armature: float | None = None
    """kg m^2, the rotor's inertia at the joint; None keeps the file's."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What makes a robot of an MJCF file."""

    file: Path
    feet: Mapping[str, Sequence[str]]
    """geoms of each foot, all on one body"""
    touching: Sequence[str]
    """other geoms that touch the floor, without friction"""
    pose: Callable[[str], float]
    """rad, of a joint in the default pose"""
    servos: Sequence[Servo]
    foot_friction: float
    fall_height: float


def load_robot(name: str) -> Robot:
    """Build a robot: `quadruped`, `go1`, `g1`, or a folder of MuJoCo Menagerie.

    Args:
        name: of a folder, such as `unitree_go2`: under $MENAGERIE_ROOT.

    Raises:
        ValueError: unknown robot, its files are missing or unfit.
    """
    if name in _RECIPES:
        return _walking(name, _RECIPES[name]())
    root = os.environ.get("MENAGERIE_ROOT")
    if root is None:
        raise ValueError(
            f"unknown robot {name!r}{_nearest(name, _RECIPES)}: give one of {', '.join(_RECIPES)}, "
            "or set MENAGERIE_ROOT to a MuJoCo Menagerie checkout for others"
        )
    return _walking(name, _menagerie(Path(root), name))


def _walking(name: str, recipe: Recipe) -> Robot:
    return build_robot(name, recipe, foot_sensors=True)


def foot_site(foot: str) -> str:
    """Name of the site around a foot."""
    return f"{foot}_foot_site"


def action_bound(
    lower: np.ndarray, upper: np.ndarray, default: np.ndarray, scale: np.ndarray
) -> np.ndarray:
    """Symmetric action bounds that put every joint limit within reach and 0 at the default pose.

    FastSAC, Seo et al. 2025, arXiv 2512.01996. All (num_joints,).
    """
    return np.maximum(np.abs(lower - default), np.abs(upper - default)) / scale


def _quadruped() -> Recipe:
    legs = ("FL", "FR", "RL", "RR")
    pose = {"abduction": 0.0, "hip": 0.85, "knee": -1.7}
    return Recipe(
        file=Path(__file__).with_name("quadruped.xml"),
        feet={leg: (f"{leg}_foot",) for leg in legs},
        touching=("trunk",),
        pose=lambda joint: pose[joint.split("_")[1]],
        servos=(Servo(joints=".*", stiffness=35.0, damping=0.8, effort=30.0, action_scale=0.5),),
        foot_friction=1.0,
        fall_height=0.14,
    )


def _go1() -> Recipe:
    """Unitree Go1. Pose, rotor inertias and friction are those of mjlab 1.6.0,
    `asset_zoo/robots/unitree_go1/go1_constants.py`."""
    pose = {"R_hip": 0.1, "L_hip": -0.1, "R_thigh": 0.9, "L_thigh": 0.9}
    rotor = 0.000111842

    def servo(joints: str, gear: float) -> Servo:
        return Servo(
            joints=joints,
            stiffness=35.0,
            damping=0.8,
            effort=30.0,
            action_scale=0.5,
            armature=rotor * gear**2,
        )

    return Recipe(
        file=_mjlab("go1"),
        feet={leg: (f"{leg}_foot_collision",) for leg in ("FR", "FL", "RR", "RL")},
        touching=("trunk_collision",),
        pose=lambda joint: pose.get(joint[1:].removesuffix("_joint"), -1.8),
        servos=(servo(".*_(hip|thigh)_joint", 6.0), servo(".*_calf_joint", 9.0)),
        foot_friction=1.0,
        fall_height=0.13,
    )


def g1_recipe() -> Recipe:
    """Unitree G1 with 29 joints. Motors, the knees-bent pose, action scales and friction are those
    of mjlab 1.6.0, `asset_zoo/robots/unitree_g1/g1_constants.py`."""
    pose = {
        "hip_pitch": -0.312,
        "knee": 0.669,
        "ankle_pitch": -0.363,
        "shoulder_pitch": 0.2,
        "elbow": 0.6,
        "left_shoulder_roll": 0.2,
        "right_shoulder_roll": -0.2,
    }

    def angle(joint: str) -> float:
        name = joint.removesuffix("_joint")
        return pose.get(name, pose.get(name.split("_", 1)[1], 0.0))

    def servo(joints: str, effort: float, armature: float) -> Servo:
        frequency = 10 * 2 * math.pi
        stiffness = armature * frequency**2
        return Servo(
            joints=rf"({joints})_joint",
            stiffness=stiffness,
            damping=2 * 2 * armature * frequency,
            effort=effort,
            action_scale=0.25 * effort / stiffness,
            armature=armature,
        )

    def planetary(rotors: tuple[float, float, float], first: float, second: float) -> float:
        """Inertia of a two-stage gearbox at its output, from its stages' and gear ratios."""
        return rotors[0] * (first * second) ** 2 + rotors[1] * second**2 + rotors[2]

    small = planetary((0.139e-4, 0.017e-4, 0.169e-4), 1 + 46 / 18, 1 + 56 / 16)
    medium = planetary((0.489e-4, 0.098e-4, 0.533e-4), 4.5, 1 + 48 / 22)
    large = planetary((0.489e-4, 0.109e-4, 0.738e-4), 4.5, 5.0)
    wrist = planetary((0.068e-4, 0.0, 0.0), 5.0, 5.0)
    return Recipe(
        file=_mjlab("g1"),
        # The outer long capsules of the sole: four corners per foot instead of 14 contacts.
        feet={side: [f"{side}_foot{i}_collision" for i in (2, 6)] for side in ("left", "right")},
        touching=[
            "pelvis_collision",
            "torso_collision",
            *(
                f"{side}_{part}_collision"
                for side in ("left", "right")
                for part in ("shin", "hand")
            ),
        ],
        pose=angle,
        servos=(
            servo(".*_(elbow|shoulder_pitch|shoulder_roll|shoulder_yaw|wrist_roll)", 25.0, small),
            servo(".*_(hip_pitch|hip_yaw)|waist_yaw", 88.0, medium),
            servo(".*_(hip_roll|knee)", 139.0, large),
            servo(".*_(wrist_pitch|wrist_yaw)", 5.0, wrist),
            # Two small motors on a linkage.
            servo("waist_(pitch|roll)|.*_ankle_(pitch|roll)", 50.0, 2 * small),
        ),
        foot_friction=0.6,
        fall_height=0.4,
    )


_RECIPES: dict[str, Callable[[], Recipe]] = {"quadruped": _quadruped, "go1": _go1, "g1": g1_recipe}


def _mjlab(robot: str) -> Path:
    """MJCF of a robot in mjlab's wheel; importing mjlab would take seconds."""
    found = importlib.util.find_spec("mjlab")
    if found is None or not found.submodule_search_locations:
        raise ValueError(f"robot {robot!r} needs the robots extra: pip install 'fastsac[robots]'")
    package = Path(found.submodule_search_locations[0])
    return package / f"asset_zoo/robots/unitree_{robot}/xmls/{robot}.xml"


def _nearest(name: str, known: Sequence[str] | Mapping[str, object]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""


def _menagerie(root: Path, name: str) -> Recipe:
    """Robot of a Menagerie folder in the pose of its home keyframe. Its servos get the gains and
    torques of `quadruped`'s, scaled by mass."""
    file = _menagerie_file(root, name)
    spec = mujoco.MjSpec.from_file(str(file))
    if not spec.worldbody.bodies or not any(
        joint.type == mujoco.mjtJoint.mjJNT_FREE for joint in spec.worldbody.bodies[0].joints
    ):
        raise ValueError(f"robot {name!r}: {file} has no floating base (a free joint)")
    if not spec.keys:
        raise ValueError(f"robot {name!r}: {file} has no keyframe for the default pose")
    hinges = _hinges(name, spec)
    key = next((key for key in spec.keys if key.name == "home"), spec.keys[0])
    angles = dict(zip((joint.name for joint in hinges), list(key.qpos)[7:], strict=True))
    _name_geoms(spec)
    feet = _feet(spec)
    if not feet:
        raise ValueError(
            f"robot {name!r}: {file} has no feet: colliding geoms whose name or class says foot, "
            "or spheres on the last body of a leg"
        )
    base = spec.worldbody.bodies[0]
    model = spec.compile()
    relative_mass = float(model.body_subtreemass[0]) / 12.0
    return Recipe(
        file=file,
        feet=feet,
        touching=[geom.name for geom in base.geoms if geom.contype or geom.conaffinity],
        pose=lambda joint: float(angles[joint]),
        servos=(
            Servo(
                joints=".*",
                stiffness=35.0 * relative_mass,
                damping=0.8 * relative_mass,
                effort=30.0 * relative_mass,
                action_scale=0.5,
            ),
        ),
        foot_friction=1.0,
        fall_height=0.45 * float(key.qpos[2]),
    )


def _menagerie_file(root: Path, name: str) -> Path:
    folder = root / name
    if not root.is_dir():
        raise ValueError(f"robot {name!r}: MENAGERIE_ROOT is {root}, which is not a folder")
    if not folder.is_dir():
        folders = sorted(path.name for path in root.iterdir() if path.is_dir())
        raise ValueError(
            f"unknown robot {name!r}{_nearest(name, [*_RECIPES, *folders])}: neither one of "
            f"{', '.join(_RECIPES)} nor a folder of MENAGERIE_ROOT {root}"
        )
    files = [
        file
        for file in sorted(folder.glob("*.xml"))
        if not file.stem.startswith("scene") and not file.stem.endswith("_mjx")
    ]
    named = [file for file in files if file.stem == name.split("_", 1)[-1]]
    if len(files) != 1 and len(named) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ValueError(f"robot {name!r}: {folder} must hold one robot xml, found {found}")
    return (named or files)[0]


def _name_geoms(spec: mujoco.MjSpec) -> None:
    for index, geom in enumerate(spec.geoms):
        geom.name = geom.name or f"geom{index}"


def _feet(spec: mujoco.MjSpec) -> dict[str, list[str]]:
    """Geoms of each foot, by body: those called foot, or else spheres at the ends of legs."""
    colliding = [geom for geom in spec.geoms if geom.contype or geom.conaffinity]
    found = [geom for geom in colliding if "foot" in f"{geom.name} {geom.classname.name}".lower()]
    if not found:
        sphere = mujoco.mjtGeom.mjGEOM_SPHERE
        found = [geom for geom in colliding if geom.type == sphere and not geom.parent.bodies]
    feet: dict[str, list[str]] = {}
    for geom in found:
        feet.setdefault(geom.parent.name, []).append(geom.name)
    return feet


def _hinges(name: str, spec: mujoco.MjSpec) -> list[mujoco.MjsJoint]:
    """The joints after the free base, in the order of the model."""
    hinges = spec.joints[1:]
    for joint in hinges:
        if joint.type != mujoco.mjtJoint.mjJNT_HINGE or not joint.range[0] < joint.range[1]:
            raise ValueError(f"robot {name!r}: joint {joint.name!r} is not a hinge with a range")
    if spec.equalities:
        raise ValueError(f"robot {name!r} has closed chains, which are not supported")
    return hinges


def build_robot(name: str, recipe: Recipe, *, foot_sensors: bool) -> Robot:
    """Build a robot of a recipe; its only sensors are those of the feet, if asked for."""
    spec = mujoco.MjSpec.from_file(str(recipe.file))
    _name_geoms(spec)
    _strip(spec, recipe)
    _set_world(spec)
    hinges = _hinges(name, spec)
    servos = [_servo_of(joint.name, recipe.servos) for joint in hinges]
    for joint, servo in zip(hinges, servos, strict=True):
        _add_servo(spec, joint, servo)
    joint_names = tuple(joint.name for joint in hinges)
    pose = np.array([recipe.pose(joint) for joint in joint_names])
    feet_geoms = [geom for geoms in recipe.feet.values() for geom in geoms]
    base_height = _height_over_feet(spec.compile(), pose, feet_geoms)
    if foot_sensors:
        _add_foot_sensors(spec, recipe.feet)
    spec.add_key(name="default", qpos=[0, 0, base_height, 1, 0, 0, 0, *pose], ctrl=pose)
    model = spec.compile()
    assert [model.joint(index).name for index in range(1, model.njnt)] == list(joint_names)

    scale = np.array([servo.action_scale for servo in servos])
    limits = model.jnt_range[1:]
    bound = torch.tensor(action_bound(limits[:, 0], limits[:, 1], pose, scale), dtype=torch.float32)
    contacts, rows = _room(model)
    return Robot(
        name=name,
        model=model,
        joint_names=joint_names,
        default_pose=torch.tensor(pose, dtype=torch.float32),
        base_height=base_height,
        fall_height=recipe.fall_height,
        action_low=-bound,
        action_high=bound,
        action_scale=torch.tensor(scale, dtype=torch.float32),
        foot_names=tuple(recipe.feet),
        timestep=TIMESTEP,
        max_contacts=contacts,
        max_constraints=rows,
        base_body=int(model.jnt_bodyid[0]),
        foot_geoms=tuple(model.geom(geom).id for geom in feet_geoms),
    )


def _strip(spec: mujoco.MjSpec, recipe: Recipe) -> None:
    """Leave bodies, joints, and geoms of which only those of the recipe collide."""
    if spec.meshes and not all(body.explicitinertial for body in spec.bodies[1:]):
        _fix_inertias(spec)
    kept = {geom for geoms in recipe.feet.values() for geom in geoms}
    colliding = kept | set(recipe.touching)
    for geom in list(spec.geoms):
        if geom.type == mujoco.mjtGeom.mjGEOM_MESH and geom.name not in colliding:
            spec.delete(geom)
            continue
        touches = geom.name in colliding
        # Bit 0 of the floor's contype meets conaffinity here; two geoms of the robot never match.
        geom.contype, geom.conaffinity = 0, int(touches)
        geom.group = 0
        # With priority, the friction of the foot itself holds, and base contacts have one row.
        geom.priority = int(touches)
        geom.condim = 3 if geom.name in kept else 1
        if geom.name in kept:
            geom.friction[0] = recipe.foot_friction
    used = {geom.meshname for geom in spec.geoms}
    for mesh in list(spec.meshes):
        if (mesh.name or Path(mesh.file).stem) not in used:
            spec.delete(mesh)
    for part in (spec.sensors, spec.actuators, spec.keys, spec.excludes, spec.pairs):
        for element in list(part):
            spec.delete(element)


def _fix_inertias(spec: mujoco.MjSpec) -> None:
    """Write down what the compiler infers from geoms, so that these may go."""
    model = spec.copy().compile()
    for body in spec.bodies[1:]:
        compiled = model.body(body.name)
        body.mass = float(compiled.mass[0])
        body.ipos, body.iquat, body.inertia = compiled.ipos, compiled.iquat, compiled.inertia
        body.explicitinertial = True


def _set_world(spec: mujoco.MjSpec) -> None:
    """Floor, light and solver."""
    option = spec.option
    option.timestep = TIMESTEP
    option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    option.cone = mujoco.mjtCone.mjCONE_PYRAMIDAL
    option.solver = mujoco.mjtSolver.mjSOL_NEWTON
    option.iterations = 10
    option.ls_iterations = 20
    texture = spec.add_texture(
        name="floor", type=mujoco.mjtTexture.mjTEXTURE_2D, width=64, height=64
    )
    texture.builtin = mujoco.mjtBuiltin.mjBUILTIN_CHECKER
    texture.rgb1, texture.rgb2 = [0.78, 0.80, 0.82], [0.70, 0.72, 0.75]
    material = spec.add_material(name="floor", texuniform=True, texrepeat=[2, 2])
    material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = "floor"
    spec.worldbody.add_geom(
        name="floor",
        type=mujoco.mjtGeom.mjGEOM_PLANE,
        size=[0, 0, 0.05],
        material="floor",
        contype=1,
        conaffinity=0,
        condim=3,
    )
    spec.worldbody.add_light(pos=[0, 0, 4], dir=[0.3, 0.2, -1], type=1)


def _servo_of(joint: str, servos: Sequence[Servo]) -> Servo:
    matching = [servo for servo in servos if re.fullmatch(servo.joints, joint)]
    assert len(matching) == 1, (joint, matching)
    return matching[0]


def _add_servo(spec: mujoco.MjSpec, joint: mujoco.MjsJoint, servo: Servo) -> None:
    if servo.armature is not None:
        joint.armature = servo.armature
    joint.limited = True
    actuator = spec.add_actuator(
        name=joint.name,
        target=joint.name,
        trntype=mujoco.mjtTrn.mjTRN_JOINT,
        gear=[1, 0, 0, 0, 0, 0],
        ctrllimited=False,
        forcelimited=True,
        forcerange=[-servo.effort, servo.effort],
    )
    actuator.set_to_position(kp=servo.stiffness, kv=servo.damping)


def _height_over_feet(model: mujoco.MjModel, pose: np.ndarray, feet: Sequence[str]) -> float:
    """Height of the base at which the lowest foot touches the floor."""
    data = mujoco.MjData(model)
    high = 10.0
    data.qpos[:] = [0, 0, high, 1, 0, 0, 0, *pose]
    mujoco.mj_kinematics(model, data)
    floor = model.geom("floor").id
    return high - min(
        mujoco.mj_geomDistance(model, data, floor, model.geom(foot).id, 2 * high, None)
        for foot in feet
    )


def _add_foot_sensors(spec: mujoco.MjSpec, feet: Mapping[str, Sequence[str]]) -> None:
    """One box site around the geoms of each foot; position, velocity and force of each."""
    model = spec.compile()
    names = [foot_site(foot) for foot in feet]
    for site, geoms in zip(names, feet.values(), strict=True):
        corners = np.concatenate([_corners(model, geom) for geom in geoms])
        low, high = corners.min(axis=0) - SITE_MARGIN, corners.max(axis=0) + SITE_MARGIN
        spec.geom(geoms[0]).parent.add_site(
            name=site,
            type=mujoco.mjtGeom.mjGEOM_BOX,
            pos=(low + high) / 2,
            size=(high - low) / 2,
            group=4,
        )
    for kind, label in (
        (mujoco.mjtSensor.mjSENS_FRAMEPOS, "position"),
        (mujoco.mjtSensor.mjSENS_FRAMELINVEL, "velocity"),
        (mujoco.mjtSensor.mjSENS_TOUCH, "force"),
    ):
        for site in names:
            spec.add_sensor(
                name=f"{site}_{label}", type=kind, objtype=mujoco.mjtObj.mjOBJ_SITE, objname=site
            )


def _corners(model: mujoco.MjModel, name: str) -> np.ndarray:
    """(8, 3) corners of a geom's bounding box in the frame of its body."""
    geom = model.geom(name)
    rotation = np.empty(9)
    mujoco.mju_quat2Mat(rotation, geom.quat)
    centre, half = np.split(model.geom_aabb[geom.id], 2)
    signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    return geom.pos + (centre + signs * half) @ rotation.reshape(3, 3).T


def _room(model: mujoco.MjModel) -> tuple[int, int]:
    """Contacts and constraint rows of a world in which everything touches and binds at once."""
    contacts = 0
    rows = int(model.jnt_limited.sum()) + int((model.dof_frictionloss > 0).sum())
    for geom in range(model.ngeom):
        if model.geom_conaffinity[geom]:
            count = CONTACTS.get(model.geom_type[geom], 4)
            contacts += count
            rows += count * (1 if model.geom_condim[geom] == 1 else 4)
    return contacts, rows
