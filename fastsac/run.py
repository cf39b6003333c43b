"""A run's folder: what it records, when it is asked to stop, what it hands back at the end."""

from __future__ import annotations

import datetime
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from collectors.collector import CollectReport
from collectors.guard import EnvError
from fastsac.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint
from fastsac.config_files import load_config, save_config
from fastsac.core.config import Config
from fastsac.core.metrics import MetricValue
from fastsac.core.progress import Progress
from fastsac.metrics import MetricAccumulator, RunLog, make_display, write_summary

MAX_DUMPS = 100
"""Non-finite transitions kept in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run left behind."""

    run_dir: Path
    summary: dict[str, Any]
    """Contents of summary.json."""
    exit_status: int
    """0 when complete, 130 after SIGINT, 143 after SIGTERM."""


def new_run_dir(config: Config) -> Path:
    """Make `log.dir/name-seed-time`, holding the configuration as config.yaml.

    Raises:
        ValueError: the folder cannot be made.
    """
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{config.name}-seed{config.seed}-{stamp}"
    try:
        base = Path(config.log.dir).expanduser().resolve()
        base.mkdir(parents=True, exist_ok=True)
        run_dir, number = base / name, 1
        while not _make(run_dir):  # another run may begin in the same second
            number += 1
            run_dir = base / f"{name}-{number}"
        save_config(config, run_dir / "config.yaml")
    except (OSError, RuntimeError) as error:  # RuntimeError: `~user` of nobody
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"log.dir {config.log.dir!r} cannot hold a run ({reason}): give a folder that you may "
            "write"
        ) from None
    return run_dir


def _make(folder: Path) -> bool:
    """Whether the folder is new."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def remove_unused(run_dir: Path) -> None:
    """Remove the folder of a run that was refused before it recorded anything."""
    if not (run_dir / "metrics.jsonl").exists():
        shutil.rmtree(run_dir)


def open_run(run_dir: Path) -> tuple[Config, dict[str, Any]]:
    """Configuration and newest whole checkpoint of a run.

    Raises:
        ValueError: the folder holds no run, or no whole checkpoint.
    """
    config = run_config(run_dir)
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is None:
        raise ValueError(f"{run_dir} has no whole checkpoint: train it anew")
    return config, load_checkpoint(checkpoint)


def run_config(run_dir: Path, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """Configuration that a run keeps.

    Raises:
        ValueError: the folder holds no run, or an override is refused.
    """
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{run_dir} is not a run: give a folder that holds a config.yaml")
    return load_config(str(path), overrides)


@dataclass
class Due:
    """Whether a multiple of `interval` env steps was passed since the last time it was due."""

    interval: int
    """Fleet-wide env steps; 0 is never due."""
    last: int = 0

    def __call__(self, env_steps: int) -> bool:
        if self.interval == 0 or env_steps // self.interval == self.last // self.interval:
            return False
        self.last = env_steps
        return True


class Run:
    """Owner of the run's folder while it trains."""

    def __init__(self, run_dir: Path, config: Config, progress: Progress) -> None:
        self.dir = run_dir
        self._config = config
        self._log = RunLog(run_dir, tensorboard=config.log.tensorboard)
        self._log.truncate_after(progress.env_steps)
        self._display = make_display(config.total_env_steps, progress.env_steps)
        self._accumulator = MetricAccumulator()
        self._newest: dict[str, float] = {}
        self._recorded = replace(progress)
        self._clock = time.perf_counter()
        self._num_dumps = len(list((run_dir / "nonfinite").glob("*.npz")))
        self.saved_at = progress.env_steps or None
        """Env steps of the newest checkpoint; a resumed run begins with one."""
        self._warn_if_folder_disappears()

    def count(self, values: Mapping[str, MetricValue]) -> None:
        """Add a tick's (or an evaluation's) metrics to the next record."""
        self._accumulator.add(values)

    def write(self, progress: Progress, bins: Mapping[str, Tensor] | None = None) -> None:
        """Record what was counted since the last record, in every sink, and the curriculum's
        present bins, see `RunLog.write`."""
        if progress.env_steps == self._recorded.env_steps:
            return
        now = time.perf_counter()
        progress.wall_s += now - self._clock
        self._clock = now
        values = self._accumulator.take() | self._rates(progress)
        self._recorded = replace(progress)
        self._newest |= {name: v for name, v in values.items() if not math.isnan(v)}
        self._log.write(progress.env_steps, values, bins)
        self._display.update(progress.env_steps, self._newest)

    def save(self, env_steps: int, state: dict[str, Any]) -> None:
        """Write a checkpoint."""
        save_checkpoint(self.dir, state, env_steps=env_steps, keep=self._config.checkpoint.keep)
        self.saved_at = env_steps

    def dump(self, reports: Sequence[CollectReport]) -> None:
        """Keep non-finite transitions for inspection: nonfinite/NUMBER-shardS.npz."""
        folder = self.dir / "nonfinite"
        for report in reports:
            for values in report.dumps[: MAX_DUMPS - self._num_dumps]:
                folder.mkdir(exist_ok=True)
                path = folder / f"{self._num_dumps:04d}-shard{report.shard}.npz"
                np.savez(path, allow_pickle=False, **values)
                self._num_dumps += 1

    def note_restarts(self, failures: Sequence[Exception]) -> None:
        """Say why collectors are restarted."""
        for error in failures:
            seen = (
                f"; traceback in {self.keep_traceback(error)}"
                if isinstance(error, EnvError)
                else ""
            )
            self._display.message(f"a collector is restarted: {error}{seen}")

    def keep_traceback(self, error: EnvError) -> Path:
        """Keep where an environment failed: errors/shardS.txt."""
        path = self.dir / "errors" / f"shard{error.shard}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(error.details, encoding="utf-8")
        return path

    def finish(self, progress: Progress, *, complete: bool) -> dict[str, Any]:
        """Write summary.json and return it."""
        summary: dict[str, Any] = {
            "name": self._config.name,
            "task": self._config.env.task,
            "seed": self._config.seed,
            "complete": complete,
            **progress.state_dict(),
            "metrics": self._newest,
        }
        write_summary(self.dir, summary)
        return summary

    def close(self) -> None:
        self._display.close()
        self._log.close()

    def _rates(self, progress: Progress) -> dict[str, float]:
        """The fleet's counts, and their ratios since the last record."""
        before = self._recorded
        env_steps = progress.env_steps - before.env_steps
        updates = progress.updates - before.updates
        seconds = progress.wall_s - before.wall_s
        return {
            "fleet/env_steps": progress.env_steps,
            "fleet/updates": progress.updates,
            "fleet/ticks": progress.ticks,
            "fleet/policy_version": progress.updates,
            "fleet/utd": updates / env_steps,
            "fleet/replay_ratio": (progress.samples - before.samples) / env_steps,
            "time/wall": progress.wall_s,
            "time/env_steps_per_s": env_steps / seconds,
            "time/updates_per_s": updates / seconds,
        }

    def _warn_if_folder_disappears(self) -> None:
        """A Ray job's working directory goes with the job, and a run inside it too."""
        if (
            "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
            and not Path(self._config.log.dir).is_absolute()
        ):
            self._display.message(
                f"log.dir {self._config.log.dir!r} is relative, and a Ray job's working directory "
                "is removed with the job: give an absolute --log.dir to keep the run"
            )
