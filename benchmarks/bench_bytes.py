"""Bytes that each process sends in a step, per token and layer, counted on gloo beside the least that each form needs.

Tiny models train two steps on the same trees on a CPU, in 2 and in 4 processes forked from this one; counts are those
of the second step, of every collective operation that torch dispatches. An operation counts what one process sends by
the algorithms that send least (rings, pairs): of n bytes and p processes 2 n (p-1)/p for an all-reduce, n (p-1)/p for
an all-gather (n: its result), a reduce-scatter (n: its input) and an exchange between all. Only floating-point
tensors count as data; the rest (plans, counts of tokens) is `control`.

    python benchmarks/bench_bytes.py

`parameter_bytes` are what a process holds of the parameters, in the mean; `predicted` is what `treewise plan --mesh`
counts from the configuration.

Least, with D the model's width, b bytes of a number, k experts of a token:

    gradients    one sum in a step over the p processes that hold the same n bytes: 2 n (p-1)/p; shards that are
                 gathered once and scattered once come to the same
    tp           partial sums after attention and after the MLP, forward and backward: 4 x 2 D b (p-1)/p per token and
                 layer (2 sums where experts take the place of the MLP)
    ep           each token's row to each other process that holds one of its experts, and one row back, forward and
                 backward: 4 D b times the processes other than its own that hold one (for k experts drawn evenly)
    context      keys and values of each token to all other processes, and their gradients back, if all have tokens
                 that see it
"""

import json
import math
import os
import socket
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import save
from transformers import AutoModelForCausalLM, TrainerCallback

from treewise.distributed.divided_tensors import local_part
from treewise.distributed.mesh import load_on_mesh
from treewise.nn.wrapped import unwrap_model
from treewise.report.analysis.mesh_facts import report_mesh
from treewise.testing import tiny_model
from treewise.testing.collectives import Collective, Recorder
from treewise.trainer import TreeTrainer, TreeTrainingArguments
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

VOCABULARY, NUM_TREES = 64, 8
# Form, family, processes, settings of the run.
FORMS: list[tuple[str, str, int, dict[str, Any]]] = [
    *(("data", "llama", size, {}) for size in (2, 4)),
    *(("fsdp", "llama", size, {"sharded": True}) for size in (2, 4)),
    ("fsdp, whole to the backward", "llama", 2, {"sharded": True, "shard_config": {"reshard_after_forward": False}}),
    ("hsdp, 2 copies", "llama", 4, {"sharded": True, "shard_config": {"dp_replicate_size": 2}}),
    *(("tp", "llama", size, {"tp_size": size}) for size in (2, 4)),
    ("tp=2, fsdp", "llama", 4, {"tp_size": 2, "sharded": True}),
    *(("ep", "qwen3_moe", size, {"ep_size": size}) for size in (2, 4)),
    ("tp=2, ep=2", "qwen3_moe", 2, {"tp_size": 2, "ep_size": 2}),
    ("ep=2, fsdp", "qwen3_moe", 4, {"ep_size": 2, "sharded": True}),
    *(("context", "llama", size, {"context_size": size}) for size in (2, 4)),
]


def sent_by_kind(found: Iterable[Collective]) -> dict[str, float]:
    """Bytes that this process sends, by kind of operation."""
    sent: Counter[str] = Counter()
    for each in found:
        if each.kind != "barrier":
            sent[each.kind if each.is_data else "control"] += each.num_sent
    return dict(sent)


def the_model(family: str) -> Any:
    """Three layers of width 32, with heads enough for four processes."""
    return tiny_model(family, vocab_size=VOCABULARY, num_key_value_heads=4)


def trees() -> list[Forest]:
    """Eight trees of six answers to one prompt, in two turns, of equal size."""
    rng, found = np.random.default_rng(0), []
    for _ in range(NUM_TREES):
        prompt, turns = rng.integers(3, VOCABULARY, 24), [rng.integers(3, VOCABULARY, 12) for _ in range(2)]
        rows = [np.concatenate([prompt, turns[row // 3], rng.integers(3, VOCABULARY, 8)]) for row in range(6)]
        found.append(Forest.from_trajectories([Trajectory(row) for row in rows]))
    return found


@contextmanager
def tokens_of(model: torch.nn.Module) -> Iterator[list[int]]:
    """Tokens of each forward of the first layer, recomputed and empty ones included."""
    counts: list[int] = []
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.0"))
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: counts.append(_rows(args, kwargs)), with_kwargs=True)
    try:
        yield counts
    finally:
        hook.remove()


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    hidden = args[0] if args else kwargs["hidden_states"]
    return hidden.shape[-2]


def one_step(folder: Path, family: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What this process sends in the second of two equal steps."""
    args = TreeTrainingArguments(
        output_dir=str(folder / "run"), max_steps=2, save_strategy="no", report_to="none", use_cpu=True, seed=1,
        disable_tqdm=True, learning_rate=1e-3, max_tokens=4096, logging_steps=1, **settings,
    )  # fmt: skip
    args.per_device_train_batch_size = NUM_TREES // args.data_size
    if args.tp_size > 1 or args.ep_size > 1:
        model = load_on_mesh(str(folder / family), tp_size=args.tp_size, ep_size=args.ep_size, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32)
    trainer = TreeTrainer(model, args, train_dataset=trees())
    watch = Watch()
    trainer.add_callback(watch)
    with tokens_of(model) as watch.tokens, watch.mode:
        trainer.train()
    held = sum(local_part(each.data).nbytes for each in unwrap_model(trainer.model).parameters())
    return {**watch.steps[-1], "held": held}


class Watch(TrainerCallback):
    """What is sent and computed within each step."""

    def __init__(self) -> None:
        self.mode, self.tokens, self.steps = Recorder(), list[int](), list[dict[str, Any]]()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.mode.found.clear()
        self.tokens.clear()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append({"sent": sent_by_kind(self.mode.found), "tokens": sum(self.tokens)})


def fork(num_processes: int, folder: Path, work: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
    """What `work` returns in each of so many processes, which a gloo group joins."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    children = []
    for rank in range(num_processes):
        child = os.fork()
        if child == 0:
            here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in here.items()} | {"MASTER_ADDR": "127.0.0.1"})
            for stream in (1, 2):
                os.dup2(os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT), stream)
            torch.distributed.init_process_group("gloo")
            code = 1
            try:
                (folder / f"{rank}.json").write_text(json.dumps(work()))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    assert not any(ends), (folder / "0.log").read_text()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_processes)]


def least(family: str, size: int, settings: dict[str, Any], num_tokens: float) -> float:
    """Bytes that a process has to send in the step (see above)."""
    model, mesh, context = the_model(family), mesh_of_form(size, settings), settings.get("context_size", 1)
    config, tp, ep = model.config, mesh["tp"], mesh["ep"]
    layers, row = num_tokens * config.num_hidden_layers, 4 * config.hidden_size
    experts = sum(each.nbytes for name, each in model.named_parameters() if ".experts." in name) if ep > 1 else 0
    rest = report_mesh(config, {**mesh, "fsdp": 1, "dp": size // tp}, torch.float32).bytes_weights - experts / ep
    total = sum_of(rest, size // tp) + sum_of(experts / ep, size // ep)
    total += layers * (2 if ep > 1 else 4) * sum_of(row, tp)
    if ep > 1:
        misses = math.comb(config.num_experts - config.num_experts // ep, config.num_experts_per_tok)
        reached = 1 - misses / math.comb(config.num_experts, config.num_experts_per_tok)
        total += layers * 4 * row * (ep - 1) * reached / tp  # processes that compute one batch share its tokens
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return total + layers * 2 * (context - 1) * 2 * 4 * config.num_key_value_heads * head_size


def sum_of(num_bytes: float, size: int) -> float:
    """What each process sends so that all have the sum."""
    return 2 * num_bytes * (size - 1) / size


def mesh_of_form(size: int, settings: dict[str, Any]) -> dict[str, int]:
    """The sizes by which `treewise plan --mesh` counts a form."""
    tp, ep = settings.get("tp_size", 1), settings.get("ep_size", 1)
    copies = settings.get("shard_config", {}).get("dp_replicate_size", 1)
    fsdp = size // tp // copies if settings.get("sharded") else 1
    return {"tp": tp, "ep": ep, "fsdp": fsdp, "dp": size // tp // fsdp}


def main() -> None:
    rows: list[dict[str, Any]] = []
    for form, family, size, settings in FORMS:
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            the_model(family).save_pretrained(folder / family)
            found = fork(size, folder, partial(one_step, folder, family, settings))
        config = the_model(family).config
        kinds = sorted({kind for each in found for kind in each["sent"]})
        sent = {kind: sum(each["sent"].get(kind, 0) for each in found) / size for kind in kinds}
        tokens = sum(each["tokens"] for each in found) / size
        data = sum(value for kind, value in sent.items() if kind != "control")
        layers = tokens * config.num_hidden_layers
        needed = least(family, size, settings, tokens)
        predicted = report_mesh(config, mesh_of_form(size, settings), torch.float32).bytes_weights
        rows.append(
            {
                "form": form, "family": family, "processes": size, "tokens": tokens,
                "bytes_by_kind": {kind: round(value) for kind, value in sent.items()},
                "bytes_per_token_and_layer": round(data / layers, 1),
                "least_per_token_and_layer": round(needed / layers, 1),
                "ratio": round(data / needed, 2),
                "parameter_bytes": round(sum(each["held"] for each in found) / size), "predicted": predicted,
                "hidden_size": config.hidden_size, "layers": config.num_hidden_layers,
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    print(save("bytes", rows))


if __name__ == "__main__":
    main()
