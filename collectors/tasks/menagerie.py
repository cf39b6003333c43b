# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""Robots of a MuJoCo Menagerie checkout."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import mujoco

from collectors.tasks.robot_model import Recipe, Servo, hinges_of, name_geoms


def menagerie_recipe(root: Path, name: str, *, others: Sequence[str]) -> Recipe:
    """Robot of a Menagerie folder in the pose of its home keyframe. Its servos get the gains and
    torques of `quadruped`'s, scaled by mass.

    Args:
        others: robots that are not in the checkout, for the message on an unknown one.

    Raises:
        ValueError: there is no such folder, or what it holds is no legged robot.
    """
    file = _file(root, name, others)
    spec = mujoco.MjSpec.from_file(str(file))
    if not spec.worldbody.bodies or not any(
        joint.type == mujoco.mjtJoint.mjJNT_FREE for joint in spec.worldbody.bodies[0].joints
    ):
        raise ValueError(f"robot {name!r}: {file} has no floating base (a free joint)")
    if not spec.keys:
        raise ValueError(f"robot {name!r}: {file} has no keyframe for the default pose")
    hinges = hinges_of(name, spec)
    key = next((key for key in spec.keys if key.name == "home"), spec.keys[0])
    angles = dict(zip((joint.name for joint in hinges), list(key.qpos)[7:], strict=True))
    name_geoms(spec)
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


def _file(root: Path, name: str, others: Sequence[str]) -> Path:
    folder = root / name
    if not root.is_dir():
        raise ValueError(f"robot {name!r}: MENAGERIE_ROOT is {root}, which is not a folder")
    if not folder.is_dir():
        folders = sorted(path.name for path in root.iterdir() if path.is_dir())
        raise ValueError(
            f"unknown robot {name!r}{nearest(name, [*others, *folders])}: neither one of "
            f"{', '.join(others)} nor a folder of MENAGERIE_ROOT {root}"
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


def nearest(name: str, known: Sequence[str]) -> str:
    """The known names that resemble an unknown one, for a message."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
