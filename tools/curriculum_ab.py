"""Does it matter how shards share a curriculum? The same task, seeds and budget under four rules.

    python tools/curriculum_ab.py OUT               # five seeds per arm
    python tools/curriculum_ab.py OUT --seeds 2 --env-steps 20000 --set algorithm.batch_size=64

Four shards of whole-body tracking start unequal on purpose: with other seeds, and, in the first
quarter of the run, each in its own quarter of the clip. Runs that are complete are kept, others
are resumed, so the command can be stopped and repeated. It writes OUT/curriculum_ab.md, a table of
interquartile means with 95 % bootstrap intervals over seeds, and OUT/curriculum_ab.png.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy import stats

from collectors.curriculum.bin_sampler import bin_of, num_bins
from collectors.tasks.motion import load_motion
from collectors.tasks.wbt_robots import default_motion
from fastsac.evaluation import evaluate_run
from fastsac.metrics import read_metrics

ARMS = ("none", "resolve_one", "weighted_mean", "linear_ema")
SHARDS = 4
THRESHOLD = 0.8
"""Share of the evaluation's episodes that reach the clip's end, from starts all over it."""


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    env_steps: np.ndarray
    """(records,) of the drift"""
    drift: np.ndarray
    """(records,) mean over shards of the total variation to the fleet's mean"""
    evaluated_at: np.ndarray
    """(evaluations,) env steps"""
    survival: np.ndarray
    """(evaluations,)"""
    bins: np.ndarray
    """(bins,) share of the last evaluation's episodes that survived, by the bin of their start"""
    error: float
    """m, mean error of the bodies' places in the last evaluation"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Help)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the runs and the results")
    parser.add_argument("--seeds", type=int, default=5, help="per arm (default: %(default)s)")
    parser.add_argument("--env-steps", type=int, default=200_000, help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=2, help="at once (default: %(default)s)")
    parser.add_argument(
        "--episodes", type=int, default=240, help="of the last policy (default: %(default)s)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="fields")
    args = parser.parse_args(argv)
    seeds = range(1, args.seeds + 1)
    pairs = [(arm, seed) for seed in seeds for arm in ARMS]
    with ThreadPoolExecutor(args.processes) as pool:
        folders = list(
            pool.map(
                lambda pair: run(args.out, pair[0], pair[1], args.env_steps, args.fields), pairs
            )
        )
    outcomes: dict[str, list[Outcome]] = {arm: [] for arm in ARMS}
    for (arm, _), folder in zip(pairs, folders, strict=True):
        outcomes[arm].append(read_outcome(folder, args.episodes))
    table = args.out / "curriculum_ab.md"
    table.write_text(make_table(outcomes, args.env_steps), encoding="utf-8")
    draw(outcomes, args.out / "curriculum_ab.png")
    print(table.read_text(encoding="utf-8"))


class _Help(argparse.RawDescriptionHelpFormatter):
    pass


def run(out: Path, arm: str, seed: int, env_steps: int, fields: Sequence[str]) -> Path:
    """Train, or resume, or keep what is complete; returns the run's folder.

    Raises:
        RuntimeError: the training failed.
    """
    place = out / f"{arm}-seed{seed}"
    found = sorted(place.glob("*/config.yaml"))
    if found and _complete(found[-1].parent):
        return found[-1].parent
    if found and any((found[-1].parent / "checkpoints").glob("*")):
        command = ["resume", str(found[-1].parent)]
    else:
        overrides = settings(arm, seed, env_steps) | dict(f.split("=", 1) for f in fields)
        flags = [part for n, v in overrides.items() for part in (f"--{n}", v)]
        command = ["train", "humanoid-wbt", *flags, "--log.dir", str(place)]
    done = subprocess.run(
        [sys.executable, "-m", "fastsac", *command, "--runtime", "inline"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    folder = max(place.glob("*/config.yaml"), default=place).parent
    if done.returncode or not _complete(folder):
        raise RuntimeError(f"{arm}, seed {seed}: {done.stderr.strip()}: repeat the command")
    return folder


def settings(arm: str, seed: int, env_steps: int) -> dict[str, str]:
    """Fields of the configuration that differ from `humanoid-wbt`."""
    motion = load_motion(_clip())
    bins = num_bins(len(motion.joint_pos), motion.fps)
    num_envs = 128
    quarters = [[i * bins // SHARDS, (i + 1) * bins // SHARDS - 1] for i in range(SHARDS)]
    first = max(1, env_steps // num_envs // 4)
    return {
        "name": arm,
        "seed": str(seed),
        "total_env_steps": str(env_steps),
        "env.num_envs": str(num_envs),
        "env.args": json.dumps({"initial_steps": first}),
        "env.shard_args": json.dumps([{"initial_bins": quarter} for quarter in quarters]),
        "shard_state": json.dumps({"failures": arm}),
        "fleet.num_ranks": "1",
        "fleet.collectors_per_rank": str(SHARDS),
        "evaluation.interval_env_steps": str(max(1, env_steps // 10)),
        "checkpoint.interval_env_steps": str(max(1, env_steps // 5)),
        "checkpoint.keep": "1",
        "log.tensorboard": "false",
    }


def read_outcome(folder: Path, episodes: int) -> Outcome:
    """Curves of a complete run, and an evaluation of its last policy from all over the clip."""
    records = read_metrics(folder)

    def curve(name: str) -> tuple[np.ndarray, np.ndarray]:
        known = [r for r in records if not math.isnan(r.get(name, math.nan))]
        return np.array([r["env_steps"] for r in known]), np.array([r[name] for r in known])

    motion = load_motion(_clip())
    frames = len(motion.joint_pos)
    bins = num_bins(frames, motion.fps)
    last = evaluate_run(folder, num_episodes=episodes, seed=1)
    where = bin_of(last.info["start_frame"].round().long(), frames, bins).numpy()
    survived = (~last.terminated).double().numpy()
    by_bin = [survived[where == b].mean() for b in range(bins)]
    return Outcome(
        *curve("curriculum/sampling/tv_mean"),
        *curve("eval/survival"),
        np.array(by_bin),
        float(last.info["body_position_error"].mean()),
    )


def iqm(values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Interquartile mean (Agarwal et al. 2021, arXiv 2108.13264)."""
    return stats.trim_mean(values, 0.25, axis=axis)


def interval(values: Sequence[float]) -> str:
    """Interquartile mean and its 95 % percentile bootstrap interval over seeds."""
    sample = np.asarray(values, dtype=np.float64)
    middle = float(iqm(sample))
    if len(sample) < 2 or np.ptp(sample) == 0:
        return f"{middle:.3g}"
    found = stats.bootstrap(
        (sample,), iqm, method="percentile", rng=np.random.default_rng(0), n_resamples=9999
    ).confidence_interval
    return f"{middle:.3g} [{found.low:.3g}, {found.high:.3g}]"


def make_table(outcomes: dict[str, list[Outcome]], env_steps: int) -> str:
    """Markdown, one row per measure and one column per arm."""
    seeds = len(outcomes[ARMS[0]])
    rows: dict[str, Callable[[Outcome], float]] = {
        "drift, mean over the run (total variation)": lambda o: float(o.drift.mean()),
        "drift, last record": lambda o: float(o.drift[-1]),
        "survival of the rest of the clip, last policy": lambda o: float(o.bins.mean()),
        "likewise, starts in the worst bin": lambda o: float(o.bins.min()),
        "error of the bodies' places, m": lambda o: o.error,
        f"env steps to a survival of {THRESHOLD:.0%}, or all": lambda o: _reached(o, env_steps),
    }
    lines = [
        f"Interquartile mean over {seeds} seeds and 95 % bootstrap interval; {env_steps:,} env "
        f"steps, {SHARDS} unequal shards.",
        "",
        "| " + " | ".join(["measure", *ARMS]) + " |",
        "| --- " * (1 + len(ARMS)) + "|",
    ]
    for name, measure in rows.items():
        cells = [interval([measure(outcome) for outcome in outcomes[arm]]) for arm in ARMS]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines) + "\n"


def draw(outcomes: dict[str, list[Outcome]], path: Path) -> None:
    """Drift and survival over the run, and survival by the bin of the start; IQM over seeds, the
    band from the worst to the best seed."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    drift, survival, bins = figure.subplots(1, 3)
    for arm, runs in outcomes.items():
        for axes, x, name in (
            (drift, runs[0].env_steps, "drift"),
            (survival, runs[0].evaluated_at, "survival"),
            (bins, np.arange(len(runs[0].bins)), "bins"),
        ):
            values = np.stack([getattr(outcome, name) for outcome in runs])
            [line] = axes.plot(x, iqm(values), label=arm)
            axes.fill_between(
                x, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, linewidth=0
            )
    drift.set(xlabel="env steps", title="drift between shards, total variation")
    survival.set(xlabel="env steps", title="survival of the rest of the clip", ylim=(0, 1))
    bins.set(xlabel="bin of the start", title="last policy's survival", ylim=(0, 1))
    drift.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _reached(outcome: Outcome, env_steps: int) -> float:
    good = outcome.evaluated_at[outcome.survival >= THRESHOLD]
    return float(good[0]) if len(good) else float(env_steps)


def _complete(folder: Path) -> bool:
    summary = folder / "summary.json"
    return summary.is_file() and json.loads(summary.read_text(encoding="utf-8"))["complete"]


def _clip() -> Path:
    clip = default_motion("humanoid")
    assert clip is not None
    return clip


if __name__ == "__main__":
    main()
