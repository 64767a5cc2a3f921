"""How good the policy is on held-out items: one rollout of each, without branches."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treewise.rl.branching import Branch, RolloutTree
from treewise.rl.online.continuation import Continuation
from treewise.rl.online.conversations import Conversation
from treewise.rl.online.rewarding import rewards_of
from treewise.rl.online.sampling import Rounds, continue_all
from treewise.rl.tasks import TaskItem


def evaluated(
    items: Sequence[tuple[TaskItem, Conversation]], rounds: Rounds, *, temperature: float, success_at: float, seed: int
) -> dict[str, float]:
    """`eval_pass@1`, `eval_reward` and `eval_length` (generated tokens), means over the items whose reward is known,
    and `eval_failed`, the number of the others.

    Parameters:
        items: each with a conversation at its prompt.
        temperature: 0 is greedy.
        seed: of samples at other temperatures; the same at every evaluation of a run.
    """
    request = replace(rounds.request, temperature=temperature, want_entropy=False, num_top=0)
    rounds = replace(rounds, request=request, journal=rounds.journal)
    continuations = [
        Continuation(
            RolloutTree(start.token_ids), Branch(), start.branch(len(start.token_ids)), rounds.limits, (seed, i)
        )
        for i, (_, start) in enumerate(items)
    ]
    continue_all(continuations, rounds)
    ended = [(item, each.conversation) for (item, _), each in zip(items, continuations, strict=True)]
    rewards = [each for each in rewards_of(ended, rounds.rewards, rounds.journal) if isinstance(each, float)]
    lengths = [each.num_drawn for each in continuations]
    mean = float(np.mean(rewards)) if rewards else float("nan")
    passed = float(np.mean([reward >= success_at for reward in rewards])) if rewards else float("nan")
    return {
        "eval_pass@1": passed,
        "eval_reward": mean,
        "eval_length": float(np.mean(lengths)),
        "eval_failed": float(len(ended) - len(rewards)),
    }
