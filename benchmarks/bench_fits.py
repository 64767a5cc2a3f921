"""What fits into one GPU: the largest budget by the prediction of `treewise plan --gpu_memory`; needs no GPU.

    python benchmarks/bench_fits.py [--model qwen3-8b ...]

For shapes of Qwen3 in bfloat16, all weights trained with AdamW or with its states in 8 bits, or LoRA of rank 16 on all
projections; with gradient checkpointing and without. `8 x 80 GiB`: sharded over eight processes (`plan --mesh fsdp=8`),
each with a tree of its own. The tree is that of the workload 164k-83k.
"""

import argparse
import json
from bisect import bisect_left
from typing import Any

import torch
from count_gpu import RESULTS, forest_of
from transformers import AutoConfig

from treewise.bench import SHAPES
from treewise.engine.step_memory import step_memory
from treewise.nn.adapters import adapted
from treewise.nn.model_flops import auto_class, flop_model
from treewise.planning.planner import plan
from treewise.report.analysis.mesh_facts import read_mesh, report_mesh
from treewise.report.analysis.plan_facts import USABLE, report_plan
from treewise.tree.forest import Forest

GPUS = (24, 80, 141)  # GiB
BUDGETS = (2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
# Sizes as published with the weights.
LARGER = {
    "qwen3-32b": (
        "qwen3",
        {
            **{"vocab_size": 151_936, "hidden_size": 5120, "intermediate_size": 25_600, "num_hidden_layers": 64},
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False},
        },
    )
}
MODELS = {**{name: SHAPES[name] for name in ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")}, **LARGER}
LORA = {"r": 16, "target_modules": "all-linear"}
WAYS = {
    "full, AdamW": (None, "adamw_torch"),
    "full, 8-bit AdamW": (None, "adamw_bnb_8bit"),
    "LoRA": (LORA, "adamw_torch"),
}


def config_of(name: str) -> Any:
    kind, sizes = MODELS[name]
    return AutoConfig.for_model(kind, **{**sizes, "max_position_embeddings": 262_144, "pad_token_id": None})


def model_without_data(name: str, lora: dict[str, Any] | None, is_checkpointed: bool) -> Any:
    config = config_of(name)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=torch.bfloat16)
        model = model if lora is None else adapted(model, dict(lora))
    if is_checkpointed:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def largest(model: Any, forest: Forest, room: float, known: dict[int, int]) -> int | None:
    """The largest budget whose step fits; None: none. known: bytes of steps by budget, which are filled in."""

    def exceeds(budget: int) -> bool:
        if budget not in known:
            known[budget] = step_memory(model, plan(forest, budget), "cuda").total
        return known[budget] > room

    fitting = bisect_left(BUDGETS, True, key=exceeds) if room > 0 else 0  # a smaller budget takes less
    return BUDGETS[fitting - 1] if fitting else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"| model | trained | {' | '.join(f'{size} GiB' for size in (*GPUS, '8 x 80'))} |")
    print(f"|---|---|{'---|' * (len(GPUS) + 1)}")
    for name in args.model:
        forest = forest_of("164k-83k", "qwen3-8b")
        steps: dict[tuple[bool, bool], dict[int, int]] = {}
        for way, (lora, optim) in WAYS.items():
            cells = dict.fromkeys((*GPUS, "8 x 80"), "")
            for is_checkpointed in (False, True):
                model = model_without_data(name, lora, is_checkpointed)
                weights = report_plan(plan(forest), flop_model(model), name, "bfloat16", optim=optim).bytes_weights
                assert weights is not None
                known = steps.setdefault((lora is None, is_checkpointed), {})
                places = {size: (1, USABLE * size * 2**30 - weights) for size in GPUS}
                if way == "full, AdamW":
                    held = report_mesh(config_of(name), read_mesh("fsdp=8"), torch.bfloat16).bytes_static
                    places["8 x 80"] = (8, USABLE * 80 * 2**30 - held)
                for place, (processes, room) in places.items():
                    budget = largest(model, forest, room, known)
                    row = {"model": name, "trained": way, "checkpointing": is_checkpointed, "gib": place}
                    step = None if budget is None else known[budget]
                    rows.append({**row, "processes": processes, "max_tokens": budget, "bytes_step": step})
                    shown = "-" if budget is None else f"{budget:,}"
                    cells[place] += f", {shown}" if is_checkpointed else shown
            print(f"| {name} | {way} | {' | '.join(cells.values())} |", flush=True)
    file = RESULTS / "fits.json"
    kept = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = [*(each for each in kept if each["model"] not in args.model), *rows]
    rows.sort(key=lambda each: list(MODELS).index(each["model"]))
    results = {"benchmark": "what fits", "tree": "164k-83k", "torch": torch.__version__, "rows": rows}
    file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
