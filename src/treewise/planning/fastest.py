"""The fastest plan at or below a budget, by the costs of the planner (`Plan.relative_cost`)."""

from operator import attrgetter

from treewise.planning.planner import Plan, plan
from treewise.tree.forest import Forest

# Budgets that are tried: the largest, and so many more, each a sixteenth of it below the last.
SIXTEENTHS, NUM_SMALLER = 16, 4


def fastest_plan(forest: Forest, max_tokens: int | None, *, hold: str = "auto") -> Plan:
    """The plan of the least `relative_cost` for budgets of at most `max_tokens`, with no more memory than that.

    Holding nothing may fill micro-batches better, and so may a smaller budget, which is taken where the gateways that
    it adds are not more tokens than it saves: a gateway token takes less than a token with activations. Of equal plans
    that of the largest budget. Deterministic: it depends on the forest and the arguments alone. Arguments as in `plan`.

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
    return min(candidates, key=attrgetter("relative_cost"))


def smaller_budgets(max_tokens: int) -> list[int]:
    """The budgets below `max_tokens` that `fastest_plan` tries, descending: in sixteenths, down to three quarters."""
    budgets = {max_tokens * part // SIXTEENTHS for part in range(SIXTEENTHS - NUM_SMALLER, SIXTEENTHS)}
    return sorted(budgets - {0, max_tokens}, reverse=True)
