"""Supervised fine-tuning of SmolLM2-135M on agents' recorded calls, one trainer at a time: held-out loss over time.

Every trainer gets the same steps in the same order: the weights, AdamW, its rate, the rows of each step and the mean
over the step's trained tokens are the same, so that curves over steps coincide and curves over minutes tell trainers
apart. A step holds `ROWS` calls of one agent, as an agent's server logs them (earlier thinking dropped where the
template drops it): tool calls of ToolBench, crosswords and games of 24. Held out are other searches, and a call of a
tau2 conversation; a step of those, 36,000 flat tokens, takes row-wise training ten minutes on two cores.

    python benchmarks/proof_sft.py treewise --seed 0 [--steps 4]     # one trainer; `make proof` runs all
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import DATA, smollm2
from datasets import Dataset
from transformers import AttentionInterface, AttentionMaskInterface, TrainerCallback
from trl import SFTConfig, SFTTrainer

import treewise as tw
from treewise.bench.flat import attention, packed_attention
from treewise.bench.trl_rows import TrlRows
from treewise.data import RenderOptions, load_trees
from treewise.nn.model import split_model
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

TRAINERS = {
    "rows": "TRL SFTTrainer, a row a call",
    "packed": "TRL SFTTrainer, packed without padding",
    "tree rows": "TRL's tree rows",
    "treewise": "treewise",
    "treewise, budget": "treewise, a quarter of the largest tree at a time",
}
ROWS, PACKED = 8, 2  # rows of a step; rows of one packed sequence: 9,000 tokens hold 12 GiB of activations
RATE, CLIP, EVERY = 5e-5, 1.0, 5  # steps from one held-out loss to the next
SEARCHES = tuple(f"crosswords-{number}" for number in (0, 2, 6, 9, 12))
SEARCHES += tuple(f"game24-{number}" for number in (904, 913, 976, 990))
VARLEN = "proof_varlen"

Step = list[Trajectory]


@dataclass
class Data:
    """steps: what is trained, in order. held_out: rows of other conversations and searches."""

    steps: list[Step]
    held_out: list[Trajectory]

    @property
    def largest(self) -> int:
        """Tokens of the largest tree of a step."""
        return max(Forest.from_trajectories(step).num_tokens for step in self.steps)

    def counts(self) -> dict[str, Any]:
        """Sizes of what is trained."""
        forests = [Forest.from_trajectories(step) for step in self.steps]
        flat, tree = (sum(getattr(each, name) for each in forests) for name in ("num_flat_tokens", "num_tokens"))
        trained = sum(int((row.loss_weights > 0).sum()) for step in self.steps for row in step)
        return {"steps": len(forests), "flat_tokens": flat, "tree_tokens": tree, "trained_tokens": trained}


@dataclass
class Clock:
    """Seconds of training: what evaluation takes is taken off. points: step, seconds, held-out figure."""

    held_out: Callable[[], float]
    points: list[tuple[int, float, float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    started: float = 0.0
    paused: float = 0.0
    ended: float = 0.0

    def start(self) -> None:
        """Before the first step."""
        loss = self.held_out()
        self.started = time.perf_counter()
        self.points.append((0, 0.0, loss))

    def step_ended(self, step: int, *, is_due: bool) -> None:
        """After the optimizer's update; evaluates where due."""
        now = time.perf_counter()
        self.ended = now - self.started - self.paused
        if is_due:
            self.points.append((step, self.ended, self.held_out()))
            self.paused += time.perf_counter() - now


class Watch(TrainerCallback):
    """Runs a clock beside transformers' loop."""

    def __init__(self, clock: Clock, every: int = EVERY, num_steps: int | None = None) -> None:
        self.clock, self.every, self.num_steps = clock, every, num_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clock.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        self.clock.step_ended(step, is_due=step % self.every == 0 or step == (self.num_steps or state.max_steps))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        self.clock.losses.append(logs["loss"])
        if "iteration" in logs:  # of an online run, which has no other event at the end of a step
            self.on_step_end(args, state, control)


def loaded_data(tokenizer: Any, seed: int, num_steps: int | None) -> Data:
    """A step of each search and one of tool calls, in an order that the seed draws."""
    rng = np.random.default_rng(seed)
    trees: dict[str, Step] = {}
    for file, template in (("searches", None), ("toolbench", "chatml"), ("tau_airline", "chatml")):
        options = RenderOptions() if template is None else RenderOptions(chat_template=template)
        for tree in load_trees(DATA / f"{file}.jsonl.gz", tokenizer, options=options, num_workers=0):
            trees[tree.name] = tree.trajectories or []
    steps = []
    for name in (*SEARCHES, "toolbench-G3-15"):
        rows = trees[name]
        start = int(rng.integers(0, len(rows) - ROWS + 1))
        steps.append(rows[start : start + ROWS])
    order = rng.permutation(len(steps))
    held_out = [*trees["crosswords-8-first-20"][:12], *trees["game24-937-first-20"][:12], trees["airline-38"][4]]
    return Data([steps[number] for number in order[:num_steps]], held_out)


@torch.no_grad()
def held_out_loss(model: Any, rows: list[Trajectory]) -> float:
    """Mean over the trained tokens, each row alone, by transformers' own forward."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor(np.asarray(row.token_ids).tolist())[None]
        at = torch.as_tensor(np.flatnonzero(np.asarray(row.loss_weights) > 0))
        with attention(split_model(model), "sdpa"):  # torch's, whoever trains
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, at - 1]
        total += float(F.cross_entropy(model.lm_head(hidden), ids[0, at], reduction="sum"))
        count += len(at)
    model.train(was_training)
    return total / count


# -- the trainers ------------------------------------------------------------------------------------------------------


def settings(folder: str, rate: float, **own: Any) -> dict[str, Any]:
    """What all trainers of both parts are given, and what those of one are."""
    return {
        "output_dir": folder,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": CLIP,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": True,
        **own,
    }


def settings_of(folder: str, data: Data) -> dict[str, Any]:
    """What all trainers of this part are given."""
    own = {"max_steps": len(data.steps), "train_sampling_strategy": "sequential", "logging_steps": 1}
    return settings(folder, RATE, gradient_checkpointing=False, **own)


def by_trl(model: Any, tokenizer: Any, data: Data, clock: Clock, folder: str, *, packed: bool) -> None:
    """TRL's trainer on the rows of each step; each packed row is one kernel call, as in FlashAttention."""
    rows = [
        {
            "input_ids": np.asarray(row.token_ids).tolist(),
            "labels": np.where(np.asarray(row.loss_weights) > 0, np.asarray(row.token_ids), -100).tolist(),
        }
        for step in data.steps
        for row in step
    ]
    size = PACKED if packed else 1
    if packed:
        AttentionInterface.register(VARLEN, packed_attention)
        AttentionMaskInterface.register(VARLEN, lambda **_: None)
        model.config._attn_implementation_internal = VARLEN
    config = SFTConfig(
        **settings_of(folder, data),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=ROWS // size,
        max_length=None,
        padding_free=packed,
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Watch(clock)],
    )
    trainer.train()


def by_tree_rows(model: Any, data: Data, clock: Clock) -> None:
    """TRL's rows, which none of its trainers offers for this loss, in a plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    lm = split_model(model)
    model.train()
    clock.start()
    for number, step in enumerate(data.steps, 1):
        clock.losses.append(TrlRows(lm, step).step())
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_ended(number, is_due=number % EVERY == 0 or number == len(data.steps))


def by_treewise(
    model: Any, tokenizer: Any, data: Data, clock: Clock, folder: str, max_tokens: int | None = None
) -> None:
    """treewise's trainer: a step is a tree."""
    args = tw.TreeTrainingArguments(**settings_of(folder, data), per_device_train_batch_size=1, max_tokens=max_tokens)
    trainer = tw.TreeTrainer(
        model, args, train_dataset=data.steps, processing_class=tokenizer, callbacks=[Watch(clock)]
    )
    trainer.train()


def run(name: str, seed: int, num_steps: int | None) -> dict[str, Any]:
    """One trainer in this process."""
    model, tokenizer = smollm2(torch.float32)
    data = loaded_data(tokenizer, seed, num_steps)
    clock = Clock(lambda: held_out_loss(model, data.held_out))
    before = peak_mib()
    with tempfile.TemporaryDirectory() as folder:
        if name in ("rows", "packed"):
            by_trl(model, tokenizer, data, clock, folder, packed=name == "packed")
        elif name == "tree rows":
            by_tree_rows(model, data, clock)
        else:
            by_treewise(model, tokenizer, data, clock, folder, data.largest // 4 if "budget" in name else None)
    return {
        "part": "sft",
        "trainer": name,
        "label": TRAINERS[name],
        "seed": seed,
        **data.counts(),
        "max_tokens": data.largest // 4 if "budget" in name else None,
        "threads": torch.get_num_threads(),
        "seconds": clock.ended,
        "cpu_seconds": time.process_time(),
        "peak_mib": peak_mib(),
        "peak_mib_before": before,
        "curve": clock.points,
        "losses": clock.losses,
    }


def peak_mib() -> int:
    """Peak resident set of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)


def tell(row: dict[str, Any], output: Path | None) -> None:
    """Writes the result of a trainer, and prints its curve."""
    if output:
        output.write_text(json.dumps(row))
    points = ", ".join(f"{seconds:.0f} s {value:.4f}" for _, seconds, value in row["curve"])
    print(f"{row['label']}: {row['seconds']:.0f} s, peak {row['peak_mib']:,} MiB; held out {points}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainer", choices=list(TRAINERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="the first so many steps only")
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    args = parser.parse_args()
    tell(run(args.trainer, args.seed, args.steps), args.output)


if __name__ == "__main__":
    main()
