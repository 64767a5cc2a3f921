"""Every sampler by its name in a configuration."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from treewise.base.features import feature
from treewise.errors import ConfigError, check_choice
from treewise.rl.samplers.protocol import Sampler
from treewise.rl.samplers.transformers_sampler import TransformersSampler

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
        if name == "transformers":
            return TransformersSampler(model, **chosen)
        on_server: Sampler = feature("servers").ServerSampler(**chosen)
        return on_server
    except TypeError as error:
        raise ConfigError(f"sampler_settings of {name!r}: {error}") from None
