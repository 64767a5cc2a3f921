"""A YAML file as keys with their lines, read without making anything but plain values."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from treewise.errors import ConfigError

MAX_VALUES = 100_000  # of a configuration, each alias counted as what it stands for


def read_file(path: Path, required: Sequence[str]) -> dict[str, tuple[Any, str]]:
    """Values by key, each with its location (`run.yaml:3`). `required`: keys that the error of an empty file names.

    Raises:
        ConfigError: a file that is missing, empty, not YAML or no mapping; a key that is given twice, at any depth.
    """
    if path.name.endswith((".jsonl", ".jsonl.gz", ".parquet", ".arrow")):
        raise ConfigError(f"{path} holds data, not a configuration; give it as --data {path}.")
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
        _check_size(node, str(path))
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


def read_value(text: str) -> Any:
    """A value of a flag, as YAML reads it.

    Raises:
        yaml.YAMLError: it is not YAML.
        ConfigError: its aliases stand for more values than a configuration holds.
    """
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is not None:
        _check_size(node, "a flag's value")
    return yaml.safe_load(text)


def read_mapping(flag: str, text: str) -> dict[str, Any]:
    """A flag's mapping, written in YAML. Raises `ConfigError` for anything else."""
    try:
        value = read_value(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # nested without end; an integer that cannot be
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{flag} {text!r} is not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} {text!r} is not a mapping; write '{{name: value}}'.")
    return value


def _check_size(root: yaml.Node, location: str) -> None:
    """Counts values with aliases written out, each node once: fifteen aliases of ten each stand for 10**15."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        sizes[id(node)] = MAX_VALUES  # an alias that leads back to itself stands for no end of values
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        total = 1 + (sum(map(size, parts)) if isinstance(node, yaml.CollectionNode) else 0)
        sizes[id(node)] = total
        return total

    if size(root) > MAX_VALUES:
        raise ConfigError(f"{location}: its aliases stand for more than {MAX_VALUES:,} values; write them out.")


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


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())[:200]
