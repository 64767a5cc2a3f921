"""Which rows of verl go where, so that relatives stay together, for equal predicted time.

`rows_by_rank`: rows of a step to ranks. `runs_of_relatives`: rows of a rank to dynamic micro-batches
(`use_dynamic_bsz`), side by side in the order of their tokens, with a budget that counts tree tokens.

verl predicts the time of a row from its length; of a row on a tree it is what the row takes beyond the prefix that the
one before it has computed.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from treewise.base.arrays import Floats, Ints
from treewise.distributed.placement import CostModel, assign_ranks
from treewise.errors import ConfigError
from treewise.tree.forest import Forest
from treewise.tree.prefix_merge import in_order
from treewise.tree.trajectory import Trajectory

# A group is cut only where its slowest rank takes more than this, over what it takes with groups cut.
WORTH_A_CUT = 1.1

Workload = Callable[[Ints], Floats]


@dataclass(frozen=True, slots=True)
class RankRows:
    """rows: indices of each rank's rows, the first mini-batch first, relatives side by side. imbalance: predicted time
    of the step over what it were if all ranks were as fast. num_cut: groups that are not whole on one rank."""

    rows: list[list[int]]
    imbalance: float
    num_cut: int


def rows_by_rank(
    rows: Sequence[Ints],
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
    if len(rows) % (num_ranks * num_mini_batches):
        raise ConfigError(
            f"{len(rows)} rows do not go to {num_ranks} ranks in {num_mini_batches} mini-batches of one length."
        )
    cost = _cost_model(workload)
    mini_batches: Sequence[Sequence[int]] = [range(len(rows))]
    if num_mini_batches > 1:
        mini_batches, _ = _parts(rows, groups, mini_batches[0], num_mini_batches, cost)
    placed = [_parts(rows, groups, mini_batch, num_ranks, cost) for mini_batch in mini_batches]
    seconds: Floats = np.array([each for _, each in placed])
    parts_of: dict[Hashable, set[tuple[int, int]]] = {}
    for mini_batch, (parts, _) in enumerate(placed):
        for rank, part in enumerate(parts):
            for index in part:
                parts_of.setdefault(groups[index], set()).add((mini_batch, rank))
    return RankRows(
        rows=[[index for parts, _ in placed for index in parts[rank]] for rank in range(num_ranks)],
        imbalance=float(seconds.max(1).sum() / seconds.mean(1).sum()),
        num_cut=sum(len(each) > 1 for each in parts_of.values()),
    )


def _parts(
    rows: Sequence[Ints], groups: Sequence[Hashable], chosen: Sequence[int], num_parts: int, cost: CostModel
) -> tuple[list[list[int]], Floats]:
    """Some rows in parts of as many, relatives side by side in each; [parts] predicted seconds.

    Groups are whole, unless they do not make parts of equal numbers, or one part takes too long by them.
    """
    members: dict[Hashable, list[int]] = {}
    for index in chosen:
        members.setdefault(groups[index], []).append(index)
    in_groups: Ints = np.concatenate(list(members.values()))
    # A last token of its own makes each row a leaf, so that any number of rows makes a part.
    new_id = 1 + max(int(row.max()) for row in rows)
    forests = [
        Forest.from_trajectories([Trajectory(np.append(rows[index], new_id + index), rollout=0) for index in of_group])
        for of_group in members.values()
    ]
    placed = assign_ranks(forests, num_parts, cost, split="rollouts", in_equal_number=True)
    is_equal = len(set(np.bincount(placed.rank_of_trajectory, minlength=num_parts).tolist())) == 1
    if not is_equal or placed.imbalance > WORTH_A_CUT:
        cut = assign_ranks(forests, num_parts, cost, split="trajectories", in_equal_number=True)
        if not is_equal or placed.seconds.max() > WORTH_A_CUT * cut.seconds.max():
            placed = cut
    order, _ = in_order(
        np.concatenate([rows[index] for index in in_groups.tolist()]),
        np.cumsum([0, *(len(rows[index]) for index in in_groups.tolist())]),
    )
    order = order[np.argsort(placed.rank_of_trajectory[order], kind="stable")]
    return in_groups[order].reshape(num_parts, -1).tolist(), placed.seconds


def _cost_model(workload: Workload) -> CostModel:
    """verl's time of a row, a * length + b * length^2, as costs of its tokens and of its length * (length + 1) / 2
    pairs."""
    one, two = (float(each) for each in workload(np.array([1, 2])))
    square = (two - 2 * one) / 2
    return CostModel(one - 2 * square, 2 * square, 0.0)


def runs_of_relatives(
    rows: Sequence[Ints],
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
    lengths: Ints = np.array([len(rows[index]) for index in order.tolist()])
    whole, rest = (workload(each).astype(float) for each in (lengths, shared))
    columns: tuple[list[float], ...] = (lengths.tolist(), shared.tolist(), whole.tolist(), rest.tolist())

    def cut(most: float) -> list[list[int]]:
        """Runs that take no longer than `most`, each as long as it can be."""
        runs: list[list[int]] = []
        tree = flat = time = 0.0
        for place, length, old, seconds, saved in zip(order.tolist(), *columns, strict=True):
            tree, flat, time = tree + length - old, flat + length, time + seconds - saved
            has_room = tree <= max_tokens and (flat <= max_tokens or flat >= min_ratio * tree)
            if not runs or not has_room or time > most:
                runs.append([])
                tree, flat, time = length, length, seconds
            runs[-1].append(place)
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


def verl_workload(lengths: Ints) -> Floats:
    """verl's own prediction of the time of rows, by length."""
    from verl.utils.seqlen_balancing import calculate_workload

    found: Floats = calculate_workload(torch.as_tensor(lengths)).numpy()
    return found


@contextmanager
def relatives_together(min_ratio: float) -> Iterator[None]:
    """Inside, verl's FSDP engine cuts dynamic micro-batches by `runs_of_relatives`, all ranks as many."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.fsdp import transformer_impl

    own = transformer_impl.prepare_micro_batches

    def prepare(data: Any, dp_group: Any = None, **more: Any) -> tuple[list[Any], Any]:
        ids: torch.Tensor = data["input_ids"]
        has_images = any(tu.get(data, "multi_modal_inputs", []))  # of rows without, empty dictionaries
        if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True) or has_images:
            return own(data=data, dp_group=dp_group, **more)
        if ids.is_nested:
            rows = [each.cpu().numpy() for each in ids.unbind()]
        else:
            masks: torch.Tensor = data["attention_mask"]
            rows = [row[mask.bool()].cpu().numpy() for row, mask in zip(ids, masks, strict=True)]
        runs = runs_of_relatives(rows, int(data["max_token_len_per_gpu"]), verl_workload, min_ratio)
        count = torch.tensor([len(runs)], device=ids.device)
        if dp_group is not None and torch.distributed.is_initialized():
            torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX, group=dp_group)
        if count.item() > len(runs):
            runs = runs_of_relatives(
                rows, int(data["max_token_len_per_gpu"]), verl_workload, min_ratio, int(count.item())
            )
        return [tu.index_select_tensor_dict(data, run) for run in runs], runs

    transformer_impl.prepare_micro_batches = prepare
    try:
        yield
    finally:
        transformer_impl.prepare_micro_batches = own
