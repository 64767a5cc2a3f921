"""Seconds of one optimizer step of trainers that accumulate, with and without `share_prefixes`: what a window saves.

Contestants, in one process, taking turns, each with a model of its own: the trainer as it is; with the line; with the
line and `window=None`, which shares what one micro-batch holds. Micro-batches go through the trainer's own
`training_step`, as its loop calls it; rollouts and data are given, clipping and the optimizer are left out.

* TRL's GRPOTrainer on a group of 8 (prompts of 500 tokens, answers of 50 to 100) in micro-batches of 1, 2 and 8;
* TRL's DPOTrainer on 4 answers to a prompt, in pairs with the first, one pair at a time;
* transformers.Trainer on the logged calls of one run (14 rows, share ratio 4.9), one call at a time;
* `treewise serve` with LoRA, one datum in each call: the group of 8, 16 samples of 64 tokens after a prompt of 512, an
  episode of 8 turns, and a run in which nothing is shared. Contestants: `--window none`, with a window, and all rows in
  one call.

The bound: FLOPs of all rows over those of the tree; times 3/4 where the window let its graphs go (docs/windows.md).
For `serve` also: how fast products of a call's rows are beside those of whole rows, which no window can mend while each
call is answered before the next comes; what parts of a call take; and what of a waiting client's time is the server's
(SDK over HTTP).

    python benchmarks/bench_windows.py [--cases grpo-1 ...] [--repetitions 3] [--cpu_seconds]

Each case is saved when it is there, beside those of earlier runs; `python benchmarks/tables.py` writes the tables.
"""

import argparse
import copy
import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import bench_serve
import numpy as np
import torch
from bench_trl import dpo_inputs, dpo_trainer, groups, grpo_inputs, grpo_trainer, settings
from common import RESULTS, commit, hardware, paired_seconds, save, smollm2, speed_up_of, spread
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from tree_shapes import recorded

import treewise
from treewise.engine.window import StepCalls, Window, chunks, scores
from treewise.models.load_model import DEMO_MODEL
from treewise.serve.journal import RequestJournal
from treewise.serve.weights import ServedModel
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

CALLS = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
VOCABULARY = 16_384

MODEL = DEMO_MODEL  # of `serve`
SERVED = {
    "serve-group": "GRPO: a group of 8",
    "serve": "GRPO: 16 samples after a prompt of 512",
    "serve-episode": "episode: 8 turns, one row a turn",
    "serve-alone": "SFT: a recorded run, nothing shared",
}
PARTS = {
    "the decoder": [(chunks, "run_decoder")],
    "the head": [(scores, "hold_logits"), (scores, "edge_values")],
    "the end, all backwards": [(Window, "end")],
}
SERVER_PARTS = {
    "computing": [(ServedModel, "compute"), (ServedModel, "end_window"), (ServedModel, "optimize")],
    "the journal": [(RequestJournal, name) for name in ("add", "begin", "body", "answer", "find", "get", "put")],
}
SHARES = ("of_step", "of_client")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cases = {
        **{f"grpo-{size}": lambda size=size: grpo(size) for size in (1, 2, 8)},
        "dpo-1": dpo,
        "calls-1": logged_calls,
    }
    names = [*cases, *SERVED]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cpu_seconds", action="store_true", help="of this process, where others load the machine")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_seconds else time.perf_counter
    path = RESULTS / f"windows-{hardware()}.json"
    rows = {row["case"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}
    for name in args.cases:
        if name in SERVED:
            found = served_calls(name, args.repetitions, clock)
        else:
            found = measure(name, *cases[name](), args.repetitions, clock)
        rows[name] = {**found, "commit": commit(), "clock": clock.__name__}
        seconds = ", ".join(f"{key} {value['median']:.2f} s" for key, value in found["seconds"].items())
        print(
            f"{name}: {found['flat_tokens']:,} flat, {found['tree_tokens']:,} tree tokens; speed-up "
            f"{found['speed_up']:.2f} of {found['flop_bound']:.2f}, efficiency {found['efficiency']:.2f}; {seconds}",
            *(f"{key}: {', '.join(f'{part} {share:.1%}' for part, share in found[key].items())}" for key in SHARES
              if key in found),
            sep="\n  ", flush=True,
        )  # fmt: skip
        written = save("windows", [rows[each] for each in names if each in rows])  # as they come
    print("written to", written)


def measure(
    name: str,
    loaded: Any,
    trainer_of: Callable[[Any], Trainer],
    micro_batches: list[dict[str, torch.Tensor]],
    forest: Forest,
    repetitions: int,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Steps of the contestants in turn; gradients of a first one are compared."""
    contestants, grads, sharings = {}, {}, {}
    for key in ("plain", "window", "no window"):
        model = copy.deepcopy(loaded)
        if key != "plain":
            sharings[key] = treewise.share_prefixes(model, window="auto" if key == "window" else None)
        contestants[key] = step_of(trainer_of(model), model, micro_batches)
        contestants[key]()
        if key == "window":  # a first one is not known to be worth it where it shares nothing at once
            contestants[key]()
        grads[key] = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    largest = max(float(each.abs().max()) for each in grads["plain"])
    worst = {
        key: max(float((a - b).abs().max()) for a, b in zip(of, grads["plain"], strict=True)) / largest
        for key, of in grads.items()
    }
    assert max(worst.values()) <= 1e-4, worst
    seconds = {key: spread(value) for key, value in paired_seconds(contestants, repetitions, clock).items()}
    return {
        "case": name,
        "micro_batches": len(micro_batches),
        **speed_up_of(loaded, forest, seconds["plain"]["median"], seconds["window"]["median"]),
        "gradient_difference": worst["window"],
        "sharing": str(sharings["window"]),
        "seconds": seconds,
    }


def step_of(trainer: Any, model: Any, micro_batches: list[dict[str, torch.Tensor]]) -> Callable[[], None]:
    """Forward and backward of all micro-batches of a step, as the trainer's own loop calls them."""
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.current_gradient_accumulation_steps = len(micro_batches)
    trainer.accelerator.prepare(model)
    num_items = sum((batch["labels"] != -100).sum() for batch in micro_batches if "labels" in batch)

    def step() -> None:
        model.zero_grad()
        for index, batch in enumerate(micro_batches):
            trainer.accelerator.gradient_state._set_sync_gradients(index == len(micro_batches) - 1)
            trainer.training_step(model, dict(batch), num_items if "labels" in batch else None)

    return step


def grpo(size: int) -> tuple[Any, ...]:
    """A group of 8, in micro-batches of `size` rows."""
    batch = groups(1, 8, 500, 100)
    model, tokenizer = smollm2(torch.float32)
    whole = grpo_inputs(batch)
    parts = [
        {key: value[first : first + size] if value.dim() else value for key, value in whole.items()}
        for first in range(0, 8, size)
    ]
    own = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
    return model, lambda model: grpo_trainer(model, tokenizer, 8, **own), parts, _forest(batch)


def dpo() -> tuple[Any, ...]:
    """4 answers to a prompt, each beside a first one that is better: one pair in each of 4 micro-batches."""
    chosen, *rejected = groups(1, 5, 500, 100)
    model, tokenizer = smollm2(torch.float32)
    parts = [dpo_inputs([chosen, each]) for each in rejected]
    rows = [row for each in rejected for row in (chosen, each)]
    own = {"gradient_accumulation_steps": 4}
    return model, lambda model: dpo_trainer(model, tokenizer, 1, **own), parts, _forest(rows)


def logged_calls() -> tuple[Any, ...]:
    """The calls of one recorded run, each a row whose last tokens are trained."""
    shape = next(forest for source, forest in recorded() if source == "toolbench_dfs" and len(forest.paths) == 14)
    ids = np.random.default_rng(0).integers(100, VOCABULARY, shape.num_tokens)
    batch = [(ids[path][:-50], ids[path][-50:]) for path in shape.paths]
    torch.manual_seed(0)
    config = LlamaConfig(**CALLS, vocab_size=VOCABULARY, max_position_embeddings=16_384, tie_word_embeddings=True)
    parts = []
    for prompt, answer in batch:
        row = torch.as_tensor(np.concatenate([prompt, answer]))[None]
        labels = torch.where(torch.arange(row.shape[1]) < len(prompt), -100, row)
        parts.append({"input_ids": row, "labels": labels, "attention_mask": torch.ones_like(row)})
    own = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": len(parts)}
    make = lambda model: Trainer(model, TrainingArguments(**settings(1) | own))  # noqa: E731
    return LlamaForCausalLM(config).train(), make, parts, _forest(batch)


def sequences_of(name: str, vocabulary: int) -> list[list[int]]:
    """Rows of a case of `serve`."""
    if name == "serve-group":
        return [np.concatenate(row).tolist() for row in groups(1, 8, 500, 100)]
    return bench_serve.workloads(vocabulary)[SERVED[name]]


def served_calls(name: str, repetitions: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Steps of a run whose rows come one at a time, with a window and without, and all at once."""
    models = {window: bench_serve.served(MODEL, "all", window=window) for window in ("auto", "none")}
    weights = {window: model.new_weights(bench_serve.Shape(bench_serve.RANK), 0) for window, model in models.items()}
    windows = {window: model.new_window() for window, model in models.items()}
    rows = bench_serve.rows_of(sequences_of(name, models["auto"].vocabulary))

    def step(window: str, calls: list[list[Any]]) -> list[torch.Tensor]:
        model, own = models[window], weights[window]
        for call in calls:
            model.compute(own, call, windows[window], gradients=True)
        model.end_window(own, windows[window])
        grads = [each.grad for each in own.parameters.values() if each.grad is not None]
        own.forget(with_moments=False)
        return grads

    one_each = [[row] for row in rows]
    one, other = step("auto", one_each), step("none", one_each)
    worst = max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
    difference = worst / max(float(each.abs().max()) for each in other)
    assert difference <= 1e-4, difference
    contestants = {
        "plain": lambda: step("none", one_each),
        "window": lambda: step("auto", one_each),
        "at once": lambda: step("none", [rows]),
    }
    seconds = {key: spread(value) for key, value in paired_seconds(contestants, repetitions, clock).items()}
    with timed(PARTS, clock) as parts:
        begun = clock()
        step("auto", one_each)
        whole = clock() - begun
    forest = Forest.from_trajectories([Trajectory(row.token_ids) for row in rows])
    return {
        "case": name,
        "micro_batches": len(rows),
        **speed_up_of(models["none"].base, forest, seconds["plain"]["median"], seconds["window"]["median"]),
        "gradient_difference": difference,
        "seconds": seconds,
        "products": products(models["none"].base, [row.token_ids for row in rows]),
        **({"of_step": shares(parts, whole, "the engine's Python")} if any(parts.values()) else {}),  # none: no window
        "of_client": waiting_client(name),
    }


@torch.no_grad()
def products(model: Any, rows: list[np.ndarray]) -> float:
    """Rate of products with the layers' weights, forward and backward, of calls' new tokens over that of whole rows."""
    calls, sizes = StepCalls(), []
    for row in rows:
        before = calls.num_tree_tokens
        calls.add(Forest.from_trajectories([Trajectory(row)]))
        sizes.append(calls.num_tree_tokens - before)
    named = model.named_parameters()
    weights = [each for name, each in named if ".layers." in name and each.dim() == 2 and "lora" not in name]

    @functools.cache
    def seconds_per_token(size: int) -> float:
        def run() -> None:
            for each in weights:
                torch.zeros(size, each.shape[0]) @ each
                torch.zeros(size, each.shape[1]) @ each.T

        return float(np.median(paired_seconds({"": run}, 3)[""])) / size

    own = sum(size * seconds_per_token(size) for size in sizes if size) / sum(sizes)
    return seconds_per_token(int(np.median([len(row) for row in rows]))) / own


def waiting_client(name: str) -> dict[str, float]:
    """Where the time of a client goes that sends one datum over HTTP, and the next once it has the answer."""
    import tinker
    from tinker import types

    with bench_serve.running(MODEL) as (url, model):
        client = tinker.ServiceClient(base_url=url, api_key="tml-local")
        run = client.create_lora_training_client(base_model=model, rank=bench_serve.RANK).result()
        data = bench_serve.data_of(sequences_of(name, 8192))

        def step() -> float:
            begun = time.perf_counter()
            for each in data:
                run.forward_backward([each], "cross_entropy").result()
            run.optim_step(types.AdamParams()).result()
            return time.perf_counter() - begun

        step()
        with timed(SERVER_PARTS, time.perf_counter) as parts:
            whole = step()
        client.close("success").result()
    return shares(parts, whole, "HTTP, the SDK, and waiting")


@contextmanager
def timed(parts: dict[str, list[tuple[Any, str]]], clock: Callable[[], float]) -> Iterator[dict[str, float]]:
    """Inside, seconds that functions take, by name of the part."""
    seconds = dict.fromkeys(parts, 0.0)

    def around(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = clock()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += clock() - begun

        return run

    with ExitStack() as patched:
        for part, functions in parts.items():
            for owner, name in functions:
                patched.enter_context(mock.patch.object(owner, name, around(getattr(owner, name), part)))
        yield seconds


def shares(parts: dict[str, float], whole: float, rest: str) -> dict[str, float]:
    """Of the whole; what is in no part is the rest."""
    return {**{part: value / whole for part, value in parts.items()}, rest: 1 - sum(parts.values()) / whole}


def _forest(batch: list[tuple[np.ndarray, np.ndarray]]) -> Forest:
    """Every row scores its answer alone."""
    return Forest.from_trajectories(
        [Trajectory(np.concatenate(row), np.repeat([0.0, 1.0], [len(row[0]), len(row[1])])) for row in batch]
    )


if __name__ == "__main__":
    main()
