# pyright: reportAttributeAccessIssue=false
# MuJoCo's bindings are a C extension without stubs.
"""What a native env step costs beside its engine: physics, observations, rewards and resets of a
shard over the bare engine stepping the same worlds, alternately in one process.

    python tools/bench_env_step.py --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import mujoco
import numpy as np
import torch
from mujoco.rollout import Rollout
from rich.console import Console
from rich.table import Table

from collectors.env import resolve_task
from collectors.tasks.mujoco_env import MujocoEnv

ROUNDS, STEPS = 12, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tasks", nargs="+", default=["quadruped-velocity", "go1-velocity"])
    parser.add_argument("--num-envs", nargs="+", type=int, default=[64, 256])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table = Table("task", "envs", "bare engine, ms", "env step, ms", "ratio", "env steps/s")
    for task in args.tasks:
        for num_envs in args.num_envs:
            bare, full = _measure(task, num_envs, args.threads)
            ratio = statistics.median(f / b for f, b in zip(full, bare, strict=True))
            step_s, bare_s = statistics.median(full), statistics.median(bare)
            row = f"{bare_s * 1e3:.2f} {step_s * 1e3:.2f} {ratio:.2f} {num_envs / step_s:,.0f}"
            table.add_row(task, str(num_envs), *row.split())
    Console().print(table)


def _measure(task: str, num_envs: int, threads: int) -> tuple[list[float], list[float]]:
    """Seconds per env step of the bare engine and of the shard, round by round."""
    device = torch.device("cpu")
    env = resolve_task(task)(num_envs=num_envs, device=device, evaluation=False)
    assert isinstance(env, MujocoEnv)
    env.reset(1)
    generator = torch.Generator().manual_seed(1)
    low, high = env.spec.action_low, env.spec.action_high
    actions = [
        0.1 * (low + torch.rand((num_envs, len(low)), generator=generator) * (high - low))
        for _ in range(STEPS)
    ]
    bare = _bare_engine(env, threads)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 1):
        for seconds, step in zip(times, (bare, lambda i: env.step(actions[i])), strict=True):
            started = time.perf_counter()
            for i in range(STEPS):
                step(i)
            seconds.append((time.perf_counter() - started) / STEPS)
    env.close()
    return times[0][1:], times[1][1:]  # the first round warms up


def _bare_engine(env: MujocoEnv, threads: int) -> Callable[[int], object]:
    """`mujoco.rollout` over the shard's present states and controls, again and again."""
    simulation, physics = env._task.simulation, env._physics
    assert physics is not None
    model, decimation, n = simulation.model, simulation.decimation, env.spec.num_envs
    pool = Rollout(nthread=threads if threads > 1 else 0)
    models = [model] * n
    datas = [mujoco.MjData(model) for _ in range(threads)]
    size = mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_FULLPHYSICS)
    state_out = np.zeros((n, decimation, size))
    sensors_out = np.zeros((n, decimation, model.nsensordata))

    def step(_: int) -> object:
        states = np.concatenate(
            [np.zeros((n, 1)), physics.qpos.numpy(), physics.qvel.numpy()], axis=1
        )
        controls = np.repeat(physics.ctrl.numpy()[:, None], decimation, axis=1)
        return pool.rollout(
            models, datas, states, controls, skip_checks=True, nstep=decimation,
            state=state_out, sensordata=sensors_out,
        )  # fmt: skip

    return step


if __name__ == "__main__":
    main()
