"""Settings out of a configuration: their names and types, for a dataclass that is chosen by name."""

import dataclasses
import numbers
import types
import typing
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, Literal, TypeVar

from treewise.errors import ConfigError, check_fields, did_you_mean, parts_of

S = TypeVar("S")
_TYPE_NAMES = {float: "a number", int: "an integer", str: "text", bool: "true or false", types.NoneType: "none"}


def check_setting_types(owner: str, settings: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Checks settings out of a configuration. owner: whose they are, for messages. known: the type of each setting.

    Raises:
        ConfigError: an unknown setting, or a value of another type; integers are numbers, booleans are not.
    """
    for setting, value in settings.items():
        if setting not in known:
            hint = did_you_mean(setting, known)
            raise ConfigError(f"unknown setting {setting!r} of {owner}.{hint} Known: {', '.join(known)}.")
        kinds = tuple(str if typing.get_origin(kind) is Literal else kind for kind, _ in parts_of(known[setting]))
        is_number = float in kinds and isinstance(value, numbers.Real)
        if bool not in kinds if isinstance(value, bool) else not (isinstance(value, kinds) or is_number):
            names = " or ".join(_TYPE_NAMES[kind] for kind in kinds)
            raise ConfigError(f"{owner}: {setting}={value!r} must be {names}.")


def settings_named(what: str, name: str, known: Mapping[str, type[S] | str], given: Mapping[str, Any]) -> S:
    """The settings of one of several kinds, dataclasses by their names, out of a configuration.

    what: kind of thing, for messages. known: the kinds, or where they are (`module:name`).

    Raises:
        ConfigError: an unknown name or setting, or a value that is out of range or of another type.
    """
    if name not in known:
        raise ConfigError(f"unknown {what} {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}.")
    found = known[name]
    kind: type[S] = resolve_name(found) if isinstance(found, str) else found
    types_of = {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    check_setting_types(f"{what} {name!r}", given, types_of)
    settings = kind(**given)
    check_fields(settings)
    return settings
