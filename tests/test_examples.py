"""The documented environment of a user, trained as the documentation says."""

from pathlib import Path

import pytest

from collectors.testing import check_env_shard
from docs.examples.hard_starts import BINS, HardStarts
from docs.examples.point_mass import PointMass
from fastsac.cli import main
from fastsac.config_files import load_config
from fastsac.metrics import read_metrics
from fastsac.trainer import train

REPOSITORY = Path(__file__).parents[1]
CONFIG = str(REPOSITORY / "docs/examples/point_mass.yaml")


def test_the_example_keeps_the_rules_of_an_env_shard():
    check_env_shard(PointMass)


def test_an_environment_class_learns_from_python(tmp_path):
    overrides = [("log.dir", str(tmp_path)), ("evaluation.interval_env_steps", "3200")]
    config = load_config(CONFIG, overrides)
    result = train(config, env=PointMass, runtime="inline")
    evaluations = [r["eval/return"] for r in read_metrics(result.run_dir) if "eval/return" in r]
    # resting at the origin is worth 50, and getting there costs about 10
    assert evaluations[0] < 15
    assert evaluations[-1] > 35


def test_a_module_and_class_path_trains_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    arguments = ["--total_env_steps", "3200", "--log.dir", str(tmp_path)]
    assert main(["train", CONFIG, "--runtime", "inline", *arguments]) == 0
    [run_dir] = tmp_path.iterdir()
    assert str(run_dir) in capsys.readouterr().out
    assert main(["eval", str(run_dir), "--episodes", "4"]) == 0


def test_the_curriculum_example_keeps_the_rules_of_an_env_shard():
    check_env_shard(HardStarts)


@pytest.mark.parametrize(("rule", "drifts"), [("linear_ema", False), ("none", True)])
def test_the_curriculum_example_is_shared_as_the_configuration_says(tmp_path, rule, drifts):
    overrides = [
        ("log.dir", str(tmp_path)),
        ("total_env_steps", "3200"),
        ("fleet.collectors_per_rank", "2"),
        ("shard_state.failures", rule),
    ]
    run_dir = train(load_config(CONFIG, overrides), env=HardStarts, runtime="inline").run_dir
    records = read_metrics(run_dir)
    assert max(r["curriculum/sampling/top_probability"] for r in records) > 1.5 / BINS
    drift = max(r["curriculum/sampling/tv_max"] for r in records)
    assert drift > 0.02 if drifts else drift < 1e-12
    assert main(["plot", str(run_dir), "--curriculum"]) == 0


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("docs.examples.point_mass:Nothing", "cannot be imported"),
        ("no_such_module:Class", "cannot be imported"),
        ("cartpole", "nearest are cartpole-swingup"),
    ],
)
def test_a_task_that_is_not_there_is_one_line(tmp_path, capsys, task, message):
    arguments = ["--env.task", task, "--log.dir", str(tmp_path)]
    assert main(["train", CONFIG, "--runtime", "inline", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not any(tmp_path.iterdir())
