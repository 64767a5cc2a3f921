"""A first look at a model: does it follow a tree, and do its decoder and head give the logits that the model gives?

Three tiny forwards. Changing one branch must not change the other's hidden rows, in either direction, not by one bit;
models with experts may regroup tokens, so for them not beyond rounding. And the log-probs of one branch must be those
of the model's own forward. What no flag of a model announces (a mask ignored, a scale applied to the logits) shows
here.
"""

import numpy as np
import torch

from treewise.attention import TreeContext, TreeMask
from treewise.errors import UnsupportedModelError
from treewise.forest import Forest
from treewise.layout import lay_out
from treewise.logprobs import edge_logprobs
from treewise.models import ModelParts
from treewise.planner import plan
from treewise.recurrent import TreeRows
from treewise.trajectory import Trajectory

# Largest difference of a log-prob between the tree and the model's own forward; in low precision the mean difference,
# because it may route single tokens elsewhere.
_MAX_LOGPROB_GAP = {torch.float64: 1e-4, torch.float32: 1e-2}
_LOW_PRECISION_GAP = 1.0


def probe(parts: ModelParts, impl: str, may_fall_back: bool, token_ids: np.ndarray) -> None:
    """Raises if the model leaks between branches, or if its logits are not what decoder and head give.

    token_ids: some of the user's own; on tokens that a model never saw, low precision alone moves log-probs by several
    nats.

    Raises:
        UnsupportedModelError: with the measured difference.
    """
    vocabulary = parts.head().weight.shape[0]
    ids = np.resize(token_ids, 12)
    trunk, left, right = ids[:4], ids[4:8], ids[8:12]
    other = (right + 1) % vocabulary
    with torch.no_grad():
        rows = _hidden(parts, impl, may_fall_back, trunk, left, right)
        for name, changed, kept in (
            ("second", _hidden(parts, impl, may_fall_back, trunk, left, other), slice(0, 8)),
            ("first", _hidden(parts, impl, may_fall_back, trunk, other, right), [0, 1, 2, 3, 8, 9, 10, 11]),
        ):
            _check_leak(parts, rows[kept], changed[kept], name)
        _check_logprobs(parts, rows, np.concatenate([trunk, left]))


def _hidden(
    parts: ModelParts, impl: str, may_fall_back: bool, trunk: np.ndarray, left: np.ndarray, right: np.ndarray
) -> torch.Tensor:
    """[12, M] hidden rows of trunk, left branch and right branch."""
    branches = [Trajectory(np.concatenate([trunk, branch])) for branch in (left, right)]
    forest = Forest.from_trajectories(branches)
    run = plan(forest)
    layout = lay_out(run, 0)
    context = TreeContext(TreeMask.from_layout(layout), impl, may_fall_back, rows=TreeRows(run, 0, layout))
    hidden = decoder_rows(parts, layout.token_ids, layout.depth, context)
    order = np.concatenate([forest.paths[0], forest.paths[1][4:]])
    return hidden[torch.as_tensor(order, device=hidden.device)]


def decoder_rows(parts: ModelParts, token_ids: np.ndarray, depth: np.ndarray, context: TreeContext) -> torch.Tensor:
    """[T, M] hidden rows of one micro-batch."""
    device = parts.device
    # A prepared 4-D mask makes every model skip the making of its own; the attention function ignores it.
    prepared = torch.zeros(1, 1, 1, 1, device=device)
    output = parts.decoder(
        input_ids=torch.as_tensor(token_ids, dtype=torch.long, device=device)[None],
        position_ids=torch.as_tensor(depth, dtype=torch.long, device=device)[None],
        attention_mask=prepared,
        use_cache=False,
        treewise=context,
    )
    return output.last_hidden_state[0]


def _check_leak(parts: ModelParts, before: torch.Tensor, after: torch.Tensor, name: str) -> None:
    difference = (before - after).abs().max().item()
    has_experts = any("expert" in path for path, _ in parts.decoder.named_modules())
    rounding = 1e3 * torch.finfo(before.dtype).eps * before.abs().max().item() if has_experts else 0.0
    if not difference <= rounding:
        raise UnsupportedModelError(
            f"{type(parts.decoder).__name__} leaks between branches: changing the {name} branch moved the other by "
            f"{difference:.3g}. Its layers cannot follow a tree. Supported models: docs/models.md."
        )


def _check_logprobs(parts: ModelParts, rows: torch.Tensor, token_ids: np.ndarray) -> None:
    tokens = torch.as_tensor(token_ids, dtype=torch.long, device=rows.device)
    source = torch.arange(len(tokens) - 1, device=rows.device)
    ours, _ = edge_logprobs(rows[: len(tokens)], parts.head(), source, tokens[1:])
    logits = parts.model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    wide = torch.promote_types(logits.dtype, torch.float32)
    native = torch.log_softmax(logits.to(wide), dim=-1)[source, tokens[1:]]
    gaps = (ours - native).abs()
    is_exact = rows.dtype in _MAX_LOGPROB_GAP
    gap = (gaps.max() if is_exact else gaps.mean()).item()
    limit = _MAX_LOGPROB_GAP.get(rows.dtype, _LOW_PRECISION_GAP)
    if not gap <= limit:
        raise UnsupportedModelError(
            f"{type(parts.model).__name__}: log-probs on the tree differ from the model's own by {gap:.3g} "
            f"(limit {limit:g}). It computes something between decoder and logits that treewise does not know. "
            "Supported models: docs/models.md."
        )
