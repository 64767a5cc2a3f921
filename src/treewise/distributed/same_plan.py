"""Whether ranks that compute a batch together have the same plan of the same trees."""

from hashlib import blake2b
from typing import Any

import numpy as np
from torch import distributed

from treewise.errors import DataError
from treewise.planning.plans import Plan
from treewise.tree.trajectory import update_with_content


def check_same_plan(group: distributed.ProcessGroup, plan: Plan, key: str) -> None:
    """Compares a plan and the values of its trajectories over the ranks that compute it together; all call this.

    group: of these ranks. key: the setting that made them.

    Raises:
        DataError: a rank has another one, on every rank.
    """
    others, size = differing(group, _digest(plan)), distributed.get_world_size(group)
    if others:
        raise DataError(
            f"ranks that compute one batch together ({key}={size}) have different trees or budgets: {others}. Give all "
            "of them the same trajectories in the same order and the same max_tokens."
        )


def differing(group: distributed.ProcessGroup, digest: str) -> str:
    """Which ranks of a group have another digest than its first one, in words; all call this."""
    digests: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(digests, digest, group=group)
    others = [str(index) for index, each in enumerate(digests) if each != digests[0]]
    return f"number {', '.join(others)} of the group differs from number 0" if others else ""


def _digest(plan: Plan) -> str:
    forest = plan.forest
    schedule = [(step.action, step.micro_batch) for step in plan.schedule]
    state = blake2b(repr((plan.max_tokens, schedule)).encode(), digest_size=16)
    for name, array in {"parent": forest.parent, "token_ids": forest.token_ids, **forest.tree_streams}.items():
        state.update(name.encode())
        state.update(np.ascontiguousarray(array).data)
    update_with_content(state, () if forest.tree_streams else forest.trajectories)
    return state.hexdigest()
