"""One continuation of a rollout tree while it is sampled: requests out, completions in, a node at the end."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treewise.rl.branching import PROMPT, Branch, RolloutNode, RolloutTree
from treewise.rl.online.conversations import Conversation
from treewise.rl.samplers import Completion, SampleRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """When a rollout stops. max_new_tokens: generated tokens of it. max_length: tokens of prompt and rollout together.
    stop_ids: end a turn.
    """

    max_new_tokens: int
    max_length: int
    stop_ids: tuple[int, ...] = ()


class Continuation:
    """What one `Branch` asks for once.

    A first token that the policy drew already stands in front, with the log-prob of that draw. A node that reaches
    `Branch.max_tokens` is left unfinished; one that reaches a limit of the loop ends as `length`.

    Parameters:
        conversation: at the branch point; the node's own.
        seed: numbers that name the random stream.

    Attributes:
        num_drawn: tokens that came from the sampler. num_chosen: that the policy drew from recorded candidates, 0 or 1.
    """

    def __init__(
        self, tree: RolloutTree, branch: Branch, conversation: Conversation, limits: Limits, seed: tuple[int, ...]
    ) -> None:
        self.branch, self.conversation, self.seed = branch, conversation, seed
        self.num_drawn = self.num_chosen = 0
        self.is_finished = False
        self._limits = limits
        self._finish: str | None = None
        self._num_before = tree.num_sampled_before(branch.node, branch.position)
        self._num_turns = 0
        self._is_sampled: list[bool] = []
        self._turn_ends: list[int] = []
        self._streams: dict[str, Any] = {"token_ids": [], "logprobs": []}
        self._first: Completion | None = None
        if branch.first_token is not None:
            self.num_chosen = 1
            self._begin(_first_token(tree, branch))

    def _begin(self, first: Completion) -> None:
        """Keeps the first token for the front of what is sampled; where it ends the turn, nothing is."""
        is_stop = int(first.token_ids[0]) in self._limits.stop_ids
        if is_stop or self._room() <= 1:
            self._append(first)
            self._end_part("stop" if is_stop else first.finish_reason)
        else:
            self._first = first

    def request(self, common: SampleRequest) -> SampleRequest:
        """What to sample next."""
        prefix = [*self.conversation.token_ids, *([] if self._first is None else self._first.token_ids.tolist())]
        seed = np.random.SeedSequence([*self.seed, self._num_turns]).generate_state(1, np.uint64)[0]
        room = self._room() - (self._first is not None)
        return replace(common, prefix_ids=tuple(prefix), max_new_tokens=room, seed=int(seed >> np.uint64(1)))

    def take(self, completion: Completion) -> None:
        """Adds what was sampled, and what the environment answers."""
        for part in (self._first, completion):
            if part is not None:
                self._append(part)
        self._first = None
        self.num_drawn += completion.num_tokens
        self._end_part(completion.finish_reason)

    def _end_part(self, reason: str) -> None:
        if reason == "length" and self._is_segment_full():
            self.is_finished = True
            return
        self._num_turns += 1
        observation, finish = self.conversation.end_turn(reason)
        self._observe(observation)
        if finish is None and self._limit_reached():
            finish = "length"
        elif finish is None and self._is_segment_full():
            self.is_finished = True
            return
        self._finish, self.is_finished = finish, finish is not None

    def node(self) -> RolloutNode:
        """The finished node."""
        ends = self._turn_ends
        if self._finish is not None and (not ends or ends[-1] < len(self._is_sampled)):
            ends = [*ends, len(self._is_sampled)]
        return RolloutNode(
            **self._streams,
            parent=self.branch.node,
            cut=0 if self.branch.node == PROMPT else self.branch.position,
            is_sampled=self._is_sampled,
            turn_ends=ends,
            finish=self._finish,
        )

    # -- limits -------------------------------------------------------------------------------------------------------

    @property
    def _num_generated(self) -> int:
        return sum(self._is_sampled)

    def _room(self) -> int:
        """Tokens that may be generated before some limit is reached."""
        rooms = [
            self._limits.max_new_tokens - self._num_before - self._num_generated,
            self._limits.max_length - len(self.conversation.token_ids),
        ]
        if self.branch.max_tokens is not None:
            rooms.append(self.branch.max_tokens - self._num_generated)
        return min(rooms)

    def _is_segment_full(self) -> bool:
        """Whether `Branch.max_tokens` ended the continuation, and no limit of the loop did."""
        limit = self.branch.max_tokens
        return limit is not None and self._num_generated >= limit and not self._limit_reached()

    def _limit_reached(self) -> bool:
        generated = self._num_before + self._num_generated
        return generated >= self._limits.max_new_tokens or len(self.conversation.token_ids) >= self._limits.max_length

    # -- streams ------------------------------------------------------------------------------------------------------

    def _append(self, part: Completion) -> None:
        self._is_sampled += [True] * part.num_tokens
        for name in ("token_ids", "logprobs", "entropies", "top_ids", "top_logprobs"):
            values = getattr(part, name)
            if values is not None:
                self._streams.setdefault(name, []).extend(values.tolist())
        self.conversation.extend(part.token_ids.tolist())

    def _observe(self, token_ids: list[int]) -> None:
        """Tokens of weight 0; their log-probs, entropies and candidates are empty."""
        num_tokens = len(token_ids)
        self._is_sampled += [False] * num_tokens
        self._streams["token_ids"] += token_ids
        self._streams["logprobs"] += [0.0] * num_tokens
        if "entropies" in self._streams:
            self._streams["entropies"] += [0.0] * num_tokens
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
    )
