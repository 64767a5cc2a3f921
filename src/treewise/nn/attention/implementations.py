"""The table of attention implementations. A new one is one entry here and one module beside it.

Their modules are imported when one runs: the names are choices of commands, and torch takes seconds.
"""

import logging
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from treewise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from treewise.nn.attention.mask import TreeMask

logger = logging.getLogger("treewise")

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Implementation:
    """run: a function, or its name, so that its module is imported when it runs: attention of one layer under a tree,
    of [1, H, T, D] queries, [1, Hkv, T, D] keys and values of the micro-batch's own tokens, mask, rule, sinks ([H]
    extra logits without a value, or None), gateway rows in front of the keys, and the name that they are kept under;
    returns [1, H, T, D of values]. devices: types of device on which `auto` takes it; none: any. available: a function
    that says whether it runs here; none: it does. rows: a function of a mask and a device: key rows that one layer
    without a window reads in a forward of a micro-batch, for benchmarks; none: all keys for every query.
    without_float64: types of device on which it has no kernels for that dtype."""

    run: "str | Callable[..., Tensor]"
    devices: tuple[str, ...] = ()
    available: str = ""
    rows: str = ""
    without_float64: tuple[str, ...] = ()

    def suits(self, device_type: str) -> bool:
        """Whether `auto` takes it on a type of device."""
        if self.devices and device_type not in self.devices:
            return False
        return not self.available or bool(resolve_name(self.available)())

    def takes(self, device_type: str, dtype: "torch.dtype | None") -> bool:
        """Whether it has kernels for queries of a dtype on a type of device; None: any."""
        return dtype is None or dtype.itemsize <= 4 or device_type not in self.without_float64

    def num_key_rows(self, mask: "TreeMask", device: "torch.device") -> int:
        """Key rows that one layer without a window reads in a forward of a micro-batch."""
        return resolve_name(self.rows)(mask, device) if self.rows else mask.num_keys * mask.num_queries


def choose(attention: str, device_type: str, dtype: "torch.dtype | None" = None) -> str:
    """The name of the implementation that runs: the one asked for, or for `auto` the first that suits the device and
    takes the dtype of the queries, where that is known. One that is passed over for the dtype is a warning, once.

    Raises:
        ConfigError: an unknown name, or one without kernels for the dtype.
    """
    if attention == AUTO:
        suiting = [name for name, each in IMPLEMENTATIONS.items() if each.suits(device_type)]
        chosen = next(name for name in suiting if IMPLEMENTATIONS[name].takes(device_type, dtype))
        if chosen != suiting[0]:
            _warn_of_other(suiting[0], chosen, device_type, _short(dtype))
        return chosen
    if attention not in IMPLEMENTATIONS:
        raise unknown_attention(attention)
    if not IMPLEMENTATIONS[attention].takes(device_type, dtype):
        raise ConfigError(
            f"attention={attention!r} has no kernels for {_short(dtype)} on {device_type}; use 'reference', which "
            "'auto' then takes, or a model in another dtype."
        )
    return attention


@cache
def _warn_of_other(passed_over: str, chosen: str, device_type: str, dtype: str) -> None:
    logger.warning(
        "the model is in %s, for which %s has no kernels on %s: attention is %s, which holds all scores of a "
        "micro-batch.",
        *(dtype, passed_over, device_type, chosen),
    )


def _short(dtype: "torch.dtype | None") -> str:
    return str(dtype).removeprefix("torch.")


def unknown_attention(name: str) -> ConfigError:
    """The error of a name that the table lacks."""
    return ConfigError(f"attention={name!r} is unknown; choose 'auto' or one of {', '.join(IMPLEMENTATIONS)}.")


_HERE = "treewise.nn.attention"

# In the order in which `auto` prefers them.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "flex": Implementation(
        f"{_HERE}.flex:attend", ("cuda",), rows=f"{_HERE}.flex:num_key_rows", without_float64=("cuda",)
    ),
    "cascade": Implementation(
        f"{_HERE}.cascade:attend",
        ("cpu",),
        f"{_HERE}.cascade:kernel_takes_groups",
        f"{_HERE}.cascade:num_key_rows",
    ),
    "reference": Implementation(f"{_HERE}.reference:attend"),
}
