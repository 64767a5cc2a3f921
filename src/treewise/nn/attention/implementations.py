"""The table of attention implementations. A new one is one entry here and one module beside it."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from treewise.errors import ConfigError
from treewise.nn.attention import cascade
from treewise.nn.attention.gateway import GatewayRead, LayerCall, extend
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.attention.reference import reference_attention

AUTO = "auto"
Run = Callable[[Tensor, Tensor, Tensor, TreeMask, LayerRule, Tensor | None, tuple[GatewayRead, ...], LayerCall], Tensor]


@dataclass(frozen=True, slots=True)
class Implementation:
    """run: attention of one layer under a tree, of [1, H, T, D] queries, [1, Hkv, T, D] keys and values of the
    micro-batch's own tokens, mask, rule, sinks ([H] extra logits without a value, or None), gateway rows in front of
    the keys, and the name that they are kept under; returns [1, H, T, D of values]. suits: whether `auto` takes it on a
    type of device (`cpu`, `cuda`, ...). num_key_rows: key rows that one layer without a window reads in a forward of a
    micro-batch, for benchmarks."""

    run: Run
    suits: Callable[[str], bool]
    num_key_rows: Callable[[TreeMask, torch.device], int]


def implementation_named(name: str) -> Implementation:
    """The entry of a name.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in IMPLEMENTATIONS:
        raise ConfigError(f"attention={name!r} is unknown; choose 'auto' or one of {', '.join(IMPLEMENTATIONS)}.")
    return IMPLEMENTATIONS[name]


def choose(attention: str, device_type: str) -> str:
    """The name of the implementation that runs: the one asked for, or for `auto` the first that suits the device.

    Raises:
        ConfigError: an unknown name.
    """
    if attention != AUTO:
        implementation_named(attention)
        return attention
    return next(name for name, each in IMPLEMENTATIONS.items() if each.suits(device_type))


def _lazily(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported at the first call: FlexAttention loads torch's compiler."""
    return lambda *inputs: getattr(import_module(f"treewise.nn.attention.{module}"), name)(*inputs)


def _behind_gateways(attention: Callable[..., Tensor]) -> Run:
    """For functions that take one tensor of keys and one of values: gateway rows are concatenated in front."""

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: TreeMask,
        rule: LayerRule,
        sinks: Tensor | None,
        reads: tuple[GatewayRead, ...],
        call: LayerCall,
    ) -> Tensor:
        return attention(query, *extend(key, value, reads, call), mask, rule, sinks)

    return run


_flex, _flash = (
    _behind_gateways(_lazily(module, name))
    for module, name in (("flex", "flex_attention_tree"), ("flash", "flash_attention_tree"))
)
_flex_key_rows = _lazily("flex", "num_key_rows")
# In the order in which `auto` prefers them; it never takes one that suits no device.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "flex": Implementation(_flex, lambda device_type: device_type == "cuda", _flex_key_rows),
    "flash": Implementation(_flash, lambda _: False, _flex_key_rows),
    "cascade": Implementation(cascade.cascade_attention, cascade.is_available, cascade.num_key_rows),
    "reference": Implementation(
        _behind_gateways(reference_attention), lambda _: True, lambda mask, _: mask.num_keys * mask.num_queries
    ),
}
