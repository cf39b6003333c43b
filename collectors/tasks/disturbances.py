# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""What disturbs a robot in training: worlds whose models differ, and pushes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import mujoco

MODEL_FIELDS = (
    *("body_mass", "body_inertia", "body_subtreemass"),
    *("geom_friction", "actuator_gainprm", "actuator_biasprm"),
)
"""Those that `ModelSpread` changes."""
MASS_SPREAD = 0.2
"""Largest relative change of the base's mass and inertia."""
FRICTION_SPREAD = 0.4
"""Likewise of the friction of the feet."""
GAIN_SPREAD = 0.1
"""Likewise of the actuators' stiffness; as in holosoma, whose `kp_range` is 0.9 to 1.1."""


@dataclass(frozen=True, kw_only=True)
class Disturbances:
    """Scales in [0, 1], in training alone. Fields are named as in `env.args`."""

    randomization: float = 0.0
    """Of the differences between the worlds, see `ModelSpread`."""
    pushes: float = 0.0
    """Of sudden changes of the base's velocity."""
    observation_noise: float = 0.0
    """Of the noise on the actor's observation."""

    def __post_init__(self) -> None:
        """Raises ValueError: a value that is not allowed."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value <= 1:
                raise ValueError(f"env.args.{field.name} is {value:g}: give a scale in [0, 1]")


class ModelSpread:
    """Models of worlds that differ: by the base's mass, the friction of the feet and the stiffness
    of the actuators, each relative to the robot's own and uniform."""

    def __init__(
        self,
        model: mujoco.MjModel,
        foot_geoms: Sequence[int],
        scale: float,
        device: torch.device,
    ) -> None:
        """`model`: its first joint is that of the free base."""
        self._base = int(model.jnt_bodyid[0])
        self._feet = list(foot_geoms)
        self._scale = scale
        self._nominal = {
            name: torch.as_tensor(getattr(model, name), dtype=torch.float32, device=device)
            for name in MODEL_FIELDS
        }

    def draw(self, unit: Tensor) -> dict[str, Tensor]:
        """For `Physics.set_model`; `unit`: (num_envs, 3) uniform in [0, 1)."""
        n, base = len(unit), self._base
        spread = self._scale * (2 * unit - 1)
        mass = 1 + MASS_SPREAD * spread[:, 0]
        friction = 1 + FRICTION_SPREAD * spread[:, 1]
        gains = 1 + GAIN_SPREAD * spread[:, 2]
        fields = {
            name: nominal.expand(n, *nominal.shape).clone()
            for name, nominal in self._nominal.items()
        }
        extra = (mass - 1) * fields["body_mass"][:, base]
        fields["body_mass"][:, base] *= mass
        fields["body_inertia"][:, base] *= mass[:, None]
        fields["body_subtreemass"][:, : base + 1] += extra[:, None]
        fields["geom_friction"][:, self._feet, 0] *= friction[:, None]
        fields["actuator_gainprm"][:, :, 0] *= gains[:, None]
        fields["actuator_biasprm"][:, :, 1] *= gains[:, None]
        return fields


def draw_pushes(half_widths: Tensor, mean_steps: float, unit: Tensor) -> Tensor:
    """Changes of velocity, (num_envs, D): uniform, and 0 but once in `mean_steps` on average.

    Args:
        half_widths: (D,) largest changes.
        unit: (num_envs, D + 1) uniform in [0, 1).
    """
    change = half_widths * (2 * unit[:, :-1] - 1)
    return torch.where(unit[:, -1:] < 1 / mean_steps, change, 0.0)
