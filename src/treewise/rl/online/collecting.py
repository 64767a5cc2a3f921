"""Collects the rollouts of an iteration: which items, as the curriculum draws them wave by wave, and their trees, grown
under a budget of generated tokens; and one rollout each of held-out items.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from treewise.base.progress import busy_with, listeners, tell_progress
from treewise.distributed import ranks
from treewise.errors import ConfigError, DataError, num
from treewise.nn.model_checks import length_limit, refuse_lengths
from treewise.rl.branching import Branch, RolloutTree
from treewise.rl.curriculum import Outcome, TaskSampler
from treewise.rl.node_values import node_values
from treewise.rl.online.continuing import Rounds, continue_all
from treewise.rl.online.growing import GrowingTree, check_failures, grow_trees
from treewise.rl.online.journal import Journal, LoopState
from treewise.rl.online.records import Sample
from treewise.rl.online.rollout import Continuation, Limits, OpenRollout, start
from treewise.rl.online.settings import OnlineSettings
from treewise.rl.samplers import Sampler, SampleRequest
from treewise.rl.samplers.copied_weights import WholeCopy
from treewise.rl.samplers.protocol import begin_update
from treewise.rl.success_book import SuccessBook
from treewise.rl.tasks import Calls, ChatTokens, RewardRunner, TaskItem
from treewise.rl.tasks.protocol import Task
from treewise.rl.tasks.rewards import RewardTally
from treewise.tree.trajectory import Trajectory

_TREES = 2  # names random streams, beside those of the trainer


@dataclass(slots=True)
class Collected:
    """What an iteration has grown.

    trees: all, in the order of their draw. indices: their items. waves: in which each was drawn. kept: positions in
    `trees` of those that are trained. extra_budget: generated tokens that refills may spend beyond the iteration's.
    angles: concentration of each tree's prompt, where the curriculum measures it.
    """

    trees: list[GrowingTree] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    waves: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    extra_budget: int = 0
    angles: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """What is logged: trees that were drawn, trained, and refilled, where there were any."""
        num_refilled = float(sum(wave > 0 for wave in self.waves))
        shown = {"refilled_trees": num_refilled} if num_refilled else {}
        if len(self.kept) < len(self.trees):
            shown |= {"drawn_trees": float(len(self.trees)), "kept_trees": float(len(self.kept))}
        return shown

    def outcomes(self, book: SuccessBook, success_at: float) -> list[Outcome]:
        """What came of all trees so far. book: before it observes them. success_at: rewards from here on are
        successes.
        """
        found = []
        for position, (each, index) in enumerate(zip(self.trees, self.indices, strict=True)):
            rewards = [each.tree[leaf].reward for leaf in each.tree.rewarded_leaves]
            known = tuple(float(reward) for reward in rewards if reward is not None)
            prompt = node_values(each.tree, success_at)[0]
            found.append(
                Outcome(
                    index=index,
                    predicted=book.success(each.key),
                    rewards=known,
                    success=prompt.value,
                    trials=prompt.num_draws,
                    angle=self.angles[position] if self.angles else None,
                )
            )
        return found

    def count_in(self, loop: LoopState, budget: int) -> None:
        """Takes the trees into a state, as the iteration after those that it knows. budget: its generated tokens."""
        for each in self.trees:
            loop.book.observe_tree(each.key, each.tree)
            lengths = [each.tree.num_sampled_before(leaf, len(each.tree[leaf])) for leaf in each.tree.leaves]
            loop.num_rollouts += len(lengths)
            loop.rollout_tokens += sum(lengths)
        sampled = sum(each.num_sampled for each in self.trees)
        loop.num_sampled += sampled
        loop.overshoot += sampled - self.extra_budget - budget
        loop.iteration += 1


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an iteration trains on. tally: of its rewards. state: of the loop once it has trained; None where that is
    still to be observed.
    """

    collected: Collected
    tally: RewardTally
    rounds: Rounds
    state: LoopState | None = None


@dataclass(kw_only=True)
class Collector:
    """What a run samples with. temperature: of training rollouts. model: that is trained. whole: for a server, where no
    process has that whole.
    """

    task: Task
    chat: ChatTokens
    settings: OnlineSettings
    sampler: Sampler
    rewards: RewardRunner
    temperature: float
    model: Any
    whole: WholeCopy | None = None

    def rounds(self, state: LoopState, journal: Journal, version: int = 0) -> Rounds:
        """How trees grow, from the state between two iterations. version: of the policy that the sampler has."""
        settings, policy = self.settings, self.settings.policy()
        stop_ids = self.chat.end_ids()
        request = SampleRequest(
            (0,),
            temperature=self.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop_ids=stop_ids,
            want_entropy="entropies" in policy.streams,
            num_top=settings.num_candidates,
        )
        return Rounds(
            branching=policy,
            sampler=self.sampler,
            book=state.book,
            rewards=self.rewards,
            journal=journal,
            limits=Limits(settings.max_new_tokens, _longest(settings, self.model), stop_ids),
            request=request,
            expected_tokens=state.expected_tokens or float(settings.max_new_tokens),
            episodes_at_once=self.rewards.calls.at_once,
            gather_seconds=settings.gather_seconds,
            version=version,
        )

    def budget(self, loop: LoopState) -> int:
        """Generated tokens of the next iteration: less what earlier ones took too many."""
        return max(self.settings.tokens_per_iteration - loop.overshoot, self.settings.trees_per_iteration)

    def collect(self, items: TaskSampler, loop: LoopState, seed: int, iteration: int, rounds: Rounds) -> Collected:
        """Draws and grows the trees of an iteration. All first trees together may spend its budget of generated tokens,
        and a refilled tree the share of one more tree.

        Parameters:
            items: draws them, refills those that it leaves out, and decides which are trained.
            seed: names their random streams, with the iteration and a tree's number.

        Raises:
            TaskError: more rewards failed than may.
        """
        done, count, wave = Collected(), self.settings.trees_per_iteration, 0
        budget, stream = self.budget(loop), (seed, iteration, _TREES)
        indices = items.draw(count)
        share, more = divmod(budget, max(len(indices), 1))
        shares = [share + (number < more) for number in range(len(indices))]
        while indices:
            first = len(done.trees)
            trees = self.new_trees(stream, indices, first, shares)
            grow_trees(trees, rounds)
            done.trees += trees
            done.indices += indices
            done.waves += [wave] * len(trees)
            done.extra_budget += sum(shares) if wave else 0
            outcomes = done.outcomes(rounds.book, self.settings.success_at)
            done.kept += [place for place in range(first, len(done.trees)) if items.is_kept(outcomes[place])]
            missing, wave = count - len(done.kept), wave + 1
            indices = items.refill(missing) if missing > 0 else []
            shares = [max(1, budget // count)] * len(indices)
        check_failures(self.rewards.tally, self.settings.max_failed, f"iteration {iteration + 1}", rounds.journal)
        return done

    def new_trees(
        self, stream: tuple[int, ...], indices: Sequence[int], first_number: int, budgets: Sequence[int]
    ) -> list[GrowingTree]:
        """Trees of training items before their first round.

        Parameters:
            indices: of the items.
            first_number: of the first tree; the others follow.
            budgets: generated tokens of each.
        """
        trees = []
        items = [self.task.item("train", index) for index in indices]
        begun = zip(indices, budgets, items, self._start(items), strict=True)
        for number, (index, budget, item, first) in enumerate(begun, start=first_number):
            seed = (*stream, number)
            tree = RolloutTree(first.token_ids, group=item.key)
            key, rng = self.book_key(index), np.random.default_rng(seed)
            trees.append(GrowingTree(number, item, key, tree, first, budget, seed, rng))
        return trees

    def hand_over(self) -> None:
        """Gives new weights to the sampler of each process; servers get those of the first."""
        self.begin_hand_over()()

    def begin_hand_over(self) -> Callable[[], None]:
        """Takes the model's weights, which may change then; what is returned gives them to the sampler."""
        if self.whole is not None:
            self.whole.take(self.model)
        give = begin_update(self.sampler, self.model if self.whole is None else self.whole.model)

        def finish() -> None:
            give()
            ranks.on_first_rank(lambda: None)  # the others wait until a server has them

        return finish

    def num_items(self) -> int | None:
        """The items that a run practises; None: without end.

        Raises:
            ConfigError: fewer items than trees.
        """
        sizes = [size for size in (self.task.num_items("train"), self.settings.num_items) if size is not None]
        total, num_trees = min(sizes, default=None), self.settings.trees_per_iteration
        if total is not None and total < num_trees:
            raise ConfigError(
                f"{self.task.name} has {num(total, 'training item')}, fewer than trees_per_iteration={num_trees}, and "
                f"the trees of an iteration are of different items; give trees_per_iteration: {total}, or more items."
            )
        return total

    def example(self) -> list[Trajectory]:
        """A tree of two rollouts of the first training item, of the prompt's own tokens."""
        ids = self.prompt_of(0)
        weights = [0.0] * len(ids) + [1.0]
        rows = [[*ids, ids[0]], [*ids, ids[-1] + (ids[0] == ids[-1])]]
        return [
            Trajectory(row, weights, advantages=1.0, group=0, reward=1.0, source="the first prompt") for row in rows
        ]

    def prompt_of(self, index: int) -> list[int]:
        """Token ids of a training item's prompt."""
        return self._start([self.task.item("train", index)])[0].token_ids

    def book_key(self, index: int) -> str:
        """How the book calls an item."""
        return f"{self.task.name}/{index}"

    def _start(self, items: Sequence[TaskItem]) -> Sequence[OpenRollout]:
        return started(self.task, items, self.chat, self.rewards.calls, self.settings, self.model)

    # -- held-out items -----------------------------------------------------------------------------------------------

    def evaluation(self, rounds: Rounds, seed: int) -> tuple[dict[str, float], list[Sample]]:
        """`eval_pass@1`, `eval_reward` and `eval_length` (generated tokens), means over the held-out items whose reward
        is known, and `eval_failed`, the number of the others; and what was sampled: one rollout of each, without
        branches. Empty where there are none. Every process calls this, and computes its part of them.

        Parameters:
            seed: of samples at other temperatures than 0; the same at every evaluation of a run.

        Raises:
            TaskError: more rewards failed than may.
        """
        settings, total = self.settings, self.task.num_items("held_out")
        count = settings.eval_items if total is None else min(settings.eval_items, total)
        if not count:
            return {}, []
        items = [self.task.item("held_out", index) for index in range(count)]
        starts = self._start(items)
        failures = self.rewards.failures.copy()  # those of evaluations are counted by `eval_failed` alone
        request = replace(rounds.request, temperature=settings.eval_temperature, want_entropy=False, num_top=0)
        rounds = replace(rounds, request=request, seconds=dict(rounds.seconds))

        def work() -> list[tuple[int, Sample, str | None, int]]:
            own = [(i, items[i], starts[i]) for i in range(ranks.own(), count, ranks.count())]
            continuations = []
            for i, _, first in own:
                tree, conversation = RolloutTree(first.token_ids), first.branch(len(first.token_ids))
                continuations.append(Continuation(tree, Branch(), conversation, rounds.limits, (seed, i)))
            continue_all(continuations, rounds)
            found = []
            for (i, item, first), each in zip(own, continuations, strict=True):
                ids, num_prompt = each.conversation.token_ids, len(first.token_ids)
                reward = each.outcome if isinstance(each.outcome, float) else None
                failure = str(each.outcome or each.refused) if reward is None else None
                prompt, text = (self.chat.tokenizer.decode(part) for part in (ids[:num_prompt], ids[num_prompt:]))
                found.append((i, Sample(item.key, prompt, text, reward), failure, each.num_drawn))
            return found

        with torch.no_grad():
            found = sorted((each for part in ranks.on_every_rank(work) for each in part), key=lambda each: each[0])
        failed = [failure for _, _, failure, _ in found if failure is not None]
        tally = RewardTally(count, len(failed), failed[0] if failed else None)
        check_failures(tally, settings.max_failed, "evaluation", rounds.journal)
        self.rewards.failures = failures
        samples = [sample for _, sample, _, _ in found]
        rewards = np.array([each.reward for each in samples if each.reward is not None])
        figures = {
            "eval_pass@1": float(np.mean(rewards >= settings.success_at)) if len(rewards) else float("nan"),
            "eval_reward": float(np.mean(rewards)) if len(rewards) else float("nan"),
            "eval_length": float(np.mean([length for _, _, _, length in found])),
            "eval_failed": float(len(failed)),
        }
        return figures, samples


def started(
    task: Task, items: Sequence[TaskItem], chat: ChatTokens, calls: Calls, settings: OnlineSettings, model: Any
) -> Sequence[OpenRollout]:
    """A conversation for each item, which stands behind its prompt.

    Raises:
        ConfigError: `max_length` is beyond the model's positions.
        UnsupportedModelError: a rollout might become longer than training follows, as far as `max_length` lets it.
        DataError: no token can follow a prompt.
    """
    conversations, longest = start(task, items, chat, calls), _longest(settings, model)
    num_new, most = settings.max_new_tokens, settings.max_length
    for item, conversation in zip(items, conversations, strict=True):
        num_prompt = len(conversation.token_ids)
        what = f"item {item.key}: a prompt of {num_prompt} tokens with max_new_tokens={num_new}"
        num_tokens = num_prompt + num_new if most is None else min(num_prompt + num_new, most)
        refuse_lengths(model, num_tokens, what, "Lower max_new_tokens, or set max_length")
        if num_prompt >= longest:
            raise DataError(
                f"{item.key}: the prompt has {num_prompt:,} tokens, and prompt and rollout together may have "
                f"{longest:,} (max_length, or the model's positions)."
            )
    return conversations


def _longest(settings: OnlineSettings, model: Any) -> int:
    """Tokens at which a conversation ends: at most as many as training follows (`length_limit`)."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    most = settings.max_length or positions
    if most > positions:
        raise ConfigError(
            f"max_length={most} is beyond the {positions:,} positions of the model (max_position_embeddings)."
        )
    found = length_limit(model)
    return most if found is None else min(most, found[0])


@contextmanager
def token_progress(what: str, num_tokens: int, *, hidden: bool) -> Iterator[Callable[[int], None] | None]:
    """How much of a budget of tokens is sampled: told to whoever listens, else a bar on terminals; yields what to call
    with each batch's number of tokens.
    """
    if listeners:
        sampled = 0

        def advance(count: int) -> None:
            nonlocal sampled
            sampled += count
            tell_progress("sampling", sampled, num_tokens)

        with busy_with(what):
            tell_progress("sampling", 0, num_tokens)
            yield advance
        return
    if hidden or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f} tokens"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"sampling, {what}", total=num_tokens)
        yield lambda count: progress.advance(bar, count)
