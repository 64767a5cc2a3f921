"""Dumps of token ids: prime-rl, slime, verl, AReaL and TRL; as tensors or lists, and what they log as text.

Read from the public sources of PrimeIntellect-ai/prime-rl (`trainer/rl/token_export.py`, `monitors/file.py`),
THUDM/slime (`slime/utils/types.py`, `slime/observability/rollout_data_utils.py`), verl-project/verl
(`trainer/ppo/ray_trainer.py`; the tensor names in `protocol.py` and `trainer/ppo/core_algos.py`), areal-project/AReaL
(`areal/infra/workflow_executor.py`, `areal/experimental/openai/types.py`) and huggingface/trl
(`trainer/grpo_trainer.py`). A stack is a table of its names for ours, and what it does of its own.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from treewise.base import features
from treewise.data.importers.common import (
    Context,
    experts,
    first_of,
    integers,
    kept,
    messages,
    numbers,
    objects,
    prompt_at_step,
    sampled_row,
    stream,
    token_row,
)
from treewise.data.importers.replies import text_pair
from treewise.data.importers.traces import read_verifiers
from treewise.data.io.endings import ending_of, own_reason
from treewise.data.io.field_checks import shown
from treewise.data.io.files import Placed
from treewise.data.io.forms import Record
from treewise.data.io.replies import UnusableError
from treewise.errors import DataError

# Ours: theirs, in the order in which they are looked for.
PRIME_RL = {"sampler_logprobs": ("inference_logprobs",), "advantages": ("advantages",)}
VERL = {
    "old_logprobs": ("old_log_probs",),
    "sampler_logprobs": ("rollout_log_probs",),
    "ref_logprobs": ("ref_log_probs", "ref_log_prob"),
    "advantages": ("advantages",),
}
VERL_SCORES = ("token_level_scores", "rm_scores", "token_level_rewards")
AREAL = {"sampler_logprobs": ("logprobs",), "old_logprobs": ("prox_logp",), "advantages": ("advantages",)}
TRL = {"old_logprobs": "old_per_token_logps", "ref_logprobs": "ref_per_token_logps"}
TRL_MASKS = ("env_mask", "tool_mask", "completion_mask")
OneSample = Callable[[Record, str, Context], Iterator[Record]]


def read_prime_rl(records: Iterable[Placed], context: Context) -> Iterator[Record]:
    """`token_exports/step_N/rank_R.jsonl` (`enable_token_export`), or the `traces.jsonl` that verifiers defines.

    A line of an export is one sequence with its streams, each as long as `token_ids`. It names no group and no rollout,
    and holds advantages in place of rewards.
    """
    for record in records:
        if "token_ids" in record.value:
            yield from kept(context, _prime_rl_sequence(record.value, record.location, context))
        else:
            yield from read_verifiers([record], context)


def _prime_rl_sequence(value: Record, location: str, context: Context) -> Iterator[Record]:
    ids = integers(value["token_ids"], "token_ids", location)
    weights = numbers(value.get("loss_mask"), "loss_mask", len(ids), location)
    rl_weights = value.get("rl_weights")
    if isinstance(rl_weights, list) and any(rl_weight is not None for rl_weight in rl_weights):
        factors = stream(rl_weights, "rl_weights", len(ids), location)
        for index, (weight, factor) in enumerate(zip(weights, factors, strict=True)):
            if weight and math.isnan(factor):
                raise UnusableError(f"{location}: rl_weights[{index}]", "a sampled token without its rl_weights")
            weights[index] = weight * factor if weight else 0.0
    for name in ("ce_weights", "ref_kl_weights"):
        if isinstance(value.get(name), list) and any(value[name]):
            context.warn(f"{name} (another component of prime-rl's loss) is not imported")
    routes = _routes(experts(value.get("routed_experts"), "routed_experts", len(ids), location))
    yield from token_row(context, location, ids, weights, **_streams(value, PRIME_RL, len(ids), location), **routes)


def read_slime(records: Iterable[Placed], context: Context) -> Iterator[Record]:
    """What `--save-debug-rollout-data` writes, or the same samples one per line.

    `tokens` is prompt and response; `loss_mask` and `rollout_log_probs` cover the last `response_length` tokens.
    Samples of one execution (compaction, sub-agents) share `rollout_id`.
    """
    for record in records:
        if "samples" not in record.value:
            yield from kept(context, _slime_sample(record.value, record.location, context))
            continue
        for index, sample in enumerate(objects(record.value["samples"], "samples", record.location)):
            yield from kept(context, _slime_sample(sample, f"{record.location}: samples[{index}]", context))


def _slime_sample(value: Record, location: str, context: Context) -> Iterator[Record]:
    if value.get("remove_sample"):
        context.leave_out(location, "remove_sample is set")
        return
    if isinstance(value.get("status"), str) and ending_of(value["status"]) == "unusable":
        context.leave_out(location, f"a sample that ended with {shown(value['status'])}")
        return
    if value.get("multimodal_inputs"):
        raise DataError(f"{location}: the sample has multimodal inputs, which this importer does not read.")
    ids = integers(value.get("tokens"), "tokens", location)
    length = value.get("response_length")
    if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= len(ids):
        raise DataError(f"{location}: response_length {shown(length)} does not fit {len(ids)} tokens.")
    before = len(ids) - length
    if value.get("teacher_log_probs"):
        context.warn("teacher_log_probs are not imported: compute reference log-probs with --reference")
    yield from sampled_row(
        context,
        location,
        ids[:before],
        ids[before:],
        value.get("loss_mask"),
        {"sampler_logprobs": ("rollout_log_probs", value.get("rollout_log_probs") or None)},
        **_routes(experts(value.get("rollout_routed_experts"), "rollout_routed_experts", len(ids), location)),
        group=value.get("group_index"),
        rollout=first_of(value, "rollout_id", "index"),
        reward=context.reward(value.get("reward"), location),
    )


def _tokens_or_text(
    records: Iterable[Placed], context: Context, *, ids: str, sample: OneSample, text: OneSample
) -> Iterator[Record]:
    """Dumps of verl, AReaL or TRL, each of which are tensors or rows that hold `ids`, one sample or a batch in columns,
    or else what the stack logs as text.
    """
    for record in records:
        if record.value.get(ids) is None:
            yield from kept(context, text(record.value, record.location, context))
            continue
        for each in _samples(record, ids):
            yield from kept(context, _unless_failed(sample, each, context))


def _unless_failed(sample: OneSample, each: Placed, context: Context) -> Iterator[Record]:
    reason = own_reason(each.value)
    if ending_of(reason) == "unusable":
        raise UnusableError(each.location, f"a sample that ended with {shown(reason)}")
    yield from sample(each.value, each.location, context)


def _verl_text(value: Record, location: str, context: Context) -> Iterator[Record]:
    """`trainer.rollout_data_dir`: text without special tokens, of which what was sampled cannot be had back."""
    for name in ("input", "output"):
        if not isinstance(value.get(name), str):
            raise DataError(f"{location}: {name} must be text.")
    context.warn(
        "verl's generation dump is text without special tokens: chat markers and the end token are gone, so these "
        "rows are not what was sampled; save a batch's tensors where that matters (docs/import.md)"
    )
    yield from text_pair(
        context,
        location,
        {**value, "prompt": value["input"], "completion": value["output"]},
        reward=context.reward(value if context.reward_field else value.get("score"), location),
        group=prompt_at_step(value["input"], value.get("step")),
    )


def _verl_sample(value: Record, location: str, context: Context) -> Iterator[Record]:
    """`prompts` padded on the left, `responses` on the right, `attention_mask` over both, `response_mask` (1 where the
    model sampled) and the log-probs over the response.
    """
    prompt = integers(value["prompts"], "prompts", location)
    response = integers(value["responses"], "responses", location)
    width, before = len(prompt) + len(response), len(prompt)
    if value.get("attention_mask") is None:
        if value.get("response_mask") is None:
            raise DataError(
                f"{location}: neither attention_mask nor response_mask, so padding cannot be distinguished from tokens."
            )
        seen = [1.0] * width
    else:
        seen = numbers(value["attention_mask"], "attention_mask", width, location)
    mask = seen[before:]
    if value.get("response_mask") is not None:
        sampled = numbers(value["response_mask"], "response_mask", len(response), location)
        mask = [each * own for each, own in zip(sampled, mask, strict=True)]
    if context.reward_field is not None and context.reward_field not in VERL_SCORES:
        reward = context.reward(value, location)
    else:  # scores are spread over the response, and summed as verl itself sums them
        known = (context.reward_field,) if context.reward_field else VERL_SCORES
        name = next((each for each in known if value.get(each) is not None), None)
        reward = None if name is None else sum(numbers(value[name], name, len(response), location))
    streams, ids = _streams(value, VERL, len(response), location, before), [*prompt, *response]
    weights, routes = [0.0] * before + mask, experts(value.get("routed_experts"), "routed_experts", width, location)
    kept = [position for position in range(width) if seen[position]]
    labels = {"group": value.get("uid"), "reward": reward, **_routes(None if routes is None else routes[kept])}
    yield from _unpadded_row(context, location, seen, ids, weights, streams, **labels)


def _areal_sample(value: Record, location: str, context: Context) -> Iterator[Record]:
    """`input_ids`, `attention_mask`, `loss_mask` (1 where the model sampled), `logprobs` at the token that they belong
    to, and one reward per sequence.
    """
    ids = integers(value["input_ids"], "input_ids", location)
    mask = value.get("attention_mask")
    seen = [1.0] * len(ids) if mask is None else numbers(mask, "attention_mask", len(ids), location)
    if value.get("loss_mask") is None:
        raise DataError(f"{location}: no loss_mask, so the sampled tokens are not known.")
    weights = numbers(value["loss_mask"], "loss_mask", len(ids), location)
    reward = value.get("rewards", value.get("reward"))
    reward = reward[0] if isinstance(reward, list) and len(reward) == 1 else reward
    streams = _streams(value, AREAL, len(ids), location)
    yield from _unpadded_row(context, location, seen, ids, weights, streams, reward=context.reward(reward, location))


def _areal_text(value: Record, location: str, context: Context) -> Iterator[Record]:
    """`rollout.dump_to_file`: text with special tokens and the number of tokens of each part, so tokenising it can be
    checked by length.
    """
    if context.tokenizer is None:
        raise DataError(f"{location}: AReaL's dump is text; name the policy's tokenizer with --tokenizer.")
    ids: list[int] = []
    weights: list[float] = []
    drifted = False
    parts: list[tuple[str, Any, Any]]
    if value.get("segments"):
        segments = objects(value["segments"], "segments", location)
        parts = [(str(part.get("role")), str(part.get("text")), part.get("len")) for part in segments]
    else:
        seqlen, prompt_len = value.get("seqlen"), value.get("prompt_len")
        if not isinstance(seqlen, int) or not isinstance(prompt_len, int):
            raise DataError(f"{location}: seqlen and prompt_len must be integers.")
        parts = [("prompt", value.get("prompt"), prompt_len), ("gen", value.get("completion"), seqlen - prompt_len)]
    for role, text, length in parts:
        if not isinstance(text, str):
            raise DataError(f"{location}: prompt and completion must be text.")
        own = context.tokenizer(text, add_special_tokens=False)["input_ids"]
        drifted |= len(own) != length
        ids += own
        weights += [float(role == "gen")] * len(own)
    if drifted:
        context.warn("text that gives another number of tokens than was sampled (retokenisation drift)")
    reward = context.reward(value if context.reward_field else value.get("reward"), location)
    yield from token_row(context, location, ids, weights, group=value.get("task_id"), reward=reward)


def _trl_text(value: Record, location: str, context: Context) -> Iterator[Record]:
    """`completions/completions_N.parquet` (`prompt`, `completion`, one column per reward function, `advantage`)."""
    for name in ("prompt", "completion"):
        if not isinstance(value.get(name), str):
            messages(value.get(name), f"where it is no text, {name}", location)
    context.warn(
        "TRL's logged completions are text without special tokens; they are tokenised anew, with an end token added"
    )
    labels = _trl_labels(value, location, context)
    if labels["group"] is None:
        labels["group"] = prompt_at_step(value["prompt"], value.get("step"))
    yield from text_pair(context, location, value, **labels)


def _trl_sample(value: Record, location: str, context: Context) -> Iterator[Record]:
    """What a `rollout_func` returns: `prompt_ids`, `completion_ids`, `logprobs`, optional `env_mask`."""
    prompt = integers(value.get("prompt_ids"), "prompt_ids", location)
    completion = integers(value.get("completion_ids"), "completion_ids", location)
    streams = {ours: (theirs, value.get(theirs)) for ours, theirs in TRL.items()}
    streams["sampler_logprobs"] = ("logprobs", _trl_logprobs(value, completion, location) or None)
    labels = _trl_labels(value, location, context)
    if isinstance(labels["advantages"], list):
        streams["advantages"] = ("advantages", labels.pop("advantages"))
    mask = first_of(value, *TRL_MASKS)
    yield from sampled_row(context, location, prompt, completion, mask, streams, **labels)


def _trl_logprobs(value: Record, completion: list[int], location: str) -> object:
    """Log-probs of the sampled tokens, out of several per token where the engine gave its top k."""
    logprobs, names = value.get("logprobs"), value.get("logprob_token_ids")
    if not (isinstance(logprobs, list) and logprobs and isinstance(logprobs[0], list)):
        return logprobs
    if not isinstance(names, list) or len(names) != len(logprobs) or len(logprobs) != len(completion):
        raise DataError(f"{location}: several logprobs per token need logprob_token_ids of the same shape.")
    matched = []
    for position, (token, own, top_logprobs) in enumerate(zip(completion, names, logprobs, strict=True)):
        if not isinstance(own, list) or not isinstance(top_logprobs, list) or len(own) != len(top_logprobs):
            raise DataError(f"{location}: logprobs[{position}] and logprob_token_ids[{position}] differ in length.")
        if token not in own:
            raise DataError(f"{location}: token {position} ({token}) is not among its logprob_token_ids.")
        matched.append(top_logprobs[own.index(token)])
    return matched


def _trl_labels(value: Record, location: str, context: Context) -> Record:
    reward = value if context.reward_field else first_of(value, "reward", "rewards")
    if isinstance(reward, list) and len(reward) == 1:
        reward = reward[0]
    if isinstance(reward, list):
        raise DataError(f"{location}: {len(reward)} rewards; give one per sample, or a mapping and --reward NAME.")
    advantage = first_of(value, "advantage", "advantages")
    if not isinstance(advantage, list):
        advantage = context.reward(advantage, f"{location}: advantage")
    labels = {name: value.get(name) for name in ("group", "rollout")}
    return {"reward": context.reward(reward, location), "advantages": advantage, **labels}


read_verl = partial(_tokens_or_text, ids="responses", sample=_verl_sample, text=_verl_text)
read_areal = partial(_tokens_or_text, ids="input_ids", sample=_areal_sample, text=_areal_text)
read_trl = partial(_tokens_or_text, ids="completion_ids", sample=_trl_sample, text=_trl_text)


# -- what they share --------------------------------------------------------------------------------------------------


def _samples(record: Placed, name: str) -> Iterator[Placed]:
    """The samples of a batch in columns, each as a record of its own; another record as it is. name: its token ids."""
    value, location = record.value, record.location
    ids = value[name]
    if not (isinstance(ids, list) and ids and isinstance(ids[0], list)):
        yield record
        return
    for other, column in value.items():
        if isinstance(column, list) and len(column) != len(ids):
            raise DataError(f"{location}: {len(column)} {other} for {len(ids)} {name}.")
    for index in range(len(ids)):
        one = {other: column[index] if isinstance(column, list) else column for other, column in value.items()}
        yield Placed(f"{location}: sample {index}", one)


def _streams(
    value: Record, names: Mapping[str, tuple[str, ...]], length: int, location: str, before: int = 0
) -> dict[str, list[float]]:
    """The streams that a record has, under our names. before: tokens of the prompt, which theirs do not cover."""
    streams = {}
    for ours, several in names.items():
        theirs = next((name for name in several if value.get(name) is not None), None)
        if theirs is not None:
            streams[ours] = [0.0] * before + stream(value[theirs], theirs, length, location)
    return streams


def _routes(table: np.ndarray | None) -> Record:
    return {} if table is None else {"routed_experts": features.encoded_arrays.encoded(table)}


def _unpadded_row(
    context: Context,
    location: str,
    seen: list[float],
    ids: list[int],
    weights: list[float],
    streams: dict[str, list[float]],
    **labels: object,
) -> Iterator[Record]:
    """A row of the tokens that are seen: the others are padding."""
    kept = [position for position in range(len(ids)) if seen[position]]
    own = {name: [values[position] for position in kept] for name, values in streams.items()}
    yield from token_row(context, location, [ids[i] for i in kept], [weights[i] for i in kept], **own, **labels)
