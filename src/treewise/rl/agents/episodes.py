"""Episodes by their keys: what each may ask for, what its calls sampled, and when it is over.

A key names an episode. Calls of many episodes at a time come apart by it, whatever process or thread of an agent they
come from. A key cannot be guessed, and is refused once its episode has ended.
"""

import hashlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from treewise.base import features
from treewise.errors import ConfigError, RequestRefusedError
from treewise.rl.agents.endpoint_settings import EndpointSettings
from treewise.rl.agents.recording import Account, RecordedCall, RecordedTurn, Recording
from treewise.rl.agents.rows import AgentRow
from treewise.rl.agents.wire.asked import AgentRequest, GivenCall, RefusedError, Reply
from treewise.rl.agents.wire.common import Answer, Usage
from treewise.rl.agents.wire.kept import Kept
from treewise.rl.recorder.call_ids import call_ids
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.recorder.reader import Parts
from treewise.rl.samplers.batching import Batcher
from treewise.rl.samplers.protocol import Completion, TextStops
from treewise.rl.tasks.calls import FailedCall
from treewise.rl.tasks.reward_functions import number

T = TypeVar("T")
AT_IMPORT = "Make the client in the function: base URL and key are in the environment once an episode has begun."


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call that is sampled. done: its replies, once they are recorded. on_progress: is
    called where its tokens have become more; from another thread."""

    call: RecordedCall
    answer: Answer
    done: "Future[tuple[Reply, ...]]" = field(default_factory=Future)
    tokens: list[list[int]] = field(default_factory=list)
    on_progress: Callable[[], None] | None = None
    is_cancelled: bool = False


class Episode:
    """One run of an agent. name: of errors and rows. group: what it is compared within. seed: of its samples."""

    def __init__(
        self,
        key: str,
        name: str,
        group: str | int | None,
        seed: int,
        chat: ChatTokens,
        batcher: Batcher,
        settings: EndpointSettings,
        version: int | None = None,
    ) -> None:
        self.key, self.name, self.group, self.seed = key, name, group, seed
        self.chat, self.batcher, self.settings = chat, batcher, settings
        self.recording = Recording(chat, f"{seed}/{name}")
        self.reward: float | None = None
        self.no_rewards: dict[tuple[str, int] | None, str] = {}  # what was sent and is none: of a call, of the episode
        self.refused: Counter[str] = Counter()
        self.ignored: Counter[str] = Counter()  # fields of calls that change nothing, and how many calls had them
        self.kept = Kept()
        self.num_passed_on = 0
        self.last_call = time.monotonic()
        self.failure: BaseException | None = None
        self.on_flood: Callable[[], None] | None = None  # is called once it makes too many calls
        self._version = version
        self._is_open = True
        self.ending = threading.Lock()  # is held by whoever writes what it recorded
        self._under_way: set[OpenCall] = set()
        self._lock = threading.Condition()

    @property
    def is_open(self) -> bool:
        """Whether it may make calls."""
        return self._is_open

    # -- a call -------------------------------------------------------------------------------------------------------

    def begin(self, asked: AgentRequest, *, is_trained: bool = True) -> OpenCall:
        """Writes a call and hands it to the sampler.

        Raises:
            RefusedError: it cannot be served, or the episode has ended or asks for too much.
        """
        with self._lock:
            self.last_call = time.monotonic()
            if not self._is_open:
                raise _ended()
            if len(self.recording.calls) >= self.settings.max_calls:
                if self.on_flood is not None:
                    self.on_flood()
                self._refuse(f"more than {self.settings.max_calls} calls of an episode (max_calls)", 403)
            if len(self._under_way) >= self.settings.calls_at_once:
                self._refuse(
                    f"more than {self.settings.calls_at_once} calls of an episode at a time (calls_at_once)", 429
                )
            call = self.recording.begin(asked, is_trained=is_trained, max_length=self.settings.max_length)
            usage = Usage(call.num_prompt, 0, call.num_prompt - len(call.new_ids))
            opened = OpenCall(call, Answer(call.id, int(time.time()), asked, usage))
            try:
                requests = self._requests(opened)
            except (ConfigError, RefusedError) as error:  # values that no sampler takes
                self.recording.fail(call)
                raise RefusedError(str(error)) if isinstance(error, ConfigError) else error from None
            self._under_way.add(opened)
            self.ignored.update(dict.fromkeys(asked.ignored, 1))
        for name in asked.ignored:
            self.chat.note(f"calls give {name}, which changes nothing here and is ignored")
        results, left = dict[int, Completion | BaseException](), [len(requests)]

        def answered(index: int, result: Completion | BaseException) -> None:
            with self._lock:
                results[index], left[0] = result, left[0] - 1
                is_last = not left[0]
            if is_last:
                self.batcher.beside(self._end, opened, [results[number] for number in range(len(requests))])

        for index, request in enumerate(requests):
            self.batcher.submit(request, partial(answered, index), (self.seed, call.number, index))
        return opened

    def _refuse(self, what: str, status: int) -> None:
        self.refused[what] += 1
        raise RefusedError(what, status=status, code="rate_limit_exceeded", is_final=status != 429)

    def cancel(self, opened: OpenCall) -> None:
        """Nobody waits for the call; what was sampled of it is recorded."""
        opened.is_cancelled = True

    def _requests(self, opened: OpenCall) -> list[TextStops]:
        """A request for each choice."""
        call, asked, settings = opened.call, opened.call.asked, self.settings
        prefix = self.recording.prompt_ids(call)
        room = settings.max_new_tokens if settings.max_length is None else settings.max_length - len(prefix)
        most = min(asked.max_tokens or settings.max_new_tokens, settings.max_new_tokens, room)
        given = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
        rules: dict[str, Any] = {}
        for name, usual in given.items():
            own, ours = getattr(asked, name), getattr(settings, name) if call.is_trained else None
            rules[name] = ours if ours is not None else usual if own is None else own
        requests, kept_to = [], self._rules_of(call)
        for index in range(asked.num_choices):
            opened.tokens.append([])
            requests.append(
                TextStops(
                    prefix_ids=tuple(prefix.tolist()),
                    max_new_tokens=most,
                    seed=self._seed(call, index),
                    stop_ids=self.chat.end_ids,
                    num_top=asked.num_top or 0,
                    want_routes=settings.records_experts,
                    stop_texts=asked.stop,
                    decode=self.chat.decode,
                    is_cancelled=lambda: opened.is_cancelled,
                    on_tokens=_shown(opened, index) if asked.is_streamed else None,
                    rules=kept_to(),
                    **rules,
                )
            )
        return requests

    def _rules_of(self, call: RecordedCall) -> Callable[[], Any]:
        """Gives each choice of a call the rules that it has to keep to. Raises `RefusedError`."""
        reader = call.reader
        if call.asked.schema is None or call.asked.must_call is not None or reader is None:
            return lambda: None
        if not getattr(self.batcher.sampler, "takes_rules", False):
            raise RefusedError("the sampler draws by no grammar, so outputs of a schema are not served.")
        self.chat.note(
            "calls ask for replies of a schema: these are sampled under a grammar, and recorded with the policy's own "
            "log-probs"
        )
        grammars = features.grammars.grammars_of(self.chat.tokenizer, self.chat.end_ids)
        return lambda: grammars.of(call.asked, reader, call.prompt_end)

    def _seed(self, call: RecordedCall, index: int) -> int:
        """Of a call and how often it was made before, so that it does not matter which of several comes first."""
        own = [self.seed, call.asked.seed, call.digest, call.repeat, index]
        return int.from_bytes(hashlib.sha256(repr(own).encode()).digest()[:7], "big")

    def _end(self, opened: OpenCall, results: Sequence[Completion | BaseException]) -> None:
        """Records a call and gives its replies out."""
        try:
            completions = [result for result in results if isinstance(result, Completion)]
            errors = [result for result in results if isinstance(result, BaseException)]
            replies = self._record(opened, completions)
            if errors:
                error = next((each for each in errors if not self._is_of_call(opened.call, each)), None)
                if not opened.is_cancelled and error is not None:
                    self.failure = error
                if not completions:
                    self.recording.fail(opened.call)
                if opened.is_cancelled and not self._is_open:
                    error = _ended()
                opened.done.set_exception(RefusedError(str(errors[0])) if error is None else error)
            else:
                opened.done.set_result(replies)
        except BaseException as error:  # is raised where the replies are waited for
            self.failure = error
            opened.done.set_exception(error)
        finally:
            with self._lock:
                self._under_way.discard(opened)
                self._lock.notify_all()
            if opened.on_progress is not None:
                opened.on_progress()

    def _is_of_call(self, call: RecordedCall, error: BaseException) -> bool:
        """Whether only what a call asks for could not be had. A setting that contradicts the sampler is the call's
        where the call, and not the run, has chosen it."""
        is_runs = call.is_trained and self.settings.temperature is not None and not call.asked.num_top
        return isinstance(error, RequestRefusedError | RefusedError) or (isinstance(error, ConfigError) and not is_runs)

    def _record(self, opened: OpenCall, completions: Sequence[Completion]) -> tuple[Reply, ...]:
        choices = [self._choice(opened, index, completion) for index, completion in enumerate(completions)]
        self.recording.end(opened.call, choices)
        replies = tuple(choice.reply for choice in choices)
        usage = replace(opened.answer.usage, completion=sum(completion.num_tokens for completion in completions))
        ids = tuple(self.recording.prompt_ids(opened.call).tolist())
        opened.answer = replace(opened.answer, replies=replies, usage=usage, prompt_ids=ids)
        return replies

    def _choice(self, opened: OpenCall, index: int, completion: Completion) -> RecordedTurn:
        """A sampled completion as an answer: text, calls and tokens."""
        call, asked = opened.call, opened.call.asked
        sampled = completion.token_ids.astype(np.int32)
        ids = np.concatenate([call.forced_ids, sampled])
        is_sampled = np.concatenate([np.zeros(len(call.forced_ids), bool), np.ones(len(sampled), bool)])
        logprobs = np.concatenate([np.zeros(len(call.forced_ids)), completion.logprobs]).astype(np.float32)
        ways: dict[str, Any] = {"reads_calls": asked.reads_calls, "is_parallel": asked.is_parallel}
        prompt = None if call.reader is None else call.prompt_end
        read = self.chat.read(ids, prompt, asked.tools, reader=call.reader, stop_texts=asked.stop, **ways)
        reply = self._reply(call, index, read.parts, completion, read.stop_text)
        finish = "cancelled" if opened.is_cancelled else reply.finish
        version = completion.version if completion.version is not None else self._version
        more: dict[str, Any] = {"routed_experts": completion.routed_experts, "num_beyond": completion.num_beyond}
        return RecordedTurn(call, 0, read.turn, is_sampled, logprobs, finish, reply, version, **more)

    def _reply(
        self, call: RecordedCall, index: int, parts: Parts, completion: Completion, stop_text: str | None
    ) -> Reply:
        tops: tuple[Mapping[int, float], ...] = ()
        if completion.top_ids is not None and completion.top_logprobs is not None:
            pairs = zip(completion.top_ids.tolist(), completion.top_logprobs.tolist(), strict=True)
            tops = tuple(
                {token: value for token, value in zip(*pair, strict=True) if np.isfinite(value)} for pair in pairs
            )
        path = np.concatenate([self.recording.prompt_ids(call), completion.token_ids])
        repeat = (call.repeat, index) if call.repeat or index else ()
        names = call_ids(path, len(parts.calls), repeat)
        calls = tuple(GivenCall(name, *found) for name, found in zip(names, parts.calls, strict=True))
        finish: str = completion.finish_reason
        return Reply(
            parts.content,
            parts.reasoning,
            calls,
            "tool_calls" if calls and finish == "stop" else finish,
            stop_text,
            tuple(completion.token_ids.tolist()),
            tuple(completion.logprobs.tolist()),
            tops,
        )

    # -- its end ------------------------------------------------------------------------------------------------------

    def set_reward(self, value: object, call_id: str | None = None, index: int = 0) -> None:
        """Of a call, or of the episode. Raises `RefusedError` for a call that it did not make; and for no number that
        is a reward, without which the episode has none either, unless another is sent in its place."""
        choice = None if call_id is None else self.recording.choice_of(call_id, index)
        if call_id is not None and choice is None:
            raise RefusedError(
                f"this episode has no call {call_id!r} with choice {index}.", status=404, param="call_id"
            )
        found, place = number(value, "the reward that it sent is"), None if call_id is None else (call_id, index)
        self.no_rewards.pop(place, None)
        if isinstance(found, FailedCall):
            self.no_rewards[place] = found.message
        reward = None if isinstance(found, FailedCall) else found
        if choice is None:
            self.reward = reward
        else:
            choice.reward = reward
        if isinstance(found, FailedCall):
            raise RefusedError(f"{found.message}; a reward is a finite number of float32.", param="reward")

    def end(self, seconds: float = 60.0) -> None:
        """No further call is taken; those under way are cancelled, and recorded."""
        with self._lock:
            self._is_open = False
            for opened in self._under_way:
                opened.is_cancelled = True
            self._lock.wait_for(lambda: not self._under_way, seconds)

    def rows(self) -> tuple[list[AgentRow], Account]:
        """See `Recording.rows`, with group, rollout and reward."""
        rows, account = self.recording.rows()
        for row in rows:
            if self.group is not None:
                row["group"] = self.group
            row["rollout"] = self.name
            if self.reward is not None:
                row["reward"] = self.reward
        return rows, account


def _shown(opened: OpenCall, index: int) -> Callable[[Sequence[int]], None]:
    """Shows a growing turn to whoever streams it."""

    def on_tokens(token_ids: Sequence[int]) -> None:
        known = opened.tokens[index]
        if len(token_ids) > len(known):
            known.extend(int(token) for token in token_ids[len(known) :])
            if opened.on_progress is not None:
                opened.on_progress()

    return on_tokens


def _ended() -> RefusedError:
    return RefusedError("this key's episode has ended.", status=410, code="episode_ended")


class Episodes:
    """All episodes of an endpoint.

    Parameters:
        batcher: None where each episode has its own.
        takes_any_key: whether a key that is not known begins an episode of that name (`treewise record`).
    """

    def __init__(
        self,
        chat: ChatTokens,
        batcher: Batcher | None,
        settings: EndpointSettings,
        *,
        takes_any_key: bool = False,
    ) -> None:
        self.chat, self.batcher, self.settings = chat, batcher, settings
        self.takes_any_key = takes_any_key
        self.import_key = f"tw-import-{secrets.token_urlsafe(24)}"  # under which an agent's module is loaded
        self.import_calls = 0
        self.refused: Counter[str] = Counter()
        self._by_key: dict[str, Episode] = {}
        self._ended: set[str] = set()  # hashes of keys
        self._named: Counter[str] = Counter()
        self._lock = threading.Lock()

    def open(
        self,
        name: str,
        group: str | int | None = None,
        seed: int = 0,
        key: str | None = None,
        *,
        batcher: Batcher | None = None,
        settings: EndpointSettings | None = None,
        version: int | None = None,
    ) -> Episode:
        """A new episode, with a key that nobody can guess.

        Parameters:
            batcher, settings: of this episode, in place of the endpoint's.
            version: of the policy that samples it, where the sampler does not say.
        """
        key = f"tw-{secrets.token_urlsafe(24)}" if key is None else key
        batcher, settings = batcher or self.batcher, settings or self.settings
        assert batcher is not None, "an endpoint without a sampler is given one with each episode"
        episode = Episode(key, name, group, seed, self.chat, batcher, settings, version)
        with self._lock:
            self._by_key[key] = episode
        return episode

    def find(self, key: str | None) -> Episode:
        """The episode of a key. Raises `RefusedError` for one that is missing, unknown, of an ended episode, or from
        before all episodes."""
        with self._lock:
            if key == self.import_key:
                self.import_calls += 1
                raise RefusedError(f"this call is of no episode. {AT_IMPORT}", status=403, code="made_at_import")
            if key and (found := self._by_key.get(key)) is not None:
                return found
            if key and _hash(key) in self._ended:
                self.refused["after the episode's end"] += 1
                raise _ended()
            if not (key and self.takes_any_key):
                self.refused["without a key" if not key else "with a key that is not known"] += 1
                raise RefusedError(
                    "the API key is missing, or is not that of an episode.", status=401, code="invalid_api_key"
                )
        return self.open(key, None, self.seed_of(key), key)

    def seed_of(self, name: str) -> int:
        """Of an episode whose caller gives none: its name's, and another one for each further episode of that name, so
        that tries of one task are different draws."""
        with self._lock:
            self._named[name] += 1
            number = self._named[name]
        text = name if number == 1 else f"{name}/{number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    def end(self, episode: Episode, written: Callable[[Episode], T] | None = None, seconds: float = 60.0) -> T | None:
        """Ends one, and forgets its key once `written` has taken what it recorded: as long as that fails, it can be
        ended again. What `written` returns; None where another caller has ended it. seconds: for calls under way."""
        episode.end(seconds)
        with episode.ending:
            if self._by_key.get(episode.key) is not episode:
                return None
            found = None if written is None else written(episode)
            with self._lock:
                self._ended.add(_hash(episode.key))
                del self._by_key[episode.key]
        return found

    @property
    def all_open(self) -> list[Episode]:
        """Those that have not ended."""
        with self._lock:
            return list(self._by_key.values())


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
