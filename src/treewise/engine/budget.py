"""Measured budgets (`max_tokens="auto"`): bytes per token of a model, and the tokens that fit into the free memory."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from treewise.base import features
from treewise.base.progress import busy_with
from treewise.engine.prepared import Budget
from treewise.engine.probed_rows import text_ids
from treewise.engine.step import StepLoss, Walk
from treewise.errors import bytes_as_text
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.device import random_state_kept
from treewise.nn.flops import gateway_bytes
from treewise.nn.gradients import gradient_bytes, gradients_restored
from treewise.nn.model_checks import num_positions
from treewise.nn.model_flops import gateway_values
from treewise.nn.platform.memory import free_bytes
from treewise.objectives.sft import SFT
from treewise.planning.planner import plan as make_plan
from treewise.planning.plans import Plan
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

logger = logging.getLogger("treewise")

# The part of the free memory for activations; the rest is for gradients in flight, workspaces and fragmentation.
_USABLE_FRACTION = 0.6
# Memory of activations and of the gradients that flow back through them, over that of activations.
_BACKWARD_FACTOR = 1.25
SLOW_TOKENS = 128  # fewer at a time leave most of a matrix product's speed unused
# On a CPU more tokens at a time are not faster, and the first use of memory is slow. On a GPU every cut costs launches
# and tokens that are computed twice: as many as fit.
MAX_TOKENS = {"cpu": 4096, "cuda": 2**20}
MAX_SCORED_TOKENS = {"cpu": 4096, "cuda": 2**16}  # without a graph, which nothing cuts for memory's sake
# Of the two runs that are measured. FlexAttention fills up to whole blocks, two at least: fewer would take as much.
CALIBRATION_TOKENS = {"cpu": (32, 96), "cuda": (256, 512)}


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of one token that holds activations, and of one gateway token (keys, values, their float32 gradients)."""

    activation: int
    gateway: int


def measure_token_bytes(
    train: Callable[[int], None], num_layers: int, gateway: int, device_type: str = "cpu"
) -> TokenBytes:
    """Measures a model. train: runs forward and backward of so many tokens; its gradients are the caller's to restore.

    num_layers: of the decoder. gateway: bytes of one gateway token.
    """
    small, large = CALIBRATION_TOKENS.get(device_type, CALIBRATION_TOKENS["cpu"])
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


@contextmanager
def saved_bytes() -> Iterator[dict[int, int]]:
    """Yields the bytes of each distinct storage that autograd saves inside, by its address; parameters left out."""
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


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


def _chains(token_ids: np.ndarray, num_tokens: int, config: Any) -> Forest:
    """So many tokens in rows of one length, as few as a model's table of positions (GPT-2's) allows."""
    longest = num_positions(config) or num_tokens
    rows = np.array_split(np.resize(token_ids, num_tokens), -(-num_tokens // longest))
    return Forest.concatenate([Forest.from_trajectories([Trajectory(row)]) for row in rows])


def measure(
    budget: Budget,
    lm: DecoderAndHead,
    forest: Forest,
    new_walk: Callable[[Plan], Walk],
    *,
    hold: str,
    reserve_bytes: int,
) -> None:
    """Chooses the budget of an `auto` setting for forests like this one; one that is slow is a warning.

    A model of which nothing is trained (a reference, or one with its adapters disabled) keeps no activations: it
    computes as many tokens at a time as are fast, and what trains later is measured then.

    reserve_bytes: memory that others will allocate later (the optimizer's state).
    """
    if not any(parameter.requires_grad for parameter in lm.model.parameters()):
        budget.tokens = budget.tokens or MAX_SCORED_TOKENS.get(lm.device.type, MAX_SCORED_TOKENS["cpu"])
        return
    state_size = features.recurrent.state_bytes(lm) if lm.is_recurrent else 0
    token_size = gateway_token_bytes(lm)

    @torch.enable_grad()
    def train(num_tokens: int) -> None:
        chains = _chains(text_ids(forest)[:2], num_tokens, lm.decoder.config)
        new_walk(make_plan(chains)).train(StepLoss(chains, SFT(), None).of_micro_batch)

    def gateway_tokens(max_tokens: int) -> int:
        plan = make_plan(forest, max_tokens, hold=hold)
        # States of recurrent layers, counted as the tokens that take as many bytes.
        more = features.recurrent.peak_cuts(plan) * state_size // token_size if state_size else 0
        return plan.peak_gateway_tokens + more

    least = max(1, forest.images.largest)  # an image is never cut
    with busy_with("measuring the budget"), gradients_restored(lm.model), random_state_kept(lm.device):
        token_bytes = measure_token_bytes(train, lm.decoder.config.num_hidden_layers, token_size, lm.device.type)
    free = free_bytes(lm.device) - gradient_bytes(lm.model.parameters()) - reserve_bytes
    budget.tokens = choose_budget(token_bytes, free, lm.device.type, gateway_tokens, least)
    budget.is_measured = True
    logger.info(
        "budget: %d tokens (%.2f MiB of activations a token, %.1f GiB free on %s)",
        budget.tokens,
        token_bytes.activation / 2**20,
        free / 2**30,
        lm.device,
    )
    if budget.tokens < SLOW_TOKENS:
        logger.warning(
            "max_tokens='auto' chose %d tokens at a time, for %s are free on %s and a token takes %s: exact, but "
            "slow (below %d tokens matrices are small). Free memory, use gradient checkpointing, or give "
            "max_tokens a number.",
            budget.tokens,
            bytes_as_text(max(0, free)),
            lm.device,
            bytes_as_text(token_bytes.activation),
            SLOW_TOKENS,
        )


def gateway_token_bytes(lm: DecoderAndHead) -> int:
    """Bytes of one gateway token over all layers, gradients included; at least 1 (a divisor)."""
    num_values = gateway_values(lm.decoder.config.get_text_config())
    return max(1, gateway_bytes(num_values, next(lm.decoder.parameters()).dtype.itemsize))
