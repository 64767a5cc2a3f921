"""A YAML file as keys with their lines, read without making anything but plain values."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from treewise.errors import ConfigError


def read_file(path: Path, required: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Values by key, each with its location (`run.yaml:3`). `required`: keys that the error of an empty file names.

    Raises:
        ConfigError: a file that is missing, empty, not YAML or no mapping; a key that is given twice, at any depth.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: the configuration cannot be read ({reason}).") from None
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{path}: empty; a configuration names at least {', '.join(required)}.")
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}: a configuration is a mapping, `key: value` line by line.")
        values: dict[str, tuple[Any, str]] = {}
        for key_node, value_node in node.value:
            location = f"{path}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{location}: a key must be a word, as in `key: value`.")
            key = str(key_node.value)
            if key in values:
                raise ConfigError(f"{location}: {key} is given twice (first at {values[key][1]}).")
            _check_unique(value_node, path, key)
            values[key] = (loader.construct_object(value_node, deep=True), location)
        return values
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        reason = _one_line(getattr(error, "problem", None) or error)
        raise ConfigError(f"{path}{line}: not valid YAML ({reason}).") from None
    except (RecursionError, ValueError) as error:  # nested without end; an integer or a date that cannot be
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not valid YAML ({_one_line(error)}).") from None
    finally:
        if loader is not None:
            loader.dispose()


def _check_unique(node: yaml.Node, path: Path, name: str) -> None:
    """Mappings inside of mappings; PyYAML would take the last of several equal keys silently."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    keys: set[str] = set()
    for key_node, value_node in pairs:
        key = f"{name}.{key_node.value}"
        if key in keys:
            raise ConfigError(f"{path}:{key_node.start_mark.line + 1}: {key} is given twice.")
        keys.add(key)
        if value_node is not node:  # an alias may lead back
            _check_unique(value_node, path, key)


def _one_line(reason: object, limit: int = 200) -> str:
    return " ".join(str(reason).split())[:limit]
