"""Peak memory of a training step over budgets: one micro-batch, what is held, and the gateways of one path.

Each row runs in a process of its own, and its peak stands beside the estimate of `treewise plan`. On CPU the peak
resident set above the loaded model with its gradients, on CUDA the allocator's peak.

    python benchmarks/bench_memory.py [--cases smollm2 qwen3-bfloat16:400] [--budgets 0 1024 512 256]
    python benchmarks/bench_memory.py --large

`--large`: a tree of 60,000 random tokens, a spine of 24,000 with 36 branches of 1,000, under a budget of 2,048, against
a flat step of one sequence of 2,048 tokens; on a Qwen3 shape with random weights, so that it ends within minutes.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

import numpy as np
import torch
from common import bundled_trees, save, smollm2
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from treewise.bench.measure import peak_bytes
from treewise.engine.budget import gateway_token_bytes
from treewise.engine.engine import TreeEngine
from treewise.engine.step_memory import step_memory
from treewise.nn.platform.memory import keep_few_kernels, keep_freed_memory
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

VOCABULARY = 8_192
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
_DELTA_NET = {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 384,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
}
# Random models of 8 layers: the type of the configuration, and its fields beside those of `random_model`.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "untied": ("llama", {"tie_word_embeddings": False}),
    "gemma": ("gemma2", {}),
    "experts": ("qwen3_moe", _EXPERTS),
    "hybrid": ("qwen3_next", _EXPERTS | _DELTA_NET),
}
# What a case may have: `qwen3-bfloat16-lora`. kept: freed memory and few kernels, as in `treewise train`.
OPTIONS = ("bfloat16", "lora", "checkpointing", "path", "kept")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", nargs="*", default=["smollm2"], help=f"of {', '.join(['smollm2', *SHAPES])}; :N: at N"
    )
    parser.add_argument("--budgets", nargs="*", type=int, default=[0, 1024, 512, 256], help="0: no budget")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("CASE", "BUDGET"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.large:
        measured = [_in_own_process(name, 2048) for name in ("flat-2048", "spine")]
        print("written to", save("memory-large", measured))
        return
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]) or None)))
        return
    rows = []
    for case in args.cases:
        name, _, budget = case.partition(":")
        rows += [_in_own_process(name, each) for each in ([int(budget)] if budget else args.budgets)]
    print("written to", save("memory", rows))


def _in_own_process(case: str, budget: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", case, str(budget)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    row = json.loads(found.splitlines()[-1])
    print(row, flush=True)
    return row


def measure(case: str, budget: int | None) -> dict[str, Any]:
    if case == "flat-2048":
        return measure_flat(2048)
    name, *options = case.split("-")
    unknown = set(options) - set(OPTIONS)
    if unknown:
        raise SystemExit(f"unknown {', '.join(unknown)} of case {case}; choose of {', '.join(OPTIONS)}.")
    model, forest = case_of(name, options)
    if "kept" in options:
        keep_freed_memory()
        keep_few_kernels()
    engine = TreeEngine(model, budget, check=False)
    if (
        budget != forest.num_tokens
    ):  # gradients, before the baseline is taken; its check of the model holds a copy of them
        TreeEngine(model, 64).step(Forest.from_trajectories(forest.trajectories[:1]))
    model.zero_grad(set_to_none=False)
    before = _peak(reset=True)
    out = engine.step(forest)
    peak, plan = _peak() - before, engine.plan(forest)
    estimate = step_memory(model, plan, engine.lm.device.type)
    return {
        "tree": case,
        "tree_tokens": forest.num_tokens,
        "max_tokens": budget,
        "num_micro_batches": out.num_micro_batches,
        "computed_tokens": out.num_computed_tokens,
        "gateway_mib": round(plan.peak_gateway_tokens * gateway_token_bytes(engine.lm) / 2**20),
        "peak_mib": round(peak / 2**20),
        "live_mib": round(estimate.live / 2**20),
        "estimate_mib": round(estimate.total / 2**20),
        "estimate_over_peak": round(estimate.total / peak, 3),
        "loss": out.loss,
    }


def case_of(name: str, options: list[str]) -> tuple[torch.nn.Module, Forest]:
    """The model of a case, and its tree or one path of it."""
    dtype = torch.bfloat16 if "bfloat16" in options else torch.float32
    if name == "smollm2":
        model, tokenizer = smollm2(dtype)
        trajectories = bundled_trees(tokenizer)["airline-38" if "path" in options else "game24-904"]
    elif name == "spine":
        model, trajectories = random_model("qwen3"), spine().trajectories
    else:
        model, trajectories = random_model(name).to(dtype), spine(900, 7, 100).trajectories
    if "lora" in options:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
    if "checkpointing" in options:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train(), Forest.from_trajectories(trajectories[:1] if "path" in options else trajectories)


def measure_flat(length: int) -> dict[str, Any]:
    """One sequence through the model's own forward and loss."""
    model = random_model("qwen3")
    ids = torch.randint(VOCABULARY, (1, length))
    for part in (ids[:, :64], ids):  # gradients are made before the baseline is taken
        model.zero_grad(set_to_none=False)
        before = _peak(reset=True)
        loss = model(input_ids=part, labels=part, use_cache=False).loss
        loss.backward()
    return {"tree": f"flat-{length}", "tree_tokens": length, "peak_mib": round((_peak() - before) / 2**20)}


def random_model(name: str) -> torch.nn.Module:
    """A shape of 8 layers, with random weights; Qwen3's has 17 million parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 8, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
    kind, more = SHAPES[name]
    fields = {**sizes, **heads, "tie_word_embeddings": True, "pad_token_id": None, **more}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)).train()


def spine(length: int = 24_000, num_branches: int = 36, branch: int = 1_000) -> Forest:
    """Branches leave a long path at even distances, and the path goes on to its end."""
    rng = np.random.default_rng(0)
    path = rng.integers(3, VOCABULARY, length)
    cuts = np.linspace(length / num_branches, length, num_branches).astype(int)
    items = [np.concatenate([path[:cut], rng.integers(3, VOCABULARY, branch)]) for cut in cuts]
    return Forest.from_trajectories([Trajectory(ids) for ids in items])


def _peak(reset: bool = False) -> int:
    """Bytes, of the device that the model is on."""
    found = peak_bytes(torch.device("cuda" if torch.cuda.is_available() else "cpu"), reset=reset)
    if found is None:
        raise SystemExit("nothing tells the peak memory of a process here; Linux and CUDA do.")
    return found


if __name__ == "__main__":
    main()
