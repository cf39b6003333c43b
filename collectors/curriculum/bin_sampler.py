"""Where episodes of a motion clip start: likelier where robots fail, by bins of about one second.

A clip of T frames at f frames per second has B = floor(T / f) + 1 bins; frame k is in bin
floor(k B / T). Failures of every env step are counted by bin in an exponential moving average
q <- (1 - a) q + a c, which the fleet shares. BeyondMimic (Liao et al. 2025, arXiv 2508.08241)
samples start frames in this way; the form `mixture` is our own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fastsac.core.shard_state import LocalState, MergeRule

Mode = Literal["adaptive", "uniform", "start"]
"""`adaptive`: by failures; `uniform`: every frame alike; `start`: always the first frame."""
Form = Literal["mixture", "additive"]
"""How failures and exploration make probabilities, see `bin_probabilities`."""

FAILURES = "failures"
"""Shard state: failures per vector step by bin, a moving average."""
SAMPLING = "sampling"
"""Shard state: the probabilities of the bins that this shard's episodes start in."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How start frames are drawn. Fields are named as in `env.args`."""

    sampling: Mode = "adaptive"
    form: Form = "mixture"
    rate: float = 0.001
    """The moving average's a, per vector step, in (0, 1)."""
    exploration: float = 0.1
    """See `bin_probabilities`; in (0, 1]."""
    kernel_size: int = 1
    """Bins that a failure reaches, its own included."""
    kernel_decay: float = 0.8
    """Weight of a bin over that of the bin after it, in (0, 1]."""
    initial_bins: tuple[int, ...] | None = None
    """First and last bin that episodes start in at first; None for all of them."""
    initial_steps: int = 0
    """Vector steps of the shard during which `initial_bins` hold."""

    def __post_init__(self) -> None:
        """Raises ValueError: a value that is not allowed."""
        for name, value, choices in (
            ("sampling", self.sampling, get_args(Mode)),
            ("form", self.form, get_args(Form)),
        ):
            if value not in choices:
                raise ValueError(f"env.args.{name} is {value!r}: give {' or '.join(choices)}")
        for name, value, good, allowed in (
            ("rate", self.rate, 0 < self.rate < 1, "in (0, 1)"),
            ("exploration", self.exploration, 0 < self.exploration <= 1, "in (0, 1]"),
            ("kernel_size", self.kernel_size, self.kernel_size >= 1, "of at least 1"),
            ("kernel_decay", self.kernel_decay, 0 < self.kernel_decay <= 1, "in (0, 1]"),
            ("initial_steps", self.initial_steps, self.initial_steps >= 0, "of at least 0"),
        ):
            if not good:
                raise ValueError(f"env.args.{name} is {value:g}: give a number {allowed}")
        if self.initial_bins is not None and not self.initial_steps:
            raise ValueError(
                f"env.args.initial_bins is {list(self.initial_bins)} for initial_steps of 0: give "
                "initial_steps too, in vector steps"
            )


class BinSampler:
    """Draws start frames of one clip on the device, and counts failures there.

    `memory` is to be saved and restored with the shard; the fleet's failures are told anew.
    """

    memory: dict[str, Tensor]

    def __init__(self, sampling: Sampling, *, num_frames: int, fps: float) -> None:
        """Nothing is on a device before `allocate`.

        Raises:
            ValueError: too short a clip, or initial bins that it does not have.
        """
        self._sampling = sampling
        self._num_frames = num_frames
        self.bins = bins = num_bins(num_frames, fps)
        self._first = first_frames(num_frames, bins)
        # An episode ends with the last frame, so none starts there.
        self._first[-1] = num_frames - 1
        if bool((self._first.diff() < 1).any()):
            raise ValueError(
                f"a motion of {num_frames} frames at {fps:g} Hz is too short to start in each of "
                f"its {bins} bins: give a longer one"
            )
        initial = (0, bins - 1) if sampling.initial_bins is None else sampling.initial_bins
        if len(initial) != 2 or not 0 <= initial[0] <= initial[1] < bins:
            raise ValueError(
                f"env.args.initial_bins is {list(initial)}: give the first and the last of some of "
                f"the motion's bins, 0 to {bins - 1}"
            )
        low, high = initial
        self._initial = (torch.arange(bins) >= low) & (torch.arange(bins) <= high)
        self._kernel = decaying_kernel(sampling.kernel_size, sampling.kernel_decay)
        self._failures = torch.zeros(bins, dtype=torch.float64)

    @property
    def shard_states(self) -> dict[str, MergeRule]:
        """For `EnvSpec`."""
        return {
            FAILURES: MergeRule(kind="linear_ema", size=self.bins, rate=self._sampling.rate),
            SAMPLING: MergeRule(kind="none", size=self.bins, distribution=True),
        }

    def allocate(self, device: torch.device) -> None:
        """Make a fresh `memory` on the device of the worlds."""
        self._device = device
        self._starts = self._first.to(device)
        self.memory = {
            # since the last report: a (1 - a)^(age in vector steps) of every failure, by bin
            "failures": torch.zeros(self.bins, dtype=torch.float64, device=device),
            "failed": torch.zeros((), dtype=torch.float64, device=device),
            "vector_steps": torch.zeros((), dtype=torch.int64, device=device),
        }
        self._cumulate()

    def draw(self, unit: Tensor) -> Tensor:
        """Start frames, (num_envs,) int64: a bin by its probability, any of its frames alike.

        Args:
            unit: (num_envs, 2) float64, uniform in [0, 1).
        """
        at_first = self.memory["vector_steps"] < self._sampling.initial_steps
        cumulated = torch.where(at_first, self._cumulated_at_first, self._cumulated)
        bins = torch.searchsorted(cumulated, unit[:, 0].contiguous(), right=True)
        low, high = self._starts[bins], self._starts[bins + 1]
        frames = low + (unit[:, 1] * (high - low)).long()
        return torch.zeros_like(frames) if self._sampling.sampling == "start" else frames

    def count(self, frame: Tensor, failed: Tensor) -> None:
        """Count one vector step.

        Args:
            frame: (num_envs,) int64, where the envs are in the clip.
            failed: (num_envs,) bool, which episodes terminated there.
        """
        counts = torch.zeros(self.bins, dtype=torch.float64, device=self._device)
        counts.index_add_(0, bin_of(frame, self._num_frames, self.bins), failed.double())
        rate = self._sampling.rate
        self.memory["failures"].mul_(1 - rate).add_(counts, alpha=rate)
        self.memory["failed"] += counts.sum()
        self.memory["vector_steps"] += 1

    def report(self) -> dict[str, LocalState]:
        """What was counted since the last report, and the present probabilities."""
        memory = self.memory
        value, weight = memory["failures"].cpu().clone(), float(memory["failed"])
        memory["failures"].zero_()
        memory["failed"].zero_()
        at_first = int(memory["vector_steps"]) < self._sampling.initial_steps
        return {
            FAILURES: LocalState(value=value, weight=weight),
            SAMPLING: LocalState(value=self.probabilities(at_first)),
        }

    def apply(self, failures: Tensor) -> None:
        """Take the fleet's failures per vector step, (bins,) float64 on the CPU; may come before
        `allocate`."""
        self._failures = failures.clone()
        if hasattr(self, "memory"):
            self._cumulate()

    def probabilities(self, at_first: bool = False) -> Tensor:
        """Of the bins, (bins,) float64 on the CPU.

        Args:
            at_first: during the first vector steps.
        """
        sampling = self._sampling
        if sampling.sampling == "start":
            return torch.eye(self.bins, dtype=torch.float64)[0]
        if sampling.sampling == "uniform":
            chances = self._first.diff() / (self._num_frames - 1)
        else:
            chances = bin_probabilities(
                self._failures,
                form=sampling.form,
                exploration=sampling.exploration,
                kernel=self._kernel,
            )
        if at_first:
            chances = chances * self._initial
        return chances.double() / chances.sum()

    def _cumulate(self) -> None:
        for at_first in (False, True):
            cumulated = self.probabilities(at_first).cumsum(0)
            # The last possible bin gets exactly 1, which no drawn number reaches.
            cumulated = (cumulated / cumulated[-1]).to(self._device)
            if at_first:
                self._cumulated_at_first = cumulated
            else:
                self._cumulated = cumulated


def num_bins(num_frames: int, fps: float) -> int:
    """Bins of a clip of `num_frames` at `fps` frames per second."""
    return int(num_frames // fps) + 1


def bin_of(frame: Tensor, num_frames: int, bins: int) -> Tensor:
    """The bins of frames, both int64 of one shape."""
    return (frame * bins // num_frames).clamp(0, bins - 1)


def first_frames(num_frames: int, bins: int) -> Tensor:
    """The first frame of every bin, and the clip's end: (bins + 1,) int64."""
    return -(-torch.arange(bins + 1) * num_frames // bins)


def decaying_kernel(size: int, decay: float) -> Tensor:
    """(size,) float64 weights in proportion to decay^i, that add up to 1."""
    weights = decay ** torch.arange(size, dtype=torch.float64)
    return weights / weights.sum()


def smooth(values: Tensor, kernel: Tensor) -> Tensor:
    """Every bin gets from itself and later ones; the last one stands for those past the end.

    So a failure in a bin makes the frames before it likelier.

    Args:
        values: (bins,) float64.
        kernel: (size,) float64, the bin's own weight first.
    """
    later = torch.cat([values, values[-1:].expand(len(kernel) - 1)])
    return later.unfold(0, len(kernel), 1) @ kernel


def bin_probabilities(
    failures: Tensor, *, form: Form, exploration: float, kernel: Tensor
) -> Tensor:
    """Probabilities of the bins, (bins,) float64.

    `mixture` draws from all bins alike with probability `exploration`, and altogether while
    nothing has failed. `additive`, as in BeyondMimic, adds `exploration` failures spread over the
    bins; its uniform share exploration / (sum of failures + exploration) shrinks as fleets grow.

    Args:
        failures: (bins,) float64, failures per vector step, none negative.
        exploration: in (0, 1].
        kernel: see `smooth`.
    """
    uniform = torch.full_like(failures, 1 / len(failures))
    if form == "additive":
        raised = smooth(failures + exploration * uniform, kernel)
        return raised / raised.sum()
    raised = smooth(failures, kernel)
    total = raised.sum()
    by_failures = raised / total if total > 0 else uniform
    return (1 - exploration) * by_failures + exploration * uniform
