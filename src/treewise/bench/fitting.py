"""How much of a workload a limit of seconds has room for, by what a few tokens take here."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from treewise.base.progress import busy_with
from treewise.bench.pace import CHECKPOINTED
from treewise.bench.settings import Settings
from treewise.bench.workloads import Workload
from treewise.engine.probed_rows import text_ids
from treewise.nn.device import synchronized_clock
from treewise.nn.flops import FlopModel
from treewise.nn.model_flops import flop_model
from treewise.nn.platform.tensors import is_out_of_memory
from treewise.nn.whole_gradients import zero_gradients
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

NUM_TRIED = {"cpu": 128, "cuda": 4096}  # tokens
ROOM = 0.8  # of the seconds, that the least measurement may take by the estimate
LEAST_ROUNDS = 2  # of steps: one that warms up, and one that counts


@busy_with("trying a few tokens")
def flops_per_second(model: PreTrainedModel, workload: Workload) -> float | None:
    """What a row of the workload's text reaches, forward and backward; None where memory does not suffice for it."""
    longest = Forest.from_trajectories([max(workload.trajectories, key=len)])
    ids = text_ids(longest)[: NUM_TRIED.get(model.device.type, NUM_TRIED["cpu"])]
    if len(ids) < 2:
        return None
    tokens = torch.as_tensor(ids, dtype=torch.long, device=model.device)[None]
    seconds = 0.0
    try:
        for _ in range(2):  # the first loads kernels
            begun = synchronized_clock(model.device)
            loss = model(input_ids=tokens, use_cache=False).logits.float().logsumexp(-1).sum()
            if loss.requires_grad:
                loss.backward()
            seconds = synchronized_clock(model.device) - begun
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        zero_gradients(model)
    return flop_model(model).tree(Forest.from_trajectories([Trajectory(ids)])) / max(seconds, 1e-9)


def round_flops(items: Sequence[Trajectory], flops: FlopModel, settings: Settings, num_budgets: int = 1) -> float:
    """FLOPs of a step of every contestant that is asked for. num_budgets: at which trees are cut."""
    forest, against = Forest.from_trajectories(items), settings.against
    flat, leaf, tree = flops.flat(forest), flops.leaf(forest), flops.tree(forest)
    total = tree + sum(("trl" in against, "tree-recurrence" in against, "trl-liger" in against)) * tree
    total += ("flat" in against) * flat + ("merged" in against and leaf < flat) * leaf
    return total * (1 + CHECKPOINTED if settings.with_checkpointing else 1) + num_budgets * tree


def fitted(
    workload: Workload, flops: FlopModel, rate: float | None, settings: Settings, seconds: float, least: int = 2
) -> tuple[Workload, bool]:
    """The workload with as many of its trajectories as `seconds` have room for, evenly spaced, `least` of them at least
    (the first ones may be one conversation, which shares nothing); and whether these have it.

    rate: by `flops_per_second`.
    """
    every, count = list(workload.trajectories), len(workload.trajectories)
    if rate is None:
        return workload, False
    while True:
        items = [every[index] for index in np.linspace(0, len(every) - 1, count).round().astype(int)]
        fits = LEAST_ROUNDS * round_flops(items, flops, settings) <= ROOM * seconds * rate
        if fits or count <= least:
            return replace(workload, trajectories=items, num_left_out=len(every) - count), fits
        count = max(least, min(count - 1, int(0.85 * count)))
