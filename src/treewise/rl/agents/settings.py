"""What an online run with an agent is made of besides `OnlineSettings`: episodes, limits, what models mean."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from treewise.errors import ConfigError, check_fields
from treewise.rl.agents.endpoint_settings import DEFAULT_MODELS, Count, EndpointSettings
from treewise.rl.online.settings import OnlineSettings

FIRST_EPISODES = 8  # of a task by budget, before the length of an episode is known
# Settings of rollouts that this process writes itself, each with what an agent has in its place.
_ELSEWHERE = {
    "branching": "an agent's episodes begin at their tasks",
    "branching_settings": "give agent_settings.episodes, the number of a task's",
    "num_candidates": "an agent draws from no candidates",
    "episodes_at_once": "give agent_settings.at_once",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings of the episodes of an agent (`agent_settings` of `treewise rl`).

    Parameters:
        episodes: of each task in an iteration; None: as many as tokens_per_iteration has room for, by the mean length
            so far, and at least two.
        at_once: episodes that run at a time.
        episode_seconds: of an episode; then its processes are ended, and it has no reward. call_seconds: for the answer
            to a call.
        max_calls: of an episode; the next one ends it. calls_at_once: of an episode.
        max_waiting: calls of all episodes. max_request_mb: of one call.
        models: by the name that a call asks for, `*` for any other: `train`, `context` (sampled by the same weights,
            not trained), or another endpoint: `{base_url, model, api_key}`.
        thinking: `keep`: turns stay in front of later ones with the reasoning that the agent or the template drops.
        host, port: where the endpoint listens; 0: any port that is free.
        python: that runs an agent's function, with the packages that it imports; None: the one of the run.

    Raises:
        ConfigError: a value beyond its limits.
    """

    episodes: Annotated[int, Ge(2)] | None = 8
    at_once: Count = 64
    episode_seconds: Annotated[float, Gt(0)] = 600.0
    call_seconds: Annotated[float, Gt(0)] = 600.0
    max_calls: Count = 200
    calls_at_once: Count = 64
    max_waiting: Count = 1024
    max_request_mb: Count = 16
    models: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_MODELS))
    thinking: Literal["as_sent", "keep"] = "as_sent"
    host: str = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535)] = 0
    python: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        EndpointSettings(models=self.models)

    def of_endpoint(self, settings: OnlineSettings, temperature: float, max_length: int | None) -> EndpointSettings:
        """What its episodes may ask for. max_length: tokens of a prompt and its reply; None: any number."""
        names = ("call_seconds", "max_calls", "calls_at_once", "max_waiting", "max_request_mb")
        return EndpointSettings(
            max_length=max_length,
            max_new_tokens=settings.max_new_tokens,
            temperature=temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            models={"*": "train", **self.models},
            keeps_thinking=self.thinking == "keep",
            records_experts=settings.routing_replay != "off",
            **{name: getattr(self, name) for name in names},
        )

    def num_episodes(self, budget: int, expected_tokens: float | None) -> int:
        """Of a task. budget: its generated tokens. expected_tokens: of one episode, where that is known."""
        if self.episodes is not None:
            return self.episodes
        return FIRST_EPISODES if expected_tokens is None else max(2, round(budget / max(expected_tokens, 1.0)))

    def facts(self) -> dict[str, Any]:
        """What decides which episodes a run has and what they sample; a resumed run must agree."""
        return {name: getattr(self, name) for name in ("episodes", "models", "thinking")}


def check_online(settings: OnlineSettings) -> None:
    """Raises `ConfigError` for a setting of rollouts that an agent's episodes do not have."""
    usual = OnlineSettings()
    for setting in fields(settings):
        if setting.name in _ELSEWHERE and getattr(settings, setting.name) != getattr(usual, setting.name):
            raise ConfigError(f"{setting.name} is given with an agent: {_ELSEWHERE[setting.name]}.")
    if settings.chosen_curriculum().measures_angles:
        raise ConfigError(f"curriculum {settings.curriculum!r} measures prompts, and an agent writes its own.")
