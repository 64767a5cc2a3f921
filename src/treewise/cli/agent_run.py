"""`treewise rl --agent`: what an online run has besides where an agent does its tasks."""

import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treewise.cli.config import RunConfig
from treewise.cli.values import coerce
from treewise.errors import ConfigError, did_you_mean, num, require_packages

if TYPE_CHECKING:
    from treewise.rl.agents.collecting import AgentCollector
    from treewise.rl.agents.settings import AgentSettings
    from treewise.rl.online import OnlineSettings
    from treewise.trainer import TreeTrainingArguments

NEEDED = ("starlette", "uvicorn", "httpx")


def settings_of(config: RunConfig) -> "AgentSettings":
    """Raises `ConfigError` for a setting that is unknown, beyond its limits, or contradicts another."""
    from treewise.rl.agents.settings import AgentSettings

    types, given = typing.get_type_hints(AgentSettings), dict(config.more.get("agent_settings") or {})
    for name in given:
        if name not in types:
            raise ConfigError(f"unknown setting agent_settings.{name}.{did_you_mean(str(name), types, '')}")
    own = AgentSettings(**{name: coerce(f"agent_settings.{name}", value, types[name]) for name, value in given.items()})
    if own.episodes is not None and "tokens_per_iteration" in config.more:
        raise ConfigError(
            "tokens_per_iteration decides how many episodes there are with agent_settings.episodes: null alone; leave "
            "one of them out."
        )
    return own


def collector_of(
    config: RunConfig,
    settings: "OnlineSettings",
    task: Any,
    tokenizer: Any,
    model: Any,
    arguments: "TreeTrainingArguments",
) -> "AgentCollector":
    """The collector of a run, whose agent is loaded and whose endpoint listens.

    Raises:
        ConfigError: the agent cannot be loaded, a package is missing, or a setting has no meaning with an agent.
    """
    require_packages("an agent", NEEDED)
    from treewise.rl.agents.collecting import AgentCollector

    own = settings_of(config)
    given = (config.more["agent"], tokenizer, model, task, settings, own)
    return AgentCollector(*given, temperature=arguments.temperature, folder=Path(arguments.output_dir))


def summary(config: RunConfig, settings: "OnlineSettings") -> list[tuple[str, str]]:
    """What a run prints before it begins, in place of the lines on rollouts."""
    own = settings_of(config)
    count = "as many as the budget holds" if own.episodes is None else str(own.episodes)
    what = f"{count} of each of {num(settings.trees_per_iteration, 'task')}, {settings.max_new_tokens:,} tokens a reply"
    return [("agent", config.more["agent"]), ("episodes", f"{what} at most")]
