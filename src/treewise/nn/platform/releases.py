"""What differs between the releases of transformers that pyproject.toml admits: one function for each difference.

Each says since which release a thing is as it is now. What a comment calls `before 5.x` goes when the lower bound has
risen to 5.x; where nothing is left, the function goes. What a release lacks altogether is one error where it is asked
for, which names the release that has it. Imports nothing heavy by itself: commands ask before they need torch.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection
from functools import cache
from importlib.metadata import version
from typing import Any

from packaging.version import Version


def is_before(release: str) -> bool:
    """Whether the installed transformers is older than a release (`5.15`)."""
    return installed() < Version(release)


@cache
def installed() -> Version:
    """The release of transformers that is here, read from files once: it is asked for with each module of a model."""
    return Version(version("transformers"))


def configuration_fields(kind: Any) -> tuple[str, ...]:
    """The names of the settings of a configuration's class; none where it names none itself."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if is_before("5.4"):  # before 5.4 configurations are plain classes
        named = inspect.signature(kind.__init__).parameters.values()
        return tuple(each.name for each in named if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self")
    return ()


def hub_api() -> Any:
    """A `HfApi` that tells the Hub which transformers calls it."""
    if is_before("5.10"):  # before 5.10 transformers makes one where it needs it
        from huggingface_hub import HfApi

        return HfApi(library_name="transformers", library_version=version("transformers"))
    from transformers.utils.hub import hf_api

    return hf_api()


def unpacking_gguf() -> dict[str, Any]:
    """What `from_pretrained` needs for the weights of a GGUF file to be unpacked."""
    if is_before("5.17"):  # before 5.17 they always are
        return {}
    from transformers import GgufConfig

    return {"quantization_config": GgufConfig(dequantize=True)}


def clips_by_accelerator() -> bool:
    """Whether the loop of transformers' Trainer clips by its accelerator, where no method of the Trainer's stands
    between them; not since 5.3. Before, it counts no tokens by a method either (`include_num_input_tokens_seen`)."""
    return is_before("5.3")


def recomputation_name() -> str:
    """How the methods and settings of layers that are computed again begin: `activation_checkpointing`."""
    return "gradient" if is_before("5.23") else "activation"  # before 5.23: `gradient_checkpointing`


def cache_name(arguments: Collection[str]) -> str | None:
    """The argument of a forward that takes a `transformers.Cache`, and the field of its output that holds it; None
    where there is none. Before 5.24 it is `past_key_values`, of layers without attention alone `cache_params`."""
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in arguments), None)


def asks_every_device_for_autocast() -> bool:
    """Whether rotary positions ask any device for its autocast, `meta`, too, which has none; not since 5.4."""
    return is_before("5.4")


def own_forward(kind: Any) -> Any:
    """The forward of a class of layers, without what transformers wraps around it."""
    function = inspect.unwrap(kind.forward)
    # before 5.16 `force_accelerate_hooks` does not say what it wraps
    closure = getattr(function, "__closure__", None)
    return inspect.getclosurevars(function).nonlocals.get("forward_func", function) if closure else function


# Attributes in which Qwen's gated delta nets hold their functions over tokens, each with its name since 5.15.
_HELD = {"causal_conv1d_fn": "causal_conv1d_fn", "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule"}


def calls_by_name() -> bool:
    """Whether recurrent layers call their functions over tokens by name, as since 5.15."""
    return not is_before("5.15")


def held_functions(mixer: Any) -> set[str]:
    """The functions over tokens that a layer holds in attributes, by their names since 5.15; since then none does.

    Those of Qwen's gated delta nets. Other layers have theirs written into their forward, where nothing replaces them.
    """
    return set(_HELD.values()) if not calls_by_name() and _HELD.keys() <= vars(mixer).keys() else set()


def replaced_functions(
    mixer: Any, stand_in: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """Such a layer's attributes with what is to be called in their place. stand_in: of a name and the function, both as
    since 5.15."""
    rule = stand_in("torch_chunk_gated_delta_rule", mixer.chunk_gated_delta_rule)
    conv = stand_in("causal_conv1d_fn", mixer.causal_conv1d_fn or _causal_conv)
    return {"chunk_gated_delta_rule": rule, "causal_conv1d_fn": lambda x, **options: conv(x, **options)}


def _causal_conv(x: Any, weight: Any, bias: Any = None, activation: str | None = None, **_: object) -> Any:
    """[B, C, L] from [B, C, L], with [C, width] weights, where the package causal-conv1d is not installed."""
    import torch.nn.functional as F
    from transformers.activations import ACT2FN

    out = F.conv1d(x, weight[:, None], bias, padding=weight.shape[-1] - 1, groups=len(weight))[..., : x.shape[-1]]
    return out if activation is None else ACT2FN[activation](out)
