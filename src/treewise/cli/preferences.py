"""Preference objectives of `treewise train`, and the reference that they are given."""

from typing import Any

from treewise.cli.config import RunConfig
from treewise.cli.objective import typed_settings
from treewise.errors import ConfigError


def objective_of(config: RunConfig) -> Any:
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


def reference_of(config: RunConfig) -> Any:
    """The model that `reference` names; None without one: the trained model as it starts."""
    from treewise.nn.load_model import load_weights

    name = config.more.get("reference")
    return None if name is None else load_weights(name, None, config.dtype)
