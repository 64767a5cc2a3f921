"""Heavy passes beside heavy passes: where ranks wait for one another, a step takes what its slowest rank takes, summed.

A micro-batch that reads no gateway is free: it may run at any turn that is a forward and backward. So ranks say what
has to keep its order (trunks and what hangs off them), what is free, and what each pass weighs. The parts in order are
merged into a common sequence (`schedules.merged`). A rank's free passes then go where it would run an empty one beside
other ranks' passes, its heaviest beside their heaviest; what is left over is appended, again the heaviest first. For
two rows of numbers the sum of the larger ones of each pair is least when both are in the same order (the rearrangement
inequality), so without trunks no order is better.

No more is alive than the plan says: a free pass never runs while a graph of its own rank is held.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from treewise.distributed.lockstep.common_sequence import LETTERS, Slot, merged, slots_of
from treewise.distributed.placement.cost_model import pairs_before
from treewise.planning.partition import FORWARD_FRACTION
from treewise.planning.planner import BACKWARD, FORWARD, HOLD, TRAIN, Plan, Step

# Query-key pairs that take as long as a token: about a model of 2B parameters. Weights only say which pass is heavier.
PAIRS_PER_TOKEN = 12_000


@dataclass(frozen=True, slots=True)
class Passes:
    """What one rank runs in a walk.

    letters: passes that keep their order, as in `schedules`. weights: of each of them. free: weights of the passes that
    may run at any turn for a forward and backward, descending. ordered_steps, free_steps: indices into the plan's
    schedule; other ranks do not get to know them.
    """

    letters: str
    weights: tuple[int, ...]
    free: tuple[int, ...]
    ordered_steps: tuple[int, ...] = ()
    free_steps: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """What other ranks are told."""
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
    ordered: list[int] = []
    free: list[int] = []
    for number, step in enumerate(plan.schedule):
        batch = plan.micro_batches[step.micro_batch]
        is_free = step.action == TRAIN and not batch.is_open and not batch.parents
        (free if is_free else ordered).append(number)
    free.sort(key=lambda number: -weight[plan.schedule[number].micro_batch])
    return Passes(
        letters="".join(LETTERS[plan.schedule[number].action] for number in ordered),
        weights=tuple(_share(plan.schedule[number], weight) for number in ordered),
        free=tuple(weight[plan.schedule[number].micro_batch] for number in free),
        ordered_steps=tuple(ordered),
        free_steps=tuple(free),
    )


def visiting_passes(plan: Plan | None) -> Passes:
    """A forward for each micro-batch, for log-probs or a loss alone."""
    number = 0 if plan is None else plan.num_micro_batches
    return Passes("F" * number, (1,) * number, (), tuple(range(number)))


def equal_schedules(plans: Sequence[Plan | None]) -> list[list[Slot]]:
    """What every rank runs, turn by turn, from the plans of all (None: nothing to do).

    Where a rank knows only its own plan: exchange `training_passes(plan).text`, then call `turns_of`.
    """
    everybody = [training_passes(plan) for plan in plans]
    return [turns_of(own, everybody) for own in everybody]


def turns_of(own: Passes, everybody: Sequence[Passes]) -> list[Slot]:
    """What a rank runs at each turn; all ranks have the same turns.

    everybody: of all ranks, in any order, `own` among them.

    Raises:
        PlanError: see `merged` and `slots_of`.
    """
    distinct = list({each.text: each for each in everybody}.values())
    common = merged([each.letters for each in distinct], [each.weights for each in distinct])
    slots_of_letters = {letters: slots_of(letters, common) for letters in {each.letters for each in distinct}}
    turns_of_free = _turns_of_free(distinct, slots_of_letters, len(common))
    num_turns = max((turn + 1 for turns in turns_of_free.values() for turn in turns), default=0)
    slots = [
        slot if slot.own_step is None else Slot(slot.action, own.ordered_steps[slot.own_step])
        for slot in slots_of_letters[own.letters]
    ]
    slots += [Slot(TRAIN, None)] * (num_turns - len(slots))
    for step, turn in zip(own.free_steps, turns_of_free[own.text], strict=True):
        slots[turn] = Slot(TRAIN, step)
    return slots


def _turns_of_free(
    distinct: list[Passes], slots_of_letters: dict[str, list[Slot]], num_common: int
) -> dict[str, list[int]]:
    """At which turns each rank runs its free passes; some are appended to the common sequence."""
    weight = [0] * num_common
    for each in distinct:
        for turn, slot in enumerate(slots_of_letters[each.letters]):
            if slot.own_step is not None:
                weight[turn] = max(weight[turn], each.weights[slot.own_step])
    idle_of_letters = {letters: _idle(slots) for letters, slots in slots_of_letters.items()}
    idle = {each.text: idle_of_letters[each.letters] for each in distinct}
    num_over = {each.text: len(each.free) - len(idle[each.text]) for each in distinct}
    appended = list(range(num_common, num_common + max([0, *num_over.values()])))
    weight += [0] * len(appended)
    found = {}
    # Ranks with the least choice come first; the others see which turns are heavy already.
    for each in sorted(distinct, key=lambda each: (-num_over[each.text], len(idle[each.text]), each.text)):
        turns = sorted([*idle[each.text], *appended], key=lambda turn: (-weight[turn], turn))
        found[each.text] = turns[: len(each.free)]
        for turn, own in zip(found[each.text], each.free, strict=True):
            weight[turn] = max(weight[turn], own)
    return found


def _idle(slots: list[Slot]) -> list[int]:
    """Turns for a forward and backward at which a rank would run an empty one, and holds no graph."""
    found, num_held = [], 0
    for turn, slot in enumerate(slots):
        if slot.own_step is not None:
            num_held += (slot.action == HOLD) - (slot.action == BACKWARD)
        elif slot.action == TRAIN and num_held == 0:
            found.append(turn)
    return found


def _share(step: Step, weights: list[int]) -> int:
    """What a step takes of the weight of its micro-batch."""
    share = {FORWARD: FORWARD_FRACTION, HOLD: FORWARD_FRACTION, TRAIN: 1, BACKWARD: 1 - FORWARD_FRACTION}[step.action]
    return max(1, round(share * weights[step.micro_batch]))


def _weights(plan: Plan) -> list[int]:
    """Of each micro-batch: its tokens, and what their attention takes in tokens."""
    below = pairs_before(plan.forest)
    pairs = [int((below[batch.ranges[:, 1]] - below[batch.ranges[:, 0]]).sum()) for batch in plan.micro_batches]
    return [
        batch.num_tokens + number // PAIRS_PER_TOKEN for batch, number in zip(plan.micro_batches, pairs, strict=True)
    ]
