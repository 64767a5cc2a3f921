"""Which fields of a message a chat template writes, found out by rendering sentinels in their place.

Templates leave things out without an error: Qwen3's writes nothing for the role `developer`, Llama 3.1's drops the
content beside a tool call, SmolLM2's has no tool calls. The first message of every shape (role, fields in use, where it
stands) is therefore rendered once more in its own conversation, each field replaced by a sentinel; what does not come
back is hidden. Later messages of the same shape cost one look-up.
"""

from collections.abc import Callable, Sequence
from typing import Any

from treewise.data.render.messages import Message
from treewise.errors import DataError

THINK, THINK_END = "<think>", "</think>"
MAX_CALLS = 2  # tool calls of one message: one, or several
MAX_LOOKS = 20  # at messages of one shape whose content a template rewrites
STANDARD_ROLES = {"developer": "system", "function": "tool"}

Render = Callable[[list[Message]], str]


class FieldProbe:
    """The shapes of messages met so far under one template, with the fields of each that are hidden."""

    def __init__(self) -> None:
        self._hidden: dict[tuple[Any, ...], tuple[str, ...]] = {}
        self._looks: dict[tuple[Any, ...], int] = {}

    def hidden_in_context(
        self,
        messages: Sequence[Message],
        index: int,
        has_tools: bool,
        renders: Sequence[Render],
        *,
        remembers: bool = True,
    ) -> tuple[str, ...] | None:
        """Fields of message `index` that reach no prompt; None where the template raises an error.

        renders: the whole history with the generation prompt, then messages alone. Templates that put a system message
        into the turn after it need the first, those that drop what is old need the second.
        """
        message = messages[index]
        marked, sentinels = with_sentinels(message, name_is_known=_is_named_by_call(messages, index))
        sentinels.pop("reasoning_content", None)  # templates may drop the reasoning of earlier turns
        sentinels.pop("thinking in content", None)
        before = messages[index - 1]["role"] if index else None
        key = ("context", message["role"], tuple(sentinels), before, has_tools)
        if key not in self._hidden or self._is_worth_another_look(key, remembers=remembers):
            hidden = list(sentinels)
            has_rendered = False
            around = [*messages[:index], marked, *messages[index + 1 :]]
            for render, talk in zip(renders, (around, around[: index + 1]), strict=False):
                try:
                    text = render(talk).lower()
                except DataError:
                    continue
                has_rendered = True
                hidden = [name for name in hidden if sentinels[name] not in text]
                if not hidden:
                    break
            if not has_rendered:
                return None
            self._hidden[key] = tuple(hidden)
        return self._hidden[key]

    def _is_worth_another_look(self, key: tuple[Any, ...], *, remembers: bool) -> bool:
        """Whether a message that was not found in its prompt is probed itself: the first of each shape are."""
        if remembers:
            return False
        self._looks[key] = self._looks.get(key, 0) + 1
        return self._looks[key] <= MAX_LOOKS

    def hidden_in_turn(
        self, history: Sequence[Message], turn: Message, has_tools: bool, sample: Callable[[Message], tuple[str, str]]
    ) -> tuple[str, ...] | None:
        """Fields of a trained turn that are not among its trained text; None where the template raises an error.

        sample: the text that is trained where a message is the turn, and the whole conversation.
        """
        marked, sentinels = with_sentinels(turn, name_is_known=False)
        key = ("turn", tuple(sentinels), history[-1]["role"], has_tools)
        if key not in self._hidden:
            try:
                trained, whole = (text.lower() for text in sample(marked))
            except DataError:
                return None
            self._hidden[key] = tuple(
                field  # who speaks is part of the header, which is not sampled
                for field, sentinel in sentinels.items()
                if sentinel not in (whole if field == "name" else trained)
            )
        return self._hidden[key]


def with_sentinels(message: Message, *, name_is_known: bool) -> tuple[Message, dict[str, str]]:
    """A message of the same shape whose texts are sentinels, and the sentinel (lower case) of every field in use.

    name_is_known: a tool result whose function an earlier call names; the name says nothing new.
    """
    sentinels: dict[str, str] = {}

    def sentinel(field: str) -> str:
        sentinels[field] = f"zq{len(sentinels)}sentinel{len(field)}qz"
        return sentinels[field]

    marked = dict(message)
    content = message["content"]
    if message["role"] == "assistant" and THINK_END in content:
        thought, _, rest = content.rpartition(THINK_END)
        opened = f"{THINK}\n{sentinel('thinking in content')}" if thought.replace(THINK, "").strip() else thought
        marked["content"] = f"{opened}\n{THINK_END}\n\n{sentinel('content') if rest.strip() else rest}"
    elif content.strip():
        marked["content"] = sentinel("content")
    for field in ("reasoning_content", "refusal", "name"):
        if isinstance(message.get(field), str) and message[field].strip():
            is_skipped = field == "name" and name_is_known
            marked[field] = message[field] if is_skipped else sentinel(field)
    if message.get("tool_calls"):
        marked["tool_calls"] = [
            _marked_call(call, number, sentinel) for number, call in enumerate(message["tool_calls"][:MAX_CALLS])
        ]
    return marked, sentinels


def _marked_call(call: dict[str, Any], number: int, sentinel: Callable[[str], str]) -> dict[str, Any]:
    function = {**call["function"], "name": sentinel(f"tool_calls[{number}].name")}
    arguments = function["arguments"]
    if arguments and arguments != "{}":
        key = sentinel(f"tool_calls[{number}].arguments")
        function["arguments"] = f'{{"{key}": "x"}}' if isinstance(arguments, str) else {key: "x"}
    return {**call, "function": function}


def _is_named_by_call(messages: Sequence[Message], index: int) -> bool:
    """Whether the nearest tool calls before a result name its function."""
    name = messages[index].get("name")
    if name is None or messages[index]["role"] not in ("tool", "function"):
        return False
    for message in reversed(messages[:index]):
        if message.get("tool_calls"):
            return any(call["function"]["name"] == name for call in message["tool_calls"])
    return False
