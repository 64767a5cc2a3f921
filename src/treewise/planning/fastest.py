"""The fastest plan at or below a budget, by the costs of the planner (`Plan.relative_cost`).

Taken where a budget was measured (`max_tokens="auto"`), and on a GPU, where a small micro-batch is no faster than its
host launches kernels.
"""

from collections.abc import Iterator

from treewise.planning.bin_packing import best_fit
from treewise.planning.partition import FORWARD_FRACTION, partition
from treewise.planning.planner import assemble, plan
from treewise.planning.plans import Plan
from treewise.tree.forest import Forest

# Budgets that are tried: the largest, and so many more, each a sixteenth of it below the last.
SIXTEENTHS, NUM_SMALLER = 16, 4
# Where a device waits for the host: the least that pieces are limited to, in sixteenths; and how many gateway tokens
# more than those of the first plan the others may have, in budgets. Keys, values and their gradients are about a ninth
# of what a token with activations takes (3.2 MiB of Qwen3-1.7B on an H100), so these are 1.4 % of its memory.
SMALLEST_PIECE, MORE_GATEWAYS = 4, 1 / 8
_NEAR = 1.02  # of what recomputation leaves: nothing more is tried


def fastest_plan(forest: Forest, max_tokens: int | None, *, hold: str = "auto", least_tokens: int = 0) -> Plan:
    """The plan of the least cost for budgets of at most `max_tokens`, with no more memory than that.

    Holding nothing may fill micro-batches better, and so may a smaller budget, which is taken where the gateways that
    it adds are not more tokens than it saves: a gateway token takes less than a token with activations. Of equal plans
    that of the largest budget. Deterministic: it depends on the forest and the arguments alone. Arguments as in `plan`.

    least_tokens: a micro-batch of fewer is no faster (`Plan.cost`). Then smaller pieces are tried, too: they fill
    micro-batches better, so there are fewer of these, and more tokens are computed twice.

    Raises:
        PlanError: see `treewise.plan`.
    """
    largest = plan(forest, max_tokens, hold=hold)
    if max_tokens is None or largest.is_whole:
        return largest
    candidates = [largest]
    for budget in [max_tokens, *smaller_budgets(max_tokens)]:
        if budget >= forest.images.largest:
            found = [] if budget == max_tokens else [plan(forest, budget, hold=hold)]
            if hold == "auto" and (found or candidates)[0].num_held_tokens:
                found.append(plan(forest, budget, hold="never"))
            room = largest.peak_gateway_tokens + max_tokens - budget
            candidates += [each for each in found if each.peak_gateway_tokens <= room]
    if least_tokens:
        candidates += _of_smaller_pieces(largest, max_tokens, hold, least_tokens)
    return min(candidates, key=lambda each: each.cost(least_tokens))


def _of_smaller_pieces(largest: Plan, max_tokens: int, hold: str, least_tokens: int) -> Iterator[Plan]:
    """Plans of one budget whose pieces have fewer tokens, where micro-batches of `largest` keep the device waiting."""
    if largest.cost(least_tokens) <= _NEAR * (
        largest.forest.num_tokens + FORWARD_FRACTION * largest.num_recomputed_tokens
    ):
        return
    for part in range(SMALLEST_PIECE, SIXTEENTHS):
        piece_tokens = max_tokens * part // SIXTEENTHS
        if piece_tokens == 0:
            continue
        for each in dict.fromkeys((hold, "never" if hold == "auto" else hold)):
            found = assemble(
                largest.forest, max_tokens, partition(largest.forest, max_tokens, each, piece_tokens), best_fit
            )
            spare = max_tokens - max(live for _, live in found.timeline)
            if found.peak_gateway_tokens <= largest.peak_gateway_tokens + spare + MORE_GATEWAYS * max_tokens:
                yield found


def smaller_budgets(max_tokens: int) -> list[int]:
    """The budgets below `max_tokens` that `fastest_plan` tries, descending: in sixteenths, down to three quarters."""
    budgets = {max_tokens * part // SIXTEENTHS for part in range(SIXTEENTHS - NUM_SMALLER, SIXTEENTHS)}
    return sorted(budgets - {0, max_tokens}, reverse=True)
