from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from fastsac.core.metrics import Mean
from fastsac.metrics import (
    LiveDisplay,
    MetricAccumulator,
    PlainDisplay,
    RunLog,
    make_display,
    read_metrics,
    write_summary,
)

VALUES = {
    "eval/return": 700.0,
    "train/return": 500.25,
    "time/env_steps_per_s": 1234.5,
    "time/updates_per_s": 40.0,
    "fleet/utd": 0.03125,
    "fleet/staleness": 4.0,
    "replay/fill": 0.5,
    "time/collect": 0.2,
    "time/learn": 0.1,
}


def tensorboard_scalars(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"))
    accumulator.Reload()
    if tag not in accumulator.Tags()["scalars"]:
        return []
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_records_are_read_back_and_nan_is_null(tmp_path: Path) -> None:
    log = RunLog(tmp_path, tensorboard=False)
    log.write(128, {"train/return": math.nan, "fleet/updates": 4})
    log.write(256, {"train/return": 1.5, "learner/q_max": math.inf})
    log.close()
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert first == '{"env_steps": 128, "train/return": null, "fleet/updates": 4.0}'
    assert second == '{"env_steps": 256, "train/return": 1.5, "learner/q_max": null}'
    records = read_metrics(tmp_path)
    assert math.isnan(records[0]["train/return"])
    assert (records[1]["env_steps"], records[1]["train/return"]) == (256, 1.5)


def test_every_record_is_on_disk_before_the_log_closes(tmp_path: Path) -> None:
    log = RunLog(tmp_path, tensorboard=False)
    log.write(128, {"fleet/updates": 4})
    assert len(read_metrics(tmp_path)) == 1
    log.close()


def test_tensorboard_gets_the_same_numbers_at_env_steps(tmp_path: Path) -> None:
    log = RunLog(tmp_path, tensorboard=True)
    log.truncate_after(0)
    log.write(128, {"train/return": 0.5, "eval/return": math.nan})
    log.write(256, {"train/return": 1.5, "eval/return": 2.0})
    log.close()
    assert tensorboard_scalars(tmp_path, "train/return") == [(128, 0.5), (256, 1.5)]
    assert tensorboard_scalars(tmp_path, "eval/return") == [(256, 2.0)]


def test_resumed_log_drops_what_is_newer_than_the_checkpoint(tmp_path: Path) -> None:
    log = RunLog(tmp_path, tensorboard=True)
    for env_steps in (128, 256, 384):
        log.write(env_steps, {"train/return": 1.0})
    log.close()
    log = RunLog(tmp_path, tensorboard=True)
    log.truncate_after(256)
    log.write(300, {"train/return": 2.0})
    log.close()
    expected = [(128, 1.0), (256, 1.0), (300, 2.0)]
    assert [(r["env_steps"], r["train/return"]) for r in read_metrics(tmp_path)] == expected
    assert tensorboard_scalars(tmp_path, "train/return") == expected


def test_last_line_that_was_cut_is_left_out_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"env_steps": 128}\n{"env_st')
    assert read_metrics(tmp_path) == [{"env_steps": 128}]
    log = RunLog(tmp_path, tensorboard=False)
    log.truncate_after(128)
    log.write(256, {})
    log.close()
    assert read_metrics(tmp_path) == [{"env_steps": 128}, {"env_steps": 256}]


@pytest.mark.parametrize("text", ['{"env_st\n{"env_steps": 128}\n', '{"env_st\n'])
def test_damage_other_than_a_cut_end_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 1 is damaged"):
        read_metrics(tmp_path)


def test_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl: give the folder of a run"):
        read_metrics(tmp_path)


def test_accumulator_pools_the_ticks_of_a_record_and_starts_afresh() -> None:
    accumulator = MetricAccumulator()
    accumulator.add({"train/return": Mean(30.0, 3), "time/tick": 1.0, "train/episodes": 3})
    accumulator.add({"learner/alpha": 0.5})
    accumulator.add({"train/return": Mean(50.0, 1), "time/tick": 2.0, "train/episodes": 1})
    accumulator.add({"learner/alpha": 0.25})
    assert accumulator.take() == {
        "train/return": 20.0,
        "time/tick": 1.5,
        "train/episodes": 4,
        "learner/alpha": 0.25,
    }
    assert accumulator.take() == {}


def test_summary_replaces_the_old_one_whole(tmp_path: Path) -> None:
    write_summary(tmp_path, {"updates": 1})
    write_summary(tmp_path, {"updates": 2})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"updates": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_plain_line_shows_pace_returns_and_who_is_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = PlainDisplay(240_000, 0)
    display.update(120_000, VALUES)
    assert capsys.readouterr().out == (
        "env steps 120,000 / 240,000  eta 0:00:00  eval return 700.0  train return 500.2  "
        "env steps/s 1,234  updates/s 40  UTD 0.0312  staleness 4  replay 50%  "
        "waits for collectors\n"
    )


def test_plain_lines_keep_their_distance_except_for_a_new_evaluation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = PlainDisplay(1000, 0, min_interval_s=3600)
    for env_steps, evaluation in [(100, None), (200, None), (300, 7.0), (400, 7.0), (500, 8.0)]:
        display.update(env_steps, {} if evaluation is None else {"eval/return": evaluation})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["100", "300", "500"]


def test_live_display_shows_the_newest_numbers() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=200)
    display = LiveDisplay(console, 240_000, 0)
    display.message("a message")
    display.update(120_000, VALUES | {"time/learn": 0.3})
    display.close()
    for text in ("a message", "120,000 / 240,000", "eval return 700.0", "waits for learners"):
        assert text in stream.getvalue()


def test_display_is_plain_where_there_is_no_terminal() -> None:
    assert isinstance(make_display(1000, 0), PlainDisplay)
