"""Replies that keep to a JSON schema (`response_format`, `text.format`): which ids may come next, by llguidance.

A turn is the answer alone; or, where the chat template thinks, a thought and the answer; or, where the call has tools,
what begins a tool call, behind which all ids may come. A schema that llguidance does not read whole is refused.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.errors import pip_install
from treewise.rl.agents.wire.asked import AgentRequest, RefusedError
from treewise.rl.recorder.reader import ReplyReader

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

MAX_KEPT = 64  # grammars that are compiled
# Of llguidance: white space between two tokens of JSON ends, which a small model would go on with; and what of a schema
# is not understood is an error, whatever the schema says.
OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,40}", "lenient": False}


class TokenGrammar:
    """The grammar of one continuation (`samplers.protocol.TokenRules`). matcher: of llguidance, at its beginning.
    marks: texts behind which a call has begun. is_plain: the answer alone.
    """

    def __init__(
        self,
        matcher: "LLMatcher",
        num_ids: int,
        tokenizer: "PreTrainedTokenizerBase",
        schema: Mapping[str, Any] | None,
        marks: Sequence[str],
        plain: bool,
    ) -> None:
        self.schema, self.is_plain = schema, plain
        self._matcher, self._num_ids, self._tokenizer, self._marks = matcher, num_ids, tokenizer, tuple(marks)
        self._num_taken, self._is_free = 0, False

    def allowed(self, token_ids: Sequence[int]) -> np.ndarray | None:
        """bool [ids of the tokenizer], which may follow these; None: all.

        Raises:
            RefusedError: the grammar fails on the way, as one that is too large does.
        """
        if len(token_ids) < self._num_taken:  # the continuation is sampled once more
            self._matcher.reset()
            self._num_taken, self._is_free = 0, False
        if not self._is_free:
            self._matcher.consume_tokens([int(token) for token in token_ids[self._num_taken :]])
            self._num_taken = len(token_ids)
            text: str = self._tokenizer.decode(token_ids[-64:]).rstrip() if self._marks else ""
            self._is_free = self._matcher.is_accepting() and text.endswith(self._marks) if self._marks else False
        if self._is_free:
            return None
        if self._matcher.is_error():
            raise RefusedError(f"the schema of the reply fails: {self._matcher.get_error()[:300]}", param="schema")
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._num_ids].astype(bool)


@lru_cache(maxsize=2)
def grammars_of(tokenizer: "PreTrainedTokenizerBase", stop_ids: tuple[int, ...]) -> "Grammars":
    """Those of a tokenizer, which are compiled once."""
    return Grammars(tokenizer, stop_ids)


class Grammars:
    """Those of one tokenizer. stop_ids: that end a turn. For several threads."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop_ids: Sequence[int]) -> None:
        self.tokenizer, self.stop_ids = tokenizer, list(stop_ids)
        self._lock = threading.Lock()
        self._own: LLTokenizer | None = None
        self._known: dict[str, LLMatcher] = {}

    def of(self, asked: AgentRequest, reader: ReplyReader, prompt_end: str) -> TokenGrammar:
        """The grammar of a reply. prompt_end: what stands before it; it may have opened a thought.

        Raises:
            RefusedError: llguidance is not installed, or cannot follow this schema, tokenizer or chat template.
        """
        if reader.is_of_messages:
            raise RefusedError("outputs of a schema are not served with this chat template.", param="schema")
        marks: tuple[str, ...] = ()
        if asked.tools and asked.reads_calls:
            if reader.family is None or reader.family.is_whole:
                raise RefusedError(
                    f"outputs of a schema beside tools are not served with {reader.name}, whose calls begin as an "
                    "answer may; give tool_choice none.",
                    param="schema",
                )
            marks = reader.family.opens
        thinking = reader.thinking
        is_opened = thinking is not None and prompt_end.rstrip().endswith(thinking[0])
        assert asked.schema is not None
        with self._lock:
            own = self._tokenizer()
            text = self._grammar(asked.schema, thinking, marks, is_opened=is_opened)
            if text not in self._known:
                self._known = dict(list(self._known.items())[-MAX_KEPT + 1 :])
                self._known[text] = self._compiled(own, text)
            matcher = self._known[text].deep_copy()
        plain = not marks and not is_opened
        return TokenGrammar(matcher, own.vocab_size, self.tokenizer, asked.schema, marks, plain)

    def _tokenizer(self) -> "LLTokenizer":
        if self._own is None:
            try:
                import llguidance.hf
            except ImportError:
                needed = pip_install("llguidance")
                raise RefusedError(f"outputs of a schema need llguidance: {needed}.", param="schema") from None
            try:
                ends = self.stop_ids or None
                self._own = llguidance.hf.from_tokenizer(self.tokenizer, eos_token=ends)
            except Exception as error:
                raise RefusedError(f"outputs of a schema: llguidance cannot follow the tokenizer ({error}).") from None
        return self._own

    def _compiled(self, own: "LLTokenizer", text: str) -> "LLMatcher":
        import llguidance

        found = llguidance.LLMatcher(own, llguidance.LLMatcher.grammar_from_lark(text), log_level=0)
        if found.is_error():
            raise RefusedError(f"the schema of the reply is not served: {found.get_error()[:500]}", param="schema")
        return found

    def _grammar(
        self, schema: Mapping[str, Any], thinking: tuple[str, str] | None, marks: Sequence[str], *, is_opened: bool
    ) -> str:
        """In llguidance's form of Lark's."""
        kinds = "answer" if not marks else "(answer | call)"
        thought = "" if thinking is None else "thought " if is_opened else "thought? "
        lines = [f"start: {thought}{kinds}", f"answer: %json {json.dumps({**schema, 'x-guidance': OPTIONS})}"]
        if marks:
            lines.append(f"call: {' | '.join(map(self._literal, marks))}")
        if thinking is not None:
            opened, closed = map(self._literal, thinking)
            lines.append(f"thought: {'' if is_opened else f'{opened} '}inner SPACE")
            is_text = closed.startswith('"')
            lines.append(f"inner[suffix={closed}]: /(.|\\n)*/" if is_text else f"inner: TEXT {closed}")
            lines += ["SPACE: /\\s*/", *([] if is_text else ["TEXT: /(.|\\n)*/"])]
        return "\n".join(lines)

    def _literal(self, text: str) -> str:
        """A text, or the id that stands for it, which no text matches then."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        own = self._tokenizer()
        return f"<[{ids[0]}]>" if len(ids) == 1 and own.is_special_token(ids[0]) else json.dumps(text)
