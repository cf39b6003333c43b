# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""Robots for whole-body tracking: `humanoid` ships with the package, and so does a clip for it;
`g1` is the Unitree G1 of the robots extra."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import mujoco
from torch import Tensor

from collectors.tasks.robot_model import Recipe, Servo, build_robot
from collectors.tasks.robots import g1_recipe

DECIMATION = 4
"""Physics steps per env step: 50 env steps per second."""


@dataclass(frozen=True, kw_only=True)
class TrackingRobot:
    """A robot that can follow a motion, on a plane.

    `model`: geom `floor`, a free base first (body 1), then one limited hinge and one position
    actuator per joint, in the same order. Feet, hands and a few geoms of the trunk touch the
    floor, nothing else collides.
    """

    name: str
    model: mujoco.MjModel
    joint_names: tuple[str, ...]
    body_names: tuple[str, ...]
    """The tracked bodies, base and anchor among them."""
    anchor: str
    """The body that stands for the whole."""
    end_effectors: tuple[str, ...]
    """Bodies of the feet and of the hands."""
    default_pose: Tensor
    """(num_joints,) float32, rad"""
    action_low: Tensor
    """(num_joints,) float32, minus `action_high`"""
    action_high: Tensor
    """(num_joints,) float32, see `collectors.tasks.robot_model.action_bound`"""
    action_scale: Tensor
    """(num_joints,) float32, rad per unit of action: target = default + scale * action"""
    timestep: float
    """s"""
    decimation: int
    """physics steps per env step, unless the task is told otherwise"""
    max_contacts: int
    """MuJoCo-Warp's room for contacts: as many as the model's geoms can have with the floor."""
    max_constraints: int
    """MuJoCo-Warp's room for constraint rows: those of all contacts and joint limits at once."""
    foot_geoms: tuple[int, ...]
    """geom ids of the feet, whose own friction holds whatever the floor's"""

    @property
    def model_bodies(self) -> tuple[str, ...]:
        """All bodies of the model in its order, without the world."""
        return tuple(self.model.body(body).name for body in range(1, self.model.nbody))


@dataclass(frozen=True, kw_only=True)
class _Tracking:
    recipe: Callable[[], Recipe]
    anchor: str
    bodies: Sequence[str]
    end_effectors: Sequence[str]
    motion: str | None
    """File in `motions`."""


def load_tracking_robot(name: str) -> TrackingRobot:
    """Build a robot, `humanoid` or `g1`.

    Raises:
        ValueError: unknown robot, or the extra it needs is missing.
    """
    tracking = _tracking(name)
    robot = build_robot(name, tracking.recipe(), foot_sensors=False)
    return TrackingRobot(
        name=name,
        model=robot.model,
        joint_names=robot.joint_names,
        body_names=tuple(tracking.bodies),
        anchor=tracking.anchor,
        end_effectors=tuple(tracking.end_effectors),
        default_pose=robot.default_pose,
        action_low=robot.action_low,
        action_high=robot.action_high,
        action_scale=robot.action_scale,
        timestep=robot.timestep,
        decimation=DECIMATION,
        max_contacts=robot.max_contacts,
        max_constraints=robot.max_constraints,
        foot_geoms=robot.foot_geoms,
    )


def default_motion(name: str) -> Path | None:
    """The clip that comes with a robot, if any.

    Raises:
        ValueError: unknown robot.
    """
    file = _tracking(name).motion
    return None if file is None else Path(__file__).with_name("motions") / file


def _tracking(name: str) -> _Tracking:
    if name not in _ROBOTS:
        raise ValueError(f"unknown robot {name!r} for tracking: give one of {', '.join(_ROBOTS)}")
    return _ROBOTS[name]


def _sided(*parts: str) -> tuple[str, ...]:
    return tuple(f"{side}_{part}" for side in ("left", "right") for part in parts)


def _humanoid() -> Recipe:
    """The ankles hold two standing feet upright without further ado, and one foot not: together
    they are stiffer than the weight of 26 kg is at the height of its centre, 26 * 9.81 * 0.65
    N m / rad, each alone is softer."""
    pose = {"hip_pitch": -0.3, "knee": 0.6, "ankle_pitch": -0.3, "shoulder": 0.1, "elbow": 0.4}
    return Recipe(
        file=Path(__file__).with_name("humanoid.xml"),
        feet={
            side: [f"{side}_sole{corner}" for corner in (1, 2, 3, 4)] for side in ("left", "right")
        },
        touching=("pelvis", "chest", "head", "left_hand", "right_hand"),
        pose=lambda joint: pose.get(joint.split("_", 1)[1], 0.0),
        servos=(
            _servo(".*_(hip_roll|hip_pitch|knee)", 200.0, 6.0, 120.0),
            _servo(".*_(ankle_pitch|ankle_roll)", 120.0, 4.0, 50.0),
            _servo(".*_(shoulder|elbow)", 40.0, 1.5, 25.0),
        ),
        foot_friction=1.0,
        fall_height=0.35,
    )


def _servo(joints: str, stiffness: float, damping: float, effort: float) -> Servo:
    return Servo(
        joints=joints, stiffness=stiffness, damping=damping, effort=effort, action_scale=0.5
    )


_ROBOTS = {
    "humanoid": _Tracking(
        recipe=_humanoid,
        anchor="torso",
        bodies=(
            "torso",
            *_sided("thigh", "shin", "foot"),
            *_sided("upper_arm", "forearm", "hand"),
        ),
        end_effectors=_sided("foot", "hand"),
        motion="humanoid.npz",
    ),
    # Bodies, anchor and end effectors as in mjlab 1.6.0, `tasks/tracking/config/g1/env_cfgs.py`.
    "g1": _Tracking(
        recipe=g1_recipe,
        anchor="torso_link",
        bodies=(
            "pelvis",
            *_sided("hip_roll_link", "knee_link", "ankle_roll_link"),
            "torso_link",
            *_sided("shoulder_roll_link", "elbow_link", "wrist_yaw_link"),
        ),
        end_effectors=_sided("ankle_roll_link", "wrist_yaw_link"),
        motion=None,
    ),
}
