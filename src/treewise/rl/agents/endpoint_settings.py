"""What the episodes of an endpoint may ask for, and how they are sampled."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Gt

from treewise.errors import ConfigError, check_fields
from treewise.rl.agents.wire.asked import RefusedError

Count = Annotated[int, Ge(1)]
TRAIN, CONTEXT = "train", "context"
KEY_FORM = "TOKEN, with which keys begin"
DEFAULT_MODELS: Mapping[str, Any] = {"other": CONTEXT, "*": TRAIN}


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """What episodes may ask for, and how they are sampled.

    Parameters:
        max_length: tokens of a prompt and its reply; None: as many as the model follows.
        max_new_tokens: of one reply, where a call asks for more, or does not say.
        temperature, top_p, top_k: of calls that are trained, whatever they ask for; None: what they ask for, else 1, 1
            and 0.
        models: by the name that a call asks for, `*` for any other: `train`, `context` (sampled by the same weights,
            not trained), or an address that calls are passed on to: `{base_url, model, api_key}`.
        max_calls: of an episode. calls_at_once: of an episode. max_waiting: calls of all episodes.
        max_request_mb: of one call. call_seconds: for its answer.
        records_experts: of a mixture, rows hold the experts that its sampler chose (`routed_experts`).
        keeps_thinking: a turn whose reasoning the agent or the template drops stays in front of later ones.

    Raises:
        ConfigError: a value beyond its limits.
    """

    max_length: Annotated[int, Ge(2)] | None = None
    max_new_tokens: Count = 4096
    temperature: Annotated[float, Ge(0)] | None = None
    top_p: Annotated[float, Gt(0)] | None = None
    top_k: Annotated[int, Ge(0)] | None = None
    models: Mapping[str, Any] = field(default_factory=lambda: dict(DEFAULT_MODELS))
    max_calls: Count = 1000
    calls_at_once: Count = 64
    max_waiting: Count = 1024
    max_request_mb: Count = 16
    call_seconds: Annotated[float, Gt(0)] = 600.0
    keeps_thinking: bool = False
    records_experts: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name, use in self.models.items():
            is_address = isinstance(use, Mapping) and str(use.get("base_url", "")).startswith("http")
            if use not in (TRAIN, CONTEXT) and not is_address:
                raise ConfigError(
                    f"models: {name!r} is {use!r}; give {TRAIN!r}, {CONTEXT!r}, or base_url, model and api_key of "
                    "another endpoint."
                )
            if is_address and (unknown := set(use) - {"base_url", "model", "api_key"}):
                raise ConfigError(
                    f"models: {name!r} has {', '.join(sorted(unknown))}; known: base_url, model, api_key."
                )

    def use_of(self, model: str) -> Any:
        """What a name stands for. Raises `RefusedError` for one that stands for nothing."""
        found = self.models.get(model, self.models.get("*"))
        if found is None:
            names = ", ".join(self.models)
            raise RefusedError(
                f"The model `{model}` does not exist; served are {names}.",
                status=404,
                code="model_not_found",
                param="model",
            )
        return found
