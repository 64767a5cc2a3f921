"""One rollout while it is sampled: a conversation whose token ids grow, and what makes a node of its tree of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import numpy as np

from treewise.base import features
from treewise.data.render.messages import clean_conversation
from treewise.errors import DataError, TaskError
from treewise.rl.branching import PROMPT, Branch, RolloutNode, RolloutTree
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.samplers import Completion, SampleRequest
from treewise.rl.tasks import Calls, RewardFailure, RewardRunner, TaskItem
from treewise.rl.tasks.protocol import RewardRequest, SingleTurnTask, Task, TurnTask
from treewise.rl.tasks.reward_functions import Logged
from treewise.rl.tasks.rewards import Outcome

# -- conversations ----------------------------------------------------------------------------------------------------


class Conversation(Protocol):
    """What a rollout holds and how it goes on: `OneTurn`, and with an environment `ManyTurns` (`many_turns.py`).

    token_ids: the prompt and all that followed: what the sampler continues. can_return: whether a branch may start
    behind the prompt. opening: what a branch waits for before its first request, which may run in another thread, and
    raises `TaskError` if the environment cannot be brought back; None: nothing. is_rewarded_alone: whether it is
    rewarded as soon as it ended, and not together with all others that end meanwhile.
    """

    @property
    def item(self) -> TaskItem: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def can_return(self) -> bool: ...
    @property
    def opening(self) -> Callable[[], None] | None: ...
    @property
    def is_rewarded_alone(self) -> bool: ...

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds sampled tokens of the present turn."""

    def end_turn(self, finish: str) -> Callable[[], None] | None:
        """Ends the turn; what `answered` waits for, which may run in another thread."""

    def answered(self, finish: str) -> tuple[list[int], str | None]:
        """The observation that follows the turn, and why the rollout ended (None where it goes on)."""
        ...

    def branch(self, num_tokens: int) -> "Conversation":
        """An independent conversation of the first `num_tokens` tokens."""
        ...

    def reward_call(self, others: Sequence[Any], runner: RewardRunner) -> Callable[[], tuple[list[Outcome], Logged]]:
        """The call for the rewards of this conversation and `others` like it, which all ended; for another thread."""
        ...


@dataclass(slots=True)
class OneTurn:
    """A prompt of a task and one completion."""

    token_ids: list[int]
    task: SingleTurnTask
    item: TaskItem
    chat: ChatTokens
    num_prompt_tokens: int

    can_return: ClassVar[bool] = True
    opening: ClassVar[None] = None
    is_rewarded_alone: ClassVar[bool] = False

    def extend(self, token_ids: Sequence[int]) -> None:
        self.token_ids += [int(token) for token in token_ids]

    def end_turn(self, finish: str) -> None:
        del finish

    def answered(self, finish: str) -> tuple[list[int], str | None]:
        return [], finish

    def branch(self, num_tokens: int) -> "OneTurn":
        return replace(self, token_ids=self.token_ids[:num_tokens])

    def reward_call(
        self, others: Sequence["OneTurn"], runner: RewardRunner
    ) -> Callable[[], tuple[list[Outcome], Logged]]:
        return partial(runner.rewards, self.task, [each.request() for each in (self, *others)])

    def request(self) -> RewardRequest:
        """What its reward is computed from."""
        prompt_ids, ids = self.token_ids[: self.num_prompt_tokens], self.token_ids[self.num_prompt_tokens :]
        text = self.chat.tokenizer.decode(self.chat.said(ids), skip_special_tokens=True)
        message = None if isinstance(self.item.prompt, str) else self.chat.message(ids, prompt_ids)
        return RewardRequest(self.item, text, tuple(ids), message)


def start(task: Task, items: Sequence[TaskItem], chat: ChatTokens, calls: Calls) -> Sequence[Conversation]:
    """A conversation for each item, which stands behind its prompt; environments are reset at the same time."""
    if isinstance(task, TurnTask):
        episodes: Sequence[Conversation] = features.many_turns.started(task, items, chat, calls)
        return episodes
    found = []
    for item in items:
        if isinstance(item.prompt, str):
            ids = list(chat.text_ids(item.prompt))
        else:
            talk = chat.template.prepare(clean_conversation(list(item.prompt), item.key, "prompt"), item.key)
            ids = list(chat.prompt_ids(talk.messages, None, item.key))
        if not ids:
            raise DataError(f"{item.key}: the prompt has no tokens.")
        found.append(OneTurn(ids, task, item, chat, len(ids)))
    return found


# -- continuations ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limits:
    """When a rollout stops. max_new_tokens: generated tokens of it. max_length: tokens of prompt and rollout together.
    stop_ids: end a turn.
    """

    max_new_tokens: int
    max_length: int
    stop_ids: tuple[int, ...] = ()


class Continuation:
    """What one `Branch` asks for once: requests out, completions in, a node at the end.

    Where `wait` is not None, that has to be done, in whatever thread, and `go_on` be called before the next request.

    A first token that the policy drew already stands in front, with the log-prob of that draw. A node that reaches
    `Branch.max_tokens` is left unfinished; one that reaches a limit of the loop ends as `length`.

    Parameters:
        conversation: at the branch point; the node's own.
        seed: numbers that name the random stream, and the continuation among those that are continued together.

    Attributes:
        wait: see above; also before the first request. refused: why the environment could not be brought back.
        outcome: the reward of a rollout that ended, or why it has none; None before it is known.
        num_drawn: tokens that came from the sampler. num_chosen: that the policy drew from recorded candidates, 0 or 1.
    """

    def __init__(
        self, tree: RolloutTree, branch: Branch, conversation: Conversation, limits: Limits, seed: tuple[int, ...]
    ) -> None:
        self.branch, self.conversation, self.seed = branch, conversation, seed
        self.num_drawn = self.num_chosen = 0
        self._limits = limits
        self._finish: str | None = None
        self._tree = tree
        self._num_before = tree.num_sampled_before(branch.node, branch.position)
        self._num_turns = 0
        self._is_sampled: list[bool] = []
        self._turn_ends: list[int] = []
        self._streams: dict[str, Any] = {"token_ids": [], "logprobs": []}  # and those that the sampler gives
        self._routes: np.ndarray | None = None  # of the path so far, from the prompt on
        self._first: Completion | None = None
        self._reason: str | None = None  # why the part that was sampled last ended; None before the first
        self.refused: TaskError | None = None
        self.outcome: float | RewardFailure | None = None
        self.wait: Callable[[], None] | None = None
        self._chosen = None if branch.first_token is None else _first_token(tree, branch)
        if conversation.opening is None:
            self.go_on()
        else:
            self.wait = self._open

    def _open(self) -> None:
        assert self.conversation.opening is not None
        try:
            self.conversation.opening()
        except TaskError as error:
            self.refused = error

    def go_on(self) -> None:
        """Takes in what was waited for."""
        self.wait = None
        if self.refused is not None:
            return
        if self._reason is not None:
            observation, finish = self.conversation.answered(self._reason)
            is_too_long = len(self.conversation.token_ids) > self._limits.max_length
            self._observe([] if is_too_long else observation)
            self._finish = "length" if finish is None and self._room()[0] <= 0 else finish
        elif self._chosen is not None:  # stands in front of what is sampled; where it ends the turn, nothing is
            self.num_chosen = 1
            is_stop = int(self._chosen.token_ids[0]) in self._limits.stop_ids
            if is_stop or min(self._room()) <= 1:
                self._append(self._chosen)
                self._end_part("stop" if is_stop else self._chosen.finish_reason)
            else:
                self._first = self._chosen

    def request(self, common: SampleRequest) -> SampleRequest:
        """What to sample next, of settings that all requests have in common."""
        first = [] if self._first is None else self._first.token_ids.tolist()
        prefix, room = (*self.conversation.token_ids, *first), min(self._room()) - len(first)
        (seed,) = np.random.SeedSequence([*self.seed, self._num_turns]).generate_state(1, np.uint64).tolist()
        return replace(common, prefix_ids=prefix, max_new_tokens=room, seed=seed >> 1, tree=id(self._tree))

    def take(self, completion: Completion) -> None:
        """Adds a completion to the node, and ends the turn or the segment where it does."""
        if completion.routed_experts is not None or self._routes is not None:
            length = len(self.conversation.token_ids) + completion.num_tokens + (self._first is not None)
            self._routes = features.routes.filled(self._routes, completion.routed_experts, length)
        for part in (self._first, completion):
            if part is not None:
                self._append(part)
        self._first = None
        self.num_drawn += completion.num_tokens
        self._end_part(completion.finish_reason)

    def _end_part(self, reason: str) -> None:
        in_loop, in_segment = self._room()
        if reason == "length" and in_segment <= 0 < in_loop:
            return  # the turn goes on in another node
        self._num_turns += 1
        self._reason, self.wait = reason, self.conversation.end_turn(reason)
        if self.wait is None:
            self.go_on()

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is sampled for it: it was refused, its rollout has ended, or its segment is full."""
        return self.refused is not None or self.has_ended or self._room()[1] <= 0

    @property
    def has_ended(self) -> bool:
        """Whether a rollout ends here."""
        return self._finish is not None

    def node(self) -> RolloutNode:
        """What the continuation adds to its tree, once it is finished: with its reward, or why it has none."""
        ends = self._turn_ends
        if self._finish is not None and (not ends or ends[-1] < len(self._is_sampled)):
            ends = [*ends, len(self._is_sampled)]
        return RolloutNode(
            **self._streams,
            parent=self.branch.node,
            cut=0 if self.branch.node == PROMPT else self.branch.position,
            is_sampled=np.array(self._is_sampled),
            turn_ends=np.array(ends),
            finish=self._finish,
            reward=None if isinstance(self.outcome, RewardFailure) else self.outcome,
            error=str(self.outcome) if isinstance(self.outcome, RewardFailure) else None,
            routed_experts=self._routes,
        )

    # -- limits -------------------------------------------------------------------------------------------------------

    def _room(self) -> tuple[int, int]:
        """Tokens that may be generated before a limit of the loop is reached, and before that of a segment is."""
        own, most = sum(self._is_sampled), self.branch.max_tokens
        in_loop = self._limits.max_new_tokens - self._num_before - own
        in_loop = min(in_loop, self._limits.max_length - len(self.conversation.token_ids))
        return in_loop, in_loop if most is None else most - own

    # -- streams ------------------------------------------------------------------------------------------------------

    def _append(self, part: Completion) -> None:
        self._is_sampled += [True] * part.num_tokens
        for name in ("token_ids", "logprobs", "entropies", "top_ids", "top_logprobs"):
            values = getattr(part, name)
            if values is not None:
                self._streams.setdefault(name, []).extend(values.tolist())
        if part.version is not None:
            self._streams.setdefault("versions", []).extend([part.version] * part.num_tokens)
        self.conversation.extend(part.token_ids.tolist())

    def _observe(self, token_ids: list[int]) -> None:
        """Tokens of weight 0; their log-probs, entropies and candidates are empty."""
        num_tokens = len(token_ids)
        self._is_sampled += [False] * num_tokens
        self._streams["token_ids"] += token_ids
        self._streams["logprobs"] += [0.0] * num_tokens
        for name, fill in (("entropies", 0.0), ("versions", -1)):
            if name in self._streams:
                self._streams[name] += [fill] * num_tokens
        if "top_ids" in self._streams:
            width = len(self._streams["top_ids"][0])
            self._streams["top_ids"] += [[0] * width] * num_tokens
            self._streams["top_logprobs"] += [[-np.inf] * width] * num_tokens
        self._turn_ends.append(len(self._is_sampled))


def _first_token(tree: RolloutTree, branch: Branch) -> Completion:
    """The first token of a branch as a completion of one token, from what the sampler recorded at the branch point."""
    node = tree[branch.node]
    assert node.top_ids is not None
    assert node.top_logprobs is not None
    assert branch.first_logprob is not None
    at = slice(branch.position, branch.position + 1)
    rank = int(np.flatnonzero(node.top_ids[branch.position] == branch.first_token)[0])
    return Completion(
        token_ids=node.top_ids[branch.position, rank : rank + 1],
        logprobs=np.array([branch.first_logprob], dtype=np.float32),
        finish_reason="length",
        entropies=None if node.entropies is None else node.entropies[at],
        top_ids=node.top_ids[at],
        top_logprobs=node.top_logprobs[at],
        version=None if node.versions is None else int(node.versions[branch.position]),
    )
