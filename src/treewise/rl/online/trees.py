"""`TreeCollector`: groups are rollout trees, grown under a budget of generated tokens; of held-out items, one rollout
each.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treewise.base import features
from treewise.data.render.template import dated
from treewise.distributed import ranks
from treewise.errors import DataError
from treewise.nn.model_checks import length_limit, refuse_lengths
from treewise.rl.branching import PROMPT, Branch, Branching, RolloutTree, branching_named
from treewise.rl.node_values import node_values
from treewise.rl.online.collector import Collected, Group, GroupRequest, HeldOut, Moment
from treewise.rl.online.continuing import Rounds, continue_all
from treewise.rl.online.growing import GrowingTree, grow_trees
from treewise.rl.online.journal import LoopState
from treewise.rl.online.rollout import Continuation, Conversation, Limits, start
from treewise.rl.online.settings import OnlineSettings
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.recorder.lengths import longest_row
from treewise.rl.samplers import SampleRequest
from treewise.rl.tasks import Calls, RewardFailure, RewardRunner, TaskItem
from treewise.rl.tasks.protocol import Task
from treewise.rl.tasks.rewards import RewardTally

if TYPE_CHECKING:
    from treewise.trainer import TreeTrainingArguments


@dataclass(frozen=True, kw_only=True)
class TreeCollector:
    """A `Collector` of rollout trees; make one with `tree_collector`.

    branching: of training rollouts. temperature: of these. rewards: how they are computed; each call has a tally of its
    own. model: that is trained, for the lengths that it follows.
    """

    task: Task
    chat: ChatTokens
    settings: OnlineSettings
    branching: Branching
    rewards: RewardRunner
    temperature: float
    model: Any

    @cached_property
    def followed(self) -> int | None:
        """The most tokens of a row that training follows (`length_limit`); None where the model has no such limit."""
        found = length_limit(self.model)
        return None if found is None else found[0]

    @cached_property
    def limits(self) -> Limits:
        """When a rollout stops: at most where training no longer follows.

        Raises:
            ConfigError: `max_length` is beyond the model's positions.
        """
        longest = longest_row(self.model, self.settings.max_length)
        return Limits(self.settings.max_new_tokens, longest or sys.maxsize, self.chat.end_ids)

    def prompt_ids(self, item: TaskItem) -> list[int]:
        """As `Collector.prompt_ids`. Raises `DataError` also of a prompt that leaves a rollout no room."""
        return self._start([item])[0].token_ids

    def expected_size(self, _num_groups: int, budget: int, _state: LoopState, /) -> tuple[int, str]:
        """As `Collector.expected_size`: tokens."""
        return budget, "token"

    def collect(self, requests: Sequence[GroupRequest], moment: Moment) -> Collected:
        """A tree for each request: all of them grow side by side. Raises as `Collector.collect`."""
        rounds = self.rounds(moment, requests[0].num_rollouts)
        trees = self.new_trees(requests)
        grow_trees(trees, rounds)
        groups = [self._group(tree, moment) for tree in trees]
        assert rounds.rewards is not None
        return Collected(groups, rounds.rewards.tally, rounds.seconds)

    def rounds(self, moment: Moment, num_rollouts: int | None = None) -> Rounds:
        """How trees grow now. num_rollouts: of each, in one round, whatever they take; None: as the policy asks."""
        settings, state = self.settings, moment.state
        request = SampleRequest(
            (0,),
            temperature=self.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop_ids=self.limits.stop_ids,
            want_entropy="entropies" in self.branching.streams,
            num_top=settings.num_candidates,
            want_routes=settings.routing_replay != "off",
        )
        expected_tokens = None if num_rollouts else state.expected_tokens or float(settings.max_new_tokens)
        return Rounds(
            moment=moment,
            branching=self.branching if num_rollouts is None else branching_named("none", roots=num_rollouts),
            rewards=self.rewards.begun(moment.trainer_state, state.failures),
            limits=self.limits,
            request=request,
            expected_tokens=expected_tokens,
            episodes_at_once=self.rewards.calls.at_once,
            gather_seconds=settings.gather_seconds,
        )

    def new_trees(self, requests: Sequence[GroupRequest]) -> list[GrowingTree]:
        """Trees before their first round."""
        trees = []
        for request, first in zip(requests, self._start([request.item for request in requests]), strict=True):
            tree = RolloutTree(first.token_ids, group=request.item.key)
            trees.append(GrowingTree(request, tree, first, np.random.default_rng(request.seed)))
        return trees

    def _group(self, grown: GrowingTree, moment: Moment) -> Group:
        tree = grown.tree
        rows = tree.trajectories(source=f"{moment.where}, {tree.group}")
        if self.settings.routing_replay == "by_tokens":
            rows = features.routes.by_tokens(rows)
        account, prompt = tree.account(rows), node_values(tree, self.settings.success_at)[0]
        branched = [node for node in tree.nodes if node.parent != PROMPT]
        return Group(
            request=grown.request,
            prompt_ids=tree.prompt_ids.tolist(),
            rows=rows,
            rewards=[tree[leaf].reward for leaf in tree.leaves],
            lengths=[tree.num_sampled_before(leaf, len(tree[leaf])) for leaf in tree.leaves],
            success=prompt.value,
            trials=prompt.num_draws,
            num_sampled=grown.num_sampled,
            num_chosen=grown.num_chosen,
            num_failed=account["failed"],
            num_unfinished=account["unfinished"],
            counts={"refused_branches": grown.num_refused, "num_branches": len(branched)},
            means={"branch_depth": [tree.num_sampled_before(node.parent, node.cut) for node in branched]},
        )

    def evaluate(self, items: Sequence[TaskItem], moment: Moment, seed: int) -> tuple[list[HeldOut], RewardTally]:
        """One rollout of each item, without branches. Every process computes its part of them. Raises as `collect`."""
        starts, rounds = self._start(items), self.rounds(moment)
        temperature = self.settings.eval_temperature
        request = replace(rounds.request, temperature=temperature, want_entropy=False, num_top=0, want_routes=False)
        rounds = replace(rounds, request=request)

        def work() -> list[tuple[int, HeldOut]]:
            own = range(ranks.own(), len(items), ranks.count())
            continuations = []
            for index in own:
                first = starts[index]
                tree, conversation = RolloutTree(first.token_ids), first.branch(len(first.token_ids))
                continuations.append(Continuation(tree, Branch(), conversation, rounds.limits, (seed, index)))
            continue_all(continuations, rounds)
            return [
                (index, self._held_out(items[index], len(starts[index].token_ids), continuation))
                for index, continuation in zip(own, continuations, strict=True)
            ]

        with torch.no_grad():
            found = sorted((pair for part in ranks.on_every_rank(work) for pair in part), key=lambda pair: pair[0])
        held_out = [rollout for _, rollout in found]
        failed = [rollout.failure for rollout in held_out if rollout.failure is not None]
        return held_out, RewardTally(len(items), len(failed), failed[0] if failed else None)

    def _held_out(self, item: TaskItem, num_prompt: int, ended: Continuation) -> HeldOut:
        ids, outcome = ended.conversation.token_ids, ended.outcome
        prompt, text = (self.chat.tokenizer.decode(part) for part in (ids[:num_prompt], ids[num_prompt:]))
        failure = str(outcome or ended.refused) if outcome is None or isinstance(outcome, RewardFailure) else None
        reward = outcome if isinstance(outcome, float) else None
        return HeldOut(item.key, prompt, text, reward, ended.num_drawn, failure)

    def facts(self) -> dict[str, str]:
        """The date that prompts hold; else the loop's settings decide all of its rollouts."""
        return dated(self.chat.template)

    def close(self) -> None:
        """Ends the processes of rewards and environments."""
        self.rewards.close()

    def _start(self, items: Sequence[TaskItem]) -> Sequence[Conversation]:
        """A conversation for each item, which stands behind its prompt.

        Raises:
            ConfigError: as `limits`.
            UnsupportedModelError: a rollout might become longer than training follows, as far as `max_length` lets it.
            DataError: no token can follow a prompt.
        """
        conversations, longest = start(self.task, items, self.chat, self.rewards.calls), self.limits.max_length
        num_new, most = self.settings.max_new_tokens, self.settings.max_length
        for item, conversation in zip(items, conversations, strict=True):
            num_prompt = len(conversation.token_ids)
            if self.followed is not None:
                what = f"item {item.key}: a prompt of {num_prompt} tokens with max_new_tokens={num_new}"
                num_tokens = num_prompt + num_new if most is None else min(num_prompt + num_new, most)
                refuse_lengths(self.model, num_tokens, what, "Lower max_new_tokens, or set max_length")
            if num_prompt >= longest:
                raise DataError(
                    f"{item.key}: the prompt has {num_prompt:,} tokens, and prompt and rollout together may have "
                    f"{longest:,} (max_length, or the model's positions)."
                )
        return conversations


def tree_collector(
    task: Task, tokenizer: Any, settings: OnlineSettings, args: "TreeTrainingArguments", model: Any
) -> TreeCollector:
    """The collector of a run; what reward functions log goes into its folder."""
    calls = Calls(settings.reward_timeout, settings.reward_workers, settings.episodes_at_once)
    extras = Path(args.output_dir, f"reward_log-rank-{ranks.own()}.jsonl" if ranks.own() else "reward_log.jsonl")
    return TreeCollector(
        task=task,
        chat=ChatTokens(
            tokenizer, settings.chat_template, settings.template_date, getattr(model, "generation_config", None)
        ),
        settings=settings,
        branching=settings.policy(),
        rewards=RewardRunner(calls, settings.on_reward_error, extras),
        temperature=args.temperature,
        model=model,
    )
