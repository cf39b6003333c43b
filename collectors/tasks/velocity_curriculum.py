"""The curricula of velocity tracking: how hard the manner of walking is judged, and how fast the
robot is asked to go."""

from __future__ import annotations

from fastsac.core.shard_state import MergeRule

EPISODE_LENGTH = "episode_length"
"""Shard state: mean env steps of finished episodes."""
TRACKING = "tracking"
"""Shard state: mean of exp(-|planar velocity error|^2 / 0.25) per env step, in [0, 1]."""
PENALTY_SCALE = "penalty_scale"
"""Shard state: factor of the penalties on how the robot moves, in [PENALTY_START, 1]."""
COMMAND_SCALE = "command_scale"
"""Shard state: share of the command range in use, in [COMMAND_START, 1]."""
PENALTY_START = 0.3
COMMAND_START = 0.5
EPISODE_WINDOW = 64
"""Episodes of the whole fleet that the mean episode length remembers."""
TRACKING_WINDOW = 16_000
"""Env steps of the whole fleet that the mean tracking remembers."""
CURRICULUM_RATE = 2e-3
"""Relative change of the two scales per vector step."""


def shard_states() -> dict[str, MergeRule]:
    """For `EnvSpec`."""

    def mean(window: float) -> MergeRule:
        return MergeRule(kind="weighted_mean", size=1, window=window)

    return {
        EPISODE_LENGTH: mean(EPISODE_WINDOW),
        TRACKING: mean(TRACKING_WINDOW),
        PENALTY_SCALE: MergeRule(kind="resolve_one", size=1, initial=PENALTY_START),
        COMMAND_SCALE: MergeRule(kind="resolve_one", size=1, initial=COMMAND_START),
    }


def steer(scale: float, mean: float, low: float, high: float, start: float, steps: int) -> float:
    """`scale` after `steps` env steps: up where `mean` is over `high`, down where under `low`."""
    direction = (mean > high) - (mean < low)
    return min(1.0, max(start, scale * (1 + CURRICULUM_RATE * direction) ** steps))
