# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""MuJoCo's C engine: worlds of one model, advanced by a persistent pool of threads."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence

import mujoco
import numpy as np
import torch
from mujoco.rollout import Rollout
from torch import Tensor

logger = logging.getLogger(__name__)

_FULL = mujoco.mjtState.mjSTATE_FULLPHYSICS


class MujocoPhysics:
    """`Physics` on the CPU, with torch's number of threads; any number gives the same bits.

    The solver starts cold in every env step, so the state is all that a world's future depends
    on. A diverging world is not put back by the engine: its state becomes NaN once a value passes
    mjMAXVAL = 1e10, which collectors handle.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        *,
        num_envs: int,
        decimation: int,
        randomized: Sequence[str] = (),
    ) -> None:
        """See `make_physics`."""
        if mujoco.get_mju_user_warning() is None:
            # Or MuJoCo appends to MUJOCO_LOG.TXT in the working directory.
            mujoco.set_mju_user_warning(logger.debug)
        assert model.na == 0, "actuator activations would have to be saved and reset too"
        # Bodies that MuJoCo calls simple take their inertia from tables made at compile time.
        assert not (randomized and model.dof_simplenum.any()), "changed masses would be ignored"
        model = copy.copy(model)
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
        self._models = [copy.copy(model) if randomized else model for _ in range(num_envs)]
        self._randomized = tuple(randomized)
        threads = torch.get_num_threads()
        self._pool = Rollout(nthread=threads if threads > 1 else 0)
        self._datas = [mujoco.MjData(model) for _ in range(threads)]
        self._decimation = decimation
        self._chunk = max(1, num_envs // (4 * threads))

        full = np.zeros(mujoco.mj_stateSize(model, _FULL))
        mujoco.mj_getState(model, self._datas[0], full, _FULL)
        self._state = torch.from_numpy(np.tile(full, (num_envs, 1)))
        self._controls = torch.zeros((num_envs, decimation, model.nu), dtype=torch.float64)
        self._states_out = np.zeros((num_envs, decimation, len(full)))
        self._sensors_out = np.zeros((num_envs, decimation, model.nsensordata))
        self._last_state = torch.from_numpy(self._states_out)[:, -1]
        self.qpos = self._state[:, 1 : 1 + model.nq]
        self.qvel = self._state[:, 1 + model.nq : 1 + model.nq + model.nv]
        self.ctrl = torch.zeros((num_envs, model.nu), dtype=torch.float64)
        self.sensordata = torch.from_numpy(self._sensors_out)[:, -1]

    def step(self) -> None:
        self._controls.copy_(self.ctrl[:, None])
        self._pool.rollout(
            self._models,
            self._datas,
            self._state.numpy(),
            self._controls.numpy(),
            skip_checks=True,
            nstep=self._decimation,
            state=self._states_out,
            sensordata=self._sensors_out,
            chunk_size=self._chunk,
        )
        self._state.copy_(self._last_state)
        # Past this MuJoCo calls the world unstable; finite numbers would get into replay.
        stable = self._state.abs().amax(1, keepdim=True) < mujoco.mjMAXVAL
        self._state.masked_fill_(~stable, torch.nan)

    def set_state(self, mask: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        rows = mask.nonzero().flatten()
        self.qpos[rows] = qpos[rows].double()
        self.qvel[rows] = qvel[rows].double()
        self._state[rows, 0] = 0  # the time
        self.sensordata[rows] = 0

    def set_model(self, mask: Tensor, fields: Mapping[str, Tensor]) -> None:
        for name, values in fields.items():
            for row in mask.nonzero().flatten().tolist():
                getattr(self._models[row], name)[...] = values[row].numpy()

    def check(self) -> None:
        """The C engine's contacts and constraints have all the room they ask for."""

    def state_dict(self) -> dict[str, Tensor]:
        fields = {
            f"model.{name}": torch.from_numpy(np.stack([getattr(m, name) for m in self._models]))
            for name in self._randomized
        }
        return {"state": self._state.clone(), "sensordata": self.sensordata.clone(), **fields}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._state.copy_(state["state"])
        self.sensordata.copy_(state["sensordata"])
        everything = torch.ones(len(self._models), dtype=torch.bool)
        self.set_model(everything, {n: state[f"model.{n}"] for n in self._randomized})

    def close(self) -> None:
        self._pool.close()
