# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""How a robot's MJCF becomes a model for fast simulation: no meshes, few contacts, a plane, servos
and foot sensors."""

from __future__ import annotations

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


def build_robot(name: str, recipe: Recipe, *, foot_sensors: bool) -> Robot:
    """Build a robot of a recipe; its only sensors are those of the feet, if asked for."""
    spec = mujoco.MjSpec.from_file(str(recipe.file))
    name_geoms(spec)
    _strip(spec, recipe)
    _set_world(spec)
    hinges = hinges_of(name, spec)
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


def name_geoms(spec: mujoco.MjSpec) -> None:
    """Give the geoms without a name one, by which they can be referred to."""
    for index, geom in enumerate(spec.geoms):
        geom.name = geom.name or f"geom{index}"


def hinges_of(name: str, spec: mujoco.MjSpec) -> list[mujoco.MjsJoint]:
    """The joints after the free base, in the order of the model.

    Raises:
        ValueError: they are not hinges with ranges, or there are closed chains.
    """
    hinges = spec.joints[1:]
    for joint in hinges:
        if joint.type != mujoco.mjtJoint.mjJNT_HINGE or not joint.range[0] < joint.range[1]:
            raise ValueError(f"robot {name!r}: joint {joint.name!r} is not a hinge with a range")
    if spec.equalities:
        raise ValueError(f"robot {name!r} has closed chains, which are not supported")
    return hinges


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
