"""The table of attention implementations. A new one is one entry here and one module beside it.

Their modules are imported when one runs: the names are choices of commands, and torch takes seconds.
"""

from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from treewise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from treewise.nn.attention.mask import TreeMask

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Implementation:
    """run: a function, or its name, so that its module is imported when it runs: attention of one layer under a tree,
    of [1, H, T, D] queries, [1, Hkv, T, D] keys and values of the micro-batch's own tokens, mask, rule, sinks ([H]
    extra logits without a value, or None), gateway rows in front of the keys, and the name that they are kept under;
    returns [1, H, T, D of values]. devices: types of device on which `auto` takes it; none: any. available: a function
    that says whether it runs here; none: it does. rows: a function of a mask and a device: key rows that one layer
    without a window reads in a forward of a micro-batch, for benchmarks; none: all keys for every query."""

    run: "str | Callable[..., Tensor]"
    devices: tuple[str, ...] = ()
    available: str = ""
    rows: str = ""

    def suits(self, device_type: str) -> bool:
        """Whether `auto` takes it on a type of device."""
        if self.devices and device_type not in self.devices:
            return False
        return not self.available or bool(resolve_name(self.available)())

    def num_key_rows(self, mask: "TreeMask", device: "torch.device") -> int:
        """Key rows that one layer without a window reads in a forward of a micro-batch."""
        return resolve_name(self.rows)(mask, device) if self.rows else mask.num_keys * mask.num_queries


def choose(attention: str, device_type: str) -> str:
    """The name of the implementation that runs: the one asked for, or for `auto` the first that suits the device.

    Raises:
        ConfigError: an unknown name.
    """
    if attention == AUTO:
        return next(name for name, each in IMPLEMENTATIONS.items() if each.suits(device_type))
    if attention not in IMPLEMENTATIONS:
        raise unknown_attention(attention)
    return attention


def unknown_attention(name: str) -> ConfigError:
    """The error of a name that is none of the table's."""
    return ConfigError(f"attention={name!r} is unknown; choose 'auto' or one of {', '.join(IMPLEMENTATIONS)}.")


_HERE = "treewise.nn.attention"

# In the order in which `auto` prefers them.
IMPLEMENTATIONS: dict[str, Implementation] = {
    "flex": Implementation(f"{_HERE}.flex:attend", ("cuda",), rows=f"{_HERE}.flex:num_key_rows"),
    "cascade": Implementation(
        f"{_HERE}.cascade:attend",
        ("cpu",),
        f"{_HERE}.cascade:kernel_takes_groups",
        f"{_HERE}.cascade:num_key_rows",
    ),
    "reference": Implementation(f"{_HERE}.reference:attend"),
}
