"""TRL: prompts, completions and rewards, with token ids or as text.

Read from the public sources of huggingface/trl (`trainer/grpo_trainer.py`): what a `rollout_func` returns
(`prompt_ids`, `completion_ids`, `logprobs`, optional `env_mask`), one sample per line or in columns; and the logged
`completions/completions_N.parquet` (`prompt`, `completion`, one column per reward function, `advantage`), which is
text without special tokens.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from treewise.data.importers.common import (
    Context,
    Placed,
    Record,
    first_of,
    integers,
    messages,
    numbers,
    prompt_at_step,
    text_row,
    token_row,
)
from treewise.errors import DataError

MASKS = ("env_mask", "tool_mask", "completion_mask")
REWARDS = ("reward", "rewards")
ADVANTAGES = ("advantage", "advantages")


def read(records: Iterable[Placed], context: Context) -> Iterator[Record]:
    """Rows of samples, in order."""
    for record in records:
        ids = record.value.get("completion_ids")
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            yield from _columns(record, context)
        elif ids is not None:
            yield from _sample(record.value, record.location, context)
        else:
            yield _text(record.value, record.location, context)


def _columns(record: Placed, context: Context) -> Iterator[Record]:
    count = len(record.value["completion_ids"])
    for name, column in record.value.items():
        if isinstance(column, list) and len(column) != count:
            raise DataError(f"{record.location}: {len(column)} {name} for {count} completions.")
    for index in range(count):
        one = {name: column[index] if isinstance(column, list) else column for name, column in record.value.items()}
        yield from _sample(one, f"{record.location}: sample {index}", context)


def _sample(value: Record, location: str, context: Context) -> Iterator[Record]:
    prompt = integers(value.get("prompt_ids"), "prompt_ids", location)
    completion = integers(value.get("completion_ids"), "completion_ids", location)
    before = [0.0] * len(prompt)
    mask = first_of(value, *MASKS)
    weights = [1.0] * len(completion) if mask is None else numbers(mask, "env_mask", len(completion), location)
    logprobs = _sampled(value, completion, location)
    streams: dict[str, Any] = {}
    if logprobs:
        streams["sampler_logprobs"] = before + numbers(logprobs, "logprobs", len(completion), location)
    for ours, theirs in (("old_logprobs", "old_per_token_logps"), ("ref_logprobs", "ref_per_token_logps")):
        if value.get(theirs) is not None:
            streams[ours] = before + numbers(value[theirs], theirs, len(completion), location)
    labels = _labels(value, location, context)
    if isinstance(labels["advantages"], list):
        labels["advantages"] = before + numbers(labels["advantages"], "advantages", len(completion), location)
    yield from token_row(context, location, [*prompt, *completion], before + weights, **streams, **labels)


def _sampled(value: Record, completion: list[int], location: str) -> Any:
    """Log-probs of the sampled tokens, out of several per token where the engine gave its top k."""
    logprobs, names = value.get("logprobs"), value.get("logprob_token_ids")
    if not (isinstance(logprobs, list) and logprobs and isinstance(logprobs[0], list)):
        return logprobs
    if not isinstance(names, list) or len(names) != len(logprobs) or len(logprobs) != len(completion):
        raise DataError(f"{location}: several logprobs per token need logprob_token_ids of the same shape.")
    matched = []
    for position, (token, own, top_logprobs) in enumerate(zip(completion, names, logprobs, strict=True)):
        if token not in own:
            raise DataError(f"{location}: token {position} ({token}) is not among its logprob_token_ids.")
        matched.append(top_logprobs[own.index(token)])
    return matched


def _text(value: Record, location: str, context: Context) -> Record:
    for name in ("prompt", "completion"):
        if not isinstance(value.get(name), str):
            messages(value.get(name), f"where it is no text, {name}", location)
    context.warn(
        "TRL's logged completions are text without special tokens; they are tokenised anew, with an end token added"
    )
    labels = _labels(value, location, context)
    if labels["group"] is None:
        labels["group"] = prompt_at_step(value["prompt"], value.get("step"))
    return text_row(location, prompt=value["prompt"], completion=value["completion"], **labels)


def _labels(value: Record, location: str, context: Context) -> Record:
    reward = value if context.reward_field else first_of(value, *REWARDS)
    if isinstance(reward, list) and len(reward) == 1:
        reward = reward[0]
    if isinstance(reward, list):
        raise DataError(f"{location}: {len(reward)} rewards; give one per sample, or a mapping and --reward NAME.")
    advantage = first_of(value, *ADVANTAGES)
    return {
        "reward": context.reward(reward, location),
        "advantages": context.reward(advantage, f"{location}: advantage")
        if not isinstance(advantage, list)
        else advantage,
        "group": value.get("group"),
        "rollout": value.get("rollout"),
    }
