"""Log-probs after each token of prompts: of the token that follows, the most likely ones, any others, and of draws.

Prompts that share a beginning are computed once. Letters: n tokens of a prompt, K targets, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from treewise.engine.engine import TreeEngine
from treewise.rl.samplers.transformers_sampler import sampling_mode
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

_ROWS_AT_ONCE = 64  # [64, V] distributions are in memory


@dataclass(frozen=True, slots=True, eq=False)
class PromptRequest:
    """token_ids: int64 [n]. targets: int64 [n - 1, K] token ids to score after each token, -1 for none. num_top: of the
    most likely ids. num_last: the tokens, counted from the end, of which own and most likely ids are scored; None: all.
    num_drawn: ids drawn with replacement at the temperature, from the seed. images: what placeholders stand for.
    """

    token_ids: np.ndarray
    targets: np.ndarray
    num_top: int = 0
    num_last: int | None = None
    num_drawn: int = 0
    temperature: float = 1.0
    seed: int = 0
    images: tuple[ImageSpan, ...] = ()


def prompt_scores(engine: TreeEngine, requests: Sequence[PromptRequest]) -> list[dict[str, np.ndarray]]:
    """For each prompt, by name: `own` [n] and `top`, `top_ids` [n, num_top], NaN and minus infinity where none are, as
    at the first token; `targets` [n - 1, K], 0 where there is none; `drawn`, `drawn_ids` [n - 1, num_drawn].
    """
    if not requests:
        return []
    # a trajectory has a token to predict: a prompt of one token, or that ends in an image, is given one
    ids = [
        np.append(request.token_ids, 0) if len(request.token_ids) < 2 or request.images else request.token_ids
        for request in requests
    ]
    items = [Trajectory(own, images=request.images) for own, request in zip(ids, requests, strict=True)]
    with sampling_mode(engine.model):
        hidden = engine.hidden_states(Forest.from_trajectories(items))
        head = engine.lm.head()  # with adapters a sum over all of its weight, which is taken once
        return [_scored(head, own, request) for own, request in zip(hidden, requests, strict=True)]


def _scored(head: Any, hidden: torch.Tensor, asked: PromptRequest) -> dict[str, np.ndarray]:
    num_after, generator = len(asked.token_ids) - 1, torch.Generator().manual_seed(asked.seed)
    parts: dict[str, list[torch.Tensor]] = {}
    for low in range(0, max(num_after, 1), _ROWS_AT_ONCE):
        rows = slice(low, min(low + _ROWS_AT_ONCE, num_after))
        logits = head.logits(hidden[rows]).float().cpu()
        logprobs, tempered = (
            torch.log_softmax(logits / temperature, -1) for temperature in (1.0, asked.temperature or 1.0)
        )
        own, targets = torch.from_numpy(asked.token_ids[1:, None][rows]), torch.from_numpy(asked.targets[rows])
        best, drawn = logprobs.topk(asked.num_top, dim=-1), torch.zeros((len(logits), 0), dtype=torch.int64)
        if asked.num_drawn and len(logits):
            drawn = torch.multinomial(tempered.exp(), asked.num_drawn, replacement=True, generator=generator)
        for name, found in {
            "own": logprobs.gather(1, own)[:, 0],
            "top": best.values,
            "top_ids": best.indices,
            "targets": logprobs.gather(1, targets.clamp(min=0)).masked_fill(targets < 0, 0.0),
            "drawn": tempered.gather(1, drawn),
            "drawn_ids": drawn,
        }.items():
            parts.setdefault(name, []).append(found)
    scores = {name: torch.cat(chunks).numpy() for name, chunks in parts.items()}
    first = num_after - (num_after if asked.num_last is None else asked.num_last) + 1
    for name, fill in {"own": np.nan, "top": -np.inf, "top_ids": 0}.items():
        scores[name] = np.concatenate(
            [np.full_like(scores[name], fill, shape=(1, *scores[name].shape[1:])), scores[name]]
        )
        scores[name][:first] = fill
    return scores
