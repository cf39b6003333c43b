from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fastsac.cli import main
from fastsac.config_files import load_config, save_config, shipped_configs
from fastsac.metrics import RunLog, write_summary

CARTPOLE = ["train", "cartpole-swingup"]


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that `fastsac argv` refuses with."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    return captured.err.removeprefix("error: ").rstrip("\n")


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A trainer in the real one's place that records its calls and leaves a small run behind."""
    calls = SimpleNamespace(calls=[], exit_status=0, error=None, run_dir=tmp_path / "run")
    calls.run_dir.mkdir()

    def run(what: Any, **options: Any) -> Any:
        calls.calls.append((what, options))
        if calls.error is not None:
            raise calls.error
        log = RunLog(calls.run_dir, tensorboard=False)
        log.write(1000, {"eval/return": 12.5, "time/wall": 2.0})
        log.close()
        summary = {"task": "t", "seed": 1, "env_steps": 1000, "updates": 10, "wall_s": 2.0}
        write_summary(calls.run_dir, summary)
        return SimpleNamespace(
            run_dir=calls.run_dir, summary=summary, exit_status=calls.exit_status
        )

    module: Any = ModuleType("fastsac.trainer")
    module.train = module.resume = run
    module.TrainingError = type("TrainingError", (RuntimeError,), {})
    calls.TrainingError = module.TrainingError
    monkeypatch.setitem(sys.modules, "fastsac.trainer", module)
    return calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--algorithm.batchsize", "3"],
            "algorithm.batchsize: unknown field, nearest are algorithm.batch_size,",
        ),
        (["--algorithm.tau", "much"], "algorithm.tau: given 'much', should be a valid number"),
        (["--seed=-1"], "seed: given -1, should be greater than or equal to 0"),
        (
            ["--env.num_envs", "127"],
            "env.num_envs 127 does not divide by 2 (collectors): nearest valid [126, 128]",
        ),
        (
            ["--replay.steps_per_env", "5", "--algorithm.batch_size", "512"],
            "replay.steps_per_env 5 leaves 3 vector steps to sample, algorithm.batch_size 512 and "
            "replay.n_step 1 need 4: give at least 6",
        ),
        (
            ["--algorithm.weight_publish_interval", "6"],
            "algorithm: weight_publish_interval 6 is 1.5 vector steps at "
            "updates_per_vector_step 4, not a whole number: nearest valid [4, 8]",
        ),
        (["--algorithm.tau"], "--algorithm.tau has no value: write --algorithm.tau VALUE"),
        (["--seed", "--runtime", "ray"], "--seed has no value: write --seed VALUE"),
        (["--runtime", "slurm"], "argument --runtime: invalid choice: 'slurm' (choose from"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_train_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert refusal(capsys, *CARTPOLE, *arguments).startswith(message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "argument COMMAND: invalid choice: 'trian' (choose from"),
        (["train"], "the following arguments are required: CONFIG"),
        (["train", "nothing.yaml"], "no configuration 'nothing.yaml': give the path of a YAML"),
        (["train", "."], ". is a folder: give a YAML file"),
        (["eval", ".", "--episodes", "0"], "argument --episodes: given '0', should be an integer"),
        (["eval", ".", "--seed", "-1"], "argument --seed: "),
        (["resume", ".", "--total_env_steps", "9"], ". is not a run: give a folder that holds a"),
        (["resume", ".", "--algorithm.tau", "1"], "algorithm.tau: a resumed run keeps its conf"),
    ],
)
def test_commands_refuse_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert refusal(capsys, *argv).startswith(message)


def test_train_passes_the_configuration_and_prints_what_the_run_left(
    trainer: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = ["--algorithm.batch_size", "1024", "--env.args.easy=0.2", "--algorithm.v_min", "-5"]
    assert main([*CARTPOLE, *fields, "--runtime", "inline", "--seed", "3"]) == 0
    [(config, options)] = trainer.calls
    assert (config.algorithm.batch_size, config.env.args, config.seed) == (1024, {"easy": 0.2}, 3)
    assert config.algorithm.v_min == -5
    assert options == {"runtime": "inline", "address": None}
    out = capsys.readouterr().out
    assert "12.5" in out
    assert f"curve: {trainer.run_dir / 'curve.png'}\n" in out
    assert out.endswith(f"run: {trainer.run_dir}\n")
    assert (trainer.run_dir / "curve.png").is_file()


def test_fields_may_come_before_the_configuration(trainer: SimpleNamespace) -> None:
    assert main(["train", "--seed", "3", "--address", "host:6379", "cartpole-swingup"]) == 0
    [(config, options)] = trainer.calls
    assert config.seed == 3
    assert options == {"runtime": "ray", "address": "host:6379"}


@pytest.mark.parametrize("status", [130, 143])
def test_stopped_run_gives_its_exit_status(trainer: SimpleNamespace, status: int) -> None:
    trainer.exit_status = status
    assert main(CARTPOLE) == status


def test_failures_of_training_exit_with_1_and_refusals_with_2(
    trainer: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.error = trainer.TrainingError("too many non-finite transitions")
    assert main(CARTPOLE) == 1
    assert capsys.readouterr().err == "error: too many non-finite transitions\n"
    trainer.error = ValueError("the cluster\n  is busy")
    assert refusal(capsys, *CARTPOLE) == "the cluster is busy"
    trainer.error = KeyError("a defect")
    with pytest.raises(KeyError):
        main(CARTPOLE)


def test_resume_takes_a_new_end_only(
    trainer: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    save_config(load_config("cartpole-swingup"), trainer.run_dir / "config.yaml")
    run = str(trainer.run_dir)
    assert main(["resume", run]) == 0
    assert main(["resume", run, "--total_env_steps", "1e6", "--runtime=inline"]) == 0
    assert trainer.calls == [
        (trainer.run_dir, {"total_env_steps": None, "runtime": "ray", "address": None}),
        (trainer.run_dir, {"total_env_steps": 1_000_000, "runtime": "inline", "address": None}),
    ]
    capsys.readouterr()
    message = refusal(capsys, "resume", run, "--total_env_steps", "soon")
    assert message == "total_env_steps: given 'soon', should be a valid integer"


def test_eval_prints_the_statistics_of_the_episodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def evaluate_run(run_dir: Path, *, num_episodes: int, seed: int) -> Any:
        asked.append((run_dir, num_episodes, seed))
        return SimpleNamespace(
            returns=torch.tensor([1.0, 3.0]),
            lengths=torch.tensor([10, 20]),
            terminated=torch.tensor([True, False]),
            info={"velocity_error": torch.tensor([0.1, 0.3])},
            policy_version=4000,
            env_steps=128_000,
        )

    module: Any = ModuleType("fastsac.evaluation")
    module.evaluate_run = evaluate_run
    monkeypatch.setitem(sys.modules, "fastsac.evaluation", module)
    assert main(["eval", "runs/a", "--episodes", "2", "--seed", "0"]) == 0
    assert asked == [(Path("runs/a"), 2, 0)]
    out = capsys.readouterr().out
    assert "50.0% of the episodes" in out
    assert "0.2000" in out
    for text in ("2.00", "1.00, 3.00", "15.0 env steps", "4,000 updates", "128,000 env steps"):
        assert text in out


class Described:
    """What the task is about.

    More that the list leaves out.
    """


def test_list_tasks_shows_descriptions_and_shipped_configurations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("collectors.env.TASKS", {"cartpole-swingup": "described:Described"})
    monkeypatch.setitem(sys.modules, "described", sys.modules[__name__])
    assert main(["list-tasks"]) == 0
    out = capsys.readouterr().out
    assert "What the task is about." in out
    assert "More that" not in out
    assert all(name in out for name in shipped_configs())


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from fastsac.cli import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'ray', 'pydantic', 'rich', 'zarr') if m in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert "usage: fastsac train" in result.stdout
    assert result.stdout.endswith("\n[]\n")
