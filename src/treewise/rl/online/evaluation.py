"""How good the policy is on held-out items: one rollout of each, without branches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from treewise.distributed import ranks
from treewise.rl.branching import Branch, RolloutTree
from treewise.rl.online.continuation import Continuation
from treewise.rl.online.conversations import Conversation
from treewise.rl.online.records import Sample
from treewise.rl.online.rewarding import check_failures, rewards_of
from treewise.rl.online.sampling import Rounds, continue_all
from treewise.rl.tasks import RewardFailure, TaskItem
from treewise.rl.tasks.rewards import RewardTally


def evaluated(
    items: Sequence[tuple[TaskItem, Conversation]],
    rounds: Rounds,
    tokenizer: Any,
    *,
    temperature: float,
    success_at: float,
    seed: int,
    max_failed: float = 1.0,
) -> tuple[dict[str, float], list[Sample]]:
    """`eval_pass@1`, `eval_reward` and `eval_length` (generated tokens), means over the items whose reward is known,
    and `eval_failed`, the number of the others; and what was sampled, with its text.

    Parameters:
        items: each with a conversation at its prompt.
        temperature: 0 is greedy.
        seed: of samples at other temperatures; the same at every evaluation of a run.
        max_failed: the share of rewards that may fail.

    Every process calls this with all items, and computes its part of them.

    Raises:
        TaskError: more rewards failed than may.
    """
    request = replace(rounds.request, temperature=temperature, want_entropy=False, num_top=0)
    rounds = replace(rounds, request=request, journal=rounds.journal)

    def work() -> list[tuple[int, Sample, str | None, int]]:
        own = range(ranks.own(), len(items), ranks.count())
        continuations = [_continuation(items[i][1], rounds, (seed, i)) for i in own]
        continue_all(continuations, rounds)
        ended = [(items[i][0], each.conversation) for i, each in zip(own, continuations, strict=True)]
        outcomes: Sequence[float | RewardFailure] = rewards_of(ended, rounds.rewards, rounds.journal)
        found = []
        for i, each, outcome in zip(own, continuations, outcomes, strict=True):
            item, first = items[i][0], len(items[i][1].token_ids)
            ids, has_failed = each.conversation.token_ids, isinstance(outcome, RewardFailure)
            texts = tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:])
            sample = Sample(item.key, *texts, None if isinstance(outcome, RewardFailure) else outcome)
            found.append((i, sample, str(outcome) if has_failed else None, each.num_drawn))
        return found

    found = sorted((each for part in ranks.on_every_rank(work) for each in part), key=lambda each: each[0])
    samples = [sample for _, sample, _, _ in found]
    rewards = [each.reward for each in samples if each.reward is not None]
    failed = [failure for _, _, failure, _ in found if failure is not None]
    tally = RewardTally(len(found), len(failed), failed[0] if failed else None)
    check_failures(tally, max_failed, "evaluation", rounds.journal)
    mean = float(np.mean(rewards)) if rewards else float("nan")
    passed = float(np.mean([reward >= success_at for reward in rewards])) if rewards else float("nan")
    figures = {
        "eval_pass@1": passed,
        "eval_reward": mean,
        "eval_length": float(np.mean([length for _, _, _, length in found])),
        "eval_failed": float(len(found) - len(rewards)),
    }
    return figures, samples


def _continuation(start: Conversation, rounds: Rounds, seed: tuple[int, ...]) -> Continuation:
    tree = RolloutTree(start.token_ids)
    return Continuation(tree, Branch(), start.branch(len(start.token_ids)), rounds.limits, seed)
