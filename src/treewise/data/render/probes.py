"""Questions to a chat template, asked with conversations of our own: which fields it writes, and in which form.

What is looked for in a rendered text is chosen so that neither conversation nor template holds it: no character of a
user's text has a meaning. Forms are compared as wholes: a text may stand in another by chance.
"""

import json
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from treewise.base import features
from treewise.data.render.messages import PLACES, Message, Tools

PRIVATE = tuple(map(chr, range(0xE000, 0xF900)))  # characters of private use, which templates have no rules for
MAX_CALLS = 2  # tool calls of one message: one, or several
THINK, THINK_END = "<think>", "</think>"
QUESTION: Message = {"role": "user", "content": "a"}
# Values of every kind; and a text alone, for templates that write no others. Spelled as `tojson` spells them.
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"text": "a b", "number": 1, "flag": True, "none": None, "list": [1.5, "c"], "inner": {"d": 2}},
    {"text": "a b"},
)
Written = Callable[[list[Message], Tools], str | None]  # by a template; None: it raises an error


def mark_for(text: str) -> str:
    """What no part of a text, and nothing that is put together of its parts, can be taken for."""
    character = next((each for each in PRIVATE if each not in text), PRIVATE[0])
    return character * (text.count(character) + 1)


def word_for(text: str) -> str:
    """The beginning of words that a text does not hold in any case, for templates that change letters."""
    lower = text.lower()
    return next(word for word in (f"zq{number or ''}z" for number in count()) if word not in lower)


def tool_of(name: str) -> dict[str, Any]:
    """A function's schema."""
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": name, "description": "a", "parameters": parameters}}


def called(name: str, *arguments: str | dict[str, Any]) -> Message:
    """A message that calls a function, once for each arguments."""
    calls = [
        {"type": "function", "id": f"call0000{number}", "function": {"name": name, "arguments": given}}
        for number, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def takes_text(written: Written, *, has_arguments: bool) -> bool:
    """Whether a template wants the arguments of a tool call as JSON text, and not as an object.

    Servers give it an object. A template that writes the text exactly as that object gets the text, which keeps the
    spacing of what was sampled; so does one that fails on an object, or writes it as Python prints it.
    """
    found = False
    for arguments in ARGUMENTS if has_arguments else ({},):
        for tools in (None, [tool_of("f")]):
            as_object, as_text, as_printed = (
                written([QUESTION, called("f", given)], tools)
                for given in (arguments, json.dumps(arguments), str(arguments))
            )
            if as_object is not None:
                return as_object == as_text or (as_text is not None and as_object == as_printed)
            found = found or as_text is not None
    return found


def is_paired_by_place(written: Written) -> bool:
    """Whether a template pairs results of tools with their calls by their order alone: their ids change nothing."""
    talk, texts = [QUESTION, called("f", {"text": "a"}, {"text": "b"})], []
    for contents, numbers in (("cd", "01"), ("cd", "10"), ("dc", "01")):
        results: list[Message] = [
            {"role": "tool", "name": "f", "content": content, "tool_call_id": f"call0000{number}"}
            for content, number in zip(contents, numbers, strict=True)
        ]
        texts.append(written([*talk, *results], None) or written([*talk, *results], [tool_of("f")]))
    return texts[0] is not None and texts[0] == texts[1] != texts[2]


def in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with the results of each message's tool calls in the order of these calls, by their ids."""
    found, at = list(messages), 0
    while at < len(found):
        numbers = {call.get("id"): number for number, call in enumerate(found[at].get("tool_calls") or ())}
        at += 1
        end = at
        while end < len(found) and found[end]["role"] == "tool":
            end += 1
        ids = [message.get("tool_call_id") for message in found[at:end]]
        if None not in numbers and len(numbers) > 1 and len({*ids}) == len(ids) and {*ids} <= {*numbers}:
            found[at:end] = sorted(found[at:end], key=lambda message: numbers[message["tool_call_id"]])
        at = end
    return found


def with_words(message: Message, word: str, *, name_is_known: bool) -> tuple[Message, dict[str, str]]:
    """A message of the same shape whose texts are words, and the word (lower case) of every field in use.

    word: that these begin with. name_is_known: a tool result whose function an earlier call names; the name says
    nothing new.
    """
    words: dict[str, str] = {}

    def word_of(field: str) -> str:
        words[field] = f"{word}{len(words)}sentinel{len(field)}qz"
        return words[field]

    marked = dict(message)
    content = message["content"]
    if message["role"] == "assistant" and THINK_END in content:
        thought, _, rest = content.rpartition(THINK_END)
        opened = f"{THINK}\n{word_of('thinking in content')}" if thought.replace(THINK, "").strip() else thought
        marked["content"] = f"{opened}\n{THINK_END}\n\n{word_of('content') if rest.strip() else rest}"
    elif content.strip():
        marked["content"] = word_of("content")
    if PLACES in message:
        marked[PLACES] = [0] * len(message[PLACES])
    for field in ("reasoning_content", "refusal", "name"):
        if isinstance(message.get(field), str) and message[field].strip():
            is_skipped = field == "name" and name_is_known
            marked[field] = message[field] if is_skipped else word_of(field)
    if message.get("tool_calls"):
        marked["tool_calls"] = [
            features.tools.marked_call(call, number, word_of)
            for number, call in enumerate(message["tool_calls"][:MAX_CALLS])
        ]
    return marked, words


def is_named_by_call(messages: Sequence[Message], index: int) -> bool:
    """Whether the nearest tool calls before a result name its function."""
    name = messages[index].get("name")
    if name is None or messages[index]["role"] not in ("tool", "function"):
        return False
    for message in reversed(messages[:index]):
        if message.get("tool_calls"):
            return any(call["function"]["name"] == name for call in message["tool_calls"])
    return False
