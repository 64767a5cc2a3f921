"""What a server is asked for one continuation, and what is made of its answer: pure functions.

`POST /v1/completions` with the prompt as token ids and two fields that vLLM added: the answer's ids
(`return_token_ids`) and log-probs keyed by id (`return_tokens_as_token_ids`). Run against vLLM 0.32 (tests/engines).

A server returns no entropies. Where they are asked for, its most likely log-probs give a lower bound (`entropy_bound`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

import numpy as np

from treewise.base import features
from treewise.data.io.field_checks import shown
from treewise.errors import ConfigError, RequestRefusedError, SamplerError
from treewise.rl.samplers.draw import can_be_drawn, stream_key
from treewise.rl.samplers.protocol import Completion, SampleRequest, TextStops

MAX_EXPERT = np.iinfo(np.int16).max
LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")

Tops = Sequence[dict[int, float]]


class _Logprobs(TypedDict, total=False):
    tokens: list[object]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]] | None


class _Choice(TypedDict, total=False):
    logprobs: _Logprobs
    prompt_logprobs: list[dict[str, dict[str, float]]]
    token_ids: list[int | None] | None
    finish_reason: str
    stop_reason: object
    routed_experts: object


class ServerAnswer(TypedDict, total=False):
    """The JSON of a server, as far as it is read; what is missing or of another form is found where it is read."""

    choices: list[_Choice]
    prompt_routed_experts: object


def refuse_unanswerable(request: SampleRequest, logprobs_mode: str) -> None:
    """Checks that what a request asks for can be had from a server's log-probs.

    Raises:
        ConfigError: the server's log-probs are not those of logits / temperature, or are those after the cuts; a prompt
            with images, which this protocol does not carry as token ids.
    """
    if request.images:
        raise ConfigError("a prompt with images is sampled by the model in this process: sampler transformers.")
    if logprobs_mode == "processed_logprobs" and request.truncates:
        raise ConfigError(
            f"the server's processed log-probs are those after top_p={request.top_p} and top_k={request.top_k}, which "
            "training cannot compare; sample with top_p=1 and top_k=0, or at temperature 1 with raw_logprobs."
        )
    rules = request.rules if isinstance(request, TextStops) else None
    if rules is not None and not rules.is_plain:
        raise ConfigError(
            "a server is asked for a reply of a schema alone: give tool_choice none beside it, and a chat template "
            "that opens no thought."
        )
    if rules is not None and (request.temperature not in (0.0, 1.0) or request.num_top):
        raise ConfigError(
            "a server's log-probs under a grammar are not the policy's, so they are asked for again, which it gives at "
            "temperature 1 and of the reply's own tokens alone (no top_logprobs)."
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


def question(request: SampleRequest, continuation: int, model: str, num_top: int) -> dict[str, Any]:
    """The JSON of one continuation. model: the name of the model, or of the adapter on it."""
    return {
        "model": model,
        "prompt": list(request.prefix_ids),
        "n": 1,
        "max_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k or -1,
        "seed": stream_key(request.seed, continuation, 0) & 0x7FFFFFFF,  # 31 bits
        "stop_token_ids": list(request.stop_ids),
        "ignore_eos": True,  # the request alone says where to stop
        "skip_special_tokens": False,
        "logprobs": num_top,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **_constrained(request),
        **({"stop": list(request.stop_texts)} if isinstance(request, TextStops) and request.stop_texts else {}),
    }


def _constrained(request: SampleRequest) -> dict[str, Any]:
    rules = request.rules if isinstance(request, TextStops) else None
    return {} if rules is None else {"structured_outputs": {"json": rules.schema}}  # vLLM 0.11 and later


def question_of_scores(request: SampleRequest, completion: Completion, model: str) -> dict[str, Any]:
    """The JSON that asks for the log-probs of a reply without a grammar, as the policy has them: those of a prompt."""
    return question_of_prompt([*request.prefix_ids, *completion.token_ids.tolist()], model)


def question_of_prompt(ids: Sequence[int], model: str) -> dict[str, Any]:
    """The JSON that asks for the log-probs of a prompt's tokens."""
    return {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 1}


def scored(answer: ServerAnswer, request: SampleRequest, completion: Completion, location: str) -> Completion:
    """A completion with the log-probs of an answer to `question_of_scores`. Raises `RequestRefusedError`."""
    ids = [*request.prefix_ids, *completion.token_ids.tolist()]
    try:
        values = prompt_logprobs(answer, ids, location)[len(request.prefix_ids) - 1 :]
    except RequestRefusedError as error:
        raise RequestRefusedError(
            f"{error}, without which those of a reply under a schema are not the policy's."
        ) from None
    return replace(completion, logprobs=values.astype(np.float32))


def prompt_logprobs(answer: ServerAnswer, ids: Sequence[int], location: str) -> np.ndarray:
    """float64, of every token but the first, out of an answer to `question_of_prompt`. Raises `RequestRefusedError`."""
    try:
        entries = answer["choices"][0]["prompt_logprobs"][1 : len(ids)]
        values = [entry[str(token)]["logprob"] for entry, token in zip(entries, ids[1:], strict=True)]
    except (KeyError, IndexError, TypeError, ValueError):
        raise RequestRefusedError(f"{location}: the server scores no prompts (prompt_logprobs)") from None
    return np.array(values)


def _parsed(answer: ServerAnswer, num_top: int, location: str) -> tuple[list[int], list[float | None], Tops | None]:
    try:
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]
        names = logprobs["tokens"]
        values = logprobs["token_logprobs"]
    except (KeyError, IndexError, TypeError):
        raise SamplerError(
            f"{location}: the answer has no choices[0].logprobs with tokens and token_logprobs; the server must return "
            "the log-prob of every sampled token."
        ) from None
    found = choice.get("token_ids")
    if found is None:
        found = [_token_id(name) for name in names]
    ids = [token for token in found if token is not None]
    if len(ids) < len(found):
        raise SamplerError(
            f"{location}: the server returns text and no token ids, and text cannot be tokenised back exactly; use one "
            "that honours return_token_ids (vLLM 0.10.2 or later) or return_tokens_as_token_ids."
        )
    listed = logprobs.get("top_logprobs")
    if not num_top or not listed:
        return ids, values, None
    named = [{_token_id(name): value for name, value in top.items()} for top in listed]
    tops = [{token: value for token, value in top.items() if token is not None} for top in named]
    if any(None in top for top in named):
        raise SamplerError(f"{location}: top_logprobs are keyed by text; return_tokens_as_token_ids is not honoured.")
    return ids, values, tops


def _token_id(name: object) -> int | None:
    digits = str(name).removeprefix("token_id:")
    return int(digits) if str(name).startswith("token_id:") and digits.isdigit() else None


def answered(answer: ServerAnswer, request: SampleRequest, num_top: int, location: str) -> Completion:
    """A completion from the JSON of a server, cut after the first stop condition.

    Raises:
        SamplerError: fields are missing, as from any answer of this server (the message says which and what to start it
            with). RequestRefusedError: of this answer alone: no tokens, other counts of ids and log-probs, a log-prob
            that is not a number, or fewer of them than were asked for.
    """
    token_ids, logprobs, tops = _parsed(answer, num_top, location)
    if not token_ids:
        raise RequestRefusedError(
            f"{location}: the server returned no tokens for a request of up to {request.max_new_tokens}."
        )
    if len(token_ids) != len(logprobs):
        raise RequestRefusedError(
            f"{location}: the server returned {len(token_ids)} token ids and {len(logprobs)} log-probs."
        )
    ids = list(token_ids[: request.max_new_tokens])
    size = next((i for i in range(1, len(ids) + 1) if request.is_ended(ids[:i])), len(ids))
    ids = ids[:size]
    values = np.array([np.nan if value is None else value for value in logprobs[:size]], dtype=np.float32)
    if not np.isfinite(values).all():
        raise RequestRefusedError(f"{location}: log-prob {int(np.argmin(np.isfinite(values)))} is not a number.")
    is_stopped = request.is_ended(ids) or (size == len(token_ids) and _is_stopped_by_text(answer, request))
    if not is_stopped and size < request.max_new_tokens:
        raise RequestRefusedError(
            f"{location}: the server ended after {size} of {request.max_new_tokens} tokens with id {ids[-1]}, which is "
            "no stop id of the request; add it to stop_ids, or raise the server's length limit."
        )
    routes = None
    if request.want_routes:
        routes = _routes(answer, len(request.prefix_ids), len(token_ids), location)[: len(request.prefix_ids) + size]
    top_ids = top_logprobs = entropies = None
    if num_top:
        top_ids, top_logprobs = _most_likely(tops, num_top, size, location)
        entropies = entropy_bound(top_logprobs) if request.want_entropy else None
        top_ids, top_logprobs = top_ids[:, : request.num_top], top_logprobs[:, : request.num_top]
        can_be = can_be_drawn(request, top_logprobs)
        top_logprobs = np.where(can_be, top_logprobs, -np.inf).astype(np.float32)
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=values,
        finish_reason="stop" if is_stopped else "length",
        num_beyond=len(token_ids) - size,
        entropies=entropies,
        top_ids=top_ids if request.num_top else None,
        top_logprobs=top_logprobs if request.num_top else None,
        routed_experts=routes,
    )


def _is_stopped_by_text(answer: ServerAnswer, request: SampleRequest) -> bool:
    """Whether the server says that one of the request's texts ended it; it may decode ids otherwise than we do."""
    choice = answer["choices"][0]
    stops = request.stop_texts if isinstance(request, TextStops) else ()
    return choice.get("finish_reason") == "stop" and choice.get("stop_reason") in stops


def _routes(answer: ServerAnswer, num_prefix: int, num_sampled: int, location: str) -> np.ndarray:
    """int16 [prefix and completion, or without the last token, L, k], the experts that vLLM returns: of a completion in
    `choices[0].routed_experts`, of its prompt beside the choices in `prompt_routed_experts`; older ones of both in the
    former.
    """
    choice = answer["choices"][0]
    values = [answer.get("prompt_routed_experts"), choice.get("routed_experts")]
    decoded = partial(features.encoded_arrays.decoded, name="routed_experts", location=location)
    try:
        given = [decoded(value, num_rows=num_prefix + num_sampled) for value in values if value is not None]
        parts = [np.asarray(value) for value in given]
    except (ValueError, OverflowError) as error:  # tables of several sizes, and errors of what is encoded
        raise SamplerError(f"{location}: routed_experts cannot be read ({shown(str(error), 200)}).") from None
    if not parts or any(part.ndim != 3 or part.dtype.kind not in "iu" for part in parts):
        raise SamplerError(
            f"{location}: the answer holds no experts of its tokens (choices[0].routed_experts); start vLLM with "
            "--enable-return-routed-experts, or set routing_replay=off."
        )
    if len({part.shape[1:] for part in parts}) > 1 or max(part.max(initial=0) for part in parts) > MAX_EXPERT:
        raise SamplerError(
            f"{location}: routed_experts of shapes {' and '.join(str(part.shape) for part in parts)}, with experts up "
            f"to {max(part.max(initial=0) for part in parts)}, are none of one model."
        )
    table = np.sort(np.concatenate(parts), axis=-1).astype(np.int16)
    if num_prefix + num_sampled - len(table) not in (0, 1):
        raise RequestRefusedError(
            f"{location}: the server returned the experts of {len(table)} tokens, for a prefix of {num_prefix} and "
            f"{num_sampled} sampled ones."
        )
    return table


def entropy_bound(top_logprobs: np.ndarray) -> np.ndarray:
    """float32 [T], the least entropy, in nats, that a distribution with these most likely log-probs, [T, k] and most
    likely first, can have. Exact where they are the whole vocabulary; else what is left, of mass r, counts as if each
    of its tokens were as likely as the last of the k (or as r, where that is less), and the entropy is larger by at
    most r log(tokens left x that likelihood / r).
    """
    logprobs = top_logprobs.astype(np.float64)
    masses = np.exp(logprobs)
    rest = np.clip(1.0 - masses.sum(1), 0.0, 1.0)
    likeliest = np.minimum(rest, masses[:, -1])
    own = -(masses * np.where(masses > 0, logprobs, 0.0)).sum(1)
    tail = -rest * np.log(np.where(likeliest > 0, likeliest, 1.0))
    return (own + tail).astype(np.float32)


def _most_likely(tops: Tops | None, num_top: int, size: int, location: str) -> tuple[np.ndarray, np.ndarray]:
    """int32 and float32 [T, num_top], most likely first."""
    if tops is None or len(tops) < size or any(len(top) < num_top for top in tops[:size]):
        raise RequestRefusedError(
            f"{location}: the server gave fewer than {num_top} log-probs a token; raise its --max-logprobs, or ask for "
            "fewer (num_candidates, sampler_settings.num_entropy_top)."
        )
    ordered = [sorted(top.items(), key=lambda item: (-item[1], item[0]))[:num_top] for top in tops[:size]]
    ids = [[token for token, _ in top] for top in ordered]
    values = np.array([[value for _, value in top] for top in ordered], dtype=np.float32)
    return np.array(ids, dtype=np.int32), values
