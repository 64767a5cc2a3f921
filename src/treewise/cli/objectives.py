"""The objective and the reference that a configuration names, with settings that may be text."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treewise.cli.config import RunConfig
from treewise.cli.values import coerce
from treewise.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from treewise.objectives import Objective


def typed_settings(objective: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a named objective, as the types of its annotations.

    Raises:
        ConfigError: a value of another type; names the setting.
    """
    from treewise.objectives.registry import OBJECTIVES, setting_types

    types = setting_types(objective) if objective in OBJECTIVES else {}
    by_name = {str(key): value for key, value in settings.items()}  # YAML reads the key of `3: x` as a number
    return {key: coerce(key, value, types.get(key, Any)) for key, value in by_name.items()}


def objective_of(config: RunConfig) -> "Objective | None":
    """The objective that the configuration names; None for SFT, whose settings are keys of their own.

    Raises:
        ConfigError: an unknown objective or setting, or one that belongs to `treewise rl`.
    """
    from treewise.objectives.registry import OBJECTIVES, PREFERENCES, objective_named

    name = config.more.get("objective")
    settings = config.more.get("objective_settings") or {}
    if name in (None, "sft"):
        for key in ("objective_settings", "reference"):
            if config.more.get(key):
                raise ConfigError(f"{key} belongs to objective: {', '.join(PREFERENCES)}; SFT has keys of its own.")
        return None
    if name in OBJECTIVES and name not in PREFERENCES:
        raise ConfigError(f"objective {name!r} needs rollouts: use treewise rl. Here: sft, {', '.join(PREFERENCES)}.")
    return objective_named(name, **typed_settings(name, settings))


def reference_of(config: RunConfig) -> "PreTrainedModel | None":
    """The model that `reference` names; None without one: the trained model as it starts."""
    from treewise.nn.load_model import load_weights

    name = config.more.get("reference")
    return None if name is None else load_weights(name, None, config.dtype)
