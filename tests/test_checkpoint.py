from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from fastsac.checkpoint import load_checkpoint, newest_checkpoint, save_checkpoint


def make_state(number: int) -> dict[str, Any]:
    return {
        "progress": {"env_steps": number, "wall_s": number / 3},
        "learners": {"actor": torch.full((1000,), float(number)), "log_alpha": torch.tensor(0.5)},
    }


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().flatten().view(torch.uint8)


def saved(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "float32": torch.randn(3, 4, generator=generator),
        "float64": torch.randn(2, generator=generator, dtype=torch.float64),
        "bfloat16": torch.randn(3, generator=generator).bfloat16(),
        "float8": torch.randn(3, generator=generator).to(torch.float8_e4m3fn),
        "int64": torch.tensor([2**62, -1]),
        "bool": torch.tensor([True, False]),
        "generator": generator.get_state(),
        "scalar": torch.tensor(7, dtype=torch.int32),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "nonfinite": torch.tensor([torch.nan, torch.inf, -0.0]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "a/b": torch.tensor([1]),
        "..": torch.tensor([2]),
        "zarr.json": torch.tensor([3]),
    }
    loaded = load_checkpoint(save_checkpoint(tmp_path, tensors, env_steps=1, keep=1))
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].shape == tensor.shape, name
        assert torch.equal(as_bytes(loaded[name]), as_bytes(tensor)), name


def test_plain_values_and_nesting_come_back(tmp_path: Path) -> None:
    state = {
        "numbers": [1, 2.5, 1 / 3, 2**100, float("inf"), True, None, "text é"],
        "nested": {"deep": [{"x": 1}, [], {}], "0": {"y": None}},
    }
    assert load_checkpoint(save_checkpoint(tmp_path, state, env_steps=1, keep=1)) == state


def test_numpy_values_come_back_as_tensors_and_numbers(tmp_path: Path) -> None:
    state = {
        "array": np.arange(6)[::2],
        "list": [np.ones(2, np.float32)],
        "number": np.float32(1.5),
    }
    loaded = load_checkpoint(save_checkpoint(tmp_path, state, env_steps=1, keep=1))
    assert torch.equal(loaded["array"], torch.tensor([0, 2, 4]))
    assert torch.equal(loaded["list"][0], torch.ones(2))
    assert loaded["number"] == 1.5


def test_arrays_are_plain_zarr_at_their_path_in_the_state(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_state(3), env_steps=3, keep=1)
    group = zarr.open_group(path / "arrays.zarr", mode="r")
    assert np.array_equal(np.asarray(group["learners/actor"]), np.full(1000, 3.0))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": object()}}, "state/a/b is a object: give tensors"),
        ({"a": [{1, 2}]}, "state/a/0 is a set: give tensors"),
        ({"a": np.array(["x"])}, "state/a is a ndarray: give tensors, NumPy arrays of numbers"),
        ({"a": {1: 2}}, "state/a has the key 1: give keys that are texts"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_place(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        save_checkpoint(tmp_path, state, env_steps=1, keep=1)
    assert newest_checkpoint(tmp_path) is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for env_steps in (5, 20, 100, 1000):
        save_checkpoint(tmp_path, make_state(env_steps), env_steps=env_steps, keep=2)
    assert saved(tmp_path) == ["000000000100", "000000001000"]
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    assert load_checkpoint(newest)["progress"]["env_steps"] == 1000


def test_checkpoints_beyond_the_one_that_a_run_went_on_from_are_removed(tmp_path: Path) -> None:
    for env_steps in (100, 200):
        save_checkpoint(tmp_path, make_state(env_steps), env_steps=env_steps, keep=2)
    save_checkpoint(tmp_path, make_state(150), env_steps=150, keep=2)
    assert saved(tmp_path) == ["000000000100", "000000000150"]


def test_saving_again_at_the_same_env_steps_replaces(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, make_state(1), env_steps=100, keep=2)
    path = save_checkpoint(tmp_path, make_state(2), env_steps=100, keep=2)
    assert saved(tmp_path) == ["000000000100"]
    assert load_checkpoint(path)["progress"]["env_steps"] == 2


def test_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None


def test_every_flipped_bit_is_detected_or_harmless(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_state(7), env_steps=7, keep=1)
    whole = load_checkpoint(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    rng = random.Random(1)
    detected = 0
    for _ in range(200):
        file = rng.choice(files)
        original = file.read_bytes()
        flipped = bytearray(original)
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        file.write_bytes(flipped)
        try:
            loaded = load_checkpoint(path)
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017
            detected += 1
        else:
            assert loaded["progress"] == whole["progress"]
            for name, tensor in whole["learners"].items():
                assert torch.equal(loaded["learners"][name], tensor), file
        file.write_bytes(original)
    assert detected > 100


def test_flipped_byte_of_an_array_is_reported_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = save_checkpoint(tmp_path, make_state(100), env_steps=100, keep=2)
    newer = save_checkpoint(tmp_path, make_state(200), env_steps=200, keep=2)
    chunk = newer / "arrays.zarr/learners/actor/c/0"
    content = bytearray(chunk.read_bytes())
    content[1234] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(ValueError, match=f"^checkpoint {newer} is damaged .*/learners/actor"):
        load_checkpoint(newer)
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == older
    assert f"checkpoint {newer} is damaged" in caplog.text


@pytest.mark.parametrize("lost", ["manifest.json", "arrays.zarr/learners/actor/c/0"])
def test_lost_file_is_detected(tmp_path: Path, lost: str) -> None:
    path = save_checkpoint(tmp_path, make_state(100), env_steps=100, keep=2)
    (path / lost).unlink()
    with pytest.raises(ValueError, match="is damaged"):
        load_checkpoint(path)


def test_newer_format_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_state(100), env_steps=100, keep=2)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["format_version"] = 2
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="has format 2, this version of fastsac reads 1"):
        load_checkpoint(path)


SAVER = """
import os, sys
from pathlib import Path
from test_checkpoint import make_state
from fastsac.checkpoint import newest_checkpoint, save_checkpoint

run_dir = Path(sys.argv[1])
for _ in sys.stdin:  # every line asks for a process that saves until it is killed
    if child := os.fork():
        print(child, flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)
        continue
    newest = newest_checkpoint(run_dir)
    number = 0 if newest is None else int(newest.name)
    while True:
        number += 1
        save_checkpoint(run_dir, make_state(number), env_steps=number, keep=1)
"""


def newest_name(run_dir: Path) -> int:
    return max((int(path.name) for path in (run_dir / "checkpoints").glob("0*")), default=0)


@contextmanager
def saver(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    tests = Path(__file__).parent
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_saver_killed_at_any_moment_leaves_a_whole_newest_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(1)
    number = 0
    with saver(tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(8):
            process.stdin.write("save\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            deadline = time.monotonic() + 30
            while newest_name(tmp_path) <= number:
                assert time.monotonic() < deadline, "it saves nothing"
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.2))  # any moment of the saves that follow
            os.kill(child, signal.SIGKILL)
            assert process.stdout.readline() == "ended\n"

            newest = newest_checkpoint(tmp_path)
            assert newest is not None
            state = load_checkpoint(newest)
            assert int(newest.name) > number
            number = int(newest.name)
            assert state["progress"] == {"env_steps": number, "wall_s": number / 3}
            assert torch.equal(state["learners"]["actor"], torch.full((1000,), float(number)))
    assert not caplog.records  # nothing damaged was even looked at
