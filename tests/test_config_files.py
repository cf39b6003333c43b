from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fastsac.config_files import load_config, save_config, shipped_configs
from fastsac.core.config import ConfigError

SMALL = """
name: small
total_env_steps: 1000
env: {task: task, num_envs: 8}
algorithm:
  batch_size: 64
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


def refusal(name_or_path: str, *overrides: tuple[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(name_or_path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_load_by_name(name: str) -> None:
    assert load_config(name).name == name


def test_cartpole_is_shipped() -> None:
    assert "cartpole-swingup" in shipped_configs()


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e6", 1e6), ("1E+3", 1e3), ("3e-4", 3e-4), ("-.5e1", -5.0), ("1.e2", 100.0), ("0.5", 0.5)],
)
def test_numbers_are_read_as_yaml_1_2_reads_them(tmp_path: Path, text: str, number: float) -> None:
    path = write(tmp_path, f"{SMALL}  v_min: -1e9\n  v_max: 1e9\n  target_entropy_ratio: {text}\n")
    assert load_config(path).algorithm.target_entropy_ratio == number


def test_words_that_resemble_numbers_stay_text(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SMALL), [("name", "1e6x"), ("log.dir", "e5")])
    assert (config.name, config.log.dir) == ("1e6x", "e5")


def test_overrides_are_yaml_values_at_dotted_fields(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, SMALL),
        [
            ("total_env_steps", "1e6"),
            ("algorithm.batch_size", "128"),
            ("algorithm.betas", "[0.8, 0.9]"),
            ("env.args.easy_start_share", "0.2"),
            ("env.args.terrain.kinds", "[flat, stairs]"),
            ("log.tensorboard", "false"),
            ("algorithm.batch_size", "256"),
        ],
    )
    assert config.total_env_steps == 1_000_000
    assert config.algorithm.batch_size == 256
    assert config.algorithm.betas == (0.8, 0.9)
    assert config.env.args == {"easy_start_share": 0.2, "terrain": {"kinds": ["flat", "stairs"]}}
    assert config.log.tensorboard is False


def test_override_fills_an_empty_section(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + "replay:\n")
    assert load_config(path, [("replay.n_step", "3")]).replay.n_step == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            ("algorithm.batchsize", "3"),
            "algorithm.batchsize: unknown field, nearest are algorithm.batch_size,",
        ),
        (("batch_size", "3"), "batch_size: unknown field, nearest are algorithm.batch_size,"),
        (
            ("algorithm.batch_size.x", "3"),
            "algorithm.batch_size.x: unknown field, batch_size has no fields of its own",
        ),
        (("seed", "[1"), "seed: given '[1', should be a YAML value"),
        (("log.dir", ""), "log.dir: given None, should be text"),
    ],
)
def test_wrong_overrides_are_refused(
    tmp_path: Path, override: tuple[str, str], message: str
) -> None:
    assert refusal(write(tmp_path, SMALL), override).startswith(message)


def test_unknown_name_lists_the_shipped_ones() -> None:
    message = refusal("cartpol-swingup")
    assert message.startswith("no configuration 'cartpol-swingup', did you mean cartpole-swingup?")
    assert f"({', '.join(shipped_configs())})" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config.yaml is empty: give the fields"),
        ("# nothing\n", "config.yaml is empty: give the fields"),
        ("- a\n- b\n", "config.yaml holds a list: give the fields"),
        ("name: a\nenv: {\n", "config.yaml: line 3: "),
        ("name: a\nseed: 1\nname: b\n", "config.yaml: line 3: 'name' is given twice"),
        ("env:\n  task: a\n  task: a\n", "config.yaml: line 3: 'task' is given twice"),
        ("name: !!python/name:os.system\n", "config.yaml: line 1: could not determine a con"),
        ("name: \x00\n", "config.yaml: unacceptable character"),
    ],
)
def test_files_that_are_no_configuration_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    assert message in refusal(write(tmp_path, text))


def test_folders_and_binary_files_are_refused(tmp_path: Path) -> None:
    assert refusal(str(tmp_path)) == f"{tmp_path} is a folder: give a YAML file"
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert refusal(str(path)).startswith(f"{path} cannot be read ('utf-8' codec")


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [("algorithm.actor_lr", "1e-7"), ("algorithm.betas", "[0.1, 0.123456789012345678]")],
        [("env.args", "{a: [1, 2.5, null, true, '1e6', 'no'], b: {c: é}}"), ("name", "'007'")],
    ],
)
def test_saved_config_loads_to_an_equal_one(tmp_path: Path, changes: list[tuple[str, str]]) -> None:
    config = load_config("cartpole-swingup", changes)
    path = tmp_path / "saved.yaml"
    save_config(config, path)
    assert load_config(str(path)) == config


def test_text_that_yaml_1_2_reads_as_a_number_is_saved_in_quotes(tmp_path: Path) -> None:
    config = load_config("cartpole-swingup", [("env.args", "{a: '1e6'}")])
    path = tmp_path / "saved.yaml"
    save_config(config, path)
    saved: Any = yaml.safe_load(path.read_text())
    assert saved["env"]["args"] == {"a": "1e6"}
    assert load_config(str(path)).env.args == {"a": "1e6"}
