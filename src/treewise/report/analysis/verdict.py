"""What decides: whether training on trees is worth it here, what costs most sharing, and what to change.

Two ways of training without trees are compared: one row per call (`calls_of`), and trainers that merge turns, which
leave out what another row begins with. How much less work the trees are is counted in FLOPs where a model is named,
else in tokens.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from treewise.errors import num
from treewise.report.analysis.facts import EQUAL_REWARDS, InspectReport, TreeFacts
from treewise.report.analysis.lost_sharing import (
    PROMPT_DIFFERS,
    RETOKENISED,
    REWRITTEN,
    VOLATILE,
    CauseTotal,
    LostReport,
)

WORTH = 1.3  # times less work; with 0.8, the lowest efficiency measured of whole trees, still faster (docs/results.md)
HARDLY = 1.1  # below it, the gain is within the spread of measured efficiencies
MIN_PART = 0.01  # of the tree tokens, below which a loss is not named
PER_CALL, MERGED = "one row per call", "trainers that merge turns"
REMEDIES = {
    RETOKENISED: "keep the sampled ids (token rows), or give on_drift: error to find where they are lost",
    VOLATILE: "move clocks, counters and ids behind what is shared, or freeze them for a group",
    REWRITTEN: "keep what the template drops (thinking: keep, where the model is used so), or do not edit the history",
    PROMPT_DIFFERS: "move what differs to the end of the prompt",
}

IsWorth = Literal["yes", "hardly", "no"]


@dataclass(frozen=True, slots=True)
class Worth:
    """How much less work the trees are than one way of training without them, and whether that is worth it.

    times: by FLOPs, or by tokens where no model is known. times_in_one_batch: by the same, with all trees in one batch,
    which computes once what they begin with; None where they do not begin alike.
    """

    against: str
    times: float
    measure: Literal["FLOPs", "tokens"]
    times_in_one_batch: float | None

    @property
    def is_worth(self) -> IsWorth:
        return _is_worth(self.times)

    @property
    def needs_large_batches(self) -> bool:
        """Whether only trees that meet in a batch make it worth it."""
        return self.is_worth != "yes" and _is_worth(self.times_in_one_batch or 1.0) == "yes"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"is_worth": self.is_worth, "needs_large_batches": self.needs_large_batches}


def _is_worth(times: float) -> IsWorth:
    shown = round(times, 1)  # what is printed decides
    return "yes" if shown >= WORTH else "hardly" if shown >= HARDLY else "no"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Three lines, the first of which says yes or no, and the numbers behind it."""

    lines: tuple[str, str, str]
    worth: tuple[Worth, Worth]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"verdict": list(self.lines), "worth": [each.to_dict() for each in self.worth]}


def verdict_on(facts: InspectReport, lost: LostReport) -> Verdict:
    """The verdict on inspected data."""
    total, shared = facts.total, lost.num_shared_between
    measure: Literal["FLOPs", "tokens"] = "tokens"
    work: tuple[float, float] = (total.num_call_tokens, total.num_leaf_tokens)
    on_trees, saved = float(total.num_tree_tokens), float(shared)
    if total.call_flops and total.leaf_flops and total.tree_flops:
        measure, work = "FLOPs", (total.call_flops, total.leaf_flops)
        on_trees, saved = total.tree_flops, lost.flops_shared_between or 0.0
    begin_alike = shared >= MIN_PART * total.num_tree_tokens
    per_call, merged = (
        Worth(against, each / on_trees, measure, each / (on_trees - saved) if begin_alike else None)
        for against, each in zip((PER_CALL, MERGED), work, strict=True)
    )
    return Verdict((sentence(per_call, merged), _lost(total, lost), _change(facts, lost, merged)), (per_call, merged))


def ratios_without(total: TreeFacts, num_lost_tokens: int) -> tuple[float, float]:
    """What share ratio and leaf ratio would be if so many tree tokens were not computed twice."""
    left = total.num_tree_tokens - num_lost_tokens
    return total.num_flat_tokens / left, total.num_leaf_tokens / left


_YES_OR_NO = {"yes": "Worth it", "hardly": "Hardly worth it", "no": "Not worth it"}


def sentence(per_call: Worth, merged: Worth) -> str:
    """Whether trees are worth it, against both ways."""
    first = f"{per_call.against} ({per_call.times:.1f} times by {per_call.measure})"
    second = f"{merged.against} ({merged.times:.1f} times)"
    begins = f"{_YES_OR_NO[per_call.is_worth]} against {first}"
    if per_call.needs_large_batches:
        return (
            f"Worth it only where trees that begin alike meet in a batch: {per_call.times_in_one_batch:.1f} times by "
            f"{per_call.measure} against {PER_CALL} and {merged.times_in_one_batch:.1f} times against {MERGED} with "
            f"all in one batch; each tree alone {per_call.times:.1f} and {merged.times:.1f} times."
        )
    if per_call.is_worth == merged.is_worth == "no":
        return f"Not worth it: little or nothing is shared, neither against {first} nor against {second}."
    if per_call.is_worth == merged.is_worth:
        return f"{begins} and against {second}."
    unless = ""
    if merged.needs_large_batches:
        unless = (
            f" unless trees that begin alike meet in a batch ({merged.times_in_one_batch:.1f} times with all in one)"
        )
    return f"{begins}, {'not' if merged.is_worth == 'no' else merged.is_worth} against {second}{unless}."


def _lost(total: TreeFacts, lost: LostReport) -> str:
    largest = _largest(total, lost)
    if largest is not None:
        part = largest.num_lost_tokens / total.num_tree_tokens
        share, leaf = ratios_without(total, largest.num_lost_tokens)
        tokens = num(largest.num_lost_tokens, "token")
        return (
            f"lost sharing: {largest.cause}, {part:.1%} of the tree tokens ({tokens}); without it share ratio "
            f"{share:.2f}, leaf ratio {leaf:.2f}"
        )
    others = lost.num_lost_tokens / total.num_tree_tokens
    line = "lost sharing: none that a change of templates or data could avoid"
    if others < MIN_PART:
        return line
    causes = ", ".join(cause.cause for cause in lost.causes if not cause.is_avoidable)
    return f"{line} ({others:.1%} of the tree tokens are computed twice, unavoidably: {causes})"


def _change(facts: InspectReport, lost: LostReport, merged: Worth) -> str:
    largest = _largest(facts.total, lost)
    if largest is not None:
        return f"change: {REMEDIES[largest.cause]}"
    if merged.is_worth == "yes":
        advice = "change: nothing; train as it is"
    elif merged.needs_large_batches:
        advice = (
            "change: let trees that begin alike meet: name them one tree (group, or group_by), or make batches large "
            "(per_device_train_batch_size)"
        )
    else:
        advice = "change: nothing in the data; several samples or branches of each prompt would make it worth more"
    equal = next((finding.count for finding in facts.findings if finding.kind == EQUAL_REWARDS), 0)
    if not equal:
        return advice
    return (
        f"{advice}. Reinforcement learning learns nothing from {num(equal, 'group')} whose rewards are all equal: "
        "drop_flat_groups leaves them out, other rewards or more samples tell rollouts apart"
    )


def _largest(total: TreeFacts, lost: LostReport) -> CauseTotal | None:
    """The largest avoidable loss; None where none is worth a line."""
    causes = [cause for cause in lost.causes if cause.is_avoidable]
    largest = max(causes, key=lambda each: each.num_lost_tokens, default=None)
    return None if largest is None or largest.num_lost_tokens < MIN_PART * total.num_tree_tokens else largest
