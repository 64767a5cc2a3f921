"""AReaL: trajectories as tensors, or the text of `rollout.dump_to_file`.

Read from the public sources of areal-project/AReaL (`areal/infra/workflow_executor.py`,
`areal/experimental/openai/types.py`). Tensors: `input_ids`, `attention_mask`, `loss_mask` (1 where the model sampled),
`logprobs` at the token that they belong to, and one reward per sequence. The dump is text with special tokens and the
number of tokens of each part, so tokenising it can be checked by length.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from treewise.data.importers.common import Context, Placed, Record, integers, numbers, only_dicts, token_row
from treewise.errors import DataError


def read(records: Iterable[Placed], context: Context) -> Iterator[Record]:
    """Rows of trajectories or dumped samples, in order."""
    for record in records:
        if "input_ids" in record.value:
            yield from _trajectories(record, context)
        else:
            yield from _text(record, context)


def _trajectories(record: Placed, context: Context) -> Iterator[Record]:
    value, location = record.value, record.location
    ids = value["input_ids"]
    if not (isinstance(ids, list) and ids and isinstance(ids[0], list)):
        yield from _trajectory(value, location, context)
        return
    for index in range(len(ids)):
        one = {name: column[index] if isinstance(column, list) else column for name, column in value.items()}
        yield from _trajectory(one, f"{location}: sample {index}", context)


def _trajectory(value: Record, location: str, context: Context) -> Iterator[Record]:
    ids = integers(value["input_ids"], "input_ids", location)
    seen = value.get("attention_mask")
    seen = [1.0] * len(ids) if seen is None else numbers(seen, "attention_mask", len(ids), location)
    positions = [position for position in range(len(ids)) if seen[position]]

    def column(name: str) -> list[float] | None:
        if value.get(name) is None:
            return None
        full = numbers(value[name], name, len(ids), location)
        return [full[position] for position in positions]

    mask = column("loss_mask")
    if mask is None:
        raise DataError(f"{location}: no loss_mask, so the sampled tokens are not known.")
    reward = value.get("rewards", value.get("reward"))
    yield from token_row(
        context,
        location,
        [ids[position] for position in positions],
        mask,
        sampler_logprobs=column("logprobs"),
        old_logprobs=column("prox_logp"),
        advantages=column("advantages"),
        reward=context.reward(reward[0] if isinstance(reward, list) and len(reward) == 1 else reward, location),
    )


def _text(record: Placed, context: Context) -> Iterator[Record]:
    value, location = record.value, record.location
    if context.tokenizer is None:
        raise DataError(f"{location}: AReaL's dump is text; name the policy's tokenizer with --tokenizer.")
    ids: list[int] = []
    weights: list[float] = []
    drifted = False
    for role, text, length in _parts(value, location):
        own = context.tokenizer(text, add_special_tokens=False)["input_ids"]
        drifted |= len(own) != length
        ids += own
        weights += [float(role == "gen")] * len(own)
    if drifted:
        context.warn("text that gives another number of tokens than was sampled (retokenisation drift)")
    yield from token_row(
        context,
        location,
        ids,
        weights,
        group=value.get("task_id"),
        reward=context.reward(value if context.reward_field else value.get("reward"), location),
    )


def _parts(value: Record, location: str) -> Iterator[tuple[str, str, Any]]:
    """Role, text and number of tokens of each part of a dumped sample."""
    if value.get("segments"):
        for part in only_dicts(value["segments"], "segments", location):
            yield str(part.get("role")), str(part.get("text")), part.get("len")
        return
    seqlen, prompt_len = value.get("seqlen"), value.get("prompt_len")
    if not isinstance(seqlen, int) or not isinstance(prompt_len, int):
        raise DataError(f"{location}: seqlen and prompt_len must be integers.")
    for role, name, length in (("prompt", "prompt", prompt_len), ("gen", "completion", seqlen - prompt_len)):
        if not isinstance(value.get(name), str):
            raise DataError(f"{location}: {name} must be text.")
        yield role, value[name], length
