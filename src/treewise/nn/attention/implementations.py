"""The table of attention implementations. A new one is one entry here and one module beside it.

Their modules are imported when one runs: the names are choices of commands, and torch takes seconds. What kernels
beyond Triton's need, and on which cards `auto` takes them, stands in `needs`.
"""

import logging
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from treewise.base import features
from treewise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn

    from treewise.nn.attention.mask import TreeMask

logger = logging.getLogger("treewise")

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Implementation:
    """run: a function, or its name, so that its module is imported when it runs: attention of one layer under a tree,
    of [1, H, T, D] queries, [1, Hkv, T, D] keys and values of the micro-batch's own tokens, mask, rule, sinks ([H]
    extra logits without a value, or None), gateway rows in front of the keys, and the name that they are kept under;
    returns [1, H, T, D of values], through which autograd reaches queries, keys, values and sinks. devices: types of
    device on which `auto` takes it unmeasured; none: any. available: a function that says whether it runs here; none:
    it does. rows: a function of a mask and a device: key rows that one layer without a window reads in a forward of a
    micro-batch, for benchmarks; none: all keys for every query. without_float64: types of device on which it has no
    kernels for that dtype. is_gated: it needs what `needs.NEEDS` says, and `auto` takes it by measurement alone."""

    run: "str | Callable[..., Tensor]"
    devices: tuple[str, ...] = ()
    available: str = ""
    rows: str = ""
    without_float64: tuple[str, ...] = ()
    is_gated: bool = False

    def suits(self, device_type: str) -> bool:
        """Whether `auto` takes it on a type of device."""
        if self.is_gated or (self.devices and device_type not in self.devices):
            return False
        return not self.available or bool(resolve_name(self.available)())

    def takes(self, device_type: str, dtype: "torch.dtype | None") -> bool:
        """Whether it has kernels for queries of a dtype on a type of device; None: any."""
        return dtype is None or dtype.itemsize <= 4 or device_type not in self.without_float64

    def num_key_rows(self, mask: "TreeMask", device: "torch.device") -> int:
        """Key rows that one layer without a window reads in a forward of a micro-batch."""
        return resolve_name(self.rows)(mask, device) if self.rows else mask.num_keys * mask.num_queries


def choose(
    attention: str, device_type: str, dtype: "torch.dtype | None" = None, decoder: "nn.Module | None" = None
) -> str:
    """The name of the implementation that runs: the one asked for, or for `auto` the one that was measured to be the
    fastest for such layers on such a card, else the first that suits the device and takes the dtype of the queries,
    where that is known. One that is passed over for the dtype is a warning, once.

    decoder: whose layers are asked what they need (`needs.asked_by`); None: not known yet, so no fact is checked.

    Raises:
        ConfigError: an unknown name, one without kernels for the dtype, or a card, a package or a setting that it
            cannot be taken with.
        UnsupportedModelError: something of the model that its kernels lack.
    """
    if attention == AUTO:
        if device_type == "cuda" and decoder is not None and features.is_there("attention_needs"):
            measured: str | None = features.attention_needs.fastest(device_type, dtype, decoder)
            if measured is not None:
                return measured
        suiting = [name for name, each in IMPLEMENTATIONS.items() if each.suits(device_type)]
        chosen = next(name for name in suiting if IMPLEMENTATIONS[name].takes(device_type, dtype))
        if chosen != suiting[0]:
            _warn_of_other(suiting[0], chosen, device_type, str(dtype).removeprefix("torch."))
        return chosen
    if attention not in IMPLEMENTATIONS:
        raise unknown_attention(attention)
    if not IMPLEMENTATIONS[attention].takes(device_type, dtype):
        raise ConfigError(
            f"attention={attention!r} has no kernels for {str(dtype).removeprefix('torch.')} on {device_type}; use "
            "'reference', which 'auto' then takes, or a model in another dtype."
        )
    if decoder is not None and IMPLEMENTATIONS[attention].is_gated:
        needs = features.attention_needs
        needs.require(attention, needs.place_of(device_type, dtype), needs.asked_by(decoder))
    return attention


@cache
def _warn_of_other(passed_over: str, chosen: str, device_type: str, dtype: str) -> None:
    logger.warning(
        "the model is in %s, for which %s has no kernels on %s: attention is %s, which holds all scores of a "
        "micro-batch.",
        *(dtype, passed_over, device_type, chosen),
    )


def unknown_attention(name: str) -> ConfigError:
    """The error of a name that the table lacks."""
    return ConfigError(f"attention={name!r} is unknown; choose 'auto' or one of {', '.join(IMPLEMENTATIONS)}.")


# -- the table --------------------------------------------------------------------------------------------------------

_HERE, _SHELF = "treewise.nn.attention", "treewise.experimental.kernels"

# In the order in which `auto` prefers them; those that are gated by measurement alone.
IMPLEMENTATIONS: dict[str, Implementation] = {
    # FlexAttention compiled by Triton: any GPU, any size of heads, all features.
    "flex": Implementation(
        f"{_HERE}.flex:attend", ("cuda",), rows=f"{_HERE}.flex:num_key_rows", without_float64=("cuda",)
    ),
    # FlexAttention's FLASH backend, FlashAttention 4.
    "flash": Implementation(
        f"{_SHELF}.flash:attend",
        rows=f"{_SHELF}.flash:num_key_rows",
        is_gated=True,
    ),
    # cuDNN Frontend's flex_attention, whose mask is intervals of keys for each query.
    "cudnn": Implementation(
        f"{_SHELF}.cudnn:attend",
        rows=f"{_HERE}.flex:num_key_rows",
        is_gated=True,
    ),
    "cascade": Implementation(
        f"{_HERE}.cascade:attend",
        ("cpu",),
        f"{_HERE}.cascade:kernel_takes_groups",
        f"{_HERE}.cascade:num_key_rows",
    ),
    "reference": Implementation(f"{_HERE}.reference:attend"),
}
