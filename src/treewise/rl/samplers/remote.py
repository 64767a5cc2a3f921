"""What samplers on servers share: one call per continuation, answers checked and cut at the stop conditions."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from treewise.errors import ConfigError, SamplerError
from treewise.rl.samplers.draw import stream_key
from treewise.rl.samplers.protocol import Completion, SampleRequest

LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")


def refuse_unanswerable(request: SampleRequest, logprobs_mode: str) -> None:
    """Checks that what a request asks for can be had from a server's log-probs.

    Raises:
        ConfigError: entropies are wanted, or the server's log-probs are not those of logits / temperature.
    """
    if request.want_entropy:
        raise ConfigError(
            "servers return no entropies; leave want_entropy off (branch on log-probs), or use TransformersSampler."
        )
    if logprobs_mode == "processed_logprobs" and request.truncates:
        raise ConfigError(
            f"the server's processed log-probs are those after top_p={request.top_p} and top_k={request.top_k}, which "
            "training cannot compare; sample with top_p=1 and top_k=0, or at temperature 1 with raw_logprobs."
        )
    if request.num_top < request.top_k and request.num_top and request.top_p < 1:
        raise ConfigError(
            f"num_top={request.num_top} of top_k={request.top_k} log-probs do not tell what top_p={request.top_p} "
            "leaves; ask for num_top (num_candidates of an online run) of at least top_k, or leave one of the cuts out."
        )
    if logprobs_mode == "raw_logprobs" and request.temperature not in (0.0, 1.0):
        raise ConfigError(
            f"the server's raw log-probs are those of temperature 1, and the request has {request.temperature}; "
            "start the server with --logprobs-mode processed_logprobs."
        )


def server_seed(request: SampleRequest, continuation: int) -> int:
    """The seed of one continuation, 31 bits: servers take one seed per call."""
    return stream_key(request.seed, continuation, 0) & 0x7FFFFFFF


def sample_each(
    requests: Sequence[SampleRequest], call: Callable[[SampleRequest, int], Completion], max_concurrent: int
) -> list[tuple[Completion, ...]]:
    """Calls once for every continuation, several at a time; completions in the order of requests."""
    jobs = [(request, request.first_continuation + i) for request in requests for i in range(request.num_continuations)]
    if not jobs:
        return []
    with ThreadPoolExecutor(max_workers=min(max_concurrent, len(jobs))) as executor:
        flat = iter(list(executor.map(lambda job: call(*job), jobs)))
    return [tuple(next(flat) for _ in range(request.num_continuations)) for request in requests]


def checked_completion(
    request: SampleRequest,
    continuation: int,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[dict[int, float]] | None,
    location: str,
) -> Completion:
    """A completion of what a server answered, cut after the first stop condition.

    Raises:
        SamplerError: no tokens, other counts of ids and log-probs, or a log-prob that is not a number.
    """
    if not token_ids:
        raise SamplerError(
            f"{location}: the server returned no tokens for a request of up to {request.max_new_tokens}."
        )
    if len(token_ids) != len(logprobs):
        raise SamplerError(f"{location}: the server returned {len(token_ids)} token ids and {len(logprobs)} log-probs.")
    ids = list(token_ids[: request.max_new_tokens])
    size = next((i for i in range(1, len(ids) + 1) if request.is_stopped(ids[:i])), len(ids))
    ids = ids[:size]
    values = np.array([np.nan if value is None else value for value in logprobs[:size]], dtype=np.float32)
    if not np.isfinite(values).all():
        raise SamplerError(f"{location}: log-prob {int(np.argmin(np.isfinite(values)))} is not a number.")
    if not request.is_stopped(ids) and size < request.max_new_tokens:
        raise SamplerError(
            f"{location}: the server ended after {size} of {request.max_new_tokens} tokens with id {ids[-1]}, which is "
            "no stop id of the request; add it to stop_ids, or raise the server's length limit."
        )
    top_ids, top_logprobs = _tops(request, tops, size, location)
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=values,
        finish_reason="stop" if request.is_stopped(ids) else "length",
        continuation=continuation,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _tops(
    request: SampleRequest, tops: Sequence[dict[int, float]] | None, size: int, location: str
) -> tuple[np.ndarray | None, np.ndarray | None]:
    if not request.num_top:
        return None, None
    if tops is None or any(len(top) < request.num_top for top in tops[:size]):
        raise SamplerError(
            f"{location}: the server gave fewer than {request.num_top} log-probs a token; raise its --max-logprobs."
        )
    ordered = [sorted(top.items(), key=lambda item: -item[1])[: request.num_top] for top in tops[:size]]
    ids: list[list[Any]] = [[token for token, _ in top] for top in ordered]
    values = np.array([[value for _, value in top] for top in ordered], dtype=np.float32)
    return np.array(ids, dtype=np.int32), np.where(can_be_drawn(request, values), values, -np.inf).astype(np.float32)


def can_be_drawn(request: SampleRequest, values: np.ndarray) -> np.ndarray:
    """[T, k] bool, which of the most likely log-probs, ordered, are left by the request's cuts."""
    rank = np.arange(values.shape[1])
    if request.temperature == 0:
        return np.broadcast_to(rank == 0, values.shape)
    masses = np.exp(values.astype(np.float64))
    is_left = np.broadcast_to(rank < (request.top_k or len(rank)), values.shape)
    total = (masses * is_left).sum(1, keepdims=True) if request.top_k else 1.0
    return is_left & ((masses.cumsum(1) - masses) / total < request.top_p)
