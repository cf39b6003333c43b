"""Tensors in memory that another process can map: a nameless file on CPU, CUDA IPC on a GPU.

The file is unlinked as soon as it is made, so that the system takes the memory back when the last
process that has it open ends, however it ends. Others open it through such a process, as
/proc/PID/fd/N.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import shutil
import time
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

    On CPU the memory lives until the last process that maps it has closed it or ended, and any of
    them can share it further. On a GPU it ends with the process that allocated it.
    """

    def __init__(
        self, tensors: dict[str, Tensor], layout: TensorLayout, descriptor: int | None
    ) -> None:
        self._tensors = tensors
        self._layout = layout
        self._descriptor = descriptor
        """Of the file, on CPU."""

    @classmethod
    def allocate(
        cls, layout: TensorLayout, *, device: torch.device, directory: str, name: str
    ) -> SharedTensors:
        """Reserve all memory now, for this process to write.

        Args:
            directory: whose file system holds the memory, on CPU.
            name: what the file is called in /proc.

        Raises:
            ValueError: `directory` has no room, or is not ours to write.
        """
        if device.type == "cuda":
            tensors = {
                name: torch.zeros(shape, dtype=dtype, device=device)
                for name, (shape, dtype) in layout.items()
            }
            return cls(tensors, layout, None)
        shared = _map(_reserve(Path(directory) / name, num_bytes(layout)), layout)
        shared.own()
        return shared

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def own(self, timeout_s: float = 0.0) -> None:
        """Become the one process that writes, until it closes the memory or ends.

        The lock belongs to the process alone: what it forks does not hold it.

        Args:
            timeout_s: how long one that is being killed may take to end.

        Raises:
            ValueError: another process writes.
        """
        if self._descriptor is None:
            return
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise ValueError("another process still writes this replay shard") from None
            time.sleep(0.1)

    def close(self) -> None:
        """Give the memory back once nobody maps it any more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self._descriptor is not None:
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            return _open_file, (path, self._layout)
        from torch.multiprocessing.reductions import reduce_tensor

        handles = {name: reduce_tensor(tensor) for name, tensor in self._tensors.items()}
        return _open_handles, (handles, self._layout)


def num_bytes(layout: TensorLayout) -> int:
    """Bytes of memory that the tensors take."""
    return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in layout.values())


def _reserve(path: Path, size: int) -> int:
    """Make a file whose every page is there, so that a full disk is an error here and now.

    Returns:
        Its descriptor; it has no name any more.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            path.unlink()
            os.posix_fallocate(descriptor, 0, size)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    except (OSError, OverflowError) as error:  # more than a file offset can say
        advice = "set replay.dir to a folder with room"
        number = error.errno if isinstance(error, OSError) else errno.EFBIG
        if number in (errno.ENOSPC, errno.EFBIG, errno.EINVAL):
            free = shutil.disk_usage(path.parent).free
            advice = f"{free:,} bytes are free: {advice} or lower replay.steps_per_env"
        raise ValueError(
            f"a replay shard of {size:,} bytes cannot be made at {path} "
            f"({os.strerror(number or 0)}): {advice}"
        ) from None


def _open_file(path: str, layout: TensorLayout) -> SharedTensors:
    """Map the file that another process has open."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        raise ValueError(f"replay shard {path} is gone: the process that held it ended") from None
    assert os.fstat(descriptor).st_size == num_bytes(layout), "the same layout in both"
    return _map(descriptor, layout)


def _map(descriptor: int, layout: TensorLayout) -> SharedTensors:
    path, size = f"/proc/self/fd/{descriptor}", num_bytes(layout)
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    tensors, offset = {}, 0
    for name, (shape, dtype) in layout.items():
        size = math.prod(shape) * dtype.itemsize
        tensors[name] = memory[offset : offset + size].view(dtype).view(shape)
        offset += _aligned(size)
    return SharedTensors(tensors, layout, descriptor)


def _open_handles(handles: Mapping[str, tuple[Any, Any]], layout: TensorLayout) -> SharedTensors:
    tensors = {name: rebuild(*arguments) for name, (rebuild, arguments) in handles.items()}
    return SharedTensors(tensors, layout, None)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
