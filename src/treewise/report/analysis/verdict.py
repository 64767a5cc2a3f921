"""Three lines that decide: what tree training is worth here, what costs most sharing, and what to change."""

from treewise.errors import num
from treewise.report.analysis.facts import InspectReport, TreeFacts
from treewise.report.analysis.findings import EQUAL_REWARDS
from treewise.report.analysis.lost_sharing import REMEDIES
from treewise.report.analysis.lost_totals import LostReport

WORTH = 1.2  # times less work, below which the gain drowns in the noise of a machine
MIN_PART = 0.01  # of the tree tokens, below which a loss is not named


def ratios_without(total: TreeFacts, num_lost_tokens: int) -> tuple[float, float]:
    """What the row ratio and the share ratio would be if so many tree tokens were not computed twice."""
    left = total.num_tree_tokens - num_lost_tokens
    return total.num_row_tokens / left, total.num_flat_tokens / left


def verdict(facts: InspectReport, lost: LostReport) -> list[str]:
    """What it is worth, the largest avoidable loss, and what to change. Ratios are in tokens; FLOPs where known."""
    total = facts.total
    worth = (
        f"worth: {total.row_ratio:.2f} times fewer tokens than one row per conversation, {total.leaf_ratio:.2f} than "
        f"rows without contained ones, {total.share_ratio:.2f} than every trajectory alone"
    )
    if total.row_ratio < WORTH:
        worth += "; against one row per conversation there is little to gain"
    causes = [each for each in lost.causes if each.is_avoidable]
    largest = max(causes, key=lambda each: each.num_lost_tokens, default=None)
    if largest is None or largest.num_lost_tokens < MIN_PART * total.num_tree_tokens:
        return [worth, "lost sharing: none that a change of templates or data could avoid", _advice(facts)]
    row_ratio, share_ratio = ratios_without(total, largest.num_lost_tokens)
    part = largest.num_lost_tokens / total.num_tree_tokens
    loss = (
        f"lost sharing: {largest.cause}, {part:.1%} of the tree tokens ({largest.num_lost_tokens:,}); without it "
        f"{row_ratio:.2f} times fewer tokens than one row per conversation, {share_ratio:.2f} than every trajectory "
        "alone"
    )
    return [worth, loss, f"change: {REMEDIES[largest.cause]}"]


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
