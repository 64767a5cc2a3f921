"""The budget of an engine: set by the user or measured, and halved after an out-of-memory error.

A step that runs out of memory is run again at half the budget, with the same result; its incomplete gradients are
dropped, those of earlier calls are kept.
"""

import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from treewise.engine.probed_rows import text_ids
from treewise.engine.scoring import StepLoss
from treewise.engine.walk import Walk
from treewise.errors import ConfigError, OutOfMemoryError, busy_with, bytes_as_text
from treewise.nn.attention import Gateway, TreeContext, TreeMask
from treewise.nn.device import free_bytes, is_out_of_memory
from treewise.nn.flops import gateway_bytes
from treewise.nn.gradients import clear_gradients, gradients_restored, gradients_set_aside
from treewise.nn.model import DecoderAndHead, run_decoder
from treewise.nn.model_flops import gateway_values
from treewise.nn.recurrent import TreeRows, kinds_of, peak_cuts
from treewise.objectives import SFT
from treewise.planning.layout import lay_out
from treewise.planning.planner import Plan
from treewise.planning.planner import plan as make_plan
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

# -- Calibration: bytes per token of a model, measured, and the budget that fits into the free memory -----------------


# The part of the free memory for activations; the rest is for gradients in flight, workspaces and fragmentation.
_USABLE_FRACTION = 0.6
# Memory of activations and of the gradients that flow back through them, over that of activations.
_BACKWARD_FACTOR = 1.25
SLOW_TOKENS = 128  # fewer at a time leave most of a matrix product's speed unused
# More tokens at a time are not faster, and on a CPU the first use of memory is slow.
MAX_TOKENS = {"cpu": 4096, "cuda": 65536}
# Of the two runs that are measured. FlexAttention pads to 128 tokens, so fewer would all take the same memory there.
CALIBRATION_TOKENS = {"cpu": (32, 96), "cuda": (128, 256)}


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


logger = logging.getLogger("treewise")

AUTO = "auto"

T = TypeVar("T")


class Budget:
    """Tokens that may hold activations at a time.

    setting: a number, None (no limit) or `auto` (from the free memory, measured at the first step).
    """

    def __init__(self, setting: int | str | None) -> None:
        is_number = isinstance(setting, int | np.integer) and not isinstance(setting, bool)
        if not (setting is None or setting == AUTO or (is_number and int(setting) > 0)):
            raise ConfigError(f"max_tokens={setting!r}; give a positive number of tokens, None, or 'auto'.")
        self.setting = setting
        self.tokens: int | None = int(setting) if isinstance(setting, int | np.integer) else None
        self.is_measured = setting != AUTO
        self.recovers = True  # whether a step that runs out of memory may run again

    def fix(self, settings: str) -> None:
        """Raises `ConfigError` for `auto`: ranks that compute a batch together (by these settings) all need the budget
        of the others, and none may run a step again.
        """
        if self.setting == AUTO:
            raise ConfigError(
                "max_tokens='auto' measures the free memory of each rank, and ranks that compute a batch together "
                f"{settings} need one budget; give max_tokens a number, or None."
            )
        self.recovers = False

    def measure(
        self,
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
        if not any(each.requires_grad for each in lm.model.parameters()):
            self.tokens = self.tokens or MAX_TOKENS.get(lm.device.type, MAX_TOKENS["cpu"])
            return
        state_size, token_size = state_bytes(lm), gateway_token_bytes(lm)

        @torch.enable_grad()
        def train(num_tokens: int) -> None:
            chain = Forest.from_trajectories([Trajectory(np.resize(text_ids(forest)[:2], num_tokens))])
            new_walk(make_plan(chain)).train(StepLoss(chain, SFT(), None).of_micro_batch)

        def gateway_tokens(budget: int) -> int:
            plan = make_plan(forest, budget, hold=hold)
            # States of recurrent layers, counted as the tokens that take as many bytes.
            return plan.peak_gateway_tokens + (peak_cuts(plan) * state_size // token_size if state_size else 0)

        least = max(1, forest.images.largest)  # an image is never cut
        with busy_with("measuring the budget"), gradients_restored(lm.model):
            token_bytes = measure_token_bytes(train, lm.decoder.config.num_hidden_layers, token_size, lm.device.type)
        missing = (each for each in lm.model.parameters() if each.requires_grad and each.grad is None)
        free = free_bytes(lm.device) - sum(each.numel() * each.element_size() for each in missing) - reserve_bytes
        self.tokens = choose_budget(token_bytes, free, lm.device.type, gateway_tokens, least)
        self.is_measured = True
        logger.info(
            "budget: %d tokens (%.2f MiB of activations a token, %.1f GiB free on %s)",
            self.tokens,
            token_bytes.activation / 2**20,
            free / 2**30,
            lm.device,
        )
        if self.tokens < SLOW_TOKENS:
            logger.warning(
                "max_tokens='auto' chose %d tokens at a time, for %s are free on %s and a token takes %s: exact, but "
                "slow (below %d tokens matrices are small). Free memory, use gradient checkpointing, or give "
                "max_tokens a number.",
                self.tokens,
                bytes_as_text(max(0, free)),
                lm.device,
                bytes_as_text(token_bytes.activation),
                SLOW_TOKENS,
            )

    def run(self, step: Callable[[], T], num_tokens: int, model: nn.Module | None = None) -> T:
        """The result of `step`, which runs again with half the budget while memory runs out.

        num_tokens: tree tokens of the step. model: the one whose gradients the step adds to; None if it adds to none.

        Raises:
            OutOfMemoryError: at a budget of one token, or if `.grad` also holds gradients of earlier calls, which can
                only be kept apart with `max_tokens="auto"`.
        """
        is_auto = self.setting == AUTO
        can_retry = is_auto or model is None or all(each.grad is None for each in model.parameters())
        with gradients_set_aside(model) if is_auto and model is not None else nullcontext():
            while True:
                try:
                    return step()
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error) or not self.recovers:
                        raise
                    reason = str(error).splitlines()[0]
                self._halve(num_tokens, reason, can_retry=can_retry)
                if model is not None:
                    clear_gradients(model.parameters())
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()

    def _halve(self, num_tokens: int, reason: str, *, can_retry: bool) -> None:
        """Halves the budget after a step of `num_tokens` ran out of memory; raises where that cannot help."""
        used = num_tokens if self.tokens is None else min(self.tokens, num_tokens)
        if not can_retry:
            raise OutOfMemoryError(
                f"out of memory with {used:,} tokens at a time, and .grad now holds a part of this step. Zero it, "
                f"lower max_tokens (the gradients stay the same), or use max_tokens='auto', which recovers. ({reason})"
            )
        if used <= 1:
            raise OutOfMemoryError(f"out of memory even with one token at a time. ({reason})")
        self.tokens = used // 2
        logger.warning("out of memory with %d tokens at a time; the same step again with %d", used, self.tokens)


def gateway_token_bytes(lm: DecoderAndHead) -> int:
    """Bytes of one gateway token over all layers, gradients included; at least 1 (a divisor)."""
    num_values = gateway_values(lm.decoder.config.get_text_config())
    return max(1, gateway_bytes(num_values, next(lm.decoder.parameters()).dtype.itemsize))


@torch.no_grad()
def state_bytes(lm: DecoderAndHead) -> int:
    """Bytes that recurrent layers keep in a gateway for one token that is continued elsewhere, gradients included.

    Measured on a tree of two tokens; 0 without such layers.
    """
    if not kinds_of(lm.decoder):
        return 0
    plan = make_plan(Forest.from_trajectories([Trajectory(np.zeros(2, dtype=np.int32))]), 1, hold="never")
    layout, gateway = lay_out(plan, 0), Gateway()
    context = TreeContext(TreeMask.from_layout(layout), "reference", writes=gateway, rows=TreeRows(plan, 0, layout))
    run_decoder(lm, layout.token_ids, layout.depth, context)
    return sum(each.numel() * (each.element_size() + max(4, each.element_size())) for each in gateway.states.values())
