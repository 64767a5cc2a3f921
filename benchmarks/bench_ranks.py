"""A step of 64, 256 and 1,024 ranks, taken on torch's fake process groups: whether it ends, what it sends and holds.

Trees of recorded shapes, one for each batch that is computed at a time, are placed on all ranks and planned. Ranks
that have passes of every kind take the step that a trainer takes; from these the collective operations of all ranks are
derived. Those with the most and the fewest tokens take it, too, and have to enter what was derived. Then the operations
of all ranks are played against one another (`treewise.testing.fake_ranks`).

    python benchmarks/bench_ranks.py [--ranks 64 256 1024] [--workers 2]

What is counted on a tiny model is converted to a model of public sizes in bfloat16: operations of a layer by its
parameters, of rows by their columns. Memory is that of `treewise plan --mesh`, with the activations and gateways that
the fullest rank's plan holds. Seconds of placing and merging are CPU seconds of one rank, which computes them for all.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_meshes import MODELS
from common import save
from transformers import AutoConfig, AutoModelForCausalLM
from tree_shapes import recorded

from treewise.distributed.online_placement import costs_of_flops
from treewise.nn.model_flops import flop_model
from treewise.report.analysis.mesh_facts import report_mesh
from treewise.testing.collectives import Collective, deadlock
from treewise.testing.fake_ranks import PlacedStep, derived, representatives, save_model, walk

MAX_TOKENS, LONGEST_PATH = 8_192, 16_384
DENSE, MIXTURE = "Llama 3.1 8B", "Qwen3 30B-A3B"
SHARDED = {"sharded": True}
# Form, model, settings of the run. A product has a number of each.
FORMS: list[tuple[str, str, dict[str, Any]]] = [
    ("whole copies", DENSE, {}),
    ("`sharded`", DENSE, SHARDED),
    ("`sharded`, copies of 8", DENSE, {**SHARDED, "shard_config": {"dp_replicate_size": 0}}),  # as many as it takes
    ("`tp_size: 4`, `sharded`", DENSE, {**SHARDED, "tp_size": 4}),
    ("`context_size: 8`, `sharded`", DENSE, {**SHARDED, "context_size": 8}),
    ("`ep_size: 8`, `sharded`", MIXTURE, {**SHARDED, "ep_size": 8}),
    ("`tp_size: 2`, `ep_size: 8`, `sharded`", MIXTURE, {**SHARDED, "tp_size": 2, "ep_size": 8}),
]
LAYERS, WIDTH, HEAD = 2, 8, 2  # of the tiny model (`save_model`)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    pool = [forest for _, forest in recorded() if forest.path_lengths.max() <= LONGEST_PATH]
    rows = []
    for num_ranks in args.ranks:
        for form, model, given in FORMS:
            settings = dict(given)
            if "shard_config" in settings:
                settings["shard_config"] = {"dp_replicate_size": num_ranks // 8}
            rows.append({"form": form, "model": model, **one_step(pool, model, settings, num_ranks, args.workers)})
            print(rows[-1], flush=True)
            path = save("ranks", rows)
    print("written to", path)


def one_step(
    pool: Sequence[Any], name: str, settings: dict[str, Any], num_ranks: int, num_workers: int
) -> dict[str, Any]:
    family, sizes = MODELS[name]
    config = AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        costs = costs_of_flops(flop_model(AutoModelForCausalLM.from_config(config)))
    rng = np.random.default_rng(num_ranks)
    num_batches = num_ranks // (settings.get("tp_size", 1) * settings.get("context_size", 1))
    forests = [pool[index] for index in rng.choice(len(pool), num_batches)]
    step = PlacedStep.place(forests, settings, num_ranks=num_ranks, max_tokens=MAX_TOKENS, costs=costs)
    began = time.process_time()
    turns = step.turns
    merging = (time.process_time() - began) / len(turns)
    tokens = [0 if made is None else made.num_computed_tokens for made in step.plans]
    fullest = int(np.argmax(tokens))
    first = representatives(step)
    more = {fullest, int(np.argmin(tokens))}
    more_ranks = {index * step.ranks_per_batch + place for index in more for place in range(step.ranks_per_batch)}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), settings)
        walked = walk(step, Path(folder), sorted({*first, *more_ranks}), num_workers=num_workers)
    found = derived(step, {rank: walked[rank] for rank in first})
    for rank, each in walked.items():
        names = [[(one.kind, one.group, one.number) for one in all_of] for all_of in (found[rank], each.collectives)]
        assert names[0] == names[1], f"rank {rank} enters other operations than were derived"
    stuck = deadlock(found)
    assert stuck is None, stuck
    passes = [0 if made is None else len(made.schedule) for made in step.plans]
    sent = bytes_sent(walked[fullest * step.ranks_per_batch].collectives, config, settings, num_ranks)
    return {
        "ranks": num_ranks, "trees": len(forests), "ends": True, "walked": len(walked),
        "operations": sum(map(len, found.values())),
        "turns": [min(map(len, turns)), max(map(len, turns))], "passes": [min(passes), max(passes)],
        "tokens": [min(tokens), round(float(np.mean(tokens))), max(tokens)],
        "gb_sent": round(sent / 1e9, 2),
        "gib_held": round(bytes_held(step, config, settings, num_ranks) / 2**30, 1),
        "seconds_placing": round(step.seconds_placing, 3), "seconds_merging": round(merging, 3),
        "seconds_walking": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def axes(settings: dict[str, Any], num_ranks: int) -> dict[str, int]:
    """As `treewise plan --mesh` takes them."""
    tp, copies = settings.get("tp_size", 1), settings.get("shard_config", {}).get("dp_replicate_size", 1)
    shards = num_ranks // tp // copies if settings.get("sharded") else 1
    return {"tp": tp, "ep": settings.get("ep_size", 1), "fsdp": shards, "dp": num_ranks // tp // shards}


def bytes_held(step: PlacedStep, config: Any, settings: dict[str, Any], num_ranks: int) -> float:
    """Of the fullest rank: weights, gradients, AdamW's moments; activations and gateways of its plan."""
    report = report_mesh(config, axes(settings, num_ranks), torch.bfloat16)
    together = settings.get("context_size", 1)
    of_plans = [
        alive * report.bytes_per_gateway_token + live * report.bytes_per_activation_token / together
        for made in step.plans
        if made is not None
        for alive, live in made.timeline
    ]
    return report.bytes_static + max(of_plans)


def bytes_sent(found: Sequence[Collective], config: Any, settings: dict[str, Any], num_ranks: int) -> float:
    """What a rank sends in the step, for a model of these sizes in bfloat16."""
    mesh, context = axes(settings, num_ranks), settings.get("context_size", 1)
    layer, experts, outside = parameters_of(config)
    width, deep = config.hidden_size / WIDTH, config.num_hidden_layers / LAYERS
    # Of bfloat16 in place of float32; sums of gradients for keys and values are in float32 in both.
    heads = config.num_key_value_heads * config.head_dim / (HEAD * mesh["tp"])
    total = 0.0
    for each in found:
        size = len(each.group)
        part = (size - 1) / size * (2 if each.kind == "all_reduce" else 1)
        if each.num_bytes < 4 * WIDTH or not each.is_data:  # sums of a few numbers, and plans
            continue
        if each.kind == "all_to_all":
            total += each.num_sent / 2 * width * deep * config.num_experts_per_tok / 2
        elif size == context > 1:
            total += each.num_sent / (2 if each.kind == "all_gather" else 1) * heads * deep
        elif size == mesh["tp"] > 1:
            total += each.num_sent / 2 * width * deep
        elif each.kind == "all_reduce" and mesh["fsdp"] == 1:  # of whole copies, once a step, by parameters
            continue
        elif mesh["ep"] > 1 and size == num_ranks // mesh["ep"]:
            total += 2 * experts / mesh["ep"] * part * deep
        elif each.kind == "all_reduce":  # sums over copies, of shards
            total += 2 * layer / mesh["fsdp"] / mesh["tp"] * part * deep
        else:
            total += 2 * layer / mesh["tp"] * part * deep
    # Parameters outside the layers were counted as three layers' each way; they are gathered and added up once.
    if mesh["fsdp"] > 1:
        shards = mesh["fsdp"]
        total += 2 * 2 * (outside - 3 * layer * deep) / mesh["tp"] * (shards - 1) / shards
    else:
        total += 2 * 2 * (outside + layer * config.num_hidden_layers) * (num_ranks - 1) / num_ranks
    return total


def parameters_of(config: Any) -> tuple[int, int, int]:
    """Of a layer without experts, of its experts, and outside the layers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layer = experts = outside = 0
    for name, parameter in model.named_parameters():
        if ".layers." not in name:
            outside += parameter.numel()
        elif ".layers.0." in name:
            is_expert = ".experts." in name
            experts, layer = experts + is_expert * parameter.numel(), layer + (not is_expert) * parameter.numel()
    return layer, experts, outside


if __name__ == "__main__":
    main()
