"""Checkpoints: Zarr arrays and a manifest, in a folder that appears whole or not at all.

    run_dir/checkpoints/000000240000/
        arrays.zarr/      one array per tensor, at its path in the state
        manifest.json     everything else, and a checksum of every array

A state is a nested dict whose top-level keys belong to the parts of a run (`learners`, `bus`,
...). A part that learns to save itself, such as a replay or an environment shard, is one more
key; nothing here needs to know of it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zlib
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import numpy as np
import torch
import zarr
from torch import Tensor

FORMAT_VERSION = 1

_log = logging.getLogger(__name__)


def save_checkpoint(run_dir: Path, state: dict[str, Any], *, env_steps: int, keep: int) -> Path:
    """Save `state`, then remove all but the `keep` newest checkpoints up to `env_steps`.

    Checkpoints beyond `env_steps` are removed too: the run went on from an earlier one, so they
    belong to a future that did not happen.

    Args:
        state: nested dicts with text keys, of tensors, NumPy arrays, numbers, texts, booleans,
            None, and lists of these; arrays come back as CPU tensors, tuples as lists.
        env_steps: fleet-wide env steps; names the folder.

    Raises:
        ValueError: the state holds something else; the message names its place.
    """
    arrays: dict[str, Tensor] = {}
    tree = _split(state, "", arrays)
    folder = run_dir / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".*"):
        shutil.rmtree(leftover)

    partial = folder / ".partial"
    entries = _write_arrays(partial / "arrays.zarr", arrays)
    content = {"env_steps": env_steps, "state": tree, "arrays": entries}
    manifest = {
        "format_version": FORMAT_VERSION,
        "crc32": _manifest_checksum(content),
        "content": content,
    }
    (partial / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    _sync_tree(partial)

    path = folder / f"{env_steps:012d}"
    if path.exists():
        _remove(path)
    partial.rename(path)
    _sync(folder)
    _sync(run_dir)
    older = [other for other in _newest_first(run_dir) if int(other.name) <= env_steps]
    for other in set(_newest_first(run_dir)) - set(older[:keep]):
        _remove(other)
    return path


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state of a checkpoint, every array of it checked, tensors on the CPU.

    Raises:
        ValueError: it is damaged, or written in another format.
    """
    # damage can show as any of these, from json, zarr or torch
    damage = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        version = manifest["format_version"]
    except damage as error:
        raise _damaged(path, error) from error
    if version != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint {path} has format {version}, this version of fastsac reads "
            f"{FORMAT_VERSION}: use the version that wrote it"
        )
    try:
        content = manifest["content"]
        _refuse_unless_equal("manifest.json", _manifest_checksum(content), manifest["crc32"])
        return _join(content["state"], "", _read_arrays(path / "arrays.zarr", content["arrays"]))
    except damage as error:
        raise _damaged(path, error) from error


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest whole checkpoint of a run; damaged ones are skipped with a warning."""
    for path in _newest_first(run_dir):
        try:
            load_checkpoint(path)
        except ValueError as error:
            _log.warning("skipped: %s", error)
        else:
            return path
    return None


def _split(value: Any, path: str, arrays: dict[str, Tensor]) -> Any:
    """`value` as JSON holds it; arrays move to `arrays` by path and leave null behind."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or not key:
                raise ValueError(f"state{path} has the key {key!r}: give keys that are texts")
        return {k: _split(v, _child(path, k), arrays) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_split(v, _child(path, str(i)), arrays) for i, v in enumerate(value)]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.array(value))
    if isinstance(value, Tensor):
        arrays[path] = value.detach().cpu().contiguous()
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"state{path} is a {type(value).__name__}: give tensors, NumPy arrays of numbers, "
        "numbers, texts, booleans, None, or dicts and lists of these"
    )


def _join(node: Any, path: str, arrays: dict[str, Tensor]) -> Any:
    """The inverse of `_split`."""
    if path in arrays:
        return arrays[path]
    if isinstance(node, dict):
        return {k: _join(v, _child(path, k), arrays) for k, v in node.items()}
    if isinstance(node, list):
        return [_join(v, _child(path, str(i)), arrays) for i, v in enumerate(node)]
    return node


def _child(path: str, key: str) -> str:
    """Path of an entry; '/' and '.' mean something in the path of a Zarr array."""
    return f"{path}/{quote(key, safe='').replace('.', '%2E')}"


def _write_arrays(folder: Path, arrays: dict[str, Tensor]) -> dict[str, Any]:
    """Write every array uncompressed, in one chunk; returns their entries in the manifest."""
    group = zarr.create_group(folder)
    entries = {}
    for path, tensor in arrays.items():
        values = _as_numpy(tensor)
        array = group.create_array(
            path,
            shape=values.shape,
            dtype=values.dtype,
            chunks=tuple(max(1, size) for size in values.shape),
            compressors=None,
        )
        array[...] = values
        entries[path] = {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "crc32": _checksum(values),
        }
    return entries


def _read_arrays(folder: Path, entries: dict[str, Any]) -> dict[str, Tensor]:
    group = zarr.open_group(folder, mode="r")
    tensors = {}
    for path, entry in entries.items():
        values = np.array(cast(zarr.Array, group[path])[...])
        _refuse_unless_equal(f"the shape of {path}", list(values.shape), entry["shape"])
        _refuse_unless_equal(path, _checksum(values), entry["crc32"])
        tensors[path] = torch.from_numpy(values).view(getattr(torch, entry["dtype"]))
    return tensors


def _as_numpy(tensor: Tensor) -> np.ndarray:
    """The tensor's memory; types that NumPy lacks (bfloat16, float8) as integers of their bits."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view({1: torch.uint8, 2: torch.int16}[tensor.element_size()]).numpy()


def _checksum(values: np.ndarray) -> int:
    return zlib.crc32(values.reshape(-1).view(np.uint8).data)


def _manifest_checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def _refuse_unless_equal(what: str, found: Any, saved: Any) -> None:
    if found != saved:
        raise ValueError(f"{what} is {found}, {saved} was saved")


def _damaged(path: Path, error: Exception) -> ValueError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ValueError(f"checkpoint {path} is damaged ({reason}): remove its folder")


def _newest_first(run_dir: Path) -> list[Path]:
    paths = [p for p in (run_dir / "checkpoints").glob("*") if p.name.isdecimal()]
    return sorted(paths, key=lambda path: int(path.name), reverse=True)


def _remove(path: Path) -> None:
    """Rename first, so that the checkpoint is gone at once and never half there."""
    hidden = path.with_name(f".removed-{path.name}")
    path.rename(hidden)
    shutil.rmtree(hidden)


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            _sync(Path(root, name))
        _sync(Path(root))


def _sync(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
