"""Sampled ids as what is given out: text, thinking and tool calls apart.

By the tokenizer's own response template where it has one and its own chat template is used, else by the family that
the chat template writes calls for (`families.py`). What cannot be read is given out as text. While a turn grows,
`sure` is what of it cannot change any more.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treewise.data.render.messages import Message, Tools
from treewise.data.render.template import Template, common_prefix
from treewise.errors import DataError
from treewise.rl.agents.families import FAMILIES, HARMONY, THINKING, Family, Found, Types, calls_in, harmony_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAME, _KEY = "zqname", "zqkey"
_PROBE: list[Message] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": "call00000", "function": {"name": _NAME, "arguments": {_KEY: "zqvalue"}}}
        ],
    },
]
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "a", "parameters": {"type": "object", "properties": {}}},
}
_BEFORE_KEY = re.compile(r'\{\s*"zqkey"|<parameter=zqkey|<arg_key>zqkey')
UNFINISHED = "\ufffd"  # of a character whose bytes have not all come


@dataclass(frozen=True, slots=True)
class Parts:
    """A turn taken apart. calls: names and arguments as JSON text. end: how much of the turn this is; None: all."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Found, ...] = ()
    end: int | None = None


class ReplyReader:
    """Reads the turns of one chat template. with_own: whether the tokenizer's response template is that template's."""

    def __init__(self, template: Template, *, with_own: bool) -> None:
        tokenizer = template.tokenizer
        source = str(template.text or getattr(tokenizer, "chat_template", None) or "")
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self.own = getattr(tokenizer, "response_template", None) if with_own else None
        self.thinking = next((pair for pair in THINKING if pair[1] in source), None)
        self._turn = _written(template)
        self.family: Family | None = next(
            (family for family in FAMILIES if any(s in self._turn for s in family.signs)), None
        )
        self.is_harmony = HARMONY in self._turn and "<|message|>" in self._turn

    @property
    def name(self) -> str:
        """What replies are read by, in words."""
        if self.own is not None:
            return "the tokenizer's response template"
        return "harmony" if self.is_harmony else self.family.name if self.family else "text alone"

    def opening(self, function: str) -> str | None:
        """The beginning of a turn that calls a function, "" for any; None where the template writes no calls."""
        if _NAME not in self._turn or self.is_harmony:
            return None
        if not function:
            return self._turn[: self._turn.index(_NAME)]
        key = _BEFORE_KEY.search(self._turn)
        end = key.start() if key else self._turn.index(_NAME) + len(_NAME)
        return self._turn[:end].replace(_NAME, function)

    def whole(
        self, text: str, prompt: str, tools: Tools, *, reads_calls: bool = True, is_parallel: bool = True
    ) -> Parts:
        """A finished turn.

        Parameters:
            text: of the turn, without the token that ended it.
            prompt: what the model saw; it may have opened the thinking.
            is_parallel: whether it may hold several calls; else it ends with the first, where a family reads it.
        """
        if self.own is not None:
            found = self._by_template(text, prompt, tools)
        elif self.is_harmony:
            parts = harmony_parts(text)
            found = None if parts is None else Parts(parts[0].strip(), parts[1], tuple(parts[2]))
        else:
            return self._by_family(text, prompt, tools, reads_calls=reads_calls, is_parallel=is_parallel)
        if found is None or (found.calls and not reads_calls):
            return Parts(content=text)
        return found

    def sure(self, text: str, prompt: str, *, reads_calls: bool = True, stops: Sequence[str] = ()) -> Parts:
        """What of a growing turn cannot change any more."""
        if self.own is not None or self.is_harmony:
            return Parts()
        text = held_back(text, stops)
        reasoning, content, is_thinking = self._thought(text, prompt)
        if is_thinking:
            assert self.thinking is not None
            return Parts(held_back(reasoning, self.thinking[1:]).strip())
        if self.family is not None and reads_calls:
            if self.family.is_whole and content.lstrip().startswith(self.family.opens):
                return Parts(reasoning)
            content = held_back(content, () if self.family.is_whole else self.family.opens)
        if self.thinking is not None and not reasoning and self.thinking[0].startswith(content.strip()):
            return Parts()
        return Parts(reasoning, content.rstrip())

    # -- how ----------------------------------------------------------------------------------------------------------

    def _thought(self, text: str, prompt: str) -> tuple[str, str, bool]:
        """Reasoning, what follows it, and whether the reasoning has not ended."""
        if self.thinking is None:
            return "", text, False
        opened, closed = self.thinking
        body = text.lstrip()
        if body.startswith(opened):
            body = body[len(opened) :]
        elif not prompt.rstrip().endswith(opened):
            return "", text, False
        reasoning, mark, rest = body.partition(closed)
        return (reasoning.strip(), rest.lstrip(), False) if mark else (reasoning, "", True)

    def _by_family(self, text: str, prompt: str, tools: Tools, *, reads_calls: bool, is_parallel: bool) -> Parts:
        reasoning, content, _ = self._thought(text, prompt)
        if self.family is None or not reads_calls:
            return Parts(reasoning.strip(), content)
        texts, calls, last, at = list[str](), list[Found](), 0, 0
        while True:
            starts = [content.find(opening, at) for opening in self.family.opens]
            if self.family.is_whole:
                start = len(content) - len(content.lstrip()) if content.lstrip().startswith(self.family.opens) else -1
                starts = [start if at <= start else -1]
            start = min((place for place in starts if place >= 0), default=-1)
            if start < 0:
                break
            found, end = calls_in(self.family, content, start, _types(tools))
            if len(found) == 1 and not is_parallel:
                return Parts(reasoning.strip(), content[:start].rstrip(), tuple(found), len(text) - len(content) + end)
            if found:
                texts.append(content[last:start])
                calls, last = calls + found, end
            at = max(end, start + 1)
        if not calls:
            return Parts(reasoning.strip(), content)
        first, *others = [*texts, content[last:]]
        kept = [first.rstrip(), *(text.strip() for text in others)]
        return Parts(reasoning.strip(), "\n".join(text for text in kept if text), tuple(calls))

    def _by_template(self, text: str, prompt: str, tools: Tools) -> Parts | None:
        try:
            parsed = self.tokenizer.parse_response(text, prefix=prompt, tools=tools)
            calls = [call.get("function", call) for call in parsed.get("tool_calls") or ()]
            found = [(str(call["name"]), _text_of(call.get("arguments"))) for call in calls]
        except (ValueError, TypeError, KeyError, AttributeError):  # it reads only what it is made for
            return None
        reasoning = parsed.get("reasoning_content") or parsed.get("thinking") or ""
        return Parts(str(reasoning), str(parsed.get("content") or ""), tuple(found))


def held_back(text: str, markers: Sequence[str]) -> str:
    """The text up to the first marker, or to what may become one, or a character, once more comes."""
    text, end = text.rstrip(UNFINISHED), len(text)
    for marker in markers:
        at = text.find(marker)
        sizes = range(min(len(marker) - 1, len(text)), 0, -1)
        begun = next((size for size in sizes if text.endswith(marker[:size])), 0)
        end = min(end, len(text) - begun, len(text) if at < 0 else at)
    return text[:end]


def _text_of(arguments: object) -> str:
    if isinstance(arguments, str):
        if not isinstance(json.loads(arguments or "{}"), dict):
            raise ValueError("the arguments of a call are an object")
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _types(tools: Tools) -> Types:
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties")
        found[function["name"]] = properties if isinstance(properties, dict) else {}
    return found


def _written(template: Template) -> str:
    """What the template writes for a turn that calls a function; "" where it writes none."""
    for arguments in ({_KEY: "zqvalue"}, '{"zqkey": "zqvalue"}'):
        question, turn = _PROBE
        call = turn["tool_calls"][0]
        turn = {**turn, "tool_calls": [{**call, "function": {"name": _NAME, "arguments": arguments}}]}
        try:
            prompt = template.render([[question]], [_TOOL], "chat template", generation=True)[0]
            whole = template.render([[question, turn]], [_TOOL], "chat template")[0]
        except DataError:
            continue
        text = whole[len(prompt) :] if whole.startswith(prompt) else _behind(prompt, whole)
        if _NAME in text and "zqvalue" in text:
            return text
    return ""


def _behind(prompt: str, whole: str) -> str:
    """The turn where the template writes what the prompt began otherwise: from where they differ; and where the prompt
    opened a thought, behind its end.
    """
    for opened, closed in THINKING:
        base = prompt.rstrip().removesuffix(opened)
        if base != prompt.rstrip() and whole.startswith(base):
            rest = re.sub(rf"\A\s*{re.escape(opened)}\s*{re.escape(closed)}", "", whole[len(base) :])
            return f"\n{closed}\n\n{rest.lstrip()}"
    return whole[common_prefix(prompt, whole) :]
