"""The table of attention implementations. A new one is one entry here and one module beside it.

Their modules are imported when one runs: the names are choices of commands, and torch takes seconds. What a kernel
needs stands in its entry, from top to bottom: `needs` says what is refused, by name. Which kernels `auto` takes on a
card in place of Triton's is measured: `measured.json` has the rows of benchmarks/results in which one was right and
faster (`benchmarks/attention_kernels.py adopt` writes it).
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from treewise.errors import ConfigError
from treewise.nn.attention.needs import CAPS, SINKS, Asked, Heads, Needs, Place, place_of
from treewise.nn.platform.versions import installed_version

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from treewise.nn.attention.mask import LayerRule, TreeMask

logger = logging.getLogger("treewise")

AUTO = "auto"
FASTER = 1.02  # than Triton's, at least, where `auto` takes another kernel


@dataclass(frozen=True, slots=True)
class Implementation:
    """run: a function, or its name, so that its module is imported when it runs: attention of one layer under a tree,
    of [1, H, T, D] queries, [1, Hkv, T, D] keys and values of the micro-batch's own tokens, mask, rule, sinks ([H]
    extra logits without a value, or None), gateway rows in front of the keys, and the name that they are kept under;
    returns [1, H, T, D of values], through which autograd reaches queries, keys, values and sinks. devices: types of
    device on which `auto` takes it unmeasured; none: any. available: a function that says whether it runs here; none:
    it does. rows: a function of a mask and a device: key rows that one layer without a window reads in a forward of a
    micro-batch, for benchmarks; none: all keys for every query. without_float64: types of device on which it has no
    kernels for that dtype. needs: what has to hold where it is asked for; with it, `auto` takes it by measurement
    alone."""

    run: "str | Callable[..., Tensor]"
    devices: tuple[str, ...] = ()
    available: str = ""
    rows: str = ""
    without_float64: tuple[str, ...] = ()
    needs: Needs | None = None

    def suits(self, device_type: str) -> bool:
        """Whether `auto` takes it on a type of device."""
        if self.needs is not None or (self.devices and device_type not in self.devices):
            return False
        return not self.available or bool(resolve_name(self.available)())

    def takes(self, device_type: str, dtype: "torch.dtype | None") -> bool:
        """Whether it has kernels for queries of a dtype on a type of device; None: any."""
        return dtype is None or dtype.itemsize <= 4 or device_type not in self.without_float64

    def num_key_rows(self, mask: "TreeMask", device: "torch.device") -> int:
        """Key rows that one layer without a window reads in a forward of a micro-batch."""
        return resolve_name(self.rows)(mask, device) if self.rows else mask.num_keys * mask.num_queries


def choose(attention: str, device_type: str, dtype: "torch.dtype | None" = None, asked: Asked | None = None) -> str:
    """The name of the implementation that runs: the one asked for, or for `auto` the one that was measured to be the
    fastest for such layers on such a card, else the first that suits the device and takes the dtype of the queries,
    where that is known. One that is passed over for the dtype is a warning, once.

    asked: what the model's layers ask (`needs.asked_by`); None: not known yet, so no fact is checked.

    Raises:
        ConfigError: an unknown name, one without kernels for the dtype, or a card, a package or a setting that it
            cannot be taken with.
        UnsupportedModelError: something of the model that its kernels lack.
    """
    if attention == AUTO:
        measured = None if asked is None else _fastest(place_of(device_type, dtype), asked)
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
    if asked is not None:
        require(attention, place_of(device_type, dtype), asked)
    return attention


def require(name: str, place: Place, asked: Asked) -> None:
    """Raises the error of the first fact that an implementation needs and that does not hold."""
    needs = IMPLEMENTATIONS[name].needs
    refusal = None if needs is None else needs.refusal(name, place, asked)
    if refusal is not None:
        raise refusal


def require_of_call(
    mask: "TreeMask", name: str, query: "Tensor", value: "Tensor", rule: "LayerRule", sinks: Any
) -> None:
    """Raises as `require` what one call of a layer asks, looked at once in a micro-batch for each kind of layer."""
    sizes = query.shape[3], value.shape[3]
    mask.derived(_checked, name, query.device.type, query.dtype, sizes, rule, sinks is not None)


def _checked(
    _: "TreeMask",
    name: str,
    device_type: str,
    dtype: "torch.dtype",
    sizes: tuple[int, int],
    rule: "LayerRule",
    has_sinks: bool,
) -> None:
    require(name, place_of(device_type, dtype), Asked.by_call(sizes, rule, has_sinks=has_sinks))


# -- what was measured ------------------------------------------------------------------------------------------------


def _fastest(place: Place, asked: Asked) -> str | None:
    """The kernel that was the fastest, beyond Triton's, for all head sizes on such a card, and right for every feature;
    None where none was, or where it cannot be taken."""
    if place.capability is None or not asked.sizes:
        return None
    speeds: dict[str, float] = {}
    for name, implementation in IMPLEMENTATIONS.items():
        if implementation.needs is None or implementation.needs.refusal(name, place, asked) is not None:
            continue
        packages = {package: installed_version(package) for package in implementation.needs.packages}
        rows = [_row_of(name, place, sizes, packages) for sizes in asked.sizes]
        if all(row is not None and asked.features <= set(row["features"]) for row in rows):
            speeds[name] = min(row["speed"] for row in rows if row is not None)
    best = max(speeds, key=speeds.__getitem__, default=None)
    return best if best is not None and speeds[best] >= FASTER else None


def _row_of(
    name: str, place: Place, sizes: tuple[int, int], packages: Mapping[str, str | None]
) -> Mapping[str, Any] | None:
    """What was measured of a kernel with these very releases on such a card; the last row counts."""
    wanted = {
        "kernel": name,
        "capability": list(place.capability or ()),
        "dtype": place.dtype,
        "head_sizes": list(sizes),
        "packages": {package: _release(version) for package, version in packages.items()},
    }
    found = [row for row in measured() if all(row[key] == value for key, value in wanted.items())]
    return found[-1] if found else None


def _release(version: str | None) -> str | None:
    """A version without what says how it was built (`+cu130`)."""
    return None if version is None else version.partition("+")[0]


@cache
def measured() -> list[dict[str, Any]]:
    """Rows of `measured.json`: kernel, capability, dtype, head_sizes, packages (with their versions), features (for
    which it was right), speed (over Triton's forward and backward), result (the file in benchmarks/results)."""
    text = resources.files("treewise.nn.attention").joinpath("measured.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)["rows"]
    return rows


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

_HERE = "treewise.nn.attention"
_OF_CUTE = Heads(most=128)  # what both kernels in CuTe DSL have on every card

# In the order in which `auto` prefers them; those with `needs` by measurement alone.
IMPLEMENTATIONS: dict[str, Implementation] = {
    # FlexAttention compiled by Triton: any GPU, any size of heads, all features.
    "flex": Implementation(
        f"{_HERE}.flex:attend", ("cuda",), rows=f"{_HERE}.flex:num_key_rows", without_float64=("cuda",)
    ),
    # FlexAttention's FLASH backend, FlashAttention 4. Before b26 its backward raced on Hopper (Dao-AILab/
    # flash-attention #2756); torch 2.10 has no backward under a mask, and before 2.14 none for the log-sum-exp.
    "flash": Implementation(
        f"{_HERE}.flash:attend",
        rows=f"{_HERE}.flash:num_key_rows",
        needs=Needs(
            cards={(9, 0): _OF_CUTE, (10, 0): _OF_CUTE, (10, 3): _OF_CUTE},
            packages={
                "torch": ("2.11", "pip install --upgrade torch"),
                "flash-attn-4": ("4.0.0b26", "pip install --pre 'flash-attn-4[cu13]'"),
            },
            lacks={SINKS: ("torch", "2.14")},
            is_repeatable=False,
        ),
    ),
    # cuDNN Frontend's flex_attention, whose mask is intervals of keys for each query. It takes no function of scores.
    "cudnn": Implementation(
        f"{_HERE}.cudnn:attend",
        rows=f"{_HERE}.flex:num_key_rows",
        needs=Needs(
            cards=dict.fromkeys(((9, 0), (10, 0), (10, 3)), _OF_CUTE._replace(pairs=((192, 128), (256, 256)))),
            packages={
                "nvidia-cudnn-frontend": ("1.32", "pip install nvidia-cudnn-frontend"),
                "nvidia-cutlass-dsl": ("4.8", "pip install 'nvidia-cutlass-dsl[cu13]'"),
            },
            lacks={CAPS: None},
        ),
    ),
    "cascade": Implementation(
        f"{_HERE}.cascade:attend",
        ("cpu",),
        f"{_HERE}.cascade:kernel_takes_groups",
        f"{_HERE}.cascade:num_key_rows",
    ),
    "reference": Implementation(f"{_HERE}.reference:attend"),
}
