"""Sampled ids as what is given out: text, thinking and tool calls apart.

By the tokenizer's own response template where it has one and its own chat template is used, else by the family that
the chat template writes calls for (`families.py`). What cannot be read is text for agents, as in other servers, and a
call that failed for environments, which tell the policy why. While a turn grows, `sure` is what of it cannot change any
more.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treewise.data.render import probes
from treewise.data.render.messages import Tools
from treewise.data.render.template import Template, common_prefix
from treewise.errors import DataError
from treewise.rl.recorder.families import (
    FAMILIES,
    HERMES,
    MESSAGE,
    THINKING,
    Broken,
    Family,
    Found,
    Types,
    calls_in,
    messages_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # of a character whose bytes have not all come


@dataclass(frozen=True, slots=True)
class Parts:
    """A turn taken apart.

    calls: names and arguments as JSON text. content: with what could not be read. end: how much of the turn this is;
    None: all. told: the calls with those that could not be read, in order; said: the content without these.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[Found, ...] = ()
    end: int | None = None
    told: tuple[Found | Broken, ...] = field(default=(), compare=False)
    said: str | None = field(default=None, compare=False)


class ReplyReader:
    """Reads the turns of one chat template. with_own: whether the tokenizer's response template is that template's."""

    def __init__(self, template: Template, *, with_own: bool) -> None:
        tokenizer = template.tokenizer
        source = template.source
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self.own = getattr(tokenizer, "response_template", None) if with_own else None
        self.thinking = next((pair for pair in THINKING if pair[1] in source), None)
        word = probes.word_for(source)
        self._name, self._key = f"{word}name", f"{word}key"
        self._turn, writes_tools = self._written(template)
        own = next((family for family in FAMILIES if any(sign in self._turn for sign in family.signs)), None)
        if own is None and writes_tools and not self._turn:  # the tokenizer may tell in which form calls are written
            added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
            others = [family for family in FAMILIES if family.closes != HERMES.closes]
            own = next((family for family in others if added.intersection(family.opens)), HERMES)
        self.family: Family | None = own
        self.is_of_messages = MESSAGE in self._turn

    @property
    def name(self) -> str:
        """What replies are read by, in words."""
        if self.own is not None:
            return "the tokenizer's response template"
        if self.is_of_messages:
            return "harmony" if "<|channel|>" in self._turn else "muse"
        return self.family.name if self.family else "text alone"

    def opening(self, function: str) -> str | None:
        """The beginning of a turn that calls a function, "" for any; None where the template writes no calls."""
        if self._name not in self._turn or self.is_of_messages:
            return None
        if not function:
            return self._turn[: self._turn.index(self._name)]
        key = re.search(rf'\{{\s*"?{self._key}|<parameter={self._key}|<arg_key>{self._key}', self._turn)
        end = key.start() if key else self._turn.index(self._name) + len(self._name)
        return self._turn[:end].replace(self._name, function)

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
        elif self.is_of_messages:
            found = self._by_messages(text, tools)
        else:
            return self._by_family(text, prompt, tools, reads_calls=reads_calls, is_parallel=is_parallel)
        return found if reads_calls or not found.told else Parts(content=text)

    def sure(self, text: str, prompt: str, *, reads_calls: bool = True, stops: Sequence[str] = ()) -> Parts:
        """What of a growing turn cannot change any more."""
        if self.own is not None or self.is_of_messages:
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
        told, read, skipped, at = list[Found | Broken](), list[tuple[int, int]](), list[tuple[int, int]](), 0
        while (start := self._opening_in(content, at)) >= 0:
            try:
                found, at = calls_in(self.family, content, start, _types(tools))
            except ValueError as error:
                at = self._end_of_broken(content, start)
                if self.family.looks is None or self.family.looks.match(content, start):
                    told.append(Broken(str(error)))
                    skipped.append((start, at))
                continue
            if len(found) == 1 and not is_parallel:
                own, end = tuple(found), len(text) - len(content) + at
                return Parts(reasoning.strip(), content[:start].rstrip(), own, end, told=own)
            told += found
            read.append((start, at))
        calls = tuple(call for call in told if not isinstance(call, Broken))
        rest, said = _without(content, read), _without(content, [*read, *skipped])
        return Parts(reasoning.strip(), rest, calls, told=tuple(told), said=said)

    def _opening_in(self, content: str, at: int) -> int:
        """Where the next call may begin; -1: nowhere."""
        assert self.family is not None
        if self.family.is_whole:
            start = len(content) - len(content.lstrip())
            return start if at <= start and content.startswith(self.family.opens, start) else -1
        return min((place for opens in self.family.opens if (place := content.find(opens, at)) >= 0), default=-1)

    def _end_of_broken(self, content: str, start: int) -> int:
        """Where what cannot be read ends: with what closes a call, or before the next one."""
        assert self.family is not None
        closed = content.find(self.family.closes, start) if self.family.closes else -1
        ends = [len(content), *([closed + len(self.family.closes)] if closed >= 0 else [])]
        following = self._opening_in(content, start + 1)
        return min([*ends, *([following] if following >= 0 else [])])

    def _by_messages(self, text: str, tools: Tools) -> Parts:
        found = messages_of(text, _types(tools))
        if found is None:
            return Parts(content=text)
        reasoning, content, told = found[0].strip(), found[1], tuple(found[2])
        calls = tuple(call for call in told if not isinstance(call, Broken))
        if len(calls) < len(told):  # agents get all of it as text
            return Parts(content=text, told=told, said=content)
        return Parts(reasoning, content, calls, told=told)

    def _by_template(self, text: str, prompt: str, tools: Tools) -> Parts:
        try:
            parsed = self.tokenizer.parse_response(text, prefix=prompt, tools=tools)
            calls = [call.get("function", call) for call in parsed.get("tool_calls") or ()]
            found = tuple((str(call["name"]), _text_of(call.get("arguments"))) for call in calls)
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # it reads only what it is made for
            return Parts(content=text, told=(Broken(f"the call cannot be read: {error}"),))
        reasoning = parsed.get("reasoning_content") or parsed.get("thinking") or ""
        return Parts(str(reasoning), str(parsed.get("content") or ""), found, told=found)

    def _written(self, template: Template) -> tuple[str, bool]:
        """What the template writes for a turn that calls a function, "" for none; whether it writes tools."""
        tool, question = probes.tool_of(self._name), probes.QUESTION
        writes_tools = False
        for arguments in ({self._key: "value"}, json.dumps({self._key: "value"})):
            try:
                [prompt] = template.render([[question]], [tool], "chat template", generation=True)
                [plain] = template.render([[question]], None, "chat template", generation=True)
                writes_tools = prompt != plain
                talk = [question, probes.called(self._name, arguments)]
                [whole] = template.render([talk], [tool], "chat template")
            except DataError:
                continue
            text = whole[len(prompt) :] if whole.startswith(prompt) else _behind(prompt, whole)
            if self._name in text and self._key in text:
                return text, writes_tools
        return "", writes_tools


def _without(content: str, spans: Sequence[tuple[int, int]]) -> str:
    """A content without its calls; as it is where there are none."""
    if not spans:
        return content
    bounds = [0, *(place for span in sorted(spans) for place in span), len(content)]
    first, *others = [content[low:high] for low, high in zip(bounds[::2], bounds[1::2], strict=True)]
    return "\n".join(text for text in (first.rstrip(), *(text.strip() for text in others)) if text)


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
