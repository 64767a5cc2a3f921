"""Which rows of verl go where, so that relatives stay together: rows of a step to ranks (`rows_by_rank`), and rows of a
rank to dynamic micro-batches (`runs_of_relatives`): side by side in the order of their tokens, with a budget that counts
tree tokens. Both for equal predicted time.

verl predicts the time of a row from its length; of a row on a tree it is what the row takes beyond the prefix that the
one before it has computed.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from treewise.distributed.placement import CostModel, Placement, assign_ranks
from treewise.errors import ConfigError
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import in_order
from treewise.tree.trajectory import Trajectory

# A group is cut only where its slowest rank takes more than this, over what it takes with groups cut.
WORTH_A_CUT = 1.1

Workload = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class RankRows:
    """rows: indices of each rank's rows, the first mini-batch first, relatives side by side. imbalance: predicted time
    of the step over what it were if all ranks were as fast. num_cut: groups that are not whole on one rank."""

    rows: list[list[int]]
    imbalance: float
    num_cut: int


def rows_by_rank(
    rows: Sequence[np.ndarray],
    groups: Sequence[Hashable],
    num_ranks: int,
    workload: Workload,
    num_mini_batches: int = 1,
) -> RankRows:
    """Rows to ranks and mini-batches, as many to each: groups whole, ranks of near equal predicted time.

    A group is cut where ranks of as many rows leave no other way, or where the slowest rank is a tenth faster by it.

    Parameters:
        rows: [length] token ids of each, a multiple of ranks times mini-batches.
        groups: of each row.
        workload: predicted time by length.
        num_mini_batches: each rank's rows are that many runs of one length, which ranks train side by side.

    Raises:
        ConfigError: another number of rows.
    """
    num_parts = num_ranks * num_mini_batches
    if len(rows) % num_parts:
        raise ConfigError(
            f"{len(rows)} rows do not go to {num_ranks} ranks in {num_mini_batches} mini-batches of one length."
        )
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    new_id = 1 + max(int(row.max()) for row in rows)
    # A last token of its own makes each row a leaf, so that any number of rows fits a rank.
    forests = [
        Forest.from_trajectories([Trajectory(np.append(rows[index], new_id + index), rollout=0) for index in of_group])
        for of_group in members.values()
    ]
    placed = _place(forests, num_parts, _cost_model(workload))
    part = np.empty(len(rows), dtype=np.int64)
    part[np.concatenate(list(members.values()))] = placed.rank_of_trajectory
    # The parts of a rank are neighbours, so the most expensive groups, which come to the first parts, go to all
    # mini-batches in turn.
    seconds = placed.seconds.reshape(num_ranks, num_mini_batches)
    order, _ = in_order(np.concatenate(rows), np.cumsum([0, *map(len, rows)]))
    order = order[np.argsort(part[order], kind="stable")]
    return RankRows(
        rows=order.reshape(num_ranks, -1).tolist(),
        imbalance=float(seconds.max(0).sum() / seconds.mean(0).sum()),
        num_cut=sum(len(set(part[of_group].tolist())) > 1 for of_group in members.values()),
    )


def _place(forests: list[Forest], num_parts: int, cost: CostModel) -> Placement:
    """Whole groups, unless they do not make parts of equal numbers, or one part takes too long by them."""
    whole = assign_ranks(forests, num_parts, cost, split="rollouts", in_equal_number=True)
    is_equal = len(set(np.bincount(whole.rank_of_trajectory, minlength=num_parts).tolist())) == 1
    if is_equal and whole.imbalance <= WORTH_A_CUT:
        return whole
    cut = assign_ranks(forests, num_parts, cost, split="trajectories", in_equal_number=True)
    return whole if is_equal and whole.seconds.max() <= WORTH_A_CUT * cut.seconds.max() else cut


def _cost_model(workload: Workload) -> CostModel:
    """verl's time of a row, a * length + b * length^2, as costs of its tokens and of its length * (length + 1) / 2
    pairs."""
    one, two = workload(np.array([1, 2])).tolist()
    square = (two - 2 * one) / 2
    return CostModel(one - 2 * square, 2 * square, 0.0)


def runs_of_relatives(
    rows: Sequence[np.ndarray],
    max_tokens: int,
    workload: Workload,
    min_ratio: float = 1.0,
    num_batches: int = 1,
) -> list[list[int]]:
    """Indices of rows, in micro-batches of near equal predicted time; as few as fit, but `num_batches` at least.

    Parameters:
        rows: [length] token ids of each.
        max_tokens: the most tree tokens of one; of flat ones, where they are fewer than `min_ratio` for each tree
            token.
        workload: predicted time by length.

    Raises:
        ConfigError: a row of more tokens, or fewer rows than batches.
    """
    longest_row = max(map(len, rows), default=0)
    if len(rows) < num_batches or longest_row > max_tokens:
        raise ConfigError(
            f"{len(rows)} rows of up to {longest_row} tokens do not make {num_batches} micro-batches "
            f"of up to {max_tokens}; raise ppo_max_token_len_per_gpu (log_prob_max_token_len_per_gpu)."
        )
    order, shared = in_order(np.concatenate(rows), np.cumsum([0, *map(len, rows)]))
    lengths = np.array([len(rows[index]) for index in order])
    whole, rest = (workload(each).astype(float) for each in (lengths, shared))

    def cut(most: float) -> list[list[int]]:
        """Runs that take no longer than `most`, each as long as it can be."""
        runs: list[list[int]] = []
        tree = flat = time = 0.0
        for place, length in enumerate(lengths):
            tree, flat, time = tree + length - shared[place], flat + length, time + whole[place] - rest[place]
            has_room = tree <= max_tokens and (flat <= max_tokens or flat >= min_ratio * tree)
            if not runs or not has_room or time > most:
                runs.append([])
                tree, flat, time = length, length, whole[place]
            runs[-1].append(int(order[place]))
        return runs

    high = float(whole.sum())
    wanted = max(num_batches, len(cut(high)))
    low = 0.0
    for _ in range(40):  # the least time with which so many are enough
        middle = (low + high) / 2
        low, high = (low, middle) if len(cut(middle)) <= wanted else (middle, high)
    runs = cut(high)
    while len(runs) < wanted:  # where equal times leave some over
        longest = max(range(len(runs)), key=lambda index: len(runs[index]))
        half = len(runs[longest]) // 2
        runs[longest : longest + 1] = [runs[longest][:half], runs[longest][half:]]
    return runs


def verl_workload(lengths: np.ndarray) -> np.ndarray:
    """verl's own prediction of the time of rows, by length."""
    from verl.utils.seqlen_balancing import calculate_workload

    found: np.ndarray = calculate_workload(torch.as_tensor(lengths)).numpy()
    return found


@contextmanager
def relatives_together(min_ratio: float) -> Iterator[None]:
    """Inside, verl's FSDP engine cuts dynamic micro-batches by `runs_of_relatives`, all ranks as many."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.fsdp import transformer_impl

    own = transformer_impl.prepare_micro_batches

    def prepare(data: Any, dp_group: Any = None, **more: Any) -> tuple[list[Any], Any]:
        ids = data["input_ids"]
        has_images = any(tu.get(data, "multi_modal_inputs", []))  # of rows without, empty dictionaries
        if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True) or has_images:
            return own(data=data, dp_group=dp_group, **more)
        if ids.is_nested:
            rows = [each.cpu().numpy() for each in ids.unbind()]
        else:
            rows = [row[mask.bool()].cpu().numpy() for row, mask in zip(ids, data["attention_mask"], strict=True)]
        runs = runs_of_relatives(rows, int(data["max_token_len_per_gpu"]), verl_workload, min_ratio)
        count = torch.tensor([len(runs)], device=ids.device)
        if dp_group is not None and torch.distributed.is_initialized():
            torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX, group=dp_group)
        if count.item() > len(runs):
            runs = runs_of_relatives(rows, int(data["max_token_len_per_gpu"]), verl_workload, min_ratio, int(count.item()))
        return [tu.index_select_tensor_dict(data, run) for run in runs], runs

    transformer_impl.prepare_micro_batches = prepare
    try:
        yield
    finally:
        transformer_impl.prepare_micro_batches = own
