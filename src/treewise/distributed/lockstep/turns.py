"""Orders the passes of ranks in lockstep.

Each turn lasts as long as its slowest rank, so heavy micro-batches are aligned with heavy ones. A micro-batch that
reads no gateway is free: it may run at any turn that is a forward and backward. Ranks exchange the passes that keep
their order (trunks and the micro-batches below them), their free passes, and the weight of each. Passes in order are
merged into a common sequence. A rank's free passes then replace its empty ones, its heaviest at the heaviest turns;
the rest is appended, the heaviest first. For two rows of numbers the sum of the larger of each pair is least when both
are in the same order (the rearrangement inequality), so without trunks no order is better.

Memory stays within the plan: a free pass never runs while a graph of its own rank is held.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from treewise.distributed.lockstep.merged_sequence import LETTERS, RankTurn, align, common_sequence
from treewise.distributed.placement.cost_model import pairs_before
from treewise.planning.partition import FORWARD_FRACTION
from treewise.planning.plans import BACKWARD, FORWARD, HOLD, TRAIN, Plan

# Query-key pairs that take as long as a token, for a model of about 2B parameters. Weights only rank passes.
PAIRS_PER_TOKEN = 12_000


@dataclass(frozen=True, slots=True)
class Passes:
    """The passes of one rank in a walk.

    letters: passes that keep their order, as in `common_sequence`. weights: of each of them. free: weights of the
    passes that may run at any turn with a forward and backward, descending. ordered_steps, free_steps: indices into the
    plan's schedule, which are not sent to other ranks.
    """

    letters: str
    weights: tuple[int, ...]
    free: tuple[int, ...]
    ordered_steps: tuple[int, ...] = ()
    free_steps: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """JSON for the other ranks; `from_text` reads it."""
        return json.dumps([self.letters, self.weights, self.free], separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> "Passes":
        letters, weights, free = json.loads(text)
        return cls(letters, tuple(weights), tuple(free))


NO_PASSES = Passes("", (), ())


def training_passes(plan: Plan | None) -> Passes:
    """The steps of a plan's schedule (None: nothing to do)."""
    if plan is None:
        return NO_PASSES
    weight = _weights(plan)
    fraction = {FORWARD: FORWARD_FRACTION, HOLD: FORWARD_FRACTION, TRAIN: 1, BACKWARD: 1 - FORWARD_FRACTION}
    ordered: list[int] = []
    free: list[int] = []
    for index, entry in enumerate(plan.schedule):
        batch = plan.micro_batches[entry.micro_batch]
        is_free = entry.action == TRAIN and not batch.is_open and not batch.parents
        (free if is_free else ordered).append(index)
    free.sort(key=lambda index: -weight[plan.schedule[index].micro_batch])
    return Passes(
        letters="".join(LETTERS[plan.schedule[index].action] for index in ordered),
        weights=tuple(
            max(1, round(fraction[entry.action] * weight[entry.micro_batch]))
            for entry in (plan.schedule[index] for index in ordered)
        ),
        free=tuple(weight[plan.schedule[index].micro_batch] for index in free),
        ordered_steps=tuple(ordered),
        free_steps=tuple(free),
    )


def forward_passes(plan: Plan | None) -> Passes:
    """A forward for each micro-batch, for log-probs or a loss without gradients (None: nothing to do)."""
    count = 0 if plan is None else plan.num_micro_batches
    return Passes("F" * count, (1,) * count, (), tuple(range(count)))


def turns_of(own: Passes, all_passes: Sequence[Passes]) -> list[RankTurn]:
    """What a rank runs at each turn; all ranks have the same number of turns.

    all_passes: of all ranks, in any order, including `own`.

    Raises:
        PlanError: see `align`.
    """
    distinct = list({passes.text: passes for passes in all_passes}.values())
    common = common_sequence([passes.letters for passes in distinct], [passes.weights for passes in distinct])
    turns_of_letters = {letters: align(letters, common) for letters in {passes.letters for passes in distinct}}
    turns_of_free = _turns_of_free(distinct, turns_of_letters, len(common))
    num_turns = max((turn + 1 for turns in turns_of_free.values() for turn in turns), default=0)
    turns = [
        turn if turn.own_step is None else RankTurn(turn.action, own.ordered_steps[turn.own_step])
        for turn in turns_of_letters[own.letters]
    ]
    turns += [RankTurn(TRAIN, None)] * (num_turns - len(turns))
    for step, index in zip(own.free_steps, turns_of_free[own.text], strict=True):
        turns[index] = RankTurn(TRAIN, step)
    return turns


def _turns_of_free(
    distinct: list[Passes], turns_of_letters: dict[str, list[RankTurn]], num_common: int
) -> dict[str, list[int]]:
    """Indices of the turns of each rank's free passes; turns from `num_common` on are appended."""
    weight = [0] * num_common
    for each in distinct:
        for index, turn in enumerate(turns_of_letters[each.letters]):
            if turn.own_step is not None:
                weight[index] = max(weight[index], each.weights[turn.own_step])
    idle_of_letters = {letters: _idle(turns) for letters, turns in turns_of_letters.items()}
    idle = {each.text: idle_of_letters[each.letters] for each in distinct}
    num_over = {each.text: len(each.free) - len(idle[each.text]) for each in distinct}
    appended = list(range(num_common, num_common + max([0, *num_over.values()])))
    weight += [0] * len(appended)
    chosen = {}
    # Ranks with the least choice come first; the others then take the heavy turns.
    for each in sorted(distinct, key=lambda each: (-num_over[each.text], len(idle[each.text]), each.text)):
        candidates = sorted([*idle[each.text], *appended], key=lambda index: (-weight[index], index))
        chosen[each.text] = candidates[: len(each.free)]
        for index, own_weight in zip(chosen[each.text], each.free, strict=True):
            weight[index] = max(weight[index], own_weight)
    return chosen


def _idle(turns: list[RankTurn]) -> list[int]:
    """Indices of turns at which a rank runs an empty forward and backward and holds no graph."""
    idle, num_held = [], 0
    for index, turn in enumerate(turns):
        if turn.own_step is not None:
            num_held += (turn.action == HOLD) - (turn.action == BACKWARD)
        elif turn.action == TRAIN and num_held == 0:
            idle.append(index)
    return idle


def _weights(plan: Plan) -> list[int]:
    """Of each micro-batch: its tokens, plus its attention pairs in tokens."""
    before = pairs_before(plan.forest)
    pairs = [int((before[batch.ranges[:, 1]] - before[batch.ranges[:, 0]]).sum()) for batch in plan.micro_batches]
    return [batch.num_tokens + count // PAIRS_PER_TOKEN for batch, count in zip(plan.micro_batches, pairs, strict=True)]
