"""Continuations and log-probs of prompts, as a client asks for them."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from treewise.errors import DataError
from treewise.rl.samplers.protocol import Completion, SampleRequest
from treewise.rl.samplers.transformers_sampler import sampling_mode
from treewise.serve.weights import ServedModel, Weights
from treewise.serve.wire import PromptScores, check_cells, check_ids, from_csr, read_prompt, sample_answer
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

_ROWS_AT_ONCE = 64  # whole distributions of this many tokens are in memory


@dataclass(frozen=True, slots=True)
class TextStops(SampleRequest):
    """Also ends where the text of the continuation holds one of `stop_texts`."""

    stop_texts: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] = field(default=str, compare=False)
    is_cancelled: Callable[[], bool] = field(default=bool, compare=False)

    def is_stopped(self, token_ids: Sequence[int]) -> bool:
        """See `SampleRequest`."""
        if self.is_cancelled() or SampleRequest.is_stopped(self, token_ids):
            return True
        if not self.stop_texts:
            return False
        tail = self.decode(token_ids[-max(len(text.encode()) for text in self.stop_texts) - 4 :])
        return any(text in tail for text in self.stop_texts)


@dataclass(frozen=True, slots=True)
class Sampling:
    """A checked request. asked: of the SDK's type. targets: [n - 1, K] tokens of which log-probs are asked after each
    of the prompt's n tokens, -1 where none is."""

    asked: Any
    prompt: np.ndarray
    rules: SampleRequest
    targets: np.ndarray | None


def read_request(asked: Any, name: str, model: ServedModel, is_cancelled: Callable[[], bool] = bool) -> Sampling:
    """Checks a request of the SDK's type `SampleRequest`. name: of the request, from which its seed follows where it
    has none. Raises `DataError`."""
    ids, images = read_prompt(asked.prompt.chunks, model, "prompt")
    prompt = ids.astype(np.int64)
    params, settings = asked.sampling_params, model.settings
    room = settings.max_sample_tokens
    if model.max_length is not None:
        room = min(room, model.max_length - len(prompt))
    wanted = room if params.max_tokens is None else params.max_tokens
    if not 1 <= wanted <= room:
        raise DataError(f"max_tokens={wanted} after a prompt of {len(prompt)} tokens; at most {room} fit.")
    for what, value, most in (
        ("topk_sample_logprobs", asked.topk_sample_logprobs, model.vocabulary),
        ("topk_prompt_logprobs", asked.topk_prompt_logprobs, model.vocabulary),
        ("prompt_alt_tokens_k", asked.prompt_alt_tokens_k, model.vocabulary),
        ("prompt_logprobs_last_n", asked.prompt_logprobs_last_n or 0, max(len(prompt) - 1, 0)),
    ):
        if not 0 <= value <= most:
            raise DataError(f"{what}={value} must be between 0 and {most}.")
    if asked.prompt_logprobs_last_n is not None and not (asked.prompt_logprobs and asked.prompt_logprobs_last_n):
        raise DataError("prompt_logprobs_last_n must be at least 1, and needs prompt_logprobs.")
    tables = asked.topk_prompt_logprobs + asked.prompt_alt_tokens_k
    check_cells([len(prompt) * tables, asked.num_samples * wanted * asked.topk_sample_logprobs])
    stop_ids, texts = _stops(params.stop, model)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big") if params.seed is None else params.seed
    rules = TextStops(
        prefix_ids=tuple(prompt.tolist()),
        num_continuations=asked.num_samples,
        max_new_tokens=wanted,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        seed=seed,
        stop_ids=stop_ids,
        num_top=asked.topk_sample_logprobs,
        images=images,
        stop_texts=texts,
        decode=str if model.tokenizer is None else model.tokenizer.decode,
        is_cancelled=is_cancelled,
    )
    return Sampling(asked, prompt, rules, _targets(asked.target_prompt_logprobs, len(prompt), model.vocabulary))


def _stops(stop: Any, model: ServedModel) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if stop is None:
        return model.stop_ids, ()
    items = [stop] if isinstance(stop, str) else list(stop)
    ids = tuple(item for item in items if isinstance(item, int))
    texts = tuple(item for item in items if isinstance(item, str))
    if any(not text for text in texts):
        raise DataError("stop: an empty text would stop before the first token.")
    if texts and model.tokenizer is None:
        raise DataError("stop: this server's model has no tokenizer, so it stops at token ids alone.")
    check_ids(np.array(ids, dtype=np.int64), model.vocabulary, "stop")
    return ids, texts


def _targets(given: Any, length: int, vocabulary: int) -> np.ndarray | None:
    if given is None:
        return None
    what = "target_prompt_logprobs"
    if given.sparse_crow_indices is None:
        targets = given.to_numpy()
    else:  # not by the SDK, which does not check the indices
        shape = tuple(given.shape or ())
        check_cells([abs(math.prod(shape))])
        ends, inner = (np.array(each or ()) for each in (given.sparse_crow_indices, given.sparse_col_indices))
        targets = from_csr(shape, ends, inner, np.array(given.data), what, fill=-1)
    if targets.ndim != 2 or len(targets) != length - 1 or targets.dtype.kind != "i":
        raise DataError(f"{what} has shape {targets.shape} for {length} tokens.")
    check_ids(targets[targets != -1], vocabulary, what)
    return targets


def answers(
    model: ServedModel, weights: Weights | None, requests: Sequence[Sampling]
) -> list[tuple[bytes, tuple[Completion, ...]]]:
    """What clients get, in order, and the completions in it. Prompts that share a beginning are computed once."""
    scores = [_empty_scores(each) for each in requests]
    weights = weights or model.blank
    with model.using(weights):
        completions = model.sampler_of(weights).sample([each.rules for each in requests])
        asked = [i for i, each in enumerate(scores) if len(requests[i].prompt) > 1 and each]
        if asked:
            with sampling_mode(model.model):
                rows = [(requests[i].prompt, requests[i].rules.images) for i in asked]
                forest = Forest.from_trajectories(
                    [Trajectory(ids, np.arange(len(ids)) > 0, images=images) for ids, images in rows]
                )
                for i, hidden in zip(asked, model.engine.hidden_states(forest), strict=True):
                    _score(model.engine.lm.head(), hidden, requests[i], scores[i])
    return [(sample_answer(own, each), own) for own, each in zip(completions, scores, strict=True)]


def _empty_scores(each: Sampling) -> PromptScores:
    """Tables of what was asked; NaN and minus infinity where nothing is known, as at a prompt's first token."""
    asked, length, scores = each.asked, len(each.prompt), PromptScores()
    if asked.prompt_logprobs:
        scores["logprobs"] = (np.full(length, np.nan),)
    if top := asked.topk_prompt_logprobs:
        scores["top"] = np.zeros((length, top), dtype=np.int64), np.full((length, top), -np.inf)
    if each.targets is not None:
        scores["targets"] = (np.zeros(each.targets.shape),)
    if drawn := asked.prompt_alt_tokens_k:
        scores["drawn"] = np.zeros((length - 1, drawn), dtype=np.int64), np.zeros((length - 1, drawn))
    return scores


def _score(head: Any, hidden: torch.Tensor, each: Sampling, scores: PromptScores) -> None:
    """Fills the tables of a prompt, `_ROWS_AT_ONCE` distributions at a time."""
    length, generator = len(each.prompt), torch.Generator().manual_seed(each.rules.seed & (2**63 - 1))
    skipped = length - 1 - (each.asked.prompt_logprobs_last_n or length - 1)
    for low in range(0, length - 1, _ROWS_AT_ONCE):
        rows = slice(low, min(low + _ROWS_AT_ONCE, length - 1))
        after, later = slice(rows.start + 1, rows.stop + 1), np.arange(rows.start, rows.stop) >= skipped
        logits = head.logits(hidden[rows]).float().cpu()
        logprobs = torch.log_softmax(logits, -1)
        for name, arrays in scores.items():
            if name == "logprobs":
                own = logprobs.gather(1, torch.from_numpy(each.prompt[after, None]))[:, 0].numpy()
                arrays[0][after] = np.where(later, own, np.nan)
            elif name == "top":
                best = logprobs.topk(arrays[0].shape[1], dim=-1)
                arrays[0][after] = best.indices.numpy()
                arrays[1][after] = np.where(later[:, None], best.values.numpy(), -np.inf)
            elif name == "targets":
                assert each.targets is not None
                found = logprobs.gather(1, torch.from_numpy(each.targets[rows]).clamp(min=0)).numpy()
                arrays[0][rows] = np.where(each.targets[rows] >= 0, found, 0.0)
            else:
                tempered = torch.log_softmax(logits / (each.rules.temperature or 1.0), -1)
                picked = torch.multinomial(tempered.exp(), arrays[0].shape[1], replacement=True, generator=generator)
                arrays[0][rows], arrays[1][rows] = picked.numpy(), tempered.gather(1, picked).numpy()
