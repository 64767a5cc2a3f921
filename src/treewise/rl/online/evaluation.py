"""How good the policy is on held-out items: one rollout of each, without branches."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from treewise.distributed import ranks
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

    Every process calls this with all items, and computes its part of them.
    """
    request = replace(rounds.request, temperature=temperature, want_entropy=False, num_top=0)
    rounds = replace(rounds, request=request, journal=rounds.journal)

    def work() -> list[tuple[int, float | None, int]]:
        own = range(ranks.own(), len(items), ranks.count())
        continuations = [_continuation(items[i][1], rounds, (seed, i)) for i in own]
        continue_all(continuations, rounds)
        ended = [(items[i][0], each.conversation) for i, each in zip(own, continuations, strict=True)]
        outcomes = rewards_of(ended, rounds.rewards, rounds.journal)
        rewards = [each if isinstance(each, float) else None for each in outcomes]
        return list(zip(own, rewards, (each.num_drawn for each in continuations), strict=True))

    found = sorted((each for part in ranks.on_every_rank(work) for each in part), key=lambda each: each[0])
    rewards = [reward for _, reward, _ in found if reward is not None]
    mean = float(np.mean(rewards)) if rewards else float("nan")
    passed = float(np.mean([reward >= success_at for reward in rewards])) if rewards else float("nan")
    return {
        "eval_pass@1": passed,
        "eval_reward": mean,
        "eval_length": float(np.mean([length for _, _, length in found])),
        "eval_failed": float(len(found) - len(rewards)),
    }


def _continuation(start: Conversation, rounds: Rounds, seed: tuple[int, ...]) -> Continuation:
    tree = RolloutTree(start.token_ids)
    return Continuation(tree, Branch(), start.branch(len(start.token_ids)), rounds.limits, seed)
