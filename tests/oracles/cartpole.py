"""The swing-up reward of dm_control's cartpole, env by env in float64.

From the published formulas of `dm_control.suite.cartpole` and `dm_control.utils.rewards`.
"""

from __future__ import annotations

import math


def gaussian_tolerance(x: float, margin: float, value_at_margin: float = 0.1) -> float:
    """`rewards.tolerance` with bounds (0, 0) and the default sigmoid."""
    scale = math.sqrt(-2 * math.log(value_at_margin))
    return math.exp(-0.5 * (abs(x) / margin * scale) ** 2)


def quadratic_tolerance(x: float, margin: float) -> float:
    """`rewards.tolerance` with bounds (0, 0), `sigmoid='quadratic'` and value 0 at the margin."""
    distance = abs(x) / margin
    return 1 - distance**2 if distance < 1 else 0.0


def swingup_reward(
    position: float, angle_rad: float, angular_velocity: float, control: float
) -> float:
    upright = (math.cos(angle_rad) + 1) / 2
    centered = (1 + gaussian_tolerance(position, margin=2)) / 2
    small_control = (4 + quadratic_tolerance(control, margin=1)) / 5
    small_velocity = (1 + gaussian_tolerance(angular_velocity, margin=5)) / 2
    return upright * small_control * small_velocity * centered
