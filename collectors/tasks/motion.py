"""Clips of motion: read from npz files, and fitted to a robot and a control rate."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ARRAYS = {
    "joint_pos": ("T", "J"),
    "joint_vel": ("T", "J"),
    "body_pos_w": ("T", "K", 3),
    "body_quat_w": ("T", "K", 4),
    "body_lin_vel_w": ("T", "K", 3),
    "body_ang_vel_w": ("T", "K", 3),
}
"""Arrays of a file and their axes: T frames, J joints, K bodies."""
ROOT_POS, ROOT_VEL = 7, 6
"""Columns of a free root that may come before the joints' in `joint_pos` and `joint_vel`."""
QUAT_TOLERANCE = 1e-3
"""The most by which the length of a quaternion in a file may differ from 1."""


@dataclass(frozen=True, kw_only=True)
class Motion:
    """A clip of T frames of J joints and K bodies, float32."""

    fps: float
    """frames per second"""
    joint_names: tuple[str, ...] | None
    """None: the file names none."""
    body_names: tuple[str, ...] | None
    """Likewise."""
    joint_pos: Tensor
    """(T, J) rad"""
    joint_vel: Tensor
    """(T, J) rad/s"""
    body_pos: Tensor
    """(T, K, 3) m, in the world"""
    body_quat: Tensor
    """(T, K, 4) wxyz, unit, from the body's frame to the world's"""
    body_lin_vel: Tensor
    """(T, K, 3) m/s, of the frame's origin, in the world"""
    body_ang_vel: Tensor
    """(T, K, 3) rad/s, in the world"""


def load_motion(path: str | Path) -> Motion:
    """Read a motion file, as `whole_body_tracking`, mjlab and holosoma write it.

    npz with `fps` (a number or an array of one), the arrays of `ARRAYS` with quaternions in the
    order wxyz, and optionally `joint_names` and `body_names`. Columns of a free root before the
    joints', 7 in `joint_pos` and 6 in `joint_vel`, are left out.

    Raises:
        ValueError: the file is missing, no npz file, or its arrays do not make a motion.
    """
    arrays = _read(Path(path))
    try:
        return _motion(arrays)
    except ValueError as error:
        raise ValueError(f"motion {path}: {error}") from None


def fit_motion(
    motion: Motion,
    *,
    joint_names: Sequence[str],
    body_names: Sequence[str],
    fps: float,
    model_bodies: Sequence[str] | None = None,
) -> Motion:
    """The joints and bodies of a robot, in its order, at its control rate.

    Joints are matched by name, and motion and robot must have the same. A motion that names none
    must have as many, in the robot's order. Bodies are matched by name, and the motion may have
    others too. One that names none must have those of `model_bodies`, in that order.

    Args:
        joint_names: of the robot.
        body_names: of the robot's tracked bodies.
        fps: env steps per second. At another rate than the motion's, frames are interpolated:
            linearly, and orientations along the shortest arc. What is left of the last frame
            period is dropped.
        model_bodies: of the robot, without the world; None for `body_names`.

    Raises:
        ValueError: joints or bodies cannot be matched; names those on either side.
    """
    joints = _find_joints(motion, joint_names)
    bodies = _find_bodies(motion, body_names, body_names if model_bodies is None else model_bodies)
    chosen = replace(
        motion,
        joint_names=tuple(joint_names),
        body_names=tuple(body_names),
        joint_pos=motion.joint_pos[:, joints],
        joint_vel=motion.joint_vel[:, joints],
        body_pos=motion.body_pos[:, bodies],
        body_quat=motion.body_quat[:, bodies],
        body_lin_vel=motion.body_lin_vel[:, bodies],
        body_ang_vel=motion.body_ang_vel[:, bodies],
    )
    if abs(fps - motion.fps) <= 1e-6 * fps:
        return replace(chosen, fps=fps)
    return _resample(chosen, fps)


def _read(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise ValueError(f"motion {path}: there is no such file")
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it is one array")
            missing = [name for name in ("fps", *ARRAYS) if name not in file]
            if missing:
                raise ValueError(f"it has no {', '.join(missing)}")
            names = [name for name in ("joint_names", "body_names") if name in file]
            return {name: _array(file, name) for name in ("fps", *ARRAYS, *names)}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        needed = ", ".join(("fps", *ARRAYS))
        raise ValueError(f"motion {path}: {error}: give an npz file with {needed}") from None


def _array(file: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    try:
        return file[name]
    except ValueError:
        raise ValueError(f"{name} is not a plain array (pickled objects are not read)") from None


def _motion(arrays: dict[str, np.ndarray]) -> Motion:
    fps = _fps(arrays["fps"])
    sizes: dict[str | int, int] = {}
    for name, axes in ARRAYS.items():
        _check_shape(name, arrays[name], axes, sizes)
    if not sizes["T"]:
        raise ValueError("it has no frames: give a clip of at least one")
    names = {part: _names(arrays, f"{part}_names") for part in ("joint", "body")}
    first_pos, first_vel = _root_columns(arrays, names["joint"])
    if names["body"] is not None and len(names["body"]) != sizes["K"]:
        raise ValueError(f"body_names has {len(names['body'])} names for {sizes['K']} bodies")
    quat = arrays["body_quat_w"].astype(np.float64)
    length = np.linalg.norm(quat, axis=-1, keepdims=True)
    if (off := float(np.abs(length - 1).max(initial=0))) > QUAT_TOLERANCE:
        raise ValueError(
            f"body_quat_w has a quaternion whose length is {off:.3g} off 1: give unit quaternions"
        )
    return Motion(
        fps=fps,
        joint_names=names["joint"],
        body_names=names["body"],
        joint_pos=_tensor(arrays["joint_pos"][:, first_pos:]),
        joint_vel=_tensor(arrays["joint_vel"][:, first_vel:]),
        body_pos=_tensor(arrays["body_pos_w"]),
        body_quat=_tensor(quat / length),
        body_lin_vel=_tensor(arrays["body_lin_vel_w"]),
        body_ang_vel=_tensor(arrays["body_ang_vel_w"]),
    )


def _fps(value: np.ndarray) -> float:
    if value.size != 1 or value.dtype.kind not in "iuf":
        raise ValueError(f"fps is {value.tolist()!r}: give one number")
    fps = float(value.reshape(()))
    if not 0 < fps < np.inf:
        raise ValueError(f"fps is {fps:g}: give a positive number")
    return fps


def _check_shape(
    name: str, array: np.ndarray, axes: Sequence[str | int], sizes: dict[str | int, int]
) -> None:
    """Refuse what is not finite numbers with these axes. T and K are the same everywhere; the
    joints' columns are checked by `_root_columns`."""
    wanted = [axis if isinstance(axis, int) or axis == "J" else sizes.get(axis) for axis in axes]
    fits = array.ndim == len(axes) and all(
        want in (None, "J", have) for want, have in zip(wanted, array.shape, strict=True)
    )
    if not fits:
        known = [
            str(axis if want is None else want) for axis, want in zip(axes, wanted, strict=True)
        ]
        raise ValueError(f"{name} has shape {array.shape}, should have ({', '.join(known)})")
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} holds {array.dtype}, should hold numbers")
    finite = np.isfinite(array)
    if not finite.all():
        frame = int(np.argwhere(~finite)[0][0])
        raise ValueError(f"{name} has a NaN or infinity, the first in frame {frame}")
    sizes.update(zip(axes, array.shape, strict=True))


def _names(arrays: dict[str, np.ndarray], key: str) -> tuple[str, ...] | None:
    if key not in arrays:
        return None
    array = arrays[key]
    if array.ndim != 1 or array.dtype.kind != "U":
        raise ValueError(f"{key} holds {array.dtype} in shape {array.shape}, should be text (N,)")
    names = tuple(array.tolist())
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{key} has {', '.join(twice)} more than once")
    return names


def _root_columns(
    arrays: dict[str, np.ndarray], joint_names: tuple[str, ...] | None
) -> tuple[int, int]:
    """How many columns of `joint_pos` and of `joint_vel` come before the joints'."""
    columns = arrays["joint_pos"].shape[1], arrays["joint_vel"].shape[1]
    for root in ((0, 0), (ROOT_POS, ROOT_VEL)):
        joints = columns[0] - root[0]
        named = joint_names is None or len(joint_names) == joints
        if joints == columns[1] - root[1] and joints > 0 and named:
            return root
    given = f"joint_pos has {columns[0]} columns and joint_vel {columns[1]}"
    if joint_names is None:
        raise ValueError(
            f"{given}, should be as many, or {ROOT_POS} and {ROOT_VEL} more for a root"
        )
    n = len(joint_names)
    raise ValueError(
        f"{given}, should be {n} and {n} as joint_names has {n}, or {ROOT_POS + n} and "
        f"{ROOT_VEL + n} with a root"
    )


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.astype(np.float32))


def _find_joints(motion: Motion, robot: Sequence[str]) -> list[int]:
    given, count = motion.joint_names, motion.joint_pos.shape[1]
    if given is None:
        if count != len(robot):
            raise ValueError(
                f"the motion has {count} joints without names, the robot {len(robot)}: "
                f"{', '.join(robot)}"
            )
        return list(range(count))
    if set(given) != set(robot):
        raise ValueError(
            "the joints of motion and robot differ: "
            f"only the motion has {_those_without(given, robot)}; "
            f"only the robot has {_those_without(robot, given)}"
        )
    return [given.index(name) for name in robot]


def _find_bodies(motion: Motion, tracked: Sequence[str], model: Sequence[str]) -> list[int]:
    given, count = motion.body_names, motion.body_pos.shape[1]
    if given is None:
        if count != len(model):
            raise ValueError(
                f"the motion has {count} bodies without names, the robot {len(model)} (without "
                f"the world): {', '.join(model)}"
            )
        return [model.index(name) for name in tracked]
    if not set(tracked) <= set(given):
        raise ValueError(
            f"the motion lacks bodies that the robot tracks: {_those_without(tracked, given)}; "
            f"only the motion has {_those_without(given, tracked)}"
        )
    return [given.index(name) for name in tracked]


def _those_without(names: Sequence[str], others: Sequence[str]) -> str:
    return ", ".join(name for name in names if name not in others) or "none"


def _resample(motion: Motion, fps: float) -> Motion:
    last = len(motion.joint_pos) - 1
    # A frame that is due at the very end is not lost to rounding.
    count = int(last * fps / motion.fps + 1e-6) + 1
    place = (torch.arange(count, dtype=torch.float64) * (motion.fps / fps)).clamp(max=last)
    before = place.long().clamp(max=max(last - 1, 0))
    after = (before + 1).clamp(max=last)
    share = place - before

    def line(values: Tensor) -> Tensor:
        weight = share.reshape(-1, *[1] * (values.dim() - 1))
        return torch.lerp(values[before].double(), values[after].double(), weight).float()

    return replace(
        motion,
        fps=fps,
        joint_pos=line(motion.joint_pos),
        joint_vel=line(motion.joint_vel),
        body_pos=line(motion.body_pos),
        body_quat=slerp(
            motion.body_quat[before].double(), motion.body_quat[after].double(), share[:, None]
        ).float(),
        body_lin_vel=line(motion.body_lin_vel),
        body_ang_vel=line(motion.body_ang_vel),
    )


def slerp(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    """Orientations at `share` (...) in [0, 1] of the shortest arc between quaternions (..., 4).

    Shoemake 1985, "Animating rotation with quaternion curves".
    """
    cosine = (first * second).sum(-1, keepdim=True)
    second = torch.where(cosine < 0, -second, second)
    # The chord tells small angles more precisely than the cosine does.
    half = 2 * torch.atan2((first - second).norm(dim=-1), (first + second).norm(dim=-1))
    sine = half.sin()
    near = sine < 1e-6
    sine = torch.where(near, torch.ones_like(sine), sine)
    a = torch.where(near, 1 - share, ((1 - share) * half).sin() / sine)
    b = torch.where(near, share, (share * half).sin() / sine)
    turned = a[..., None] * first + b[..., None] * second
    return turned / turned.norm(dim=-1, keepdim=True)
