"""Settings of an objective in configurations and flags, where a number such as `1e-1` may be text."""

from collections.abc import Mapping
from typing import Any

from treewise.cli.typed_values import coerce


def typed_settings(objective: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a named objective, as the types of its annotations.

    Raises:
        ConfigError: a value of another type; names the setting.
    """
    from treewise.objectives.registry import OBJECTIVES, setting_types

    types = setting_types(objective) if objective in OBJECTIVES else {}
    by_name = {str(key): value for key, value in settings.items()}  # YAML reads the key of `3: x` as a number
    return {key: coerce(key, value, types.get(key, Any)) for key, value in by_name.items()}
