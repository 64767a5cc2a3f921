"""A `forward_backward` of `treewise serve`: shared, not shared (`--share none`), and a plain PEFT loop over the rows.

    python benchmarks/bench_serve.py [--repetitions 3] [--model smollm2-demo]

Three workloads: GRPO groups (16 samples of 64 tokens after a prompt of 512), multi-turn episodes (8 turns of 64 tokens,
one row a turn), and SFT on the shapes of recorded trees. The contestants take turns in one process on the same rows and
adapters (rank 16); the ratio of each round is paired. Over HTTP, the official SDK sends the first workload to a server
in a thread; what is not the worker's is the overhead, of time and of CPU time, which other processes hardly change.
Without --model: a random Llama of 5 million parameters. The same rows one in each call: `bench_windows.py`.
"""

import argparse
import json
import os
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import numpy as np
import psutil
import torch
import uvicorn
from common import paired_seconds, save
from transformers import LlamaConfig, LlamaForCausalLM
from tree_shapes import recorded

from treewise.models.load_model import load_weights
from treewise.nn.model_flops import flop_model
from treewise.serve.adapter_slots import OwnedWeights, Shape
from treewise.serve.app import make_app
from treewise.serve.rows_loss import make_row
from treewise.serve.settings import ServeSettings
from treewise.serve.weights import ServedModel
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

RANK, MAX_TOKENS, MAX_SFT_TOKENS = 16, 2048, 5000


def rows_of(sequences: list[list[int]]) -> list[Any]:
    """As rows of importance sampling."""
    rows = []
    for ids in sequences:
        given = {"target_tokens": np.array(ids[1:]), "advantages": np.ones(len(ids) - 1)}
        given["logprobs"] = np.full(len(ids) - 1, -9.0)
        rows.append(make_row(np.array(ids[:-1]), given, "importance_sampling", {}))
    return rows


def workloads(vocabulary: int) -> dict[str, list[list[int]]]:
    """Sequences of each workload."""
    draw = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        return draw.integers(0, vocabulary, count).tolist()

    prompt, episode = ids(512), ids(8 * 64 + 64)
    small = [forest for _, forest in recorded() if forest.num_flat_tokens <= MAX_SFT_TOKENS]
    shapes = {
        is_tree: max(
            (each for each in small if (len(each.paths) > 1) == is_tree), key=lambda each: each.num_flat_tokens
        )
        for is_tree in (True, False)
    }
    rows = {is_tree: np.array(ids(each.num_tokens)) for is_tree, each in shapes.items()}
    return {
        "GRPO: 16 samples after a prompt of 512": [prompt + ids(64) for _ in range(16)],
        "episode: 8 turns, one row a turn": [episode[: 64 + 64 * turn] for turn in range(1, 9)],
        "SFT: a recorded tree": [rows[True][path].tolist() for path in shapes[True].paths],
        "SFT: a recorded run, nothing shared": [rows[False][path].tolist() for path in shapes[False].paths],
    }


def plain(model: ServedModel, weights: OwnedWeights, sequences: list[list[int]]) -> None:
    """Each row alone: a forward of PEFT's model, the loss, a backward."""
    with model.using(weights):
        for row in sequences:
            ids = torch.tensor([row])
            logits = model.model(input_ids=ids[:, :-1], use_cache=False).logits[0]
            logprobs = torch.log_softmax(logits.float(), -1).gather(1, ids[0, 1:, None])
            (-torch.exp(logprobs + 9.0).sum()).backward()


def served(name: str | None, share: str, **settings: str) -> ServedModel:
    """A model of its own for each contestant."""
    chosen = {"model": name or "random", "share": share, "max_tokens": str(MAX_TOKENS), **settings}
    return ServedModel(ServeSettings(**chosen), made(name))


def made(name: str | None) -> Any:
    torch.manual_seed(0)
    if name is not None:
        return load_weights(name)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
            vocab_size=8192, max_position_embeddings=8192, tie_word_embeddings=True,
        )
    )  # fmt: skip


def measure(name: str | None, repetitions: int) -> list[dict[str, Any]]:
    """Seconds of each contestant, by workload, and the bound by FLOPs."""
    models = {share: served(name, share) for share in ("all", "none")}
    weights = {share: model.new_weights(Shape(RANK), 0) for share, model in models.items()}
    results: list[dict[str, Any]] = []
    for workload, sequences in workloads(models["all"].vocabulary).items():
        rows = rows_of(sequences)
        forest = Forest.from_trajectories([Trajectory(row.token_ids) for row in rows])

        def compute(share: str, rows: list[Any] = rows) -> None:
            models[share].compute(weights[share], rows, gradients=True)

        seconds = paired_seconds(
            {
                "shared": lambda: compute("all"),
                "not shared": lambda: compute("none"),
                "plain": lambda own=sequences: plain(models["none"], weights["none"], own),
            },
            repetitions,
        )
        for own in weights.values():
            for each in own.parameters.values():
                each.grad = None
        ratios = {
            other: median(a / b for a, b in zip(seconds[other], seconds["shared"], strict=True))
            for other in ("not shared", "plain")
        }
        flops = flop_model(models["all"].base)
        found = {"workload": workload, "model": name or "random Llama of 5M", "seconds": seconds, "ratios": ratios}
        found |= {"flat_tokens": forest.num_flat_tokens, "tree_tokens": forest.num_tokens}
        results.append(found | {"flop_bound": flops.flat(forest) / flops.tree(forest)})
        shown = ", ".join(f"{other} / shared {ratio:.2f}" for other, ratio in ratios.items())
        print(f"{workload}: FLOP bound {results[-1]['flop_bound']:.2f}, {shown}")
    return results


@contextmanager
def running(name: str | None) -> Iterator[tuple[str, str]]:
    """A server in a thread: its address, and what its model is called."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ServeSettings(model=name or "random", folder=folder, max_tokens=str(MAX_TOKENS))
        server = uvicorn.Server(uvicorn.Config(make_app(settings, made(name)), port=0, log_level="warning", ws="none"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", settings.model
        finally:
            server.should_exit = True
            thread.join(10)


def data_of(sequences: list[list[int]]) -> list[Any]:
    """As data of the SDK, each token trained."""
    from tinker import types

    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": np.array(ids[1:]), "weights": np.ones(len(ids) - 1, np.float32)},
        )
        for ids in sequences
    ]


def over_http(name: str | None, repetitions: int) -> dict[str, float]:
    """The fraction of a client's time that is not the worker's."""
    import tinker
    from tinker import types

    with running(name) as (url, model):
        client = tinker.ServiceClient(base_url=url, api_key="tml-local")
        run = client.create_lora_training_client(base_model=model, rank=RANK).result()
        data = data_of(workloads(8192)["GRPO: 16 samples after a prompt of 512"])

        def busy() -> float:
            request = urllib.request.Request(f"{url}/api/v1/status", headers={"X-API-Key": "tml-local"})
            with urllib.request.urlopen(request) as answer:
                return sum(json.loads(answer.read())["seconds"].values())

        process, fractions, of_cpu, seconds = psutil.Process(), [], [], []

        def cpu() -> tuple[float, float]:
            """CPU seconds of all threads, and of the worker's alone (with one thread for torch)."""
            each = {own.id: own.user_time + own.system_time for own in process.threads()}
            (worker,) = (own.native_id for own in threading.enumerate() if own.name == "treewise-serve")
            return sum(each.values()), each[worker]

        torch.set_num_threads(1)
        for repetition in range(repetitions + 1):
            before, begun, used = busy(), time.perf_counter(), cpu()
            call, step = run.forward_backward(data, "cross_entropy"), run.optim_step(types.AdamParams())
            call.result()
            step.result()
            whole = time.perf_counter() - begun
            time.sleep(0.05)  # the worker counts its time after the answer
            if repetition:
                seconds.append(whole)
                fractions.append(1 - (busy() - before) / whole)
                total, own = (after - first for after, first in zip(cpu(), used, strict=True))
                of_cpu.append(1 - own / total)
        client.close("success").result()
    print(
        f"HTTP and serialisation: {median(fractions):.1%} of a step of {median(seconds):.2f} s, "
        f"{median(of_cpu):.1%} of its CPU time"
    )
    return {"overhead": median(fractions), "overhead_cpu": median(of_cpu), "seconds": median(seconds)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--model")
    args = parser.parse_args()
    found = measure(args.model, args.repetitions)
    save("serve", [*found, {"workload": "HTTP", **over_http(args.model, args.repetitions)}])
