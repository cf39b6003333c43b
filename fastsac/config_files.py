"""Configurations in YAML files: the shipped ones, a user's, and the one that a run keeps."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fastsac.core.config import Config, ConfigError, parse_config, shortened, shown


def load_config(name_or_path: str, overrides: Sequence[tuple[str, str]] = ()) -> Config:
    """Build the configuration of a file, or of a shipped name, with overrides.

    Args:
        overrides: `(dotted field, value as YAML)` pairs, applied in order.

    Raises:
        ConfigError: one line that names the file or the field and what is allowed.
    """
    fields = _read_yaml(_find(name_or_path))
    for field, text in overrides:
        try:
            value = _parse(text)
        except yaml.YAMLError:
            raise ConfigError(
                f"{shortened(field)}: given {shown(text)}, should be a YAML value"
            ) from None
        _override(fields, field, value)
    return parse_config(fields)


def save_config(config: Config, path: Path) -> None:
    """Write `config` so that `load_config` gives an equal one."""
    text = yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False)
    path.write_text(text, encoding="utf-8")


def shipped_configs() -> list[str]:
    """Names of the configurations that come with the package."""
    return sorted(path.stem for path in _shipped_dir().glob("*.yaml"))


def _shipped_dir() -> Path:
    """Inside the package when installed from a wheel, beside it in the repository."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def _find(name_or_path: str) -> Path:
    shipped = shipped_configs()
    if name_or_path in shipped:
        return _shipped_dir() / f"{name_or_path}.yaml"
    try:
        path = Path(name_or_path).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, `~user` of nobody, NUL
        raise ConfigError(
            f"{shown(name_or_path)} is no path ({shortened(str(error))}): give a YAML file"
        ) from None
    if is_folder:
        raise ConfigError(f"{name_or_path} is a folder: give a YAML file")
    if not exists:
        near = difflib.get_close_matches(name_or_path, shipped, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"no configuration {name_or_path!r}{hint}: give the path of a YAML file or one of the "
            f"shipped names ({', '.join(shipped)})"
        )
    return path


def _parse(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        yaml.YAMLError: it has none.
    """
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        # PyYAML's own constructors on `!!int x`, `!!bool x`, `!!timestamp x`, 2001-99-99
        raise yaml.YAMLError(f"a value does not fit its kind ({shortened(str(error))})") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        fields = _parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a YAML text file") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = shortened(error.problem or "")
        raise ConfigError(f"{path}: {line}{problem}: correct the YAML") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: {reason}: correct the YAML") from None
    if not isinstance(fields, dict):
        what = "is empty" if fields is None else f"holds a {type(fields).__name__}"
        raise ConfigError(f"{path} {what}: give the fields as `name: value` lines")
    return fields


def _override(fields: dict[str, Any], field: str, value: Any) -> None:
    *sections, leaf = field.split(".")
    section = fields
    for name in sections:
        if section.get(name) is None:  # left out, or an empty section
            section[name] = {}
        section = section[name]
        if not isinstance(section, dict):
            raise ConfigError(f"{field}: unknown field, {name} has no fields of its own")
    section[leaf] = value


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers (`1e6`, `3e-4`), and no key twice in a mapping."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value!r} is given twice", problem_mark=key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Puts text in quotes that `_Loader` would read as a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )
