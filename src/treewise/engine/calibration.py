"""How many tokens fit: bytes per token of a model, measured, and the budget that follows from the free memory.

A short calibration runs two small trees and counts the bytes that autograd keeps for the backward, on whatever device;
the difference per token is what a token with live activations costs, so fixed costs drop out. With gradient
checkpointing one layer at a time is made again in the backward, and is counted as one layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Of the free memory, what activations may take; the rest is for gradients in flight, kernels' workspace and fragments.
USABLE_SHARE = 0.6
# Activations and the gradients that flow back through them: the largest few layers' worth, as a factor.
BACKWARD_FACTOR = 1.25
MIN_TOKENS = 128
# More tokens at a time are no faster than this, and memory that is touched for the first time is slow on a CPU.
MAX_TOKENS = {"cpu": 4096, "cuda": 65536}
CALIBRATION_TOKENS = (32, 96)


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of one token with live activations, and of one gateway token (keys, values, their float32 gradients)."""

    activation: int
    gateway: int


def measure_token_bytes(run: Callable[[int], None], num_layers: int, gateway: int) -> TokenBytes:
    """`run(n)` runs forward and backward of n tokens; its parameter gradients are the caller's to restore."""
    small, large = CALIBRATION_TOKENS
    kept = [_kept_bytes(run, size, num_layers) for size in (small, large)]
    return TokenBytes(max(1, int((kept[1] - kept[0]) / (large - small) * BACKWARD_FACTOR)), gateway)


def choose_budget(token_bytes: TokenBytes, free: int, device_type: str, gateway_tokens: Callable[[int], int]) -> int:
    """The largest power-of-two share of the free memory's tokens at which activations and gateways both fit.

    gateway_tokens: the most gateway tokens alive at a budget, as the planner finds.
    """
    usable = int(free * USABLE_SHARE)
    budget = min(usable // token_bytes.activation, MAX_TOKENS.get(device_type, MAX_TOKENS["cpu"]))
    while budget > MIN_TOKENS:
        if budget * token_bytes.activation + gateway_tokens(budget) * token_bytes.gateway <= usable:
            break
        budget //= 2
    return max(budget, MIN_TOKENS)


def missing_gradient_bytes(parameters: Any) -> int:
    """Bytes that gradients will take once they exist."""
    wanted = (each for each in parameters if each.requires_grad and each.grad is None)
    return sum(each.numel() * each.element_size() for each in wanted)


def _kept_bytes(run: Callable[[int], None], num_tokens: int, num_layers: int) -> float:
    """Bytes of distinct storages saved in the forward, and a layer's share of those saved again in the backward."""
    seen: dict[int, int] = {}
    again: dict[int, int] = {}
    target = seen

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            target[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal target
        target = again  # the backward has begun
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        run(num_tokens)
    return sum(seen.values()) + sum(again.values()) / max(1, num_layers)
