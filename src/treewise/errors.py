"""The one exception tree. Each error is also the standard-library type that it replaces, so callers may catch either.

Messages name the location (file and line, trajectory, layer), the number that is wrong, and what to do; the functions
at the end write what many of them share.
"""

import inspect
import math
import numbers
import operator
import re
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib import metadata
from importlib.util import find_spec
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt

T = TypeVar("T")


class TreewiseError(Exception):
    """Base of every error that treewise raises on purpose."""


class DataError(TreewiseError, ValueError):
    """A record, trajectory or file that cannot be trained on as it is."""


class PlanError(TreewiseError, ValueError):
    """A forest that cannot be cut into micro-batches under the given budget."""


class UnsupportedModelError(TreewiseError, NotImplementedError):
    """A model, layer or setting that cannot follow a tree; raised before any compute. `is_finite`: not because its
    weights give what is not a number."""

    is_finite: bool = True


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


class DiskError(TreewiseError, OSError):
    """A file that could not be written, because its disk is full or fails; nothing that it held before is changed.
    `status_code`: of servers' answers meanwhile."""

    status_code: int = 507


class LostRankError(TreewiseError, RuntimeError):
    """Another process of the run is gone, or does not answer. `exit_code` is 3."""

    exit_code: int = 3


class SamplerError(TreewiseError, ConnectionError):
    """A server that continues token ids does not answer (`is_away`), refuses (`status`, of HTTP), or answers what
    cannot be trained on."""

    is_away: bool = False
    status: int = 0


class RequestRefusedError(SamplerError, ValueError):
    """One request that a sampler does not answer, while it answers others."""


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
    """`pip install 'trl>=0.20'`: the way to packages that are missing, in the versions that pyproject.toml asks for."""
    try:
        listed = metadata.requires("treewise") or []
    except metadata.PackageNotFoundError:  # run from its sources
        listed = []
    wanted = {}
    for line in sorted(each.partition(";")[0].strip() for each in listed):
        wanted[re.split(r"[^\w.-]", line)[0].lower()] = line
    return "pip install " + " ".join(f"'{wanted.get(name.lower(), name)}'" for name in packages)


def require_packages(who: str, names: Sequence[str]) -> None:
    """Raises `ConfigError` where packages are not installed. who: begins the sentence that names them."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{who} needs {', '.join(missing)}: {pip_install(*missing)}.")


# -- settings: an annotation declares a type, its limits and its choices, and all checks read it ----------------------

_LIMITS = {
    Ge: ("ge", operator.ge, "at least {:,}", "0 or positive"),
    Gt: ("gt", operator.gt, "above {:,}", "positive"),
    Le: ("le", operator.le, "at most {:,}", "0 or negative"),
    Lt: ("lt", operator.lt, "below {:,}", "negative"),
}


def parts_of(annotation: object) -> Iterator[tuple[Any, tuple[object, ...]]]:
    """The plain types of an annotation, each with what `Annotated` declares of it: `int | Annotated[float, Gt(0)]`."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        inner, *declared = typing.get_args(annotation)
        yield from ((kind, (*own, *declared)) for kind, own in parts_of(inner))
    elif origin in (typing.Union, types.UnionType):
        for each in typing.get_args(annotation):
            yield from parts_of(each)
    else:
        yield annotation, ()


def check_fields(settings: object) -> None:
    """Checks the fields of a dataclass against the choices (`Literal`) and limits (`annotated_types`) that it declares.

    Raises:
        ConfigError: a value beyond its limits, or none of its choices; a text in the annotation is what to do.
    """
    own = [item for owner in type(settings).__mro__ for item in inspect.get_annotations(owner).items()]
    for name, annotation in own:  # of other libraries, they may be text; it holds none of these
        value = getattr(settings, name, None)
        parts = list(parts_of(annotation)) if value is not None else []
        is_flag = isinstance(value, bool) and any(kind is bool for kind, _ in parts)  # beside choices
        for kind, declared in parts:
            if typing.get_origin(kind) is Literal and not is_flag:
                flags = (True, False) if any(other is bool for other, _ in parts) else ()
                check_choice(name, value, (*typing.get_args(kind), *flags))
            if wanted := beyond_limits(value, declared):
                advice = "".join(f"; {each}" for each in declared if isinstance(each, str))
                shown = f"{value:g}" if isinstance(value, float) else repr(value)
                raise ConfigError(f"{name}={shown} must be {wanted}{advice}.")


def beyond_limits(value: Any, declared: Iterable[object]) -> str | None:
    """What a number must be, in words, where it is beyond the limits that are declared; None where it is within."""
    words, is_within = [], True
    for limit in declared:
        if type(limit) in _LIMITS:
            attribute, holds, said, said_of_0 = _LIMITS[type(limit)]
            bound = getattr(limit, attribute)
            is_within &= isinstance(value, numbers.Real) and holds(value, bound)
            words.append("finite" if bound == math.inf else said.format(bound) if bound else said_of_0)
    return None if is_within else " and ".join(words)
