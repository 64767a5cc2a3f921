"""Forms of other libraries that hold what one of treewise's own forms holds, under other names: rewritten into it.

ShareGPT's `conversations`, alpaca's `instruction`/`output`, `input_ids` with `labels` or masks, pairs of `chosen` and
`rejected`, and labelled completions (`label`).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from treewise.data.io.field_checks import flat_list, shown
from treewise.data.io.files import parse_text
from treewise.data.io.forms import OTHER_MASKS, Record
from treewise.errors import DataError, did_you_mean
from treewise.tree import checks

# Speakers of ShareGPT and its variants (FastChat, LLaMA-Factory, axolotl) as roles of OpenAI's.
ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "ipython"), "tool"),
}
IGNORED_LABEL = -100
PER_TOKEN = (*OTHER_MASKS, "attention_mask", "position_ids")


def from_sharegpt(record: Record, location: str) -> Record:
    """A chat, from turns of `from` and `value` (or `role` and `content`), and `system` beside them."""
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{location}: conversations must be a non-empty list of {{from, value}}, found {shown(turns)}.")
    messages = [_message(turn, f"{location}: conversations[{index}]") for index, turn in enumerate(turns)]
    rest = {key: value for key, value in record.items() if key not in ("conversations", "system")}
    if record.get("system"):
        messages.insert(0, {"role": "system", "content": record["system"]})
    if isinstance(rest.get("tools"), list):
        rest["tools"] = [
            {"type": "function", "function": tool} if isinstance(tool, dict) and "function" not in tool else tool
            for tool in rest["tools"]
        ]
    return {**rest, "messages": messages}


def _message(turn: object, location: str) -> Record:
    if not isinstance(turn, dict):
        raise DataError(f"{location} must be {{from, value}}, found {shown(turn)}.")
    if "role" in turn:
        return turn
    speaker = turn.get("from")
    role = ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        hint = did_you_mean(speaker, ROLES)
        raise DataError(f"{location}: from {shown(speaker)} is not a known speaker ({', '.join(ROLES)}).{hint}")
    if "value" not in turn:
        hint = did_you_mean("value", [key for key in turn if key != "from"])
        raise DataError(f"{location} has no value; its keys are {', '.join(map(str, turn))}.{hint}")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if str(speaker).lower() != "function_call":
        return {"role": role, "content": turn["value"], **rest}
    calls = turn["value"] if not isinstance(turn["value"], str) else parse_text(turn["value"], location)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise DataError(f"{location}: a function_call must be {{name, arguments}}, found {shown(turn['value'])}.")
    tool_calls = [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]
    return {"role": role, "content": "", "tool_calls": tool_calls, **rest}


def from_alpaca(record: Record, location: str) -> Record:
    """A prompt and a completion, from `instruction`, `input` (after an empty line) and `output`.

    With `history` ([[question, answer], ...]) it is a chat, of which every answer is trained.
    """
    texts = {name: record.get(name, "") for name in ("instruction", "input", "output", "system")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise DataError(f"{location}: {name} must be text, found {shown(text)}.")
    question = "\n\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    rest = {key: value for key, value in record.items() if key not in (*texts, "history")}
    before = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    answer = {"role": "assistant", "content": texts["output"]}
    past = record.get("history") or []
    if not past:
        return {**rest, "prompt": [*before, {"role": "user", "content": question}], "completion": [answer]}
    if not isinstance(past, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in past):
        raise DataError(f"{location}: history must be a list of [question, answer], found {shown(past)}.")
    for asked, answered in past:
        before += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return {**rest, "messages": [*before, {"role": "user", "content": question}, answer]}


def from_input_ids(record: Record, location: str) -> Record:
    """A token row, from `input_ids` with `labels` (-100: not trained) or a mask; without either every token is trained.

    Positions of which `attention_mask` is 0 are padding, and left out; they must stand at the ends.
    """
    rest = {key: value for key, value in record.items() if key != "input_ids"}
    return with_mask({**rest, "token_ids": record["input_ids"]}, location, "input_ids")


def with_mask(record: Record, location: str, ids_name: str = "token_ids") -> Record:
    """A token row whose `labels`, mask and padding are `loss_weights`; without a mask every token is trained.

    ids_name: what the record calls its token ids, for messages.

    Raises:
        DataError: two masks, a mask of another length, labels that are not the tokens, padding between tokens, or
            positions that do not rise by 1 (`packed` cuts rows of several samples).
    """
    ids = checks.as_array(flat_list(record["token_ids"], ids_name, location), ids_name, location)
    masks = [name for name in ("loss_weights", *OTHER_MASKS) if name in record]
    if len(masks) > 1:
        raise DataError(f"{location}: {' and '.join(masks)} both mark what is trained; give one of them.")
    per_token = [name for name in record if name in ("attention_mask", "position_ids", *masks)]
    arrays = {name: checks.as_array(flat_list(record[name], name, location), name, location) for name in per_token}
    for name, values in arrays.items():
        if len(values) != len(ids):
            raise DataError(f"{location}: {len(values)} {name} for {len(ids)} {ids_name}; they must align.")
    weights = _weights(masks, arrays, ids, ids_name, location)
    mask, keep = arrays.get("attention_mask"), None
    if mask is not None and not np.isin(mask, (0, 1)).all():
        raise DataError(f"{location}: attention_mask holds other values than 0 and 1.")
    if mask is not None and not mask.all():
        seen = np.flatnonzero(mask)
        if not len(seen) or len(seen) != seen[-1] - seen[0] + 1:
            raise DataError(f"{location}: attention_mask has zeros between ones; padding is at the ends only.")
        keep = slice(int(seen[0]), int(seen[-1]) + 1)
    positions = arrays.get("position_ids", np.arange(len(ids)))[slice(None) if keep is None else keep]
    if positions.ndim == 1 and (np.diff(positions) != 1).any():
        raise DataError(f"{location}: position_ids do not rise by 1 from token to token.")
    rest = {key: value for key, value in record.items() if key not in ("token_ids", *per_token)}
    if keep is not None:
        for name, value in rest.items():
            if isinstance(value, list | np.ndarray) and len(value) == len(ids):
                rest[name] = np.asarray(value)[keep]
        weights = weights[keep]
        ids = ids[keep]
        weights[:1] = 0
    return {**rest, "token_ids": ids, "loss_weights": weights}


def _weights(
    masks: list[str], arrays: dict[str, np.ndarray], ids: np.ndarray, ids_name: str, location: str
) -> np.ndarray:
    """Loss weights of the tokens, from the labels or the mask that is given."""
    weights = np.ones(len(ids), dtype=np.float32)
    if masks == ["labels"]:
        weights = (arrays["labels"] != IGNORED_LABEL).astype(np.float32)
        differs = np.flatnonzero((weights > 0) & (arrays["labels"] != ids))
        if len(differs):
            at = int(differs[0])
            raise DataError(
                f"{location}: labels[{at}] is {arrays['labels'][at]} and {ids_name}[{at}] is {ids[at]}; a label is the "
                "token at its own position (not shifted), or -100."
            )
    elif masks:
        weights = arrays[masks[0]]
    if len(weights) and weights.dtype.kind in "iufb":
        weights = weights.astype(np.float32)
        weights[:1] = 0  # nothing predicts a first token, and flat training does not count it
    return weights


def split_pair(record: Record, location: str) -> tuple[Record, Record]:
    """The two prompt and completion records of a preference pair, chosen first; the prompt is shared.

    Without `prompt`, chosen and rejected are lists of messages that begin alike; their common messages are the prompt.
    """
    chosen, rejected = record["chosen"], record["rejected"]
    prompt = record.get("prompt")
    rest = {key: value for key, value in record.items() if key not in ("prompt", "chosen", "rejected")}
    if prompt is None:
        if not isinstance(chosen, list) or not isinstance(rejected, list):
            raise DataError(f"{location}: chosen and rejected are texts, so a prompt is needed; add `prompt`.")
        alike = 0
        while alike < min(len(chosen), len(rejected)) and chosen[alike] == rejected[alike]:
            alike += 1
        if alike == min(len(chosen), len(rejected)):
            raise DataError(f"{location}: chosen and rejected do not differ, so there is no preference.")
        prompt, chosen, rejected = chosen[:alike], chosen[alike:], rejected[alike:]
        if not prompt:
            raise DataError(f"{location}: chosen and rejected begin with different messages; they share no prompt.")
    elif isinstance(prompt, list):
        chosen, rejected = (_after(each, prompt) for each in (chosen, rejected))
    elif isinstance(chosen, list) and isinstance(rejected, list):
        first = {"role": "user", "content": prompt}
        chosen, rejected = (_after(each, [first]) for each in (chosen, rejected))
        prompt = [first]
    if chosen == rejected:
        raise DataError(f"{location}: chosen and rejected do not differ, so there is no preference.")
    return {**rest, "prompt": prompt, "completion": chosen}, {**rest, "prompt": prompt, "completion": rejected}


def _after(messages: object, prompt: list[Any]) -> object:
    """Messages without the prompt that they repeat, as UltraFeedback's do."""
    if isinstance(messages, list) and len(messages) > len(prompt) and messages[: len(prompt)] == prompt:
        return messages[len(prompt) :]
    return messages


REWRITTEN: dict[str, Callable[[Record, str], Record]] = {
    "sharegpt": from_sharegpt,
    "alpaca": from_alpaca,
    "input_ids": from_input_ids,
}
