"""A policy whose exact gradient is known: logits for each place of a rollout, in a game of dependent steps.

A rollout is some steps of some tokens. One token of each step is its *decision*; the others are *filler*, which changes
nothing. A flag says whether all is right so far: a wrong decision lowers it, a wrong rollout is repaired by one token
at a later decision. The reward is 1 where the flag stands at the end, and there is no other.

The policy's logits are a table over (place, state), so value, success and gradient are sums over a chain of states: of
the two flags alone, or of flag and last token.
Rollouts come from the package's own loop (`rl.online.growing`) with its own policies, through `TabularSampler`.

Letters: T tokens of a rollout, V vocabulary, N requests, Z states. A flag is 0 (wrong) or 1 (right).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from treewise.rl.branching import Branching, RolloutTree, Signals
from treewise.rl.online.collector import GroupRequest, Moment
from treewise.rl.online.growing import GrowingTree, Rounds, grow_trees
from treewise.rl.online.journal import Journal, LoopState
from treewise.rl.online.rollout import Limits, OneTurn
from treewise.rl.samplers import Completion, SampleRequest
from treewise.rl.success_book import SuccessBook
from treewise.rl.tasks import TaskItem
from treewise.tree.trajectory import Trajectory

PROMPT_ID = 0
RIGHT, REPAIR = 0, 1  # tokens at a decision


@dataclass(frozen=True)
class Game:
    """logits: [T, Z, V] float64, of the policy. next_state: [T, Z, V] int64, the state after a token. rewards: [Z]
    float64, of the states at the end. start: the first state. step_tokens: of a step. is_over: [Z] bool, states that
    end a rollout before its last token, and that no token leaves; none where not given.
    """

    logits: np.ndarray
    next_state: np.ndarray
    rewards: np.ndarray
    start: int
    step_tokens: int
    is_over: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of a rollout, at the most."""
        return len(self.logits)

    @property
    def logprobs(self) -> np.ndarray:
        """[T, Z, V]."""
        return self.logits - np.logaddexp.reduce(self.logits, axis=2, keepdims=True)

    @property
    def success(self) -> float:
        """The expected reward."""
        return float(self.values()[0, self.start])

    def values(self) -> np.ndarray:
        """[T + 1, Z] the expected reward before each token, by dynamic programming from the end."""
        value = np.tile(self.rewards, (self.num_tokens + 1, 1))
        probability = np.exp(self.logprobs)
        for place in range(self.num_tokens - 1, -1, -1):
            value[place] = (probability[place] * value[place + 1][self.next_state[place]]).sum(1)
        return value

    def gradient(self) -> np.ndarray:
        """[T, Z, V] the derivative of the expected reward with respect to the logits: `d p (Q - V)` in each state, d
        being the probability that a rollout passes there.
        """
        value, num_states = self.values(), len(self.rewards)
        passing = np.arange(num_states) == self.start
        result = np.zeros_like(self.logits)
        for place in range(self.num_tokens):
            probability = np.exp(self.logprobs[place])
            gain = value[place + 1][self.next_state[place]] - value[place][:, None]
            result[place] = passing[:, None] * probability * gain
            moved = (passing[:, None] * probability).ravel()
            passing = np.bincount(self.next_state[place].ravel(), moved, minlength=num_states)
        return result

    def states(self, token_ids: np.ndarray) -> np.ndarray:
        """[N, T + 1] int64, the state before each token, and at the end, of rollouts [N, T]."""
        states = np.full((len(token_ids), token_ids.shape[1] + 1), self.start)
        for place in range(token_ids.shape[1]):
            states[:, place + 1] = self.next_state[place, states[:, place], token_ids[:, place]]
        return states

    def has_ended(self, token_ids: Sequence[int]) -> bool:
        """Whether a rollout has all of its tokens."""
        if self.is_over is None or len(token_ids) == self.num_tokens:
            return len(token_ids) == self.num_tokens
        state = self.start
        for place, token in enumerate(token_ids):
            state = self.next_state[place, state, token]
        return bool(self.is_over[state])

    def lengths(self, states: np.ndarray) -> np.ndarray:
        """[N] int64, tokens after which rollouts through states [N, T + 1] end."""
        if self.is_over is None:
            return np.full(len(states), self.num_tokens)
        over = self.is_over[states]
        return np.where(over.any(1), over.argmax(1), self.num_tokens)

    def estimate(self, rows: Sequence[Trajectory], weights: np.ndarray | None = None) -> np.ndarray:
        """[T, Z, V] the gradient of the mean over rollouts of the sum of `advantage log p` over their tokens: minus
        what a policy gradient with `weighting="per_rollout"` gives for rollouts of one length on their own policy.

        weights: [N, T] of the tokens.
        """
        ids = np.stack([row.token_ids[1:] for row in rows]).astype(np.int64)
        credit = np.stack([np.asarray(row.advantages, dtype=np.float64)[1:] for row in rows]) / len(rows)
        if weights is not None:
            credit = credit * weights
        width = self.logits.shape[2]
        state = len(self.rewards) * np.arange(self.num_tokens) + self.states(ids)[:, :-1]
        found = np.bincount((state * width + ids).ravel(), credit.ravel(), minlength=self.logits.size)
        found = found.reshape(self.logits.shape)
        return found - np.exp(self.logprobs) * found.sum(2, keepdims=True)


def new_game(
    steps: int,
    success: float,
    *,
    step_tokens: int = 4,
    vocabulary: int = 4,
    hard: Sequence[int] = (),
    repair: float = 0.1,
    with_last_token: bool = False,
) -> Game:
    """A game of a wanted probability of success.

    hard: without any, all decisions are equally hard, and filler is free: its entropy is the highest. Else only these
    steps are a choice, and every other token is near-certain (0.97). repair: probability of the token that repairs.
    with_last_token: the policy sees the last token, too, and has logits of its own for each, which begin alike.
    """
    rng = np.random.default_rng(0)
    num_tokens, decision = steps * step_tokens, step_tokens // 2
    logits = rng.normal(size=(num_tokens, 1, vocabulary)).repeat(2, axis=1) * 0.5
    if hard:
        logits[:] = _with_first(0.97, vocabulary)
    flag = np.tile(np.arange(2)[:, None], (num_tokens, 1, vocabulary))
    places = np.arange(steps) * step_tokens + decision
    flag[places, 1] = np.arange(vocabulary) == RIGHT
    flag[places, 0] = np.arange(vocabulary) == REPAIR
    logits[places, 1] = _with_first(0.97, vocabulary)
    logits[places, 0] = np.roll(_with_first(repair, vocabulary), REPAIR)
    chosen = places[list(hard)] if hard else places
    low, high = 1.0 / vocabulary, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        logits[chosen, 1] = _with_first(middle, vocabulary)
        game = Game(logits, flag, np.array([0.0, 1.0]), 1, step_tokens)
        low, high = (middle, high) if game.success < success else (low, middle)
    if not with_last_token:
        return game
    state = flag.repeat(vocabulary, axis=1) * vocabulary + np.arange(vocabulary)
    rewards = np.arange(2.0).repeat(vocabulary)
    return Game(logits.repeat(vocabulary, axis=1), state, rewards, vocabulary, step_tokens)


def new_board(num_tokens: int = 28, half_width: int = 5) -> Game:
    """A game of a margin that a move changes by one or not at all, won where it is positive at the end: nearly even."""
    rng = np.random.default_rng(0)
    margins = np.arange(2 * half_width + 1)
    logits = rng.normal(size=(num_tokens, len(margins), 3)) * 0.3
    moved = (margins[:, None] + np.arange(-1, 2)).clip(0, margins[-1])
    return Game(logits, np.tile(moved, (num_tokens, 1, 1)), (margins > half_width).astype(float), half_width, 4)


def _with_first(probability: float, vocabulary: int) -> np.ndarray:
    """[V] logits of a first token of some probability, and others that share the rest."""
    others = np.full(vocabulary - 1, (1 - probability) / (vocabulary - 1))
    return np.log(np.array([probability, *others]))


# -- sampling ---------------------------------------------------------------------------------------------------------


@dataclass
class TabularSampler:
    """A sampler (`treewise.rl.samplers`) over a game; requests of a batch draw from one generator, in their order.

    turns: whether a completion ends with its step, as a turn of an agent would; else with the rollout.
    """

    game: Game
    rng: np.random.Generator
    turns: bool = False

    def __post_init__(self) -> None:
        logprobs = self.game.logprobs
        self._logprobs = logprobs.astype(np.float32)
        self._cumulative = np.cumsum(np.exp(logprobs), axis=2)
        self._entropies = -(np.exp(logprobs) * logprobs).sum(2).astype(np.float32)
        self._order = np.argsort(-logprobs, axis=2, kind="stable").astype(np.int32)

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        """One completion for each request."""
        total, width = self.game.num_tokens, self.game.logits.shape[2]
        start = np.array([len(each.prefix_ids) - 1 for each in requests])
        ids = np.zeros((len(requests), total), dtype=np.int64)
        for row, request in enumerate(requests):
            ids[row, : start[row]] = request.prefix_ids[1:]
        states, uniform = np.zeros((len(ids), total + 1), dtype=np.int64), self.rng.random(ids.shape)
        state = np.full(len(requests), self.game.start)
        for place in range(total):
            states[:, place] = state
            drawn = (uniform[:, place, None] >= self._cumulative[place, state]).sum(1).clip(max=width - 1)
            ids[:, place] = np.where(place < start, ids[:, place], drawn)
            state = self.game.next_state[place, state, ids[:, place]]
        states[:, total] = state
        limit = self.game.lengths(states)
        if self.turns:
            limit = np.minimum(limit, (start // self.game.step_tokens + 1) * self.game.step_tokens)
        wanted = np.minimum(start + [each.max_new_tokens for each in requests], limit)
        is_stop = wanted == limit
        return [
            (self._completion(request, ids[row], states[row], slice(start[row], wanted[row]), bool(is_stop[row])),)
            for row, request in enumerate(requests)
        ]

    def _completion(
        self, request: SampleRequest, ids: np.ndarray, states: np.ndarray, own: slice, is_stop: bool
    ) -> Completion:
        places, ids, states = np.arange(own.start, own.stop), ids[own], states[own]
        top = self._order[places, states, : request.num_top]
        return Completion(
            token_ids=ids.astype(np.int32),
            logprobs=self._logprobs[places, states, ids],
            finish_reason="stop" if is_stop else "length",
            entropies=self._entropies[places, states] if request.want_entropy else None,
            top_ids=top if request.num_top else None,
            top_logprobs=np.take_along_axis(self._logprobs[places, states], top, 1) if request.num_top else None,
        )

    def update(self, model: Any) -> None:
        """Nothing to hand over."""

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(slots=True)
class Play(OneTurn):
    """One rollout of a game."""

    game: Game

    def request(self) -> "Play":
        """What `Rewards` judges."""
        return self

    def answered(self, finish: str) -> tuple[list[int], str | None]:
        return [], finish if self.game.has_ended(self.token_ids[1:]) else None


@dataclass
class Rewards:
    """In place of a `RewardRunner`."""

    game: Game

    def rewards(self, _task: None, plays: Sequence[Play]) -> list[float]:
        """The reward of each."""
        ids = np.zeros((len(plays), self.game.num_tokens), dtype=np.int64)
        for row, play in zip(ids, plays, strict=True):
            row[: len(play.token_ids) - 1] = play.token_ids[1:]
        ends = self.game.states(ids)[:, -1]
        return [float(reward) for reward in self.game.rewards[ends]]

    def count(self, outcomes: Sequence[float], metrics: object) -> None:
        """Nothing is logged."""


@dataclass
class ExactBook:
    """In place of a `SuccessBook`: the exact probability of success of the prompt, with `of_states` of every state.

    values: [T + 1, Z], predictions in place of the exact ones.
    """

    game: Game
    of_states: bool = False
    values: np.ndarray | None = None
    success: float = field(init=False)

    def __post_init__(self) -> None:
        self.values = self.game.values() if self.values is None else self.values
        self.success = float(self.values[0, self.game.start])
        self._known: WeakKeyDictionary[RolloutTree, tuple[list[int], dict[tuple[int, int], float]]]
        self._known = WeakKeyDictionary()  # how many nodes of a tree were met, and what is known of their states

    def signals(self, key: str, tree: RolloutTree) -> Signals:
        if not self.of_states:
            return Signals(self.success, {})
        assert self.values is not None
        met, known = self._known.setdefault(tree, ([0], {}))
        for node in range(met[0], len(tree)):
            states = self.game.states(tree.path(node, "token_ids")[None])[0]
            before = tree.num_sampled_before(node, 0)
            for position in range(1, len(tree[node]) + 1):
                depth = before + position
                known[node, position] = float(self.values[depth, states[depth]])
        met[0] = len(tree)
        return Signals(self.success, known)


def grown(
    game: Game,
    branching: Branching,
    num_trees: int,
    budget: int,
    seed: int,
    *,
    turns: bool = False,
    candidates: bool = False,
    book: Any = None,
) -> list[RolloutTree]:
    """Trees of one prompt each, grown as an iteration of `treewise rl` grows them.

    budget: generated tokens of a tree. candidates: the sampler records all of them. book: None for one that has not met
    the prompt.
    """
    total = game.num_tokens
    request = SampleRequest(
        (PROMPT_ID,),
        max_new_tokens=total,
        want_entropy="entropies" in branching.streams,
        num_top=game.logits.shape[2] if candidates else 0,
    )
    sampler = TabularSampler(game, np.random.default_rng([seed, 1]), turns)
    state = LoopState(SuccessBook() if book is None else book)
    rounds = Rounds(
        moment=Moment("here", state, Journal(None), sampler, 0),
        branching=branching,
        rewards=Rewards(game),  # type: ignore[arg-type]
        limits=Limits(total, total + 1),
        request=request,
        expected_tokens=float(total),
    )
    trees = []
    for number in range(num_trees):
        item, rng = TaskItem(f"{seed}/{number}", ""), np.random.default_rng([seed, 2, number])
        asked = GroupRequest(number, item, "game", budget, (seed, number))
        first = Play([PROMPT_ID], None, TaskItem("game", ""), None, 1, game)  # type: ignore[arg-type]
        trees.append(GrowingTree(asked, RolloutTree([PROMPT_ID], group=item.key), first, rng))
    grow_trees(trees, rounds)
    return [each.tree for each in trees]
