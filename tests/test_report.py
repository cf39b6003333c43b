from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fastsac.metrics import RunLog, write_summary
from fastsac.report import draw_curve, result_table


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    log = RunLog(tmp_path, tensorboard=False)
    for n in range(1, 21):
        values = {
            "train/return": 40.0 * n if n > 2 else math.nan,
            "time/wall": 3.0 * n,
        }
        if n % 5 == 0:
            score = 600.0 - abs(15 - n) * 20
            values |= {"eval/return": score}
        log.write(1000 * n, values)
    log.close()
    summary = {"task": "cartpole-swingup", "seed": 3, "env_steps": 20_000, "updates": 5000}
    write_summary(tmp_path, {**summary, "wall_s": 50.0})
    return tmp_path


def shown(run_dir: Path) -> dict[str, str]:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(result_table(run_dir))
    rows = [line.split("│")[1:3] for line in captured.get().splitlines() if "│" in line]
    return {name.strip(): value.strip() for name, value in rows}


def test_table_shows_counts_pace_and_evaluations(run_dir: Path) -> None:
    assert shown(run_dir) == {
        "task": "cartpole-swingup",
        "seed": "3",
        "env steps": "20,000",
        "updates": "5,000",
        "training time": "50.0 s",
        "env steps/s": "400",
        "updates/s": "100",
        "final evaluation return": "500.0",
        "best evaluation return": "600.0 at 15,000 env steps",
        "run": str(run_dir),
    }


def test_table_of_a_run_stopped_at_once_has_no_returns(tmp_path: Path) -> None:
    RunLog(tmp_path, tensorboard=False).close()
    summary = {"task": "t", "seed": 1, "env_steps": 0, "updates": 0, "wall_s": 0.0}
    write_summary(tmp_path, summary)
    assert list(shown(tmp_path)) == ["task", "seed", "env steps", "updates", "training time", "run"]


def test_table_needs_a_run_that_ended(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no summary\.json"):
        result_table(tmp_path)


def test_curve_draws_both_returns(run_dir: Path) -> None:
    path = draw_curve(run_dir)
    assert path == run_dir / "curve.png"
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3).astype(int)
    assert (pixels == (214, 39, 40)).all(1).any()  # tab:red, the evaluation
    assert ((pixels[:, 0] < 160) & (pixels[:, 2] > 160)).any()  # tab:blue, training episodes


def test_curve_of_a_run_without_records_is_empty(tmp_path: Path) -> None:
    RunLog(tmp_path, tensorboard=False).close()
    assert draw_curve(tmp_path).is_file()
