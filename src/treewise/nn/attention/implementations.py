"""The table of attention implementations. A new one is one entry here and one module beside it.

Their modules are imported when one runs: the names are choices of commands, and torch takes seconds.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from treewise.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from treewise.nn.attention.gateway import GatewayRead, LayerCall
    from treewise.nn.attention.mask import LayerRule, TreeMask

    Run = Callable[
        [Tensor, Tensor, Tensor, TreeMask, LayerRule, Tensor | None, tuple[GatewayRead, ...], LayerCall], Tensor
    ]

logger = logging.getLogger("treewise")

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Implementation:
    """run: attention of one layer under a tree, of [1, H, T, D] queries, [1, Hkv, T, D] keys and values of the
    micro-batch's own tokens, mask, rule, sinks ([H] extra logits without a value, or None), gateway rows in front of
    the keys, and the name that they are kept under; returns [1, H, T, D of values]. suits: whether `auto` takes it on a
    type of device (`cpu`, `cuda`, ...). num_key_rows: key rows that one layer without a window reads in a forward of a
    micro-batch, for benchmarks. takes: whether it has kernels for queries of a dtype on a type of device."""

    run: "Run"
    suits: Callable[[str], bool]
    num_key_rows: "Callable[[TreeMask, torch.device], int]"
    takes: "Callable[[str, torch.dtype], bool]" = lambda *_: True


def implementation_named(name: str) -> Implementation:
    """The entry of a name.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in IMPLEMENTATIONS:
        raise ConfigError(f"attention={name!r} is unknown; choose 'auto' or one of {', '.join(IMPLEMENTATIONS)}.")
    return IMPLEMENTATIONS[name]


def choose(attention: str, device_type: str, dtype: "torch.dtype | None" = None) -> str:
    """The name of the implementation that runs: the one asked for, or for `auto` the first that suits the device and
    takes the dtype of the queries, where that is known. One that is passed over for the dtype is a warning, once.

    Raises:
        ConfigError: an unknown name, or one without kernels for the dtype.
    """
    if attention != AUTO:
        if dtype is not None and not implementation_named(attention).takes(device_type, dtype):
            raise ConfigError(
                f"attention={attention!r} has no kernels for {_short(dtype)} on {device_type}; use 'reference', which "
                "'auto' then takes, or a model in another dtype."
            )
        implementation_named(attention)
        return attention
    suiting = [name for name, each in IMPLEMENTATIONS.items() if each.suits(device_type)]
    chosen = next(name for name in suiting if dtype is None or IMPLEMENTATIONS[name].takes(device_type, dtype))
    if chosen != suiting[0]:
        _warn_of_other(suiting[0], chosen, device_type, _short(dtype))
    return chosen


@cache
def _warn_of_other(passed_over: str, chosen: str, device_type: str, dtype: str) -> None:
    logger.warning(
        "the model is in %s, for which %s has no kernels on %s: attention is %s, which holds all scores of a "
        "micro-batch.",
        *(dtype, passed_over, device_type, chosen),
    )


def _short(dtype: "torch.dtype | None") -> str:
    return str(dtype).removeprefix("torch.")


def _lazily(module: str, name: str) -> Callable[..., Any]:
    """A function of a module beside this one, which is imported at the first call."""

    def run(*inputs: Any) -> Any:
        return getattr(import_module(f"treewise.nn.attention.{module}"), name)(*inputs)

    return run


def _of_flex(name: str) -> Callable[..., Any]:
    """A function of `flex`, which loads torch's compiler."""
    function = _lazily("flex", name)

    def run(*inputs: Any) -> Any:
        from treewise.nn.device import untested_torch_named

        with untested_torch_named():
            return function(*inputs)

    return run


def _behind_gateways(attention: "Callable[..., Tensor]") -> "Run":
    """For functions that take one tensor of keys and one of values: gateway rows are concatenated in front."""

    def run(
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        mask: "TreeMask",
        rule: "LayerRule",
        sinks: "Tensor | None",
        reads: "tuple[GatewayRead, ...]",
        call: "LayerCall",
    ) -> "Tensor":
        from treewise.nn.attention.gateway import extend

        return attention(query, *extend(key, value, reads, call), mask, rule, sinks)

    return run


# In the order in which `auto` prefers them.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "flex": Implementation(
        _behind_gateways(_of_flex("flex_attention_tree")),
        lambda device_type: device_type == "cuda",
        _of_flex("num_key_rows"),
        lambda device_type, dtype: device_type != "cuda" or dtype.itemsize <= 4,  # Triton multiplies no float64
    ),
    "cascade": Implementation(
        _lazily("cascade", "cascade_attention"), _lazily("cascade", "is_available"), _lazily("cascade", "num_key_rows")
    ),
    "reference": Implementation(
        _behind_gateways(_lazily("reference", "reference_attention")),
        lambda _: True,
        lambda mask, _: mask.num_keys * mask.num_queries,
    ),
}
