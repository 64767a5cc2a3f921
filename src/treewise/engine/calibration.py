"""Calibration: bytes per token of a model, measured, and the budget that fits into the free memory.

Two small trees run forward and backward, and the bytes that autograd keeps are counted, on any device. Their difference
per token is what a token's activations take, so fixed costs drop out. Gradient checkpointing recomputes one
layer at a time in the backward; what is saved then is counted as one layer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

# The part of the free memory for activations; the rest is for gradients in flight, workspaces and fragmentation.
_USABLE_FRACTION = 0.6
# Memory of activations and of the gradients that flow back through them, over that of activations.
_BACKWARD_FACTOR = 1.25
SLOW_TOKENS = 128  # fewer at a time leave most of a matrix product's speed unused
# More tokens at a time are not faster, and on a CPU the first use of memory is slow.
MAX_TOKENS = {"cpu": 4096, "cuda": 65536}
CALIBRATION_TOKENS = (32, 96)


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of one token that holds activations, and of one gateway token (keys, values, their float32 gradients)."""

    activation: int
    gateway: int


def measure_token_bytes(train: Callable[[int], None], num_layers: int, gateway: int) -> TokenBytes:
    """Measures a model. train: runs forward and backward of so many tokens; its gradients are the caller's to restore.

    num_layers: of the decoder. gateway: bytes of one gateway token.
    """
    small, large = CALIBRATION_TOKENS
    saved = [_saved_bytes(train, size, num_layers) for size in (small, large)]
    return TokenBytes(max(1, int((saved[1] - saved[0]) / (large - small) * _BACKWARD_FACTOR)), gateway)


def choose_budget(
    token_bytes: TokenBytes, free: int, device_type: str, gateway_tokens: Callable[[int], int], least: int = 1
) -> int:
    """The budget in tokens: those that fit into `free` bytes, lowered by a sixteenth until gateways fit beside them.

    Below `SLOW_TOKENS` it is halved, down to `least`. Where gateways leave no room at any budget, the largest of those
    that need at most an eighth more than the one that needs least. gateway_tokens: the most gateway tokens alive at a
    budget, as the planner computes them.
    """
    usable = int(free * _USABLE_FRACTION)
    budget = max(least, min(usable // token_bytes.activation, MAX_TOKENS.get(device_type, MAX_TOKENS["cpu"])))
    needed: dict[int, int] = {}
    while True:
        needed[budget] = budget * token_bytes.activation + gateway_tokens(budget) * token_bytes.gateway
        if needed[budget] <= usable:
            return budget
        if budget == least:
            return max(each for each, size in needed.items() if 8 * size <= 9 * min(needed.values()))
        budget = max(least, budget - budget // 16 if budget > SLOW_TOKENS else budget // 2)


def missing_gradient_bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Bytes of the gradients that the next backward will allocate."""
    missing = (each for each in parameters if each.requires_grad and each.grad is None)
    return sum(each.numel() * each.element_size() for each in missing)


def _saved_bytes(train: Callable[[int], None], num_tokens: int, num_layers: int) -> float:
    """Bytes of distinct storages saved in the forward, and one layer's part of those saved in the backward."""
    in_forward: dict[int, int] = {}
    in_backward: dict[int, int] = {}
    target = in_forward

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            target[storage.data_ptr()] = storage.nbytes()
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal target
        target = in_backward
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        train(num_tokens)
    return sum(in_forward.values()) + sum(in_backward.values()) / max(1, num_layers)
