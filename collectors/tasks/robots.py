"""The legged robots by name. `quadruped` ships with the package; others come from where they are
installed."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from pathlib import Path

from collectors.tasks.menagerie import menagerie_recipe, nearest
from collectors.tasks.robot_model import Recipe, Robot, Servo, build_robot


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
            f"unknown robot {name!r}{nearest(name, list(_RECIPES))}: give one of "
            f"{', '.join(_RECIPES)}, or set MENAGERIE_ROOT to a MuJoCo Menagerie checkout for "
            "others"
        )
    return _walking(name, menagerie_recipe(Path(root), name, others=list(_RECIPES)))


def _walking(name: str, recipe: Recipe) -> Robot:
    return build_robot(name, recipe, foot_sensors=True)


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
