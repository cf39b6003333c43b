# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""What a task needs from a physics engine, and the choice of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    import mujoco

Engine = Literal["auto", "warp", "mujoco"]
"""`warp`: MuJoCo-Warp; `mujoco`: MuJoCo's C engine; `auto`: Warp on CUDA, C on the CPU."""


class Physics(Protocol):
    """`num_envs` worlds of one model. Tensors are the engine's own memory, float32 on Warp and
    float64 in C: write `ctrl`, call `step`, read the others."""

    qpos: Tensor
    """(num_envs, nq)"""
    qvel: Tensor
    """(num_envs, nv); may be written, a push is a change of velocity"""
    ctrl: Tensor
    """(num_envs, nu)"""
    sensordata: Tensor
    """(num_envs, nsensordata), of the state that the last physics step began in; 0 for a world
    that was just put in a new state"""

    def step(self) -> None:
        """Advance every world `decimation` physics steps under the controls in `ctrl`."""
        ...

    def set_state(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Put worlds into a new state, as if just made.

        Args:
            mask: (num_envs,) bool, which worlds.
            qpos: (num_envs, nq); rows outside `mask` are not used, likewise `qvel` (num_envs, nv).
        """
        ...

    def set_model(self, mask: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Change the model of some worlds.

        Args:
            mask: (num_envs,) bool, which worlds.
            fields: (num_envs, *shape) by `MjModel` field, all of them declared as `randomized`.
        """
        ...

    def check(self) -> None:
        """Wait for the device and look whether it lost contacts or constraints.

        Raises:
            ValueError: a buffer overflowed; names the field to raise.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...

    def close(self) -> None: ...


def make_physics(
    engine: Engine,
    model: mujoco.MjModel,
    *,
    num_envs: int,
    decimation: int,
    device: torch.device,
    max_contacts: int,
    max_constraints: int,
    randomized: Sequence[str] = (),
) -> Physics:
    """Allocate `num_envs` worlds at the model's reference pose, at rest.

    Args:
        model: without actuator activations; Warp rounds its float64 tables to float32.
        decimation: physics steps per `step`.
        max_contacts: Warp's room for contacts, per world on average.
        max_constraints: Warp's room for constraint rows in one world; launches are this wide
            whether the rows are active or not.
        randomized: `MjModel` fields that `set_model` may change, world by world.

    Raises:
        ValueError: an engine that does not run on the device.
    """
    if engine == "auto":
        engine = "warp" if device.type == "cuda" else "mujoco"
    if engine == "mujoco":
        if device.type != "cpu":
            raise ValueError(
                f"physics 'mujoco' runs on the CPU, not on {device}: give env.args.physics auto"
            )
        from collectors.physics.mujoco_physics import MujocoPhysics

        return MujocoPhysics(model, num_envs=num_envs, decimation=decimation, randomized=randomized)
    # Importing MuJoCo-Warp takes seconds, which the C engine shall not cost.
    from collectors.physics.warp_physics import WarpPhysics

    return WarpPhysics(
        model,
        num_envs=num_envs,
        decimation=decimation,
        max_contacts=max_contacts,
        max_constraints=max_constraints,
        randomized=randomized,
        device=device,
    )
