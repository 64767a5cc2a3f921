"""Samplers: token ids in, token ids and log-probs out. `TransformersSampler` is the default."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from treewise.errors import ConfigError, check_choice
from treewise.rl.samplers.protocol import Completion, Sampler, SampleRequest
from treewise.rl.samplers.servers import ServerSampler
from treewise.rl.samplers.transformers_sampler import TransformersSampler

__all__ = ["Completion", "SampleRequest", "Sampler", "ServerSampler", "TransformersSampler", "sampler_named"]

SAMPLERS: Mapping[str, Mapping[str, Any]] = {  # by name, the settings that are not the class's defaults
    "transformers": {},
    "vllm": {"base_url": "http://localhost:8000/v1", "weights": "reload"},
    "openai": {},
}


def sampler_named(name: str, settings: Mapping[str, Any], model: nn.Module) -> Sampler:
    """The sampler that `--sampler` and `sampler_settings` ask for.

    Raises:
        ConfigError: an unknown name or setting, or a server without an address.
    """
    check_choice("sampler", name, SAMPLERS)
    chosen = {**SAMPLERS[name], **settings}
    if name != "transformers" and not chosen.get("base_url"):
        raise ConfigError(f"sampler {name!r} needs sampler_settings.base_url, as in http://localhost:8000/v1.")
    try:
        return TransformersSampler(model, **chosen) if name == "transformers" else ServerSampler(**chosen)
    except TypeError as error:
        raise ConfigError(f"sampler_settings of {name!r}: {error}") from None
