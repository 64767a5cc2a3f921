"""What a run samples with: trees of a task's items before their first round, the rounds, held-out rollouts."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from treewise.errors import DataError
from treewise.nn.model_checks import length_limit, refuse_lengths
from treewise.rl.branching import RolloutTree
from treewise.rl.online.continuation import Limits
from treewise.rl.online.conversations import Conversation, start
from treewise.rl.online.evaluation import evaluated
from treewise.rl.online.items import book_key
from treewise.rl.online.journal import Journal
from treewise.rl.online.records import Sample
from treewise.rl.online.sampling import GrowingTree, Rounds
from treewise.rl.online.settings import OnlineSettings
from treewise.rl.online.state import LoopState
from treewise.rl.samplers import Sampler, SampleRequest
from treewise.rl.tasks import ChatTokens, RewardRunner, TaskItem
from treewise.rl.tasks.protocol import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFactory:
    """temperature: of training rollouts. model: that is trained. eval_seed: of held-out rollouts."""

    task: Task
    chat: ChatTokens
    settings: OnlineSettings
    sampler: Sampler
    rewards: RewardRunner
    temperature: float
    model: Any
    eval_seed: int

    def new_trees(
        self, stream: tuple[int, ...], indices: Sequence[int], first_number: int, budgets: Sequence[int]
    ) -> list[GrowingTree]:
        """Trees of training items before their first round.

        Parameters:
            stream: names their random streams, with a tree's number.
            indices: of the items.
            first_number: of the first tree; the others follow.
            budgets: generated tokens of each.
        """
        trees = []
        for number, (index, budget) in enumerate(zip(indices, budgets, strict=True), start=first_number):
            item = self.task.item("train", index)
            first, seed = self._start(item), (*stream, number)
            tree = RolloutTree(first.token_ids, group=item.key)
            key, rng = book_key(self.task, index), np.random.default_rng(seed)
            trees.append(GrowingTree(number, item, key, tree, first, budget, seed, rng))
        return trees

    def prompt_of(self, index: int) -> list[int]:
        """Token ids of a training item's prompt."""
        return self._start(self.task.item("train", index)).token_ids

    def rounds(self, state: LoopState, journal: Journal) -> Rounds:
        """How trees grow, from the state between two iterations."""
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
            limits=Limits(settings.max_new_tokens, self._longest(), stop_ids),
            request=request,
            expected_tokens=state.expected_tokens or float(settings.max_new_tokens),
        )

    def evaluation(self, rounds: Rounds) -> tuple[dict[str, float], list[Sample]]:
        """Figures of one rollout of each held-out item, and these; empty where there are none. Failed rewards are
        counted by `eval_failed` alone.
        """
        settings = self.settings
        total = self.task.num_items("held_out")
        count = settings.eval_items if total is None else min(settings.eval_items, total)
        if not count:
            return {}, []
        items = [self.task.item("held_out", index) for index in range(count)]
        failures = self.rewards.failures.copy()
        with torch.no_grad():
            figures, samples = evaluated(
                [(item, self._start(item)) for item in items],
                replace(rounds, seconds=dict(rounds.seconds)),
                self.chat.tokenizer,
                temperature=settings.eval_temperature,
                success_at=settings.success_at,
                seed=self.eval_seed,
                max_failed=settings.max_failed,
            )
        self.rewards.failures = failures
        return figures, samples

    def _start(self, item: TaskItem) -> Conversation:
        """Raises `UnsupportedModelError` if the rollout might become longer than training follows; a `max_length` that
        is set bounds it; `DataError` if no token can follow the prompt."""
        conversation = start(self.task, item, self.chat, self.rewards.calls)
        num_prompt, num_new, most = len(conversation.token_ids), self.settings.max_new_tokens, self.settings.max_length
        what = f"item {item.key}: a prompt of {num_prompt} tokens with max_new_tokens={num_new}"
        longest = num_prompt + num_new if most is None else min(num_prompt + num_new, most)
        refuse_lengths(self.model, longest, what, "Lower max_new_tokens, or set max_length")
        if num_prompt >= self._longest():
            raise DataError(
                f"{item.key}: the prompt has {num_prompt:,} tokens, and prompt and rollout together may have "
                f"{self._longest():,} (max_length, or the model's positions)."
            )
        return conversation

    def _longest(self) -> int:
        """Tokens at which a conversation ends: at most as many as training follows (`length_limit`)."""
        own = self.settings.max_length or getattr(self.model.config, "max_position_embeddings", None) or sys.maxsize
        found = length_limit(self.model)
        return own if found is None else min(own, found[0])
