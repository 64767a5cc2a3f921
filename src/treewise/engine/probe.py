"""Probe of a model before its first step: does it follow a tree, and do decoder and head give the model's own logits?

A few tiny forwards. Changing one branch must not change the other's hidden rows, in either direction, beyond the
rounding of matrix products with rows in another order, or of experts and recurrent layers, which regroup tokens. Rows
must not depend on the budget. The head must turn the rows that the model gives it into the model's logits, also where
they are large. The log-probs of one branch must equal those of the model's own forward, whose masks must match the
settings of its layers. This detects what no flag of a model shows: an ignored mask, a scale on the logits.

A model with weights in float32 is probed in float32, also under autocast, unless its own forward enters autocast. In
lower precision rows are compared with the model's own spread between two correct orders of computation. Adapters are
stirred first, because a fresh one is the identity. Gradients are probed in `probe_gradients`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treewise.engine.stirring import adapters_stirred
from treewise.engine.vision import ForestVision, flat_images, processed_by
from treewise.engine.walk import MicroBatchOutput, Walk
from treewise.errors import TreewiseError, UnsupportedModelError, num
from treewise.nn.attention import check_masks, observe_masks
from treewise.nn.compilation import uncompiled
from treewise.nn.lm_head import edge_values
from treewise.nn.model import SUPPORTED_MODELS, DecoderAndHead
from treewise.nn.recurrent import kinds_of
from treewise.planning.planner import plan as make_plan
from treewise.shapes import Float, Int
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

# Largest difference of a log-prob between the tree and the model's own forward; in low precision the median difference,
# because it may route single tokens elsewhere.
_MAX_LOGPROB_GAP = {torch.float64: 1e-4, torch.float32: 1e-2}
_LOW_PRECISION_GAP = 1.0
# Largest relative difference of a row between one micro-batch and several, in float32 or wider.
_MAX_BUDGET_GAP = 1e-3
# In low precision the median over rows may differ by this many spreads of the model, or roundings of one number.
_MAX_SPREADS, _MAX_ROUNDINGS = 8, 4
_PROBED_LOGIT = 40.0  # the head is compared where its largest logit is about this, which shows a cap of 30


def probe(lm: DecoderAndHead, impl: str, token_ids: Int[np.ndarray, " n"]) -> None:
    """Raises if the model leaks between branches, or if decoder and head do not give its logits.

    token_ids: [n] integers, a few of the user's own tokens; on tokens that a model never saw in training, low precision
    alone moves log-probs by several nats. impl: a name of `IMPLEMENTATIONS`.

    Raises:
        UnsupportedModelError: with the measured difference.
    """
    ids = np.resize(token_ids, 12)
    trunk, left, right = ids[:4], ids[4:8], ids[8:12]
    other = (right + 1) % lm.head().num_tokens
    with torch.no_grad(), adapters_stirred(lm.model), widest_precision(lm, ids):
        rows = _hidden(lm, impl, trunk, left, right)
        _check_finite(lm, rows)
        spread = 0.0 if _is_exact(rows) else _spread(lm, impl, np.concatenate([trunk, left]))
        for name, changed, kept in (
            ("second", _hidden(lm, impl, trunk, left, other), slice(4, 8)),
            ("first", _hidden(lm, impl, trunk, other, right), slice(8, 12)),
        ):
            _check_leak(lm, rows[kept], changed[kept], name, spread)
            _check_leak(lm, rows[:4], changed[:4], name, spread)
        _check_budget(lm, rows, _hidden(lm, impl, trunk, left, right, budget=4), spread)
        _check_logprobs(lm, rows, np.concatenate([trunk, left]))
        _check_head(lm, np.concatenate([trunk, left]))


def probe_images(lm: DecoderAndHead, impl: str, forest: Forest, processor: Any) -> None:
    """Raises if the model with an image leaks between branches, or does not give its own log-probs on a tree.

    The smallest image of a forest is seen twice on the trunk, with text before, between and after, so that an image
    that sees a later one shows. processor: the model's.

    Raises:
        UnsupportedModelError: with the measured difference.
    """
    images = forest.images
    place = int(np.argmin(images.end - images.start))
    image = images.sources[images.index[place]]
    tokens, text = forest.token_ids[images.start[place] : images.end[place]], text_ids(forest)
    ids = np.resize(text if len(text) else np.zeros(1, dtype=np.int32), 12)
    changed = (ids[8:12] + 1) % lm.head().num_tokens
    changed[np.isin(changed, tokens)] = ids[0]  # a placeholder of no image
    trunk = np.concatenate([ids[:2], tokens, ids[2:4], tokens])
    starts = (2, len(trunk) - len(tokens))
    spans = tuple(replace(image, start=start, end=start + len(tokens)) for start in starts)
    left, right, other = (
        Trajectory(np.concatenate([trunk, branch]), images=spans) for branch in (ids[4:8], ids[8:12], changed)
    )
    given = torch.as_tensor(left.token_ids, dtype=torch.long, device=lm.device)
    with torch.no_grad(), adapters_stirred(lm.model), widest_precision(lm, ids):
        rows = _rows(lm, impl, (left, right), processor=processor)
        _check_finite(lm, rows)
        spread = 0.0 if _is_exact(rows) else torch.finfo(_compute_dtype(rows)).eps
        size = len(left)
        _check_leak(lm, rows[:size], _rows(lm, impl, (left, other), processor=processor)[:size], "second", spread)
        in_parts = _rows(lm, impl, (left, right), len(tokens) + 4, processor=processor)
        _check_budget(lm, rows, in_parts, spread)
        _check_logprobs(lm, rows, left.token_ids, flat_images(lm.model, processor, left, given))


def text_ids(forest: Forest) -> np.ndarray:
    """[t] int32, the tokens of a forest that stand for no image."""
    ids: np.ndarray = forest.token_ids[~forest.images.covers(forest.num_tokens)]
    return ids


@contextmanager
def widest_precision(lm: DecoderAndHead, token_ids: np.ndarray) -> Iterator[None]:
    """Without autocast, if all weights are in float32 or wider: then rounding hides nothing and refuses nothing.

    A model whose own forward enters autocast, as accelerate wraps it, is compared under the same. token_ids: [n].
    """
    floats = [each for each in [*lm.model.parameters(), *lm.model.buffers()] if each.is_floating_point()]
    is_wide = all(torch.finfo(each.dtype).bits >= 32 for each in floats)
    device = lm.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if is_wide:
        dtype = _own_autocast(lm, token_ids)
    with torch.autocast(device, dtype, enabled=dtype is not None):
        yield


def _own_autocast(lm: DecoderAndHead, token_ids: np.ndarray) -> torch.dtype | None:
    """The precision of the autocast that the model's own forward enters by itself; None: it enters none."""
    device, entered = lm.device.type, []

    def observe(*_: Any) -> None:
        if torch.is_autocast_enabled(device):
            entered.append(torch.get_autocast_dtype(device))

    hook = lm.decoder.register_forward_pre_hook(observe)
    try:
        # What a model cannot compute is reported by the comparisons that follow.
        with suppress(UnsupportedModelError, RuntimeError), torch.no_grad(), torch.autocast(device, enabled=False):
            _own_logits(lm, torch.as_tensor(token_ids, dtype=torch.long, device=lm.device))
    finally:
        hook.remove()
    return entered[0] if entered else None


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
    return _rows(lm, impl, branches, budget)


def _rows(
    lm: DecoderAndHead, impl: str, branches: Sequence[Trajectory], budget: int | None = None, processor: Any = None
) -> torch.Tensor:
    """[n, M] hidden rows of the first branch, then those of the second beyond the four last tokens' fork."""
    forest = Forest.from_trajectories(branches)
    vision = None
    if len(forest.images):
        vision = ForestVision(
            lm, forest, processed_by(processor, "TreeEngine(model, processor=...)"), is_in_graph=False
        )
    walk = Walk(lm, make_plan(forest, budget, hold="never"), impl, vision=vision)
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
    order = np.concatenate([forest.paths[0], forest.paths[1][-4:]])
    return torch.stack([by_position[position] for position in order.tolist()])


def _check_finite(lm: DecoderAndHead, rows: torch.Tensor) -> None:
    if not rows.isfinite().all():
        raise UnsupportedModelError(
            f"{type(lm.decoder).__name__} gives hidden rows that are not finite, on a tree of {len(rows)} tokens: "
            f"{_why_not_finite(lm)}"
        )


def _why_not_finite(lm: DecoderAndHead) -> str:
    wrong = [name for name, each in lm.model.named_parameters() if not each.isfinite().all()]
    if not wrong:
        return "its weights diverged, or its precision is too low."
    return f"weights of {', '.join(wrong[:3])} are not finite ({num(len(wrong), 'parameter')} in all); it diverged."


def _spread(lm: DecoderAndHead, impl: str, token_ids: np.ndarray) -> float:
    """How far the rows of one trajectory move between correct orders of computation: alone, in a batch, as a tree.

    None of them has anything else in its row, so a leak does not widen it. The largest of the medians over rows,
    relative to the norm of a row. token_ids: [n] integers.
    """
    tokens = torch.as_tensor(token_ids, dtype=torch.long, device=lm.device)
    with uncompiled(lm.model):
        alone, batched = (
            lm.decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
            for ids in (tokens[None], tokens[None].expand(3, -1))
        )
    chain = Walk(lm, make_plan(Forest.from_trajectories([Trajectory(token_ids)])), impl).whole_output().hidden
    return max(_median_gap(alone, batched), _median_gap(alone, chain))


def _median_gap(left: Float[Tensor, "n M"], right: Float[Tensor, "n M"]) -> float:
    """The median over rows ([n, M]) of their difference relative to their norm."""
    left, right = left.float(), right.float()
    return ((left - right).norm(dim=1) / left.norm(dim=1)).median().item()


def _low_precision_limit(rows: torch.Tensor, spread: float) -> float:
    eps = torch.finfo(_compute_dtype(rows)).eps
    return max(_MAX_SPREADS * spread, _MAX_ROUNDINGS * eps)


def _check_leak(lm: DecoderAndHead, before: torch.Tensor, after: torch.Tensor, name: str, spread: float) -> None:
    if _is_exact(before):
        difference = (before - after).abs().max().item()
        # Recurrent layers and experts compute in float32 in a float64 model, too.
        coarse = max(torch.finfo(before.dtype).eps, torch.finfo(torch.float32).eps)
        regroups = bool(kinds_of(lm.decoder)) or has_experts(lm)
        limit = (1e3 * coarse if regroups else 16 * torch.finfo(before.dtype).eps) * before.abs().max().item()
    else:
        difference, limit = _median_gap(before, after), _low_precision_limit(before, spread)
    if not difference <= limit:
        raise UnsupportedModelError(
            f"{type(lm.decoder).__name__} leaks between branches: changing the {name} branch moved the other by "
            f"{difference:.3g} (limit {limit:.3g}). Its layers cannot follow a tree. {SUPPORTED_MODELS}"
        )


def has_experts(lm: DecoderAndHead) -> bool:
    """Whether some module's name is that of a mixture of experts."""
    return any(word in path for path, _ in lm.decoder.named_modules() for word in ("expert", "moe"))


def _check_budget(lm: DecoderAndHead, whole: torch.Tensor, in_pieces: torch.Tensor, spread: float) -> None:
    """Rows must not depend on the budget: a gateway must carry everything that a layer reads of earlier tokens."""
    if _is_exact(whole):
        gap = ((whole - in_pieces).abs().max() / whole.abs().max()).item()
        limit = _MAX_BUDGET_GAP
    else:
        gap, limit = _median_gap(whole, in_pieces), _low_precision_limit(whole, spread)
    if not gap <= limit:
        raise UnsupportedModelError(
            f"{type(lm.decoder).__name__} computes other rows under a budget than without (by {gap:.3g} of a row, "
            f"limit {limit:.3g}). Its layers pass on more than keys and values. {SUPPORTED_MODELS}"
        )


def _check_head(lm: DecoderAndHead, token_ids: np.ndarray) -> None:
    """Compares the head with the model's own way from the decoder's rows to logits, where these are large.

    Small logits hide a cap on them. Models that do not call their decoder as a module are left to `_check_logprobs`.
    """
    tokens = torch.as_tensor(token_ids, dtype=torch.long, device=lm.device)
    factor, decoder_rows = 1.0, []
    precisions = []  # inside of the model's forward: an accelerator may have wrapped it in autocast

    def enlarge(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if isinstance(getattr(output, "last_hidden_state", None), torch.Tensor):
            output.last_hidden_state = output.last_hidden_state * factor
            decoder_rows.append(output.last_hidden_state)
            precisions.append(torch.finfo(_compute_dtype(output.last_hidden_state)).eps)

    own = _own_logits(lm, tokens)
    factor = _PROBED_LOGIT / max(own.abs().max().item(), 1e-6)
    hook = lm.decoder.register_forward_hook(enlarge)
    try:
        own = _own_logits(lm, tokens)
    finally:
        hook.remove()
    if len(decoder_rows) != 1 or decoder_rows[0].dim() != 3:
        return
    ours = lm.head().logits(decoder_rows[0][0, -len(tokens) :])
    if ours.shape != own.shape:
        return
    gap = (ours - own).abs().max().item()
    limit = max(1e-4, 8 * precisions[0]) * max(own.abs().max().item(), 1.0)
    if not gap <= limit:
        raise UnsupportedModelError(
            f"{type(lm.model).__name__}: logits from the same rows differ from the model's own by {gap:.3g} (limit "
            f"{limit:.3g}, largest logit {own.abs().max().item():.3g}). It scales or caps them in a way that treewise "
            f"does not support. {SUPPORTED_MODELS}"
        )


def _own_logits(
    lm: DecoderAndHead, tokens: Int[Tensor, " n"], images: dict[str, torch.Tensor] | None = None
) -> Float[Tensor, "n V"]:
    """[n, V] in float32 or wider: those of the model's own forward. tokens: [n] int64. images: what it is given for
    them."""
    try:
        with uncompiled(lm.model):
            logits = lm.model(input_ids=tokens[None], use_cache=False, **(images or {})).logits[0]
    except (AttributeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{type(lm.model).__name__} does not run on {'images' if images else 'text alone'}: "
            f"{type(error).__name__}: {error}. {SUPPORTED_MODELS}"
        ) from error
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def own_logprobs(
    lm: DecoderAndHead, token_ids: Int[np.ndarray, " n"], images: dict[str, torch.Tensor] | None = None
) -> Float[Tensor, " _"]:
    """[n - 1] log-probs of a row's tokens by the model's own forward, with a graph where gradients are enabled."""
    tokens = torch.as_tensor(token_ids, dtype=torch.long, device=lm.device)
    return torch.log_softmax(_own_logits(lm, tokens, images)[:-1], dim=-1).gather(1, tokens[1:, None])[:, 0]


def _check_logprobs(
    lm: DecoderAndHead, rows: torch.Tensor, token_ids: np.ndarray, images: dict[str, torch.Tensor] | None = None
) -> None:
    tokens = torch.as_tensor(token_ids, dtype=torch.long, device=rows.device)
    source = torch.arange(len(tokens) - 1, device=rows.device)
    ours = edge_values(rows[: len(tokens)], lm.head(), source, tokens[1:])["log_probs"]
    with observe_masks() as observations:
        native = own_logprobs(lm, token_ids, images)
    if not native.isfinite().all():
        raise UnsupportedModelError(
            f"{type(lm.model).__name__} gives logits that are not finite: {_why_not_finite(lm)}"
        )
    modules = set(lm.decoder.modules())
    check_masks([each for each in observations if each.module in modules])
    gaps = (ours - native).abs()
    is_exact = _is_exact(rows)
    gap = (gaps.max() if is_exact else gaps.median()).item()
    limit = _MAX_LOGPROB_GAP[rows.dtype] if is_exact else _LOW_PRECISION_GAP
    if not gap <= limit:
        if not torch.equal(own_logprobs(lm, token_ids, images), native):
            raise UnsupportedModelError(
                f"{type(lm.model).__name__} is random while training: the same tokens gave other log-probs. Call "
                "model.eval(), or disable what is random."
            )
        raise UnsupportedModelError(
            f"{type(lm.model).__name__}: log-probs on the tree differ from the model's own by {gap:.3g} "
            f"(limit {limit:g}). It computes something {'with images' if images else 'between decoder and logits'} "
            "that treewise does not support. "
            f"{SUPPORTED_MODELS}"
        )


def _compute_dtype(rows: torch.Tensor) -> torch.dtype:
    device = rows.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype


def _is_exact(rows: torch.Tensor) -> bool:
    """Whether rows were computed in float32 or wider; under autocast their dtype alone does not decide it."""
    return _compute_dtype(rows) in _MAX_LOGPROB_GAP
