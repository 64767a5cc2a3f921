"""verl's dynamic micro-batches (`use_dynamic_bsz`), cut so that relatives stay together: rows side by side in the order
of their tokens, a budget that counts tree tokens, and equal predicted time.

verl predicts the time of a row from its length; of a row on a tree it is what the row takes beyond the prefix that the
one before it has computed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from treewise.errors import ConfigError
from treewise.tree.prefix_merge import in_order


def runs_of_relatives(
    rows: Sequence[np.ndarray],
    max_tokens: int,
    workload: Callable[[np.ndarray], np.ndarray],
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


@contextmanager
def relatives_together(min_ratio: float) -> Iterator[None]:
    """Inside, verl's FSDP engine cuts dynamic micro-batches by `runs_of_relatives`, all ranks as many."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.seqlen_balancing import calculate_workload
    from verl.workers.engine.fsdp import transformer_impl

    own = transformer_impl.prepare_micro_batches

    def workload(lengths: np.ndarray) -> np.ndarray:
        found: np.ndarray = calculate_workload(torch.as_tensor(lengths)).numpy()
        return found

    def prepare(data: Any, dp_group: Any = None, **more: Any) -> tuple[list[Any], Any]:
        ids = data["input_ids"]
        has_images = "multi_modal_inputs" in data.keys()  # noqa: SIM118 - no mapping
        if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True) or has_images:
            return own(data=data, dp_group=dp_group, **more)
        if ids.is_nested:
            rows = [each.cpu().numpy() for each in ids.unbind()]
        else:
            rows = [row[mask.bool()].cpu().numpy() for row, mask in zip(ids, data["attention_mask"], strict=True)]
        runs = runs_of_relatives(rows, int(data["max_token_len_per_gpu"]), workload, min_ratio)
        count = torch.tensor([len(runs)], device=ids.device)
        if dp_group is not None and torch.distributed.is_initialized():
            torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX, group=dp_group)
        if count.item() > len(runs):
            runs = runs_of_relatives(rows, int(data["max_token_len_per_gpu"]), workload, min_ratio, int(count.item()))
        return [tu.index_select_tensor_dict(data, run) for run in runs], runs

    transformer_impl.prepare_micro_batches = prepare
    try:
        yield
    finally:
        transformer_impl.prepare_micro_batches = own
