"""Three lines that decide: what tree training is worth here, what costs most sharing, and what to change."""

from treewise.errors import num
from treewise.report.analysis.facts import EQUAL_REWARDS, InspectReport, TreeFacts
from treewise.report.analysis.lost_sharing import REMEDIES, LostReport

WORTH = 1.2  # times less work, below which the gain drowns in the noise of a machine
MIN_PART = 0.01  # of the tree tokens, below which a loss is not named
PER_CONVERSATION, PER_TRAJECTORY = "one row per conversation", "a row of each trajectory"


def ratios_without(total: TreeFacts, num_lost_tokens: int) -> tuple[float, float]:
    """What the row ratio and the share ratio would be if so many tree tokens were not computed twice."""
    left = total.num_tree_tokens - num_lost_tokens
    return total.num_row_tokens / left, total.num_flat_tokens / left


def verdict(facts: InspectReport, lost: LostReport) -> list[str]:
    """What it is worth, the largest avoidable loss, and what to change. Ratios are in tokens; FLOPs where known."""
    total = facts.total
    ways = {
        PER_CONVERSATION: total.row_ratio,
        "rows of the leaves": total.leaf_ratio,
        PER_TRAJECTORY: total.share_ratio,
    }
    worth = f"worth: {_compared(ways)}"
    if total.row_ratio < WORTH:
        worth += "; against one row per conversation there is little to gain"
    causes = [each for each in lost.causes if each.is_avoidable]
    largest = max(causes, key=lambda each: each.num_lost_tokens, default=None)
    if largest is None or largest.num_lost_tokens < MIN_PART * total.num_tree_tokens:
        return [worth, "lost sharing: none that a change of templates or data could avoid", _advice(facts)]
    row_ratio, share_ratio = ratios_without(total, largest.num_lost_tokens)
    part = largest.num_lost_tokens / total.num_tree_tokens
    without = _compared({PER_CONVERSATION: row_ratio, PER_TRAJECTORY: share_ratio})
    loss = (
        f"lost sharing: {largest.cause}, {part:.1%} of the tree tokens ({num(largest.num_lost_tokens, 'token')}); "
        f"without it {without}"
    )
    return [worth, loss, f"change: {REMEDIES[largest.cause]}"]


def _compared(ratios: dict[str, float]) -> str:
    """Tokens of the rows / tokens of the trees, for each way of making rows; once where all are equal."""
    first, *others = ((way, f"{ratio:.2f}") for way, ratio in ratios.items())
    if all(times == first[1] for _, times in others):
        return f"flat rows hold {first[1]} times as many tokens as the trees"
    more = "".join(f", {way} {times} times" for way, times in others)
    return f"{first[0]} holds {first[1]} times as many tokens as the trees{more}"


def _advice(facts: InspectReport) -> str:
    equal = next((each.count for each in facts.findings if each.kind == EQUAL_REWARDS), 0)
    if facts.total.row_ratio < WORTH:
        advice = "change: nothing in the data; several samples or branches of each prompt would make it worth more"
    else:
        advice = "change: nothing; train as it is"
    if not equal:
        return advice
    return (
        f"{advice}. Reinforcement learning learns nothing from {num(equal, 'group')} whose rewards are all equal: "
        "drop_flat_groups leaves them out, other rewards or more samples tell rollouts apart"
    )
