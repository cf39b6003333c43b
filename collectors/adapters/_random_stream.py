"""The process-wide random generators, lent to one shard at a time."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


class RandomStream:
    """The process-wide generators of torch, NumPy and `random`, as one shard's own stream.

    Simulators draw from the global generators. Inside `active` those hold this stream's state, and
    what they held before comes back afterwards: a shard neither disturbs others nor is disturbed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state = self._read()

    def seed(self, seed: int) -> None:
        """Start the stream that belongs to `seed`."""
        outside = self._read()
        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (simulators draw from the global generator)
        random.seed(seed)
        self._state = self._read()
        self._write(outside)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let the global generators continue this stream."""
        outside = self._read()
        self._write(self._state)
        try:
            yield
        finally:
            self._state = self._read()
            self._write(outside)

    def _read(self) -> tuple[Any, ...]:
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()  # noqa: NPY002

    def _write(self, state: tuple[Any, ...]) -> None:
        cpu, cuda, numpy, python = state
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self._device)
        np.random.set_state(numpy)  # noqa: NPY002
        random.setstate(python)
