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
from treewise.serve.losses import Row
from treewise.serve.weights import ServedModel, Weights
from treewise.serve.wire import PromptScores, check_cells, check_ids, from_csr, prompt_ids, sample_answer
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
    """A checked request. asked: of the SDK's type. rules: None where only the prompt is scored."""

    asked: Any
    prompt: np.ndarray
    rules: SampleRequest
    row: Row | None
    num_targets: int


def read_request(asked: Any, name: str, model: ServedModel, is_cancelled: Callable[[], bool] = bool) -> Sampling:
    """Checks a request of the SDK's type `SampleRequest`. name: of the request, from which its seed follows where it
    has none. Raises `DataError`."""
    prompt = prompt_ids(asked.prompt.chunks, model.vocabulary)
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
        stop_texts=texts,
        decode=str if model.tokenizer is None else model.tokenizer.decode,
        is_cancelled=is_cancelled,
    )
    row, num_targets = _row(asked, prompt, model.vocabulary)
    return Sampling(asked, prompt, rules, row, num_targets)


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


def _row(asked: Any, prompt: np.ndarray, vocabulary: int) -> tuple[Row | None, int]:
    """The prompt's own tokens as targets, and beside them those that were asked for."""
    columns = []
    if asked.prompt_logprobs:
        own = prompt[1:, None].copy()
        if asked.prompt_logprobs_last_n:
            own[: -asked.prompt_logprobs_last_n] = -1
        columns.append(own)
    given = asked.target_prompt_logprobs
    if given is not None:
        if given.sparse_crow_indices is None:
            targets = given.to_numpy()
        else:  # not by the SDK, which does not check the indices
            shape, what = tuple(given.shape or ()), "target_prompt_logprobs"
            check_cells([abs(math.prod(shape))])
            ends, inner = (np.array(each or ()) for each in (given.sparse_crow_indices, given.sparse_col_indices))
            targets = from_csr(shape, ends, inner, np.array(given.data), what, fill=-1)
        if targets.ndim != 2 or len(targets) != len(prompt) - 1 or targets.dtype.kind != "i":
            raise DataError(f"target_prompt_logprobs has shape {targets.shape} for {len(prompt)} tokens.")
        check_ids(targets[targets != -1], vocabulary, "target_prompt_logprobs")
        columns.append(targets)
    if not columns or len(prompt) < 2:
        return None, 0
    wide = np.concatenate(columns, axis=1).astype(np.int64)
    row = Row(prompt.astype(np.int32), wide, "cross_entropy", {"weights": np.zeros(wide.shape)}, wide.shape)
    return row if (wide >= 0).any() else None, 0 if given is None else columns[-1].shape[1]


def answers(
    model: ServedModel, weights: Weights | None, requests: Sequence[Sampling]
) -> list[tuple[bytes, tuple[Completion, ...]]]:
    """What clients get, in order, and the completions in it. Prompts that share a beginning are computed once."""
    with model.using(weights):
        completions = model.sampler.sample([each.rules for each in requests])
    logprobs = iter(_logprobs(model, weights, [each.row for each in requests if each.row is not None]))
    found = []
    for each, own in zip(requests, completions, strict=True):
        scores = _scores(each, next(logprobs) if each.row is not None else None)
        if each.asked.topk_prompt_logprobs or each.asked.prompt_alt_tokens_k:
            _score_whole(model, weights, each, scores)
        found.append((sample_answer(own, scores), own))
    return found


def _logprobs(model: ServedModel, weights: Weights | None, rows: Sequence[Row]) -> list[np.ndarray]:
    """[n - 1, columns] of each row."""
    if not rows:
        return []
    loss, _ = model.compute(weights, rows, gradients=False)
    parts = np.split(loss.logprobs, loss.bounds[1:-1])
    return [part.reshape(row.targets.shape) for part, row in zip(parts, rows, strict=True)]


def _scores(each: Sampling, logprobs: np.ndarray | None) -> PromptScores:
    scores, length = PromptScores(), len(each.prompt)
    if each.asked.prompt_logprobs:
        scores.logprobs = np.full(length, np.nan)
        if logprobs is not None and each.row is not None:
            scores.logprobs[1:] = np.where(each.row.targets[:, 0] >= 0, logprobs[:, 0], np.nan)
    if each.asked.target_prompt_logprobs is not None:
        width = each.num_targets
        scores.targets = np.zeros((max(length - 1, 0), width)) if logprobs is None else logprobs[:, -width:]
    return scores


def _score_whole(model: ServedModel, weights: Weights | None, each: Sampling, scores: PromptScores) -> None:
    """What needs the whole distribution after each token of a prompt."""
    top, num_drawn, length = each.asked.topk_prompt_logprobs, each.asked.prompt_alt_tokens_k, len(each.prompt)
    ids, logprobs = np.zeros((length, top), dtype=np.int64), np.full((length, top), -np.inf)
    drawn, drawn_logprobs = np.zeros((length - 1, num_drawn), dtype=np.int64), np.zeros((length - 1, num_drawn))
    skipped = length - 1 - (each.asked.prompt_logprobs_last_n or length - 1)
    generator = torch.Generator().manual_seed(each.rules.seed & (2**63 - 1))
    if length > 1:
        with model.using(weights), sampling_mode(model.model):
            hidden = model.engine.hidden_states(Forest.from_trajectories([Trajectory(each.prompt)]))[0]
            head = model.engine.lm.head()
            for low in range(0, length - 1, _ROWS_AT_ONCE):
                rows = slice(low, min(low + _ROWS_AT_ONCE, length - 1))
                logits = head.logits(hidden[rows]).float().cpu()
                if top:
                    best = torch.log_softmax(logits, -1).topk(top, dim=-1)
                    after = slice(rows.start + 1, rows.stop + 1)
                    ids[after], logprobs[after] = best.indices.numpy(), best.values.numpy()
                if num_drawn:
                    tempered = torch.log_softmax(logits / (each.rules.temperature or 1.0), -1)
                    picked = torch.multinomial(tempered.exp(), num_drawn, replacement=True, generator=generator)
                    drawn[rows], drawn_logprobs[rows] = picked.numpy(), tempered.gather(1, picked).numpy()
    if top:
        logprobs[: skipped + 1] = -np.inf
        scores.top = ids, logprobs
    if num_drawn:
        scores.drawn = drawn, drawn_logprobs
