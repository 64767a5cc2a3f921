"""Every sampler by its name in a configuration: `SAMPLERS` is the only place that knows one name from another.

A sampler of the user's is named `module:Class` or `file.py:Class`. It is called with the model and its settings, or is
given a name of its own in `SAMPLERS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treewise.base import features
from treewise.errors import ConfigError, check_choice

if TYPE_CHECKING:
    from torch import nn

    from treewise.rl.samplers.protocol import Sampler


@dataclass(frozen=True, slots=True)
class SamplerEntry:
    """What a name stands for.

    make: gives the sampler; called with the model in training and the settings. settings: those that are not the
    class's defaults. is_on_servers: it has `base_url`, `weights` and `weights_folder` among its settings, and samples
    without a model in this process. takes_processor: of the model, for prompts with images.
    """

    make: "Callable[..., Sampler]"
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_on_servers: bool = False
    takes_processor: bool = False


def _in_this_process(model: "nn.Module", **settings: Any) -> "Sampler":
    from treewise.rl.samplers.transformers_sampler import TransformersSampler

    return TransformersSampler(model, **settings)


def _on_servers(_model: "nn.Module | None", **settings: Any) -> "Sampler":
    sampler: Sampler = features.servers.ServerSampler(**settings)
    return sampler


SAMPLERS: dict[str, SamplerEntry] = {
    "transformers": SamplerEntry(_in_this_process, takes_processor=True),
    "vllm": SamplerEntry(
        _on_servers, {"base_url": "http://localhost:8000/v1", "weights": "reload"}, is_on_servers=True
    ),
    "openai": SamplerEntry(_on_servers, is_on_servers=True),
}


def entry_of(name: str) -> SamplerEntry:
    """Raises `ConfigError`: no such name; a module or a class that is not there."""
    if ":" not in name:
        check_choice("sampler", name, SAMPLERS)
        return SAMPLERS[name]
    from treewise.rl.tasks.calls import found_by_name

    found = found_by_name(name, "sampler")
    missing = [method for method in ("sample", "update", "close") if not callable(getattr(found, method, None))]
    if missing or not isinstance(found, type):
        lacks = f"has no {', '.join(missing)}" if missing else "is no class"
        raise ConfigError(f"sampler {name!r} {lacks}; write a class with the methods of treewise.rl.samplers.Sampler.")
    return SamplerEntry(found)


def check_sampler(name: str, settings: Mapping[str, Any] | None) -> None:
    """For a process that is a server itself, whose address may be the one that `--sampler vllm` asks by default.

    Raises:
        ConfigError: as `entry_of`, or a server without an address.
    """
    if entry_of(name).is_on_servers and not (settings or {}).get("base_url"):
        raise ConfigError(f"sampler={name} needs --sampler_settings.base_url, which is not this server's own.")


def sampler_named(
    name: str,
    settings: Mapping[str, Any],
    model: "nn.Module | None",
    *,
    of_servers: Mapping[str, Any] | None = None,
    processor: object = None,
) -> "Sampler":
    """The sampler that `--sampler` and `sampler_settings` ask for.

    Parameters:
        model: the one in training; None where the sampler is on servers.
        of_servers: settings of one on servers that `settings` may replace.
        processor: of the model, for a sampler in this process that sees images.

    Raises:
        ConfigError: an unknown name or setting, or a server without an address.
    """
    entry = entry_of(name)
    own: dict[str, Any] = {}
    if entry.is_on_servers:
        own |= of_servers or {}
    if entry.takes_processor:
        own["processor"] = processor
    chosen = {**entry.settings, **own, **settings}
    if entry.is_on_servers and not chosen.get("base_url"):
        raise ConfigError(f"sampler {name!r} needs sampler_settings.base_url, as in http://localhost:8000/v1.")
    try:
        return entry.make(model, **chosen)
    except TypeError as error:
        raise ConfigError(f"sampler_settings of {name!r}: {error}") from None


def row_limit(sampler: "Sampler") -> int | None:
    """The tokens of the longest row that servers take, where they say; None for a sampler in this process. Raises
    `SamplerError` where one does not answer.
    """
    reach = getattr(sampler, "reach", None)
    if reach is None:
        return None
    reach()
    found: int | None = getattr(sampler, "max_length", None)
    return found
