"""FlexAttention through FlashAttention 4 (torch's FLASH backend), for half precision on CUDA.

Never chosen by `auto`. Before its first use on a device, in a dtype and with given head sizes, values and gradients are
compared with the reference, several times over: FlashAttention 4 before 4.0.0b26 races in its backward on Hopper
(Dao-AILab/flash-attention #2756). torch before 2.13 returns a wrong log-sum-exp (pytorch #181645).

Sinks need the gradient of the log-sum-exp, which torch's FLASH backend does not give, and score caps a captured number,
which it does not take; both are refused. It has run on no GPU yet.
"""

from functools import cache

import torch
from packaging.version import Version
from torch import Tensor

from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn.attention.flex import flex_attention_tree
from treewise.nn.attention.kernel_cases import Case, is_within, kernel_errors, shown
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.support_table import installed_version
from treewise.shapes import Float

NEEDS = {"torch": "2.13", "flash-attn-4": "4.0.0b26"}
NUM_COMPARISONS = 3  # a race does not show every time


def flash_attention_tree(
    query: Float[Tensor, "1 H T D"],
    key: Float[Tensor, "1 Hkv K D"],
    value: Float[Tensor, "1 Hkv K Dv"],
    mask: TreeMask,
    rule: LayerRule,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "1 H T Dv"]:
    """The contract of `reference_attention`.

    Raises:
        ConfigError: no CUDA device, no half precision, or packages that are too old.
        UnsupportedModelError: sinks, a score cap, or results that differ from the reference on this device.
    """
    if sinks is not None or rule.softcap is not None:
        what = "attention sinks" if sinks is not None else f"a score cap ({rule.softcap:g})"
        raise UnsupportedModelError(f"attention='flash' takes no {what}; use attention='flex'.")
    _require_packages(query)
    _compare(query.device, query.dtype, (query.shape[1], key.shape[1]), (query.shape[3], value.shape[3]))
    return flex_attention_tree(query, key, value, mask, rule, backend="FLASH")


def missing_packages() -> list[str]:
    """What is missing or too old, as `flash-attn-4 4.0.0b12 (needs 4.0.0b26)`."""
    missing = []
    for name, least in NEEDS.items():
        installed = installed_version(name)
        if installed is None:
            missing.append(f"{name} (needs {least})")
        elif Version(installed) < Version(least):
            missing.append(f"{name} {installed} (needs {least})")
    return missing


def _require_packages(query: Tensor) -> None:
    if query.device.type != "cuda":
        raise ConfigError(f"attention='flash' runs on CUDA, and the model is on {query.device}; use attention='auto'.")
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"attention='flash' computes in bfloat16 or float16, not {query.dtype}; use attention='flex'."
        )
    missing = missing_packages()
    if missing:
        raise ConfigError(f"attention='flash': {', '.join(missing)}; install it, or use attention='flex'.")


@cache
def _compare(device: torch.device, dtype: torch.dtype, num_heads: tuple[int, int], head_sizes: tuple[int, int]) -> None:
    def attention(*inputs: Tensor) -> Tensor:
        return flex_attention_tree(*inputs, backend="FLASH")  # type: ignore[arg-type]

    plain, window = LayerRule(scaling=0.2), LayerRule(scaling=0.2, window=90)
    for rule, is_below in ((plain, False), (plain, True), (window, False)):
        case = Case(rule, (3, 140, 50), is_below, head_sizes, num_heads, dtype=dtype)
        for _ in range(NUM_COMPARISONS):
            errors = kernel_errors(attention, case, device)
            if not is_within(errors):
                raise UnsupportedModelError(
                    f"attention='flash' differs from the reference on this device: {shown(errors)}; use "
                    "attention='flex'."
                )
