"""The table of attention implementations. A new one is one entry here and one module beside it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from treewise.errors import ConfigError
from treewise.nn.attention import cascade
from treewise.nn.attention.gateway import GatewayRead, LayerCall, extend
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.attention.reference import reference_attention

AUTO = "auto"


class Run(Protocol):
    """Attention of one layer under a tree.

    query: [1, H, T, D]; key, value: [1, Hkv, T, D] of the micro-batch's own tokens. reads: gateway rows in front of
    them, kept under the name `call`. sinks: [H] extra logits without a value, or None. Returns [1, H, T, D of values].
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: TreeMask,
        rule: LayerRule,
        sinks: torch.Tensor | None,
        reads: tuple[GatewayRead, ...],
        call: LayerCall,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Implementation:
    """run: the function. suits: whether `auto` takes it on a type of device (`cpu`, `cuda`, ...). num_key_rows: key
    rows that one layer without a window reads in a forward of a micro-batch, for benchmarks."""

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


def _flex(*inputs: Any) -> torch.Tensor:
    from treewise.nn.attention.flex import flex_attention_tree  # loads torch's compiler

    return flex_attention_tree(*inputs)


def _flash(*inputs: Any) -> torch.Tensor:
    from treewise.nn.attention.flash import flash_attention_tree

    return flash_attention_tree(*inputs)


def _flex_key_rows(mask: TreeMask, device: torch.device) -> int:
    from treewise.nn.attention.flex import num_key_rows

    return num_key_rows(mask, device)


def _behind_gateways(attention: Callable[..., torch.Tensor]) -> Run:
    """For functions that take one tensor of keys and one of values: gateway rows are concatenated in front."""

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: TreeMask,
        rule: LayerRule,
        sinks: torch.Tensor | None,
        reads: tuple[GatewayRead, ...],
        call: LayerCall,
    ) -> torch.Tensor:
        return attention(query, *extend(key, value, reads, call), mask, rule, sinks)

    return run


def _all_keys(mask: TreeMask, _: torch.device) -> int:
    return mask.num_keys * mask.num_queries


# In the order in which `auto` prefers them; it never takes one that suits no device.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "flex": Implementation(_behind_gateways(_flex), lambda device_type: device_type == "cuda", _flex_key_rows),
    "flash": Implementation(_behind_gateways(_flash), lambda _: False, _flex_key_rows),
    "cascade": Implementation(cascade.cascade_attention, cascade.is_available, cascade.num_key_rows),
    "reference": Implementation(_behind_gateways(reference_attention), lambda _: True, _all_keys),
}
