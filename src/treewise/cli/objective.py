"""Settings of an objective as configurations and flags give them, where `1e-1` is a text."""

from collections.abc import Mapping
from typing import Any

from treewise.cli.config import coerce

_NUMBERS = (
    *("beta", "clip_low", "clip_high", "dual_clip", "max_ratio", "entropy_coefficient", "sampler_min", "sampler_max"),
    *("constant", "max_length"),
)
_TYPES: dict[str, Any] = {**dict.fromkeys(_NUMBERS, float | None), "measure_entropy": bool}


def typed_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as numbers and booleans where they are such.

    Raises:
        ConfigError: a value of another type; names the setting.
    """
    named = {str(key): value for key, value in given.items()}  # YAML reads `3: x` as a number's
    return {key: coerce(key, value, _TYPES.get(key, Any)) for key, value in named.items()}
