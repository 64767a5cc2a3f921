"""Preference pairs and labelled completions: rollouts of a prompt of which some are preferred, by their rewards."""

from pathlib import PurePath
from typing import Any

import numpy as np

from treewise.data.io.field_checks import printable, shown
from treewise.data.io.files import Placed
from treewise.data.io.forms import Record
from treewise.data.io.rows import RecordResult
from treewise.data.readers.texts import prompt_group, rendered
from treewise.data.records import Label, RecordReader
from treewise.errors import DataError


def read(reader: RecordReader, result: RecordResult, form: str, item: Placed, group: Label) -> None:
    """Two rollouts of one pair, or one with a label, in the tree of their prompt. A reward of 1 is preferred to 0.

    The pair has a group of its own, so that a tree may hold many, named by the file's name and line, which is the
    same wherever the file lies.
    """
    location = item.location
    if form == "preference":
        chosen, rejected = split_pair(item.value, location)
        parts = [(f"{location}: chosen", 1.0, chosen), (f"{location}: rejected", 0.0, rejected)]
    else:
        told = item.value["label"]
        if not isinstance(told, bool | np.bool_) and told not in (0, 1):
            raise DataError(f"{location}: label must be true (desirable) or false, found {shown(told)}.")
        parts = [(location, float(told), item.value)]
    for where, reward, part in parts:
        rows = rendered(reader, "prompt_completion", own_item := Placed(where, part, item.file))
        own = {key: value for key, value in part.items() if key != "reward"}
        reader.label(rows, own, f"pair {PurePath(location).name}", where, where)
        for row in rows:
            row.reward, row.rollout = reward, where
        result.rows += rows
        tree = prompt_group(own_item) if group is None else group
        result.belongs_to(tree, location if group is None else printable(group))
    result.is_preference = True


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
    elif isinstance(chosen, list) and isinstance(rejected, list):
        prompt = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        prompt = _with_system(prompt, chosen, rejected)
        chosen, rejected = (_after(reply, prompt) for reply in (chosen, rejected))
    if chosen == rejected:
        raise DataError(f"{location}: chosen and rejected do not differ, so there is no preference.")
    return {**rest, "prompt": prompt, "completion": chosen}, {**rest, "prompt": prompt, "completion": rejected}


def _after(messages: list[Any], prompt: list[Any]) -> list[Any]:
    """Messages without the prompt that they repeat, as UltraFeedback's do."""
    is_repeated = len(messages) > len(prompt) and messages[: len(prompt)] == prompt
    return messages[len(prompt) :] if is_repeated else messages


def _with_system(prompt: list[Any], chosen: list[Any], rejected: list[Any]) -> list[Any]:
    """The prompt as both repeat it, where that begins with a system message which the prompt itself lacks."""
    whole = [*chosen[:1], *prompt]
    is_system = bool(chosen) and isinstance(chosen[0], dict) and chosen[0].get("role") in ("system", "developer")
    return whole if is_system and all(each[: len(whole)] == whole for each in (chosen, rejected)) else prompt
