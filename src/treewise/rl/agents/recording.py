"""What the calls of one episode saw and sampled: token paths that share their beginnings, each sampled token once.

A call goes on from a recorded turn where its messages begin with those that the turn answered, and the turn as it was
given out, in canonical form. The ids of that path stay as they are, and what the chat template writes behind the turn
is all that is tokenised. Where an agent (or the template) changed something, the path forks at the first token that
differs: ids of a sampled turn stay as far as its text does, and what follows is text.

Rows are paths to turns that nothing goes on from. Each sampled token has a loss weight in one row alone: the first that
holds the turn which it was sampled in.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from treewise.base import features
from treewise.data.render.canonical import canonical, canonical_all, chain, root_of
from treewise.errors import ConfigError, DataError
from treewise.rl.agents.forks import AGAIN, BRANCHED, NEW, num_equal, reason_of
from treewise.rl.agents.rows import AgentRow, Streams, TurnFacts
from treewise.rl.agents.wire.asked import AgentRequest, RefusedError, Reply
from treewise.rl.recorder.chat_tokens import ChatTokens, Turn, Written
from treewise.rl.recorder.reader import ReplyReader
from treewise.rl.recorder.row_parts import RowPart, held_tokens, row_streams, written_part

_NO_IDS = np.zeros(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class RecordedTurn:
    """One sampled turn. number: of its draw in the episode. is_sampled: False for ids that were written for it (a call
    that was asked for). items: the messages of its call and its own, in canonical form. routed_experts: of prompt and
    turn, as in `Completion`. num_beyond: tokens that were sampled behind its end and dropped.
    """

    call: "RecordedCall"
    number: int
    turn: Turn
    is_sampled: np.ndarray
    logprobs: np.ndarray
    finish: str
    reply: Reply
    version: int | None = None
    reward: float | None = None
    items: list[tuple[Any, ...]] = field(default_factory=list)
    routed_experts: np.ndarray | None = None
    num_beyond: int = 0

    @property
    def num_sampled(self) -> int:
        """Tokens that the sampler made."""
        return int(self.is_sampled.sum())


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A call.

    start, num_kept: the turn whose path it goes on from, and how many of that turn's own ids stay; new_ids: what stands
    behind them, of the text `new_text`. forced_ids: written at the beginning of its turn. num_prompt: tokens that the
    model saw. num_again: of the new ones, those of messages that were there before. state: `open`, `done`, `failed`.
    """

    number: int
    id: str
    asked: AgentRequest
    reader: ReplyReader | None
    is_trained: bool
    keys: list[str]
    items: list[tuple[Any, ...]]
    start: RecordedTurn | None
    num_kept: int
    new_ids: np.ndarray
    new_text: str
    num_prompt: int
    prompt_end: str
    forced_ids: np.ndarray = field(default_factory=lambda: _NO_IDS)
    reason: str | None = None
    num_again: int = 0
    choices: list[RecordedTurn] = field(default_factory=list)
    state: str = "open"
    digest: str = ""
    repeat: int = 0


class RecordedPart(NamedTuple):
    """A part of a path. choice: whose turn it is, from its first id on; None for what was written."""

    token_ids: np.ndarray
    choice: RecordedTurn | None


@dataclass(slots=True)
class Account:
    """Tokens of an episode. sampled: that the sampler made. recorded: in rows. trained: with a loss weight. context: of
    calls that are not trained. again: written once more at forks. beyond: that a server sampled behind the end of a
    turn, and nobody has.
    """

    sampled: int = 0
    recorded: int = 0
    trained: int = 0
    context: int = 0
    again: int = 0
    calls: int = 0
    beyond: int = 0

    @property
    def fault(self) -> str | None:
        """What does not add up: each sampled token is recorded or context, and each recorded one trained once."""
        if self.sampled == self.recorded + self.context and self.recorded == self.trained:
            return None
        return f"{asdict(self)} do not add up; this is a fault of treewise, please report it"


class Recording:
    """The calls of an episode. For several threads. name: begins the ids of calls."""

    def __init__(self, chat: ChatTokens, name: str = "episode") -> None:
        self.chat, self.name = chat, name
        self.calls: list[RecordedCall] = []
        self.reasons: Counter[str] = Counter()
        self._ends: dict[str, RecordedTurn] = {}  # by the name of a conversation: the turn that ends it
        self._lock = threading.RLock()
        self._num_choices = 0
        self._digests: Counter[str] = Counter()

    # -- calls --------------------------------------------------------------------------------------------------------

    def begin(self, asked: AgentRequest, *, is_trained: bool = True, max_length: int | None = None) -> RecordedCall:
        """A call before it is sampled.

        Raises:
            RefusedError: it cannot be written, or nothing could follow it in `max_length` tokens.
        """
        with self._lock:
            call = self._plain(asked) if asked.prompt is not None else self._chat(asked)
            call.is_trained = is_trained
            if max_length is not None and call.num_prompt + len(call.forced_ids) >= max_length:
                raise RefusedError(
                    f"This model's maximum context length is {max_length} tokens. However, your messages resulted in "
                    f"{call.num_prompt} tokens. Please reduce the length of the messages.",
                    code="context_length_exceeded",
                    param="messages",
                )
            rules = (asked.num_choices, asked.max_tokens, asked.temperature, asked.top_p, asked.top_k, asked.stop)
            ids = self.prompt_ids(call)
            call.digest = hashlib.sha256(ids.tobytes() + repr((rules, call.forced_ids.tolist())).encode()).hexdigest()
            call.repeat = self._digests[call.digest]
            self._digests[call.digest] += 1
            self.calls.append(call)
            if call.reason is not None:
                self.reasons[call.reason] += 1
            return call

    def prompt_ids(self, call: RecordedCall) -> np.ndarray:
        """int32, what is sampled from."""
        parts = [] if call.start is None else self._parts(call.start, call.num_kept)
        return np.concatenate([*(part.token_ids for part in parts), call.new_ids, call.forced_ids])

    def end(self, call: RecordedCall, choices: Sequence[RecordedTurn]) -> None:
        """Records what was sampled."""
        with self._lock:
            for choice in choices:
                choice.number, self._num_choices = self._num_choices, self._num_choices + 1
                call.choices.append(choice)
                if call.asked.prompt is None:
                    message = choice.reply.message()
                    message["content"] = call.asked.prefill + message["content"]  # they come back as one message
                    own = canonical(message, with_reasoning=not self.chat.keeps_thinking)
                    choice.items = [*call.items, own]
                    self._ends[chain(call.keys[0], choice.items)[-1]] = choice
            call.state = "done"

    def fail(self, call: RecordedCall) -> None:
        """Of a call nothing was sampled."""
        call.state = "failed"

    def choice_of(self, call_id: str, index: int = 0) -> RecordedTurn | None:
        """The turn that a reward of a call means."""
        with self._lock:
            found = next((call for call in self.calls if call.id == call_id), None)
            return None if found is None or not 0 <= index < len(found.choices) else found.choices[index]

    # -- prompts ------------------------------------------------------------------------------------------------------

    def _chat(self, asked: AgentRequest) -> RecordedCall:
        written = written_for(self.chat, asked)
        items = canonical_all(written.given, with_reasoning=not self.chat.keeps_thinking)
        keys = chain(root_of(asked.tools, asked.variables), items)
        start, num_kept, text, reason = None, 0, written.text, None
        for size in range(len(items), 0, -1):
            choice = self._ends.get(keys[size])
            if choice is None:
                continue
            tail = self.chat.tail(written, size, choice.turn)
            if tail is None:
                reason = "template"
                continue
            start, num_kept, text = choice, tail.num_kept, tail.text
            if size == _last_turn(items):
                reason = "end of turn" if num_kept < len(choice.turn.token_ids) else None
            break
        has_gone_on = start is not None and reason != "template" and size == _last_turn(items)
        nearest = None if has_gone_on else self._nearest(items)
        if has_gone_on:
            others = [call.new_text == text for call in self.calls if call.start is start]
            reason = reason or ((AGAIN if any(others) else BRANCHED) if others else None)
        else:
            reason = reason or self._reason(nearest, items, keys[0])
            start, num_kept, text = self._further(start, num_kept, text, keys[0])
        _, reader = self.chat.template_of(asked.variables)
        new_ids = self._new_ids(start, num_kept, text)
        call = self._new_call(asked, reader, keys, items, start, num_kept, new_ids, text)
        call.prompt_end, call.reason = written.text[-4096:], reason
        call.num_again = self._num_again(call, nearest, written)
        if asked.must_call is not None:
            opening = reader.opening(asked.must_call)
            if opening is None:
                raise RefusedError(
                    f"tool_choice asks for a call, and with {reader.name} none can be begun; ask for 'auto'.",
                    param="tool_choice",
                )
            call.forced_ids = self.chat.following_ids(written.text, opening)
        return call

    def _plain(self, asked: AgentRequest) -> RecordedCall:
        """Of a text or ids, without a template."""
        start, num_kept, text, ids = None, 0, "", _NO_IDS
        others = [choice for call in self.calls if call.asked.prompt is not None for choice in call.choices]
        if isinstance(asked.prompt, str):
            text = asked.prompt
            start, num_kept, text = self._longest(
                [choice for choice in others if choice.call.start is None], text, None
            )
            whole = np.array(self.chat.text_ids(text), dtype=np.int32)
            ids = whole if start is None else self._new_ids(start, num_kept, text)
        else:
            ids = np.array(asked.prompt, dtype=np.int32)
            best = 0
            for choice in others:
                path = np.concatenate([part.token_ids for part in self._parts(choice)])
                own, same = len(path) - len(choice.turn.token_ids), _same(path, ids)
                if same > max(own, best):
                    start, num_kept, best = choice, same - own, same
            ids = ids[best:]
        if not len(ids) and start is None:
            raise RefusedError("the prompt has no tokens.", param="prompt")
        call = self._new_call(asked, None, [""], [], start, num_kept, ids, text)
        call.reason = None if start is not None else NEW
        return call

    def _new_ids(self, start: RecordedTurn | None, num_kept: int, text: str) -> np.ndarray:
        if start is None:
            return self.chat.ids_of(text)
        path = np.concatenate([part.token_ids for part in self._parts(start, num_kept)])
        return self.chat.following_ids(self.chat.decode(path[-16:]), text)

    def _new_call(
        self,
        asked: AgentRequest,
        reader: ReplyReader | None,
        keys: list[str],
        items: list[tuple[Any, ...]],
        start: RecordedTurn | None,
        kept: int,
        ids: np.ndarray,
        text: str,
    ) -> RecordedCall:
        before = 0 if start is None else start.call.num_prompt + kept
        number = len(self.calls)
        name = hashlib.sha256(f"{self.name}/{number}".encode()).hexdigest()[:24]
        is_trained, num_prompt = True, before + len(ids)
        return RecordedCall(
            number, name, asked, reader, is_trained, keys, items, start, kept, ids, text, num_prompt, ""
        )

    def _further(
        self, start: RecordedTurn | None, num_kept: int, text: str, root: str
    ) -> tuple[RecordedTurn | None, int, str]:
        """Along what was sampled behind a path, as far as a text agrees with it."""
        while True:
            on = [choice for call in self.calls for choice in call.choices if call.asked.prompt is None]
            if start is None:
                behind = [choice for choice in on if choice.call.start is None and choice.call.keys[0] == root]
            else:
                behind = [choice for choice in on if choice.call.start is start and choice.call.num_kept == num_kept]
            found, kept, rest = self._longest(behind, text, start)
            if found is start:
                return start, num_kept, text
            start, num_kept, text = found, kept, rest

    def _longest(
        self, choices: Sequence[RecordedTurn], text: str, start: RecordedTurn | None
    ) -> tuple[RecordedTurn | None, int, str]:
        """The turn with which a text agrees longest behind what was written before it, how many of its ids, and what is
        left of the text; `start` where there is none."""
        found, num_kept, most = start, 0, 0
        for choice in choices:
            before = len(choice.call.new_text)
            if len(choice.call.forced_ids) or not text.startswith(choice.call.new_text):
                continue
            kept = self.chat.num_within(choice.turn.token_ids, text[before:])
            size = before + len(self.chat.decode(choice.turn.token_ids[:kept]))
            if kept and size > most:
                found, num_kept, most = choice, kept, size
        return found, num_kept, text[most:]

    def _nearest(self, items: list[tuple[Any, ...]]) -> RecordedTurn | None:
        """The turn whose conversation has most messages in common with a call's; the latest of several."""
        others = [choice for call in self.calls if call.asked.prompt is None for choice in call.choices]
        return max(others, key=lambda choice: (num_equal(items, choice.items), choice.number), default=None)

    def _reason(self, nearest: RecordedTurn | None, items: list[tuple[Any, ...]], root: str) -> str:
        if nearest is None:
            return NEW
        same = nearest.call.keys[0] == root
        return reason_of(items, nearest.items, num_messages=len(nearest.call.items), same_tools=same)

    def _num_again(self, call: RecordedCall, nearest: RecordedTurn | None, written: Written) -> int:
        """Tokens that are written once more: of messages up to the last turn of the model, behind what the path shares
        with the nearest one."""
        size = _last_turn(call.items)
        if not size or nearest is None:
            return 0
        head = written.template.render([list(written.messages[:size])], written.tools, "the call")[0]
        behind = written.text[len(head) :] if written.text.startswith(head) else ""
        path = np.concatenate([part.token_ids for part in self._parts(nearest)])
        num_old = call.num_prompt - len(self.chat.following_ids(head, behind))
        return max(num_old - _same(path, self.prompt_ids(call)), 0)

    # -- paths and rows -----------------------------------------------------------------------------------------------

    def _parts(self, choice: RecordedTurn, num_kept: int | None = None) -> list[RecordedPart]:
        """The path to a turn, with the first `num_kept` of its ids (all where not given)."""
        found: list[RecordedPart] = []
        at: RecordedTurn | None = choice
        while at is not None:
            found.append(RecordedPart(at.turn.token_ids if num_kept is None else at.turn.token_ids[:num_kept], at))
            found.append(RecordedPart(at.call.new_ids, None))
            num_kept, at = at.call.num_kept, at.call.start
        return [part for part in reversed(found) if len(part.token_ids)]

    def _leaves(self) -> Iterator[RecordedTurn]:
        """Turns from which nothing goes on that holds them whole."""
        whole = {
            id(call.start)
            for call in self.calls
            if call.choices and call.start is not None and call.num_kept == len(call.start.turn.token_ids)
        }
        for call in self.calls:
            for choice in call.choices:
                if id(choice) not in whole and len(choice.turn.token_ids):
                    yield choice

    def rows(self) -> tuple[list[AgentRow], Account]:
        """Rows of plain values, and where the tokens went.

        A row has `token_ids`, `loss_weights`, `sampler_logprobs`, `draws`, `policy_versions` where they are counted,
        `token_rewards` (of calls, each at its last token) and `routed_experts` where there are any, and `turns`: of
        each turn in it that it trains, its call, its role, where it begins and ends, and its reward.
        """
        with self._lock:
            account, rows, trained = Account(calls=len(self.calls)), list[AgentRow](), set[int]()
            for leaf in self._leaves():
                row = self._row(self._parts(leaf), trained)
                account.trained += int(sum(row["loss_weights"]))
                if any(row["loss_weights"]):
                    rows.append(row)
            choices = {choice.number: choice for call in self.calls for choice in call.choices}
            sizes = {number: choice.num_sampled for number, choice in choices.items()}
            in_rows = held_tokens(sizes, ((np.array(row["draws"]), np.array(row["loss_weights"])) for row in rows))
            for number, choice in choices.items():
                account.sampled += choice.num_sampled
                account.beyond += choice.num_beyond
                if choice.call.is_trained:
                    account.recorded += int(in_rows[number].held.sum())
                else:
                    account.context += choice.num_sampled
            account.again = sum(call.num_again for call in self.calls)
            return rows, account

    def _row(self, parts: Sequence[RecordedPart], trained: set[int]) -> AgentRow:
        at, turns, of_parts = 0, list[TurnFacts](), list[RowPart]()
        for ids, choice in parts:
            end = at + len(ids)
            is_new = (
                choice is not None
                and len(ids) == len(choice.turn.token_ids)
                and id(choice) not in trained
                and choice.call.is_trained
            )
            of_parts.append(written_part(ids) if choice is None else _row_part(choice, len(ids), is_new=is_new))
            if choice is not None and is_new:
                trained.add(id(choice))
                turns.append(_turn_facts(choice, at, end))
            at = end
        streams = row_streams(of_parts)
        row: Streams = {
            "token_ids": streams["token_ids"].tolist(),
            "loss_weights": streams["loss_weights"].astype(int).tolist(),
            "sampler_logprobs": streams["sampler_logprobs"].tolist(),
            "draws": streams["draws"].tolist(),
        }
        if "policy_versions" in streams:
            row["policy_versions"] = streams["policy_versions"].tolist()
        if "routed_experts" in streams:
            row["routed_experts"] = features.encoded_arrays.encoded(streams["routed_experts"])
        if any("reward" in turn for turn in turns):
            rewards = row["token_rewards"] = [0.0] * at
            for turn in turns:
                trained_here = np.flatnonzero(streams["loss_weights"][turn["start"] : turn["end"]])
                rewards[turn["start"] + int(trained_here[-1])] = turn.get("reward", 0.0)
        return {**row, "turns": turns}


def _row_part(choice: RecordedTurn, size: int, *, is_new: bool) -> RowPart:
    """The first ids of a turn. is_new: no row before holds the turn, and it is trained."""
    own = choice.is_sampled[:size]
    return RowPart(
        choice.turn.token_ids[:size],
        own & is_new,
        np.where(own, choice.logprobs[:size], 0.0),
        np.where(own, choice.number, -1),
        None if choice.version is None else np.where(own, choice.version, -1),
        choice.routed_experts,
    )


def written_for(chat: ChatTokens, asked: AgentRequest) -> Written:
    """The conversation of a call.

    Raises:
        RefusedError: messages of another shape, images, tools that the template does not write, or an error of the
            template.
    """
    try:
        return chat.written(asked.messages, asked.tools, asked.variables, prefill=asked.prefill)
    except (DataError, ConfigError) as error:
        is_of_tools = isinstance(error, ConfigError) and asked.tools
        raise RefusedError(str(error), param="tools" if is_of_tools else "messages") from None


def _turn_facts(choice: RecordedTurn, start: int, end: int) -> TurnFacts:
    facts: TurnFacts = {
        "call": choice.call.id,
        "role": choice.call.asked.model,
        "start": start,
        "end": end,
        "finish": choice.finish,
    }
    if (reason := choice.call.reason) not in (None, NEW, AGAIN, BRANCHED):
        facts["fork"] = reason
    if choice.call.asked.schema is not None:
        facts["constrained"] = True  # sampled under a grammar
    if choice.reward is not None:
        facts["reward"] = choice.reward
    return facts


def _last_turn(items: Sequence[tuple[Any, ...]]) -> int:
    """The number of messages up to the last of the model's."""
    return max((index + 1 for index, item in enumerate(items) if item[0] == "assistant"), default=0)


def _same(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if len(differ) else size
