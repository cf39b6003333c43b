"""Env steps per second of Gymnasium and EnvPool shards, side by side in one run.

    python tools/bench_envpool.py [--num-envs 64] [--seconds 3] [--threads 1]

Both run on the same machine under the same load, and take turns: read the ratio, the absolute
numbers belong to this machine.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch

from collectors.env import EnvShard, resolve_task

TASKS = ("Pendulum-v1", "HalfCheetah-v5")
ROUNDS = 3


def env_steps_per_s(shard: EnvShard, seconds: float) -> float:
    """Steps `shard` with random actions for `seconds`; policies and replay are left out."""
    low, high = shard.spec.action_low, shard.spec.action_high
    num_envs = shard.spec.num_envs
    vector_steps = 0
    started = time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        shard.step(low + torch.rand(num_envs, low.numel()) * (high - low))
        vector_steps += 1
    return vector_steps * num_envs / elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description="Gymnasium against EnvPool, env steps per second")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=3.0, help="per shard and round")
    parser.add_argument("--threads", type=int, default=1, help="of EnvPool")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{options.num_envs} envs, EnvPool with {options.threads} threads, best of {ROUNDS}")
    print(f"{'task':<16}{'gymnasium /s':>14}{'envpool /s':>14}{'ratio':>8}")
    for task in TASKS:
        best = {"gymnasium": 0.0, "envpool": 0.0}
        args = {"gymnasium": {}, "envpool": {"num_threads": options.threads}}
        shards = {
            library: resolve_task(f"{library}:{task}")(
                num_envs=options.num_envs,
                device=torch.device("cpu"),
                evaluation=False,
                **args[library],
            )
            for library in best
        }
        for shard in shards.values():
            shard.reset(1)
        for _ in range(ROUNDS):
            for library, shard in shards.items():
                best[library] = max(best[library], env_steps_per_s(shard, options.seconds))
        for shard in shards.values():
            shard.close()
        ratio = best["envpool"] / best["gymnasium"]
        print(f"{task:<16}{best['gymnasium']:>14,.0f}{best['envpool']:>14,.0f}{ratio:>7.1f}x")


if __name__ == "__main__":
    main()
