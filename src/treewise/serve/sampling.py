"""Continuations and log-probs of prompts, as a client asks for them."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tinker import types

from treewise.errors import DataError
from treewise.rl.samplers.prompt_scores import PromptRequest, prompt_scores
from treewise.rl.samplers.protocol import Completion, SampleRequest, TextStops
from treewise.serve.adapter_slots import OwnedWeights
from treewise.serve.weights import ServedModel
from treewise.serve.wire import check_cells, check_ids, dense, read_prompt, sample_answer

if TYPE_CHECKING:
    from tinker.types._pydantic_types.tensor_data import TensorData as SentTensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """A checked request. asked: of the SDK's type. prompt: the log-probs of the prompt that are wanted; None: none."""

    asked: types.SampleRequest
    rules: SampleRequest
    prompt: PromptRequest | None


def read_request(
    asked: types.SampleRequest, name: str, model: ServedModel, is_cancelled: Callable[[], bool] = bool
) -> Sampling:
    """Checks a request of the SDK's type `SampleRequest`. name: of the request, from which its seed follows where it
    has none. Raises `DataError`."""
    ids, images = read_prompt(asked.prompt.chunks, model, "prompt")
    prompt, params, last = ids.astype(np.int64), asked.sampling_params, asked.prompt_logprobs_last_n
    room = min(model.settings.max_sample_tokens, (model.max_length or sys.maxsize) - len(prompt))
    wanted = room if params.max_tokens is None else params.max_tokens
    for what, value, low, high in (
        ("max_tokens", wanted, 1, room),
        ("topk_sample_logprobs", asked.topk_sample_logprobs, 0, model.vocabulary),
        ("topk_prompt_logprobs", asked.topk_prompt_logprobs, 0, model.vocabulary),
        ("prompt_alt_tokens_k", asked.prompt_alt_tokens_k, 0, model.vocabulary),
        ("prompt_logprobs_last_n", last, 1, len(prompt) - 1 if asked.prompt_logprobs else 0),
    ):
        if value is not None and not low <= value <= high:
            raise DataError(f"{what}={value} with a prompt of {len(prompt)} tokens must be {low} to {high}.")
    tables = asked.topk_prompt_logprobs + asked.prompt_alt_tokens_k
    check_cells([len(prompt) * tables, asked.num_samples * wanted * asked.topk_sample_logprobs])
    stop_ids, texts = _stops(params.stop, model)
    seed = model.settings.seed_of(name) if params.seed is None else params.seed
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
    targets = _targets(asked.target_prompt_logprobs, len(prompt), model.vocabulary)
    if not (asked.prompt_logprobs or tables or asked.target_prompt_logprobs is not None):
        return Sampling(asked, rules, None)
    numbers = asked.topk_prompt_logprobs, last, asked.prompt_alt_tokens_k
    scored = PromptRequest(prompt, targets, *numbers, params.temperature, seed & (2**63 - 1), images)
    return Sampling(asked, rules, scored)


def _stops(
    stop: str | Sequence[str] | Sequence[int] | None, model: ServedModel
) -> tuple[tuple[int, ...], tuple[str, ...]]:
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


def _targets(given: "SentTensor | None", length: int, vocabulary: int) -> np.ndarray:
    """[length - 1, K] int64, the tokens whose log-probs are asked for; -1 where there is none."""
    if given is None:
        return np.zeros((length - 1, 0), dtype=np.int64)
    what, is_sparse = "target_prompt_logprobs", given.sparse_crow_indices is not None
    check_cells([abs(math.prod(given.shape or ()))] if is_sparse else [])
    targets = dense(given, what, fill=-1)
    if targets.ndim != 2 or len(targets) != length - 1 or targets.dtype.kind != "i":
        raise DataError(f"{what} has shape {targets.shape} for {length} tokens.")
    check_ids(targets[targets != -1], vocabulary, what)
    return targets


def answers(
    model: ServedModel, weights: OwnedWeights | None, requests: Sequence[Sampling]
) -> list[tuple[bytes, tuple[Completion, ...]]]:
    """What clients get, in order, and the completions in it. Prompts that share a beginning are computed once."""
    weights = weights or model.blank
    with model.using(weights):
        completions = model.sampler_of(weights).sample([request.rules for request in requests])
        found = iter(
            prompt_scores(model.engine, [request.prompt for request in requests if request.prompt is not None])
        )
    return [
        (sample_answer(request.asked, own, {} if request.prompt is None else next(found)), own)
        for own, request in zip(completions, requests, strict=True)
    ]
