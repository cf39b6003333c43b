"""The categorical projection of C51 (Bellemare et al. 2017, algorithm 1), mass by mass."""

from __future__ import annotations

import math
from collections.abc import Sequence


def project_distribution(
    probabilities: Sequence[float], shifted: Sequence[float], v_min: float, v_max: float
) -> list[float]:
    """One distribution on `shifted` atoms, projected onto as many atoms from v_min to v_max."""
    num_atoms = len(probabilities)
    spacing = (v_max - v_min) / (num_atoms - 1)
    projected = [0.0] * num_atoms
    for mass, value in zip(probabilities, shifted, strict=True):
        position = (min(max(value, v_min), v_max) - v_min) / spacing
        position = min(max(position, 0.0), num_atoms - 1.0)
        lower, upper = math.floor(position), math.ceil(position)
        if lower == upper:
            projected[lower] += mass
        else:
            projected[lower] += mass * (upper - position)
            projected[upper] += mass * (position - lower)
    return projected
