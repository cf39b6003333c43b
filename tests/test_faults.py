"""What goes wrong is named in one line, and nothing that was learnt is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import probes
import pytest
import torch
from helpers import saved_state, small_config

from collectors.env import Step
from fastsac.config_files import save_config
from fastsac.core.config import Config, ConfigError
from fastsac.core.shared_memory import SharedTensors
from fastsac.metrics import read_metrics
from fastsac.trainer import TrainingError, resume, train


class RaisesInStep(probes.ConstantReward):
    """Breaks in its 30th vector step, all shards of this process counted together."""

    steps = 0

    def step(self, action: torch.Tensor) -> Step:
        RaisesInStep.steps += 1
        if RaisesInStep.steps == 30:
            raise ValueError("bad torque")
        return super().step(action)


def test_an_env_that_raises_in_step_is_named_and_its_run_can_be_resumed(tmp_path: Path) -> None:
    RaisesInStep.steps = 0
    config = small_config(tmp_path, fleet={"collector_restarts": 0})
    with pytest.raises(TrainingError, match=r"shard \d.*step.*ValueError.*bad torque"):
        train(config, env=RaisesInStep, runtime="inline")
    [run_dir] = tmp_path.iterdir()
    saved = saved_state(run_dir)["progress"]["env_steps"]
    assert 0 < saved < 640
    [told] = (run_dir / "errors").iterdir()
    assert "bad torque" in told.read_text()
    assert resume(run_dir, env=probes.ConstantReward, runtime="inline").summary["env_steps"] == 640


def test_a_collector_whose_env_raises_is_restarted_and_keeps_its_transitions(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    RaisesInStep.steps = 0
    result = train(small_config(tmp_path), env=RaisesInStep, runtime="inline")
    last = read_metrics(result.run_dir)[-1]
    assert last["fleet/collector_restarts"] == 1
    assert 0 < last["fleet/lost_env_steps"] <= 2 * 8  # a tick of one shard
    env_steps = result.summary["env_steps"]
    assert env_steps >= 640
    assert (env_steps + last["fleet/lost_env_steps"]) % 32 == 0  # whole ticks
    assert "a collector is restarted: the environment of shard" in capfd.readouterr().out
    assert "bad torque" in next((result.run_dir / "errors").iterdir()).read_text()


def test_a_collector_that_fails_again_and_again_ends_the_run(tmp_path: Path) -> None:
    class AlwaysRaises(probes.ConstantReward):
        def step(self, action: torch.Tensor) -> Step:
            raise ValueError("no torque")

    config = small_config(tmp_path, fleet={"collector_restarts": 2})
    with pytest.raises(TrainingError, match=r"no torque.*restarted 2 times.*collector_restarts"):
        train(config, env=AlwaysRaises, runtime="inline")


@pytest.mark.parametrize("method", ["reset", "__init__"])
def test_an_env_that_cannot_start_is_refused_and_leaves_no_folder(
    tmp_path: Path, method: str
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise KeyError("no scene")

    broken = type("Broken", (probes.ConstantReward,), {method: fail})
    with pytest.raises(ConfigError, match=r"KeyError.*no scene"):
        train(small_config(tmp_path), env=broken, runtime="inline")
    assert not list(tmp_path.iterdir())


def test_an_env_of_scalar_rewards_is_refused(tmp_path: Path) -> None:
    class Scalar(probes.ConstantReward):
        def reward(self, *_args: object) -> torch.Tensor:
            return torch.ones(())

    with pytest.raises((TrainingError, ValueError), match=r"reward.*\(8,\)"):
        train(small_config(tmp_path), env=Scalar, runtime="inline")


def test_an_object_that_is_no_env_is_refused(tmp_path: Path) -> None:
    class Nothing:
        def __init__(self, **_: object) -> None: ...

    with pytest.raises(ConfigError, match="reset"):
        train(small_config(tmp_path), env=Nothing, runtime="inline")  # pyright: ignore[reportArgumentType]  # on purpose


def test_a_diverging_learner_ends_in_one_line_and_saves_no_broken_network(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    rates = {"critic_lr": 1e30, "actor_lr": 1e30}
    algorithm = config.algorithm.model_copy(update=rates)  # past validation, which bounds them
    with pytest.raises(TrainingError, match="finite"):
        train(
            config.model_copy(update={"algorithm": algorithm}),
            env=probes.ConstantReward,
            runtime="inline",
        )
    assert not list(tmp_path.glob("*/checkpoints/*/*"))


def test_a_run_that_ends_before_its_first_update_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learning_starts 1000.*total_env_steps"):
        small_config(tmp_path, algorithm={"learning_starts": 1000})
    config = small_config(tmp_path, algorithm={"learning_starts": 30})
    least = _least_env_steps(config)
    assert train(_until(config, least), env=probes.ConstantReward, runtime="inline").summary[
        "updates"
    ]
    with pytest.raises(ConfigError, match=f"at least {least}"):
        small_config(tmp_path, algorithm={"learning_starts": 30}, total_env_steps=least - 1)


def test_a_replay_beyond_all_disks_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    layout = {"rows": ((10**18,), torch.float32)}
    with pytest.raises(ValueError, match=r"replay\.dir"):
        SharedTensors.allocate(
            layout, device=torch.device("cpu"), directory=str(tmp_path), name="huge"
        )
    assert not list(tmp_path.iterdir())


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    config = small_config(tmp_path, total_env_steps=3200)
    file = tmp_path / "small.yaml"
    save_config(config, file)
    command = f"{sys.executable} -m fastsac train {file} --runtime inline | head -1"
    subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=Path(__file__).parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        timeout=200,
    )
    [run_dir] = (path for path in tmp_path.iterdir() if path.is_dir())
    assert saved_state(run_dir)["progress"]["env_steps"] == 3200


def _until(config: Config, total_env_steps: int) -> Config:
    return config.model_copy(update={"total_env_steps": total_env_steps})


def _least_env_steps(config: Config) -> int:
    """The fewest env steps with an update: the tick after `learning_starts` vector steps begins."""
    tick = config.algorithm.vector_steps_per_tick
    ticks_before = -(-config.algorithm.learning_starts // tick)
    return ticks_before * tick * config.env.num_envs + 1
