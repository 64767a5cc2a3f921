"""The fastest plan at or below a budget, by the costs of the planner (`Plan.relative_cost`)."""

from operator import attrgetter

from treewise.planning.planner import Plan, plan
from treewise.tree.forest import Forest

# Budgets that are tried: the largest, and so many more, each a sixteenth of it below the last.
SIXTEENTHS, NUM_SMALLER = 16, 4


def fastest_plan(forest: Forest, max_tokens: int | None, *, hold: str = "auto") -> Plan:
    """The plan of the least `relative_cost` for budgets of at most `max_tokens`, with no more memory than that.

    A smaller budget may fill its micro-batches better. It is taken where the gateways that it adds are no more tokens
    than it saves: a gateway token takes less than a token with activations. Of equal ones the largest. Deterministic:
    it depends on the forest and the arguments alone. Arguments as in `plan`.

    Raises:
        PlanError: see `treewise.plan`.
    """
    largest = plan(forest, max_tokens, hold=hold)
    if max_tokens is None or largest.is_whole:
        return largest
    candidates = [largest]
    for budget in smaller_budgets(max_tokens):
        if budget >= forest.images.largest:
            candidate = plan(forest, budget, hold=hold)
            if candidate.peak_gateway_tokens - largest.peak_gateway_tokens <= max_tokens - budget:
                candidates.append(candidate)
    return min(candidates, key=attrgetter("relative_cost"))


def smaller_budgets(max_tokens: int) -> list[int]:
    """The budgets below `max_tokens` that `fastest_plan` tries, descending: in sixteenths, down to three quarters."""
    budgets = {max_tokens * part // SIXTEENTHS for part in range(SIXTEENTHS - NUM_SMALLER, SIXTEENTHS)}
    return sorted(budgets - {0, max_tokens}, reverse=True)
