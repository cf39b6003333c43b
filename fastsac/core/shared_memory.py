"""Tensors in memory that another process can map: a file on CPU, CUDA IPC on a GPU."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; a cache line, so that no tensor shares one with its neighbour."""

TensorLayout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by name."""


class SharedTensors:
    """Zero-initialised tensors by name. Pickling shares their memory; it copies nothing.

    The process that allocated them owns them: the memory lives until its `close`, and mappings
    elsewhere stay usable after that (on CPU).
    """

    def __init__(self, tensors: dict[str, Tensor], layout: TensorLayout, path: Path | None) -> None:
        self._tensors = tensors
        self._layout = layout
        self._path = path
        self._lock: int | None = None
        """Descriptor that the owner holds locked while it lives."""

    @classmethod
    def allocate(
        cls, layout: TensorLayout, *, device: torch.device, directory: str, name: str
    ) -> SharedTensors:
        """Reserve all memory now.

        Raises:
            ValueError: `directory` has no room, or is not ours to write.
        """
        if device.type == "cuda":
            tensors = {
                name: torch.zeros(shape, dtype=dtype, device=device)
                for name, (shape, dtype) in layout.items()
            }
            return cls(tensors, layout, None)
        path = Path(directory) / name
        _remove_stale(path)
        lock = _reserve(path, _num_bytes(layout))
        try:
            shared = _map_file(path, layout)
        except BaseException:
            os.close(lock)
            path.unlink()
            raise
        shared._lock = lock
        return shared

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        """Give the memory back once nobody maps it any more.

        Whoever maps it may call this when the run is over, so that a dead owner leaves nothing.
        """
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is not None:
            return _map_file, (self._path, self._layout)
        from torch.multiprocessing.reductions import reduce_tensor

        handles = {name: reduce_tensor(tensor) for name, tensor in self._tensors.items()}
        return _open_handles, (handles, self._layout)


def _remove_stale(path: Path) -> None:
    """Remove what a killed owner left behind; a living one holds its lock."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return  # nothing there, or not ours: making it says so
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        raise ValueError(
            f"replay shard {path} is in use: wait until the process that trains this run has ended"
        ) from None
    finally:
        os.close(descriptor)


def _reserve(path: Path, num_bytes: int) -> int:
    """Make a file whose every page is there, so that a full disk is an error here and now.

    Returns:
        Its descriptor, locked.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            path.unlink()
            raise
        return descriptor
    except (OSError, OverflowError) as error:  # more than a file offset can say
        advice = "set replay.dir to a folder with room"
        number = error.errno if isinstance(error, OSError) else errno.EFBIG
        if number in (errno.ENOSPC, errno.EFBIG, errno.EINVAL):
            free = shutil.disk_usage(path.parent).free
            advice = f"{free:,} bytes are free: {advice} or lower replay.steps_per_env"
        raise ValueError(
            f"a replay shard of {num_bytes:,} bytes cannot be made at {path} "
            f"({os.strerror(number or 0)}): {advice}"
        ) from None


def _map_file(path: Path, layout: TensorLayout) -> SharedTensors:
    num_bytes = _num_bytes(layout)
    # torch would make an empty file in the place of one that is gone
    if not path.is_file() or path.stat().st_size != num_bytes:
        raise ValueError(f"replay shard {path} is gone: its collector has closed it")
    memory = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
    tensors, offset = {}, 0
    for name, (shape, dtype) in layout.items():
        size = math.prod(shape) * dtype.itemsize
        tensors[name] = memory[offset : offset + size].view(dtype).view(shape)
        offset += _aligned(size)
    return SharedTensors(tensors, layout, path)


def _open_handles(handles: Mapping[str, tuple[Any, Any]], layout: TensorLayout) -> SharedTensors:
    tensors = {name: rebuild(*arguments) for name, (rebuild, arguments) in handles.items()}
    return SharedTensors(tensors, layout, None)


def _num_bytes(layout: TensorLayout) -> int:
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in layout.values())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
