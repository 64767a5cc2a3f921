"""Probe of a model before its first step: does it follow a tree, and do decoder and head give the model's own logits?

A few tiny forwards. Changing one branch must not change the other's hidden rows, in either direction, beyond the
rounding of matrix products with rows in another order, or of experts and recurrent layers, which regroup tokens. Rows
must not depend on the budget. The log-probs of one branch must equal those of the model's own forward, whose masks must
match the settings of its layers. This detects what no flag of a model shows: an ignored mask, a scale on the logits.
"""

import numpy as np
import torch

from treewise.engine.walk import MicroBatchOutput, Walk
from treewise.errors import TreewiseError, UnsupportedModelError
from treewise.nn.attention import check_masks, observe_masks
from treewise.nn.lm_head import edge_values
from treewise.nn.model import SUPPORTED_MODELS, DecoderAndHead
from treewise.nn.recurrent import kinds_of
from treewise.planning.planner import plan as make_plan
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

# Largest difference of a log-prob between the tree and the model's own forward; in low precision the mean difference,
# because it may route single tokens elsewhere.
_MAX_LOGPROB_GAP = {torch.float64: 1e-4, torch.float32: 1e-2}
_LOW_PRECISION_GAP = 1.0
# Largest relative difference of a row between one micro-batch and several; in low precision the mean difference.
_MAX_BUDGET_GAP = 1e-3


def probe(lm: DecoderAndHead, impl: str, token_ids: np.ndarray) -> None:
    """Raises if the model leaks between branches, or if decoder and head do not give its logits.

    token_ids: [n] integers, a few of the user's own tokens; on tokens that a model never saw in training, low precision
    alone moves log-probs by several nats. impl: `reference`, `cascade` or `flex`.

    Raises:
        UnsupportedModelError: with the measured difference.
    """
    vocabulary = lm.head().weight.shape[0]
    ids = np.resize(token_ids, 12)
    trunk, left, right = ids[:4], ids[4:8], ids[8:12]
    other = (right + 1) % vocabulary
    with torch.no_grad():
        rows = _hidden(lm, impl, trunk, left, right)
        for name, changed, kept in (
            ("second", _hidden(lm, impl, trunk, left, other), slice(0, 8)),
            ("first", _hidden(lm, impl, trunk, other, right), [0, 1, 2, 3, 8, 9, 10, 11]),
        ):
            _check_leak(lm, rows[kept], changed[kept], name)
        in_pieces = _hidden(lm, impl, trunk, left, right, budget=4)
        _check_budget(lm, rows, in_pieces)
        _check_logprobs(lm, rows, np.concatenate([trunk, left]))


def _hidden(
    lm: DecoderAndHead,
    impl: str,
    trunk: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    budget: int | None = None,
) -> torch.Tensor:
    """[12, M] hidden rows of trunk, left branch and right branch."""
    branches = [Trajectory(np.concatenate([trunk, branch])) for branch in (left, right)]
    forest = Forest.from_trajectories(branches)
    walk = Walk(lm, make_plan(forest, budget, hold="never"), impl)
    by_position: dict[int, torch.Tensor] = {}

    def keep(output: MicroBatchOutput) -> None:
        by_position.update(zip(output.positions.tolist(), output.hidden, strict=True))

    try:
        walk.visit(keep)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, TreewiseError | torch.OutOfMemoryError):
            raise
        raise UnsupportedModelError(
            f"{type(lm.decoder).__name__} fails on a tree: {type(error).__name__}: {error}. {SUPPORTED_MODELS}"
        ) from error
    order = np.concatenate([forest.paths[0], forest.paths[1][4:]])
    return torch.stack([by_position[position] for position in order.tolist()])


def _check_leak(lm: DecoderAndHead, before: torch.Tensor, after: torch.Tensor, name: str) -> None:
    difference = (before - after).abs().max().item()
    regroups = bool(kinds_of(lm.decoder)) or any(
        word in path for path, _ in lm.decoder.named_modules() for word in ("expert", "moe")
    )
    # Recurrent layers and experts compute in float32 in a float64 model, too.
    coarse = max(torch.finfo(before.dtype).eps, torch.finfo(torch.float32).eps)
    rounding = (1e3 * coarse if regroups else 16 * torch.finfo(before.dtype).eps) * before.abs().max().item()
    if not difference <= rounding:
        raise UnsupportedModelError(
            f"{type(lm.decoder).__name__} leaks between branches: changing the {name} branch moved the other by "
            f"{difference:.3g}. Its layers cannot follow a tree. {SUPPORTED_MODELS}"
        )


def _check_budget(lm: DecoderAndHead, whole: torch.Tensor, in_pieces: torch.Tensor) -> None:
    """Rows must not depend on the budget: a gateway must carry everything that a layer reads of earlier tokens."""
    wide = torch.promote_types(whole.dtype, torch.float32)
    gaps = (whole.to(wide) - in_pieces.to(wide)).abs()
    is_exact = _is_exact(whole)
    gap = (gaps.max() if is_exact else gaps.mean()).item()
    largest = whole.abs().max().item()
    if not gap <= max(_MAX_BUDGET_GAP, torch.finfo(whole.dtype).eps) * largest:
        raise UnsupportedModelError(
            f"{type(lm.decoder).__name__} computes other rows in parts than whole ({gap:.3g} beside {largest:.3g}). "
            f"Its layers hand on more than keys and values. {SUPPORTED_MODELS}"
        )


def _check_logprobs(lm: DecoderAndHead, rows: torch.Tensor, token_ids: np.ndarray) -> None:
    tokens = torch.as_tensor(token_ids, dtype=torch.long, device=rows.device)
    source = torch.arange(len(tokens) - 1, device=rows.device)
    ours = edge_values(rows[: len(tokens)], lm.head(), source, tokens[1:])["log_probs"]

    def own_logits() -> torch.Tensor:
        try:
            return lm.model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        except (AttributeError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"{type(lm.model).__name__} does not run on text alone: {type(error).__name__}: {error}. "
                f"{SUPPORTED_MODELS}"
            ) from error

    with observe_masks() as observations:
        logits = own_logits()
    modules = set(lm.decoder.modules())
    check_masks([each for each in observations if each.module in modules])
    wide = torch.promote_types(logits.dtype, torch.float32)
    native = torch.log_softmax(logits.to(wide), dim=-1)[source, tokens[1:]]
    gaps = (ours - native).abs()
    is_exact = _is_exact(rows)
    gap = (gaps.max() if is_exact else gaps.mean()).item()
    limit = _MAX_LOGPROB_GAP[rows.dtype] if is_exact else _LOW_PRECISION_GAP
    if not gap <= limit:
        again = torch.log_softmax(own_logits().to(wide), dim=-1)[source, tokens[1:]]
        if not torch.equal(again, native):
            raise UnsupportedModelError(
                f"{type(lm.model).__name__} is random while training: the same tokens gave other log-probs. Call "
                "model.eval(), or disable what is random."
            )
        raise UnsupportedModelError(
            f"{type(lm.model).__name__}: log-probs on the tree differ from the model's own by {gap:.3g} "
            f"(limit {limit:g}). It computes something between decoder and logits that treewise does not support. "
            f"{SUPPORTED_MODELS}"
        )


def _is_exact(rows: torch.Tensor) -> bool:
    """Whether rows were computed in float32 or wider; under autocast their dtype alone does not decide it."""
    return rows.dtype in _MAX_LOGPROB_GAP and not torch.is_autocast_enabled(rows.device.type)
