# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""Where the bodies of many robots are and how they move, from joint angles and velocities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Bodies:
    """Frames of K bodies in the world, float32."""

    position: Tensor
    """(num_envs, K, 3) m"""
    rotation: Tensor
    """(num_envs, K, 3, 3), from the body's frame to the world's"""
    velocity: Tensor
    """(num_envs, K, 3) m/s, of the frame's origin"""
    turning: Tensor
    """(num_envs, K, 3) rad/s"""

    def at(self, rows: Tensor) -> Bodies:
        """Those of the rows `rows` (num_envs,), whatever the rows here are."""
        return Bodies(
            self.position[rows], self.rotation[rows], self.velocity[rows], self.turning[rows]
        )


class Kinematics:
    """Forward kinematics of a free base that carries a tree of hinges.

    It is that of the present state; sensors tell of the state one physics step before, and of
    nothing at an episode's start.

    Every hinge is a link, and so is a body without one. In its parent's frame, a link's frame is
    constant + sin(angle) S + (1 - cos(angle)) C (Rodrigues), with 4 x 4 matrices S and C; links
    are put together level by level of the tree, all of a level at once.
    """

    def __init__(
        self, model: mujoco.MjModel, body_names: Sequence[str], device: torch.device
    ) -> None:
        """`model`: body 1 is the free base, all other joints are hinges."""
        links = _Links(model)
        place = {0: 0}
        self._levels: list[tuple[Tensor, Tensor]] = []
        before = [0]
        while level := [i for i, parent in enumerate(links.parents) if parent in before]:
            parents = [before.index(links.parents[i]) for i in level]
            # The base is link 0 and has no frame in a parent's.
            at = torch.tensor([i - 1 for i in level], device=device)
            self._levels.append((at, torch.tensor(parents, device=device)))
            place |= {link: len(place) + n for n, link in enumerate(level)}
            before = level

        def tensor(values: object) -> Tensor:
            return torch.tensor(np.array(values), dtype=torch.float32, device=device)

        self._frames = tensor(links.frames)
        self._angles = torch.tensor(links.angles, device=device)
        self._zero = tensor(model.qpos0[7:])
        self._joints = torch.tensor([place[i] for i in links.joints], device=device)
        self._axes = tensor(model.jnt_axis[1:])
        self._anchors = tensor(model.jnt_pos[1:])
        bodies = [model.body(name).id for name in body_names]
        self._bodies = torch.tensor([place[links.of_body[b]] for b in bodies], device=device)
        self._carried = tensor([links.carries(links.of_body[b]) for b in bodies])

    def __call__(self, qpos: Tensor, qvel: Tensor) -> Bodies:
        """`qpos`: (num_envs, 7 + num_joints), `qvel`: (num_envs, 6 + num_joints), float32."""
        frames = self._link_frames(quat_to_matrix(qpos[:, 3:7]), qpos[:, 7:] - self._zero)
        rotation, position = frames[..., :3, :3], frames[..., :3, 3]
        base = rotate(rotation[:, 0], qvel[:, 3:6])
        # Relative to the base's origin, a body moves as if turned about each joint that carries
        # it: the sum over joints of spin x (position - anchor).
        turns = rotation.index_select(1, self._joints)
        spin = rotate(turns, self._axes) * qvel[:, 6:, None]
        anchor = rotate(turns, self._anchors) + position.index_select(1, self._joints)
        turning = self._carried @ spin + base[:, None]
        offset = position.index_select(1, self._bodies)
        moment = self._carried @ torch.linalg.cross(spin, anchor)
        velocity = torch.linalg.cross(turning, offset) - moment
        return Bodies(
            position=offset + qpos[:, None, :3],
            rotation=rotation.index_select(1, self._bodies),
            velocity=velocity + qvel[:, None, :3],
            turning=turning,
        )

    def _link_frames(self, base: Tensor, angles: Tensor) -> Tensor:
        """(num_envs, links, 4, 4), level by level, with the base's origin as their own.

        Args:
            base: (num_envs, 3, 3) rotation.
            angles: (num_envs, num_joints) from the model's reference, rad.
        """
        root = torch.zeros((len(base), 1, 4, 4), device=base.device)
        root[:, 0, :3, :3] = base
        root[:, 0, 3, 3] = 1
        angles = angles.index_select(1, self._angles)[:, :, None, None]
        constant, sine, versine = self._frames.unbind(1)
        local = constant + angles.sin() * sine + (1 - angles.cos()) * versine
        levels = [root]
        for links, parents in self._levels:
            levels.append(levels[-1].index_select(1, parents) @ local.index_select(1, links))
        return torch.cat(levels, 1)


class _Links:
    """The tree of a model: link 0 is the base."""

    def __init__(self, model: mujoco.MjModel) -> None:
        assert model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE
        assert (model.jnt_type[1:] == mujoco.mjtJoint.mjJNT_HINGE).all()
        self.parents = [-1]
        """Of every link."""
        self.of_body = {1: 0}
        """The last link of every body."""
        self.joints: list[int] = []
        """The link of every hinge."""
        self.angles: list[int] = []
        """The hinge of every link after the base; any, of a link without one."""
        self.frames: list[np.ndarray] = []
        """(3, 4, 4) of every link after the base: constant, S and C."""
        for body in range(2, model.nbody):
            frame = np.eye(4)
            quat = model.body_quat[body]
            frame[:3, :3], frame[:3, 3] = _matrix(quat), model.body_pos[body]
            self.of_body[body] = self.of_body[model.body_parentid[body]]
            first, number = model.body_jntadr[body], model.body_jntnum[body]
            for joint in range(first, first + number):
                axis, anchor = model.jnt_axis[joint], model.jnt_pos[joint]
                self.joints.append(self._add(body, joint - 1, _hinge(frame, axis, anchor)))
                frame = np.eye(4)
            if not number:
                self._add(body, 0, np.stack([frame, np.zeros((4, 4)), np.zeros((4, 4))]))

    def carries(self, link: int) -> list[bool]:
        """Which hinges move a link, (num_joints,)."""
        chain = []
        while link >= 0:
            chain.append(link)
            link = self.parents[link]
        return [joint in chain for joint in self.joints]

    def _add(self, body: int, angle: int, frames: np.ndarray) -> int:
        """A link that becomes the last one of `body`; returns its number."""
        link = len(self.parents)
        self.parents.append(self.of_body[body])
        self.of_body[body] = link
        self.angles.append(angle)
        self.frames.append(frames)
        return link


def _hinge(frame: np.ndarray, axis: np.ndarray, anchor: np.ndarray) -> np.ndarray:
    """(3, 4, 4): frame (4, 4) followed by a turn about `axis` through `anchor`."""
    x, y, z = axis
    skew = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    terms = [frame]
    for turn in (skew, skew @ skew):
        term = np.zeros((4, 4))
        term[:3, :3] = turn
        term[:3, 3] = -turn @ anchor
        terms.append(frame @ term)
    return np.stack(terms)


def _matrix(quat: np.ndarray) -> np.ndarray:
    matrix = np.empty(9)
    mujoco.mju_quat2Mat(matrix, quat)
    return matrix.reshape(3, 3)


def quat_to_matrix(quat: Tensor) -> Tensor:
    """Rotation matrices (..., 3, 3) of quaternions (..., 4), wxyz, of any length but 0."""
    w, x, y, z = (quat / quat.norm(dim=-1, keepdim=True)).unbind(-1)
    rows = [
        *(1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        *(2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        *(2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    ]
    return torch.stack(rows, -1).unflatten(-1, (3, 3))


def quat_product(a: Tensor, b: Tensor) -> Tensor:
    """The rotation b and then a, quaternions (..., 4), wxyz."""
    scalar = a[..., :1] * b[..., :1] - (a[..., 1:] * b[..., 1:]).sum(-1, keepdim=True)
    vector = a[..., :1] * b[..., 1:] + b[..., :1] * a[..., 1:]
    return torch.cat([scalar, vector + torch.linalg.cross(a[..., 1:], b[..., 1:])], -1)


def rotate(rotation: Tensor, vectors: Tensor) -> Tensor:
    """`rotation` (..., 3, 3) applied to `vectors` (..., 3)."""
    return (rotation @ vectors[..., None]).squeeze(-1)


def rotation_angle(rotation: Tensor) -> Tensor:
    """Angles (...) in [0, pi] rad of rotation matrices (..., 3, 3)."""
    m = rotation
    axis = [m[..., i, j] - m[..., j, i] for i, j in ((2, 1), (0, 2), (1, 0))]
    sine = torch.stack(axis, -1).norm(dim=-1) / 2
    cosine = (m.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
    return torch.atan2(sine, cosine)


def yaw_matrix(rotation: Tensor) -> Tensor:
    """The turns about the vertical (..., 3, 3) in rotation matrices (..., 3, 3)."""
    yaw = torch.atan2(rotation[..., 1, 0], rotation[..., 0, 0])
    sine, cosine, zero = yaw.sin(), yaw.cos(), torch.zeros_like(yaw)
    rows = [cosine, -sine, zero, sine, cosine, zero, zero, zero, zero + 1]
    return torch.stack(rows, -1).unflatten(-1, (3, 3))
