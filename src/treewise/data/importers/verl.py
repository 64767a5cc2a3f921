"""verl: the tensors of a batch, or the text that `trainer.rollout_data_dir` holds.

Read from the public sources of verl-project/verl (`trainer/ppo/ray_trainer.py`; the tensor names in `protocol.py` and
`trainer/ppo/core_algos.py`). Tensors: `prompts` padded on the left, `responses` on the right, `attention_mask` over
both, `response_mask` (1 where the model sampled) and the log-probs over the response. The JSONL dump is text without
special tokens: what was sampled cannot be had back from it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from treewise.data.importers.common import (
    Context,
    Placed,
    Record,
    integers,
    numbers,
    prompt_at_step,
    text_row,
    token_row,
)
from treewise.errors import DataError

STREAMS = {
    "old_logprobs": ("old_log_probs",),
    "sampler_logprobs": ("rollout_log_probs",),
    "ref_logprobs": ("ref_log_prob", "ref_log_probs"),
    "advantages": ("advantages",),
}
SCORES = ("token_level_scores", "rm_scores", "token_level_rewards")


def read(records: Iterable[Placed], context: Context) -> Iterator[Record]:
    """Rows of batches or of dumped generations, in order."""
    for record in records:
        if "responses" in record.value:
            yield from _batch(record, context)
        else:
            yield _generation(record, context)


def _generation(record: Placed, context: Context) -> Record:
    value, location = record.value, record.location
    for name in ("input", "output"):
        if not isinstance(value.get(name), str):
            raise DataError(f"{location}: {name} must be text.")
    context.warn(
        "verl's generation dump is text without special tokens: chat markers and the end token are gone, so these rows "
        "are not what was sampled; save a batch's tensors where that matters (docs/rl.md)"
    )
    reward = value if context.reward_field else value.get("score")
    group = prompt_at_step(value["input"], value.get("step"))
    return text_row(
        location,
        prompt=value["input"],
        completion=value["output"],
        reward=context.reward(reward, location),
        group=group,
    )


def _batch(record: Placed, context: Context) -> Iterator[Record]:
    value, location = record.value, record.location
    is_batch = len(value["responses"]) > 0 and isinstance(value["responses"][0], list)
    if not is_batch:
        yield from _row(value, location, context)
        return
    count = len(value["responses"])
    for name, column in value.items():
        if isinstance(column, list) and len(column) != count:
            raise DataError(f"{location}: {len(column)} {name} for {count} responses.")
    for index in range(count):
        one = {name: column[index] if isinstance(column, list) else column for name, column in value.items()}
        yield from _row(one, f"{location}: sample {index}", context)


def _row(value: Record, location: str, context: Context) -> Iterator[Record]:
    prompt = integers(value["prompts"], "prompts", location)
    response = integers(value["responses"], "responses", location)
    width = len(prompt) + len(response)
    if value.get("attention_mask") is None:
        seen = [1.0] * width
        if value.get("response_mask") is None:
            raise DataError(
                f"{location}: neither attention_mask nor response_mask, so padding cannot be distinguished from tokens."
            )
    else:
        seen = numbers(value["attention_mask"], "attention_mask", width, location)
    mask = seen[len(prompt) :]
    if value.get("response_mask") is not None:
        response_mask = numbers(value["response_mask"], "response_mask", len(response), location)
        mask = [each * own for each, own in zip(response_mask, mask, strict=True)]
    positions = [position for position in range(width) if seen[position]]
    streams = {}
    for ours, names in STREAMS.items():
        for theirs in names:
            if value.get(theirs) is not None:
                full = [0.0] * len(prompt) + numbers(value[theirs], theirs, len(response), location)
                streams[ours] = [full[position] for position in positions]
    whole = [*([0.0] * len(prompt)), *mask]
    yield from token_row(
        context,
        location,
        [(*prompt, *response)[position] for position in positions],
        [whole[position] for position in positions],
        **streams,
        group=value.get("uid"),
        reward=_score(value, len(response), location, context),
    )


def _score(value: Record, length: int, location: str, context: Context) -> float | None:
    """The sum of the scores that verl spreads over the response, as verl itself sums them."""
    if context.reward_field is not None and context.reward_field not in SCORES:
        return context.reward(value, location)
    names: tuple[Any, ...] = (context.reward_field,) if context.reward_field else SCORES
    for name in names:
        if value.get(name) is not None:
            return float(sum(numbers(value[name], name, length, location)))
    return None
