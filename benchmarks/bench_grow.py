"""Growing a small transformer: held-out loss over FLOPs, operator training included, by each operator and from scratch.

Two sizes of a Llama (2 layers of width 32, 4 layers of width 64; characters as tokens) on the text of the conversations
in `examples/data`, or on the larger one of Python's own help. The small model is trained first. Then the large one is
trained from random weights, and from what `treewise grow` makes of the small one, with the same data, steps and
learning rate. Training is the tree engine's, on windows of text.

    python benchmarks/bench_grow.py [--seeds 3] [--steps 220] [--grown_steps 160] [--operator_steps 40]
    python benchmarks/bench_grow.py --name grow-wide --text help --width 4 --small_steps 160 --steps 160 \
        --grown_steps 160 --seeds 2

The second is a larger ratio of sizes.

FLOPs are those of `treewise.nn.flops` for each step, and for an operator also those of making its weights and of
carrying gradients back into it, counted by torch. The training of the small model is not counted, as in the papers;
`saved_all` counts it. An arm has reached the target where its held-out loss is first that of scratch at its end, by
linear interpolation between evaluations. `saved_free` leaves the FLOPs of operators out.
"""

import argparse
import gzip
import json
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from common import DATA, save
from tiny_policy import interval
from torch.utils.flop_counter import FlopCounterMode

from treewise import SFT, Forest, Trajectory, TreeEngine, testing
from treewise.experimental.grow import grow, operators
from treewise.experimental.grow.configuration import MANGO, OPERATORS, Growth
from treewise.experimental.grow.growth import load_whole
from treewise.experimental.grow.growth_plan import GrowthPlan, plan_of
from treewise.nn.model_flops import flop_model

VOCABULARY = 128  # ASCII; other characters become a question mark
WINDOW = 128
BATCH = 16
EVALUATED = 32  # windows
SMALL = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
WARM_UP = 20


def texts(value: Any) -> Iterator[str]:
    """All strings of some length in a record."""
    if isinstance(value, str) and len(value) > 40:
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)


def records(name: str) -> Iterator[tuple[int, Any]]:
    """The records of a text, each with its number in its file."""
    if name == "help":
        yield from enumerate(text for _, text in sorted(topics.items()))
        return
    for file in sorted(DATA.glob("*.jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            yield from enumerate(map(json.loads, lines))


def load_text(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Characters of what is trained on, and of what is held out (every tenth record), as int32; each string once."""
    seen: set[str] = set()
    parts: tuple[list[str], list[str]] = ([], [])
    for number, record in records(name):
        new = [text for text in texts(record) if text not in seen]
        seen.update(new)
        parts[number % 10 == 0].extend(new)
    trained, held_out = (np.frombuffer("\n".join(part).encode("ascii", "replace"), dtype=np.uint8) for part in parts)
    return trained.astype(np.int32), held_out.astype(np.int32)


def windows(text: np.ndarray, seed: int, count: int) -> list[Forest]:
    """Windows at random places, each a tree of one trajectory."""
    starts = np.random.default_rng(seed).integers(0, len(text) - WINDOW, count)
    return [Forest.from_trajectories([Trajectory(text[start : start + WINDOW])]) for start in starts.tolist()]


def new_model(seed: int, width: int = 1, layers: int = 2) -> Any:
    """A Llama with random weights."""
    sizes = {name: value * (1 if name == "num_hidden_layers" else width) for name, value in SMALL.items()}
    sizes["num_hidden_layers"] = layers
    return testing.tiny_model(
        seed=seed,
        **sizes,
        num_key_value_heads=sizes["num_attention_heads"],
        head_dim=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=WINDOW,
    )


class Run:
    """One model in training: its curve of FLOPs and held-out loss."""

    def __init__(self, model: Any, held_out: list[Forest], rate: float, flops: float = 0.0) -> None:
        self.model, self.flops, self.curve = model.train(), flops, []
        self.tokens = torch.tensor(np.stack([forest.token_ids for forest in held_out])).long()
        self.engine = TreeEngine(model, check=False)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
        self.rate = rate
        self.flops_per_window = flop_model(model).tree(held_out[0])

    def evaluate(self) -> None:
        """Adds a point to the curve."""
        self.model.eval()
        with torch.no_grad():
            logits = self.model(self.tokens).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        self.model.train()
        self.curve.append((self.flops, float(loss)))

    def train(self, batches: list[list[Forest]], evaluate_every: int) -> "Run":
        """One step for each batch."""
        self.evaluate()
        for number, batch in enumerate(batches, 1):
            self.optimizer.param_groups[0]["lr"] = self.rate * min(1.0, number / WARM_UP)
            self.engine.step(batch, SFT())
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.flops += self.flops_per_window * len(batch)
            if number % evaluate_every == 0 or number == len(batches):
                self.evaluate()
        return self


def map_flops(name: str, small: Any, grown: Any, plan: GrowthPlan) -> float:
    """FLOPs of making the large weights once, and of carrying their gradients back into the operator."""
    operator = operators.Mango(small, grown, plan)
    with FlopCounterMode(display=False) as counter:
        made = [tensor for tensor in operator().values() if tensor.requires_grad]
        torch.autograd.backward(made, [torch.ones_like(tensor) for tensor in made])
    return float(counter.get_total_flops())


def grown_run(
    name: str, folder: Path, batches: list[list[Forest]], held_out: list[Forest], args: argparse.Namespace, seed: int
) -> Run:
    """The large model that an operator makes, trained on; operator training is counted and takes the first batches."""
    num_fitted = args.operator_steps if name == MANGO else 0
    used = [forest for batch in batches[:num_fitted] for forest in batch]
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / name
        grow(
            folder,
            output,
            width=args.width,
            num_layers=args.layers,
            operator=name,
            seed=seed,
            check=False,
            forests=used,
            steps=max(num_fitted, 1),
            learning_rate=args.operator_rate,
            trees_per_step=BATCH,
        )
        model = load_whole(output)
    run = Run(model, held_out, args.rate)
    if num_fitted:
        small = load_whole(folder)
        plan = plan_of(small.config, Growth(args.width, num_layers=args.layers, operator=name, noise=0.0))
        per_step = BATCH * run.flops_per_window + map_flops(name, small, model, plan)
        run.flops = num_fitted * per_step
    return run.train(batches[num_fitted : args.grown_steps], args.eval_every)


def flops_to(curve: list[tuple[float, float]], target: float) -> float | None:
    """FLOPs at which a curve first comes down to a loss; None where it does not."""
    for (before, high), (after, low) in pairwise(curve):
        if low <= target:
            return before if high <= target else before + (after - before) * (high - target) / (high - low)
    return None


def run_seed(seed: int, text: np.ndarray, held_text: np.ndarray, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All arms of one seed."""
    held_out = windows(held_text, 10_000, EVALUATED)
    stream = windows(text, seed, (args.small_steps + args.steps) * BATCH)
    batches = [stream[start : start + BATCH] for start in range(0, len(stream), BATCH)]
    small = Run(new_model(seed), held_out, args.rate).train(batches[: args.small_steps], args.eval_every)
    batches = batches[args.small_steps :]
    scratch = Run(new_model(seed, args.width, args.layers), held_out, args.rate).train(batches, args.eval_every)
    runs = {"scratch": scratch}
    with tempfile.TemporaryDirectory() as folder:
        small.model.save_pretrained(folder)
        for name in OPERATORS:
            runs[name] = grown_run(name, Path(folder), batches, held_out, args, seed)
    rows = []
    for name, run in runs.items():
        needed = flops_to(run.curve, scratch.curve[-1][1])
        saved = None if needed is None else 1 - needed / scratch.flops
        rows.append(
            {
                "seed": seed,
                "arm": name,
                "first_loss": run.curve[0][1],
                "last_loss": run.curve[-1][1],
                "saved": saved,
                "saved_free": saved if saved is None else saved + run.curve[0][0] / scratch.flops,
                "saved_all": saved if saved is None or name == "scratch" else saved - small.flops / scratch.flops,
                "curve": run.curve,
                "small": {"loss": small.curve[-1][1], "flops": small.flops},
            }
        )
        shown = "not reached" if saved is None else f"{saved:+.3f}"
        print(f"{name:8} {seed} {run.curve[0][1]:.3f} -> {run.curve[-1][1]:.3f}  saved {shown}", flush=True)
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each arm: means over seeds, and a bootstrap interval of 95 % of the share saved where all seeds reached it."""
    table = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        own = [row for row in rows if row["arm"] == arm]
        entry: dict[str, Any] = {"arm": arm, "seeds": len(own), "reached": sum(row["saved"] is not None for row in own)}
        for name in ("first_loss", "last_loss"):
            entry[name] = round(float(np.mean([row[name] for row in own])), 4)
        for name in ("saved", "saved_free", "saved_all"):
            if entry["reached"] == len(own):
                entry[name] = interval([row[name] for row in own])
        table.append(entry)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="grow", help="of the result")
    parser.add_argument("--text", default="conversations", choices=("conversations", "help"))
    parser.add_argument("--width", type=int, default=2, help="factor of the width")
    parser.add_argument("--layers", type=int, default=4, help="of the large model; the small one has 2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--small_steps", type=int, default=100)
    parser.add_argument("--steps", type=int, default=220, help="of scratch, 16 windows of 128 characters each")
    parser.add_argument("--grown_steps", type=int, default=160, help="of each operator, its own included")
    parser.add_argument("--operator_steps", type=int, default=40, help="mango")
    parser.add_argument("--rate", type=float, default=3e-3, help="of AdamW, after a warm-up of 20 steps")
    parser.add_argument("--operator_rate", type=float, default=1e-3)
    parser.add_argument("--eval_every", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text, held_text = load_text(args.text)
    print(f"{len(text):,} characters, {len(held_text):,} held out", flush=True)
    rows: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        rows += run_seed(seed, text, held_text, args)
        table = summary(rows)
        path = save(args.name, [{"setting": vars(args), "table": table}, *rows])  # after every seed
    for entry in table:
        print(entry)
    print("written to", path)


if __name__ == "__main__":
    main()
