# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""The MuJoCo-Warp engine: many worlds of one model, advanced by a captured graph."""

from __future__ import annotations

import fcntl
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from mujoco_warp._src.types import OverflowType  # not re-exported
from torch import Tensor

# Warp tells of every kernel module that it loads, unless told otherwise before it starts.
wp.config.log_level = wp.LOG_WARNING
wp.init()

logger = logging.getLogger(__name__)

_SAVED = ("qpos", "qvel", "qacc_warmstart", "sensordata")
"""What decides a world's future, given its controls: state and the solver's starting point."""


class WarpPhysics:
    """`Physics` on MuJoCo-Warp, on CUDA and on the CPU.

    The launches of a control period are captured once and replayed as one graph, on the CPU too,
    where launching from Python would take most of the time. A CUDA graph runs on torch's current
    stream, so it is ordered with torch's own work.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        *,
        num_envs: int,
        decimation: int,
        max_contacts: int,
        max_constraints: int,
        device: torch.device,
        randomized: Sequence[str] = (),
    ) -> None:
        """See `make_physics`.

        Raises:
            ValueError: no room for a constraint.
        """
        assert model.na == 0, "actuator activations would have to be saved and reset too"
        if max_constraints < 1:
            raise ValueError(
                f"max_constraints is {max_constraints}, and MuJoCo-Warp moves no world without "
                "room for one: give env.args.max_constraints of at least 1"
            )
        self._device = wp.device_from_torch(device)
        self._decimation = decimation
        self._room = {"max_contacts": max_contacts, "max_constraints": max_constraints}
        self._randomized = tuple(randomized)
        with wp.ScopedDevice(self._device), _kernels_compiled_once(model, self._device):
            self._model = mjw.put_model(model, dict.fromkeys(randomized, num_envs))
            # `check` tells of overflows; the kernels would print a line per world and step.
            self._model.opt.warn_overflow = False
            self._data = mjw.make_data(
                model, nworld=num_envs, nconmax=max_contacts, njmax=max_constraints
            )
            wp.synchronize_device()
            start = self.state_dict()
            # Kernels are loaded before the capture: older CUDA drivers cannot do it meanwhile.
            self._launch_steps()
            with wp.ScopedCapture() as capture:
                self._launch_steps()
            wp.synchronize_device()
            self.load_state_dict(start)
            self._data.overflow.zero_()
        assert capture.graph is not None
        self._graph = capture.graph
        self.qpos = wp.to_torch(self._data.qpos)
        self.qvel = wp.to_torch(self._data.qvel)
        self.ctrl = wp.to_torch(self._data.ctrl)
        self.sensordata = wp.to_torch(self._data.sensordata)
        self._qacc_warmstart = wp.to_torch(self._data.qacc_warmstart)

    def step(self) -> None:
        stream = wp.stream_from_torch(self.qpos.device) if self._device.is_cuda else None
        wp.capture_launch(self._graph, stream=stream)

    def set_state(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        rows = mask[:, None]
        self.qpos.copy_(torch.where(rows, qpos, self.qpos))
        self.qvel.copy_(torch.where(rows, qvel, self.qvel))
        self.sensordata.masked_fill_(rows, 0)
        self._qacc_warmstart.masked_fill_(rows, 0)

    def set_model(self, mask: Tensor, fields: Mapping[str, Tensor]) -> None:
        for name, values in fields.items():
            field = wp.to_torch(getattr(self._model, name))
            rows = mask.reshape(-1, *[1] * (field.dim() - 1))
            field.copy_(torch.where(rows, values, field))

    def check(self) -> None:
        flags = wp.to_torch(self._data.overflow)
        lost = [flag for flag in OverflowType if bool((flags & flag.value).any())]
        if not lost:
            return
        in_rows = any(flag in (OverflowType.NEFC, OverflowType.NJMAX_NNZ) for flag in lost)
        field = "max_constraints" if in_rows else "max_contacts"
        raise ValueError(
            f"MuJoCo-Warp lost {'constraints' if in_rows else 'contacts'} "
            f"({', '.join(str(flag.name) for flag in lost)}) with {field} {self._room[field]}: "
            f"raise env.args.{field}"
        )

    def state_dict(self) -> dict[str, Tensor]:
        saved = {name: wp.to_torch(getattr(self._data, name)).clone() for name in _SAVED}
        for name in self._randomized:
            saved[f"model.{name}"] = wp.to_torch(getattr(self._model, name)).clone()
        return saved

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name in _SAVED:
            wp.to_torch(getattr(self._data, name)).copy_(state[name])
        for name in self._randomized:
            wp.to_torch(getattr(self._model, name)).copy_(state[f"model.{name}"])

    def close(self) -> None:
        """Memory goes with the object."""

    def _launch_steps(self) -> None:
        for _ in range(self._decimation):
            mjw.step(self._model, self._data)


@contextmanager
def _kernels_compiled_once(model: mujoco.MjModel, device: wp.Device) -> Iterator[None]:
    """Let one process of this machine compile a model's kernels while the others wait for it.

    Warp caches what it compiles, so this matters the first time only; a marker in the cache folder
    says that it is over. Warp deletes folders named `wp_*` when its kernel cache is cleared, the
    marker with them.
    """
    serialized = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, serialized)
    architecture = f"{device.alias} {device.arch} {mjw.__version__}".encode()
    digest = hashlib.sha256(architecture + serialized.tobytes()).hexdigest()[:16]
    assert wp.config.kernel_cache_dir is not None, "Warp sets it when it starts"
    cache = Path(wp.config.kernel_cache_dir)
    marker = cache / f"wp_fastsac_{digest}"
    if marker.exists():
        yield
        return
    with open(cache / "fastsac.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not marker.exists():
            logger.warning("compiling MuJoCo-Warp kernels, once per machine, about 30 s")
        yield
        marker.mkdir(exist_ok=True)
