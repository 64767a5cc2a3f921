"""The one exception tree. Each error is also the standard-library type that it replaces, so callers may catch either.

Messages name the location (file and line, trajectory, layer), the number that is wrong, and what to do; the functions
at the end write what many of them share.
"""

import numbers
import re
import types
import typing
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib import metadata
from typing import Any


class TreewiseError(Exception):
    """Base of every error that treewise raises on purpose."""


class DataError(TreewiseError, ValueError):
    """A record, trajectory or file that cannot be trained on as it is."""


class PlanError(TreewiseError, ValueError):
    """A forest that cannot be cut into micro-batches under the given budget."""


class UnsupportedModelError(TreewiseError, NotImplementedError):
    """A model, layer or setting that cannot follow a tree; raised before any compute."""


class ConfigError(TreewiseError, ValueError):
    """A setting that is unknown, of the wrong type, or contradicts another one."""


class VerificationError(TreewiseError, AssertionError):
    """Tree and flat training differ by more than the tolerance."""


class OutOfMemoryError(TreewiseError, MemoryError):
    """A step that does not fit in memory at any budget, or whose gradients could not be kept apart."""


class NonFiniteError(TreewiseError, FloatingPointError):
    """A loss or gradient that is not a number; raised before the optimizer could spread it."""


class CheckpointError(TreewiseError, RuntimeError):
    """A checkpoint that is missing, incomplete or made by a different run."""


class LostRankError(TreewiseError, RuntimeError):
    """Another process of the run is gone, or does not answer. `exit_code` is 3."""

    exit_code: int = 3


class SamplerError(TreewiseError, ConnectionError):
    """A server that continues token ids does not answer, or answers what cannot be trained on."""


class TaskError(TreewiseError, RuntimeError):
    """A reward function or environment that failed, or an episode that cannot be brought back to an earlier turn."""


class StoppedError(TreewiseError, InterruptedError):
    """A run that a signal ended, after it was saved. `exit_code` is 128 plus the signal's number, as shells have it."""

    exit_code: int = 130


def did_you_mean(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """` Did you mean 'max_tokens'?` with the nearest known name; `otherwise` (after a space) where none is near."""
    near = get_close_matches(str(name), list(known), n=1)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" {otherwise}" if otherwise else ""


def check_choice(name: str, value: object, known: Iterable[Any], error: type[TreewiseError] = ConfigError) -> None:
    """Raises `error` where a setting's value is none of the known ones; None is one of them only where it is listed."""
    choices = list(known)
    if value not in choices:
        listed = ", ".join(str(choice) for choice in choices)
        raise error(f"{name}={value!r} is unknown; choose one of {listed}.{did_you_mean(value, map(str, choices))}")


def num(count: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: `1 tree`, `2 trees`, `3 batches` (with `plural`)."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def duration(seconds: float) -> str:
    """`0:40`, `12:05`, `3:07:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def bytes_as_text(num_bytes: float | None) -> str:
    """A number of bytes in binary units: `1.50 GiB`, `3.20 MiB`, `7 bytes`; a dash where it is unknown."""
    if num_bytes is None:
        return "–"
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= limit:
            return f"{num_bytes / limit:,.2f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def pip_install(*packages: str) -> str:
    """`pip install 'trl>=1.15'`: the way to packages that are missing, in the versions that pyproject.toml asks for."""
    try:
        listed = metadata.requires("treewise") or []
    except metadata.PackageNotFoundError:  # run from its sources
        listed = []
    wanted = {}
    for line in sorted(each.partition(";")[0].strip() for each in listed):
        wanted[re.split(r"[^\w.-]", line)[0].lower()] = line
    return "pip install " + " ".join(f"'{wanted.get(name.lower(), name)}'" for name in packages)


def check_setting_types(owner: str, settings: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Checks settings out of a configuration. owner: whose they are, for messages. known: the type of each setting.

    Raises:
        ConfigError: an unknown setting, or a value of another type; integers are numbers, booleans are not.
    """
    for setting, value in settings.items():
        if setting not in known:
            hint = did_you_mean(setting, known)
            raise ConfigError(f"unknown setting {setting!r} of {owner}.{hint} Known: {', '.join(known)}.")
        if not _is_of(value, known[setting]):
            raise ConfigError(f"{owner}: {setting}={value!r} must be {_type_name(known[setting])}.")


def _kinds(annotation: Any) -> tuple[type, ...]:
    return typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


def _is_of(value: Any, annotation: Any) -> bool:
    """Whether a value has an annotated type; integers are numbers, booleans are not."""
    kinds = _kinds(annotation)
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, numbers.Real))


def _type_name(annotation: Any) -> str:
    names = {float: "a number", int: "an integer", str: "text", bool: "true or false", types.NoneType: "none"}
    return " or ".join(names[kind] for kind in _kinds(annotation))
