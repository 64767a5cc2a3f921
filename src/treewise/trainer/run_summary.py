"""The derived numbers of a run, printed before step 0: sizes of the data, number of steps, ratios, budget."""

import logging
import math
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from treewise.engine.prepared import AUTO
from treewise.errors import num
from treewise.nn.model_checks import num_positions
from treewise.planning.planner import plan
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.batches import collate, joined_batches, make_sampler
from treewise.trainer.survey import DataFacts

logger = logging.getLogger("treewise")


def steps_per_epoch(args: TreeTrainingArguments, num_trees: int) -> int:
    """Optimizer steps in which every tree is trained once."""
    if args.steps_per_epoch is not None:
        return int(args.steps_per_epoch)
    batches = math.ceil(num_trees / (args.per_device_train_batch_size * args.data_size))
    return math.ceil(batches / args.gradient_accumulation_steps)


def num_optimizer_steps(args: TreeTrainingArguments, num_trees: int) -> int:
    """Optimizer steps of the whole run."""
    if args.max_steps > 0:
        return int(args.max_steps)
    return math.ceil(args.num_train_epochs * steps_per_epoch(args, num_trees))


def length_warning(config: Any, facts: DataFacts) -> str | None:
    """A warning if a trajectory exceeds the model's `max_position_embeddings`; it is trained untruncated."""
    limit = num_positions(config)
    if limit is None or facts.num_longest_tokens <= limit:
        return None
    return (
        f"{facts.longest_source or 'the longest trajectory'} has {num(facts.num_longest_tokens, 'token')}, the model "
        f"was made for {limit} (max_position_embeddings); nothing is cut"
    )


def summarize_run(args: TreeTrainingArguments, dataset: Sequence[Any], facts: DataFacts, objective: object) -> str:
    """A table of text. Its last line describes the first optimizer step of this rank."""
    sampler = make_sampler(args, facts.num_trees)
    steps = num_optimizer_steps(args, facts.num_trees)
    limit = args.max_tokens if isinstance(args.max_tokens, int) else None
    budget = num(limit, "token") if limit else "none (each batch is one micro-batch)"
    if args.max_tokens == AUTO:
        budget = "auto (measured at the first step)"
    merges = args.merges_trees(objective)
    batches = islice(sampler, args.gradient_accumulation_steps)
    parts = joined_batches([collate([dataset[index] for index in batch], merges) for batch in batches], args, objective)
    first = [plan(part, limit) for part in parts if part]
    tree_tokens = sum(each.forest.num_tokens for each in first)
    flat_tokens = sum(each.forest.num_flat_tokens for each in first)
    num_micro_batches = sum(each.num_micro_batches for each in first)
    computed = sum(each.num_computed_tokens for each in first)
    micro_batches = num(num_micro_batches, "micro-batch", "micro-batches")
    work = f", {micro_batches}, {num(computed, 'token')} computed"
    rank = f" on rank {args.process_index} of {args.world_size}" if args.world_size > 1 else ""
    if args.places_trees:
        rank = f" on {args.world_size} ranks together"
    per_epoch = steps_per_epoch(args, facts.num_trees)
    trees = num(min(args.trees_per_step, facts.num_trees), "tree")
    per_step = facts.num_tree_tokens * min(args.trees_per_step, facts.num_trees) / facts.num_trees
    if args.steps_per_epoch is not None:
        least, most = facts.num_trees // per_epoch, math.ceil(facts.num_trees / per_epoch)
        trees = num(most, "tree") if least == most else f"{least:,} or {num(most, 'tree')}"
        per_step = facts.num_tree_tokens / per_epoch
    lines = [
        ("trees", f"{facts.num_trees:,}"),
        ("trajectories", f"{facts.num_trajectories:,}"),
        ("flat tokens", f"{facts.num_flat_tokens:,}"),
        ("tree tokens", f"{facts.num_tree_tokens:,}"),
        ("share ratio", f"{facts.num_flat_tokens / facts.num_tree_tokens:.2f}"),
        ("leaf ratio", f"{facts.num_leaf_tokens / facts.num_tree_tokens:.2f}"),
        ("optimizer steps", f"{steps:,} of {trees}, {num(round(per_step), 'tree token')}"),
        ("budget", budget),
        (
            "first step",
            f"{num(tree_tokens, 'tree token')}, share ratio {flat_tokens / max(1, tree_tokens):.2f}"
            + ("" if args.max_tokens == AUTO else work)
            + rank,
        ),
    ]
    return "\n".join(f"{name:<16} {value}" for name, value in lines)


def print_summary(
    args: TreeTrainingArguments,
    dataset: Sequence[Any],
    facts: DataFacts,
    objective: object,
    model_config: object,
    resumed: Path | None,
) -> None:
    """Prints the table, and logs `length_warning`."""
    resuming = f"resuming from {resumed}\n" if resumed else ""
    sys.stdout.write(f"{resuming}{summarize_run(args, dataset, facts, objective)}\n")
    sys.stdout.flush()
    warning = length_warning(model_config, facts)
    if warning:
        logger.warning("%s", warning)
