"""Peak memory of a training step over budgets: one micro-batch, what is held, and the gateways of one path.

Each budget runs in a process of its own. On CPU the peak resident set above the loaded model with its gradients, on
CUDA the allocator's peak.

    python benchmarks/bench_memory.py [--trees game24-904 airline-38] [--budgets 0 1024 512 256 128]
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
from transformers import AutoConfig, AutoModelForCausalLM

from treewise.bench.process_memory import peak_bytes
from treewise.engine.budget import gateway_token_bytes
from treewise.engine.engine import TreeEngine
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

VOCABULARY = 8_192
# The whole tree, and one path: a single trajectory without forks.
CASES = {"game24-904": None, "airline-38": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trees", nargs="*", default=["game24-904"])
    parser.add_argument("--budgets", nargs="*", type=int, default=[0, 1024, 512, 256, 128], help="0: no budget")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("TREE", "BUDGET"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.large:
        measured = [_in_own_process(name, 2048) for name in ("flat-2048", "spine-60000")]
        print("written to", save("memory-large", measured))
        return
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]) or None)))
        return
    rows = []
    for tree in args.trees:
        for budget in args.budgets:
            rows.append(_in_own_process(tree, budget))
    print("written to", save("memory", rows))


def _in_own_process(tree: str, budget: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", tree, str(budget)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    row = json.loads(found.splitlines()[-1])
    print(row, flush=True)
    return row


def measure(name: str, budget: int | None) -> dict[str, Any]:
    if name == "flat-2048":
        return measure_flat(2048)
    if name == "spine-60000":
        model, forest = random_model(), spine()
    else:
        model, tokenizer = smollm2(torch.float32)
        forest = Forest.from_trajectories(bundled_trees(tokenizer)[name][: CASES.get(name)])
    engine = TreeEngine(model, budget)
    small = Forest.from_trajectories(forest.trajectories[:1]) if forest.num_trajectories > 1 else forest
    if budget != forest.num_tokens:  # gradients and the probe, before the baseline is taken
        TreeEngine(model, 64).step(small)
    model.zero_grad(set_to_none=False)
    before = _peak(reset=True)
    out = engine.step(forest)
    plan = engine.plan(forest)
    gateways = plan.peak_gateway_tokens * gateway_token_bytes(engine.lm)
    return {
        "tree": name,
        "tree_tokens": forest.num_tokens,
        "max_tokens": budget,
        "num_micro_batches": out.num_micro_batches,
        "computed_tokens": out.num_computed_tokens,
        "gateway_mib": round(gateways / 2**20),
        "peak_mib": round((_peak() - before) / 2**20),
        "loss": out.loss,
    }


def measure_flat(length: int) -> dict[str, Any]:
    """One sequence through the model's own forward and loss."""
    model = random_model()
    ids = torch.randint(VOCABULARY, (1, length))
    for part in (ids[:, :64], ids):  # gradients are made before the baseline is taken
        model.zero_grad(set_to_none=False)
        before = _peak(reset=True)
        loss = model(input_ids=part, labels=part, use_cache=False).loss
        loss.backward()
    return {"tree": f"flat-{length}", "tree_tokens": length, "peak_mib": round((_peak() - before) / 2**20)}


def random_model() -> torch.nn.Module:
    """A Qwen3 shape of 8 layers and 17 million parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 8, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}
    config = AutoConfig.for_model("qwen3", **sizes, **heads, tie_word_embeddings=True, pad_token_id=None)
    return AutoModelForCausalLM.from_config(config).train()


def spine(length: int = 24_000, num_branches: int = 36, branch: int = 1_000) -> Forest:
    """Branches leave a long path at even distances, and the path goes on to its end."""
    rng = np.random.default_rng(0)
    path = rng.integers(3, VOCABULARY, length)
    cuts = np.linspace(length / num_branches, length, num_branches).astype(int)
    items = [np.concatenate([path[:cut], rng.integers(3, VOCABULARY, branch)]) for cut in cuts]
    return Forest.from_trajectories([Trajectory(ids) for ids in items])


def _peak(reset: bool = False) -> int:
    """Bytes, of the device that the model is on."""
    found = peak_bytes(torch.device("cuda" if torch.cuda.is_available() else "cpu"), reset)
    if found is None:
        raise SystemExit("nothing tells the peak memory of a process here; Linux and CUDA do.")
    return found


if __name__ == "__main__":
    main()
