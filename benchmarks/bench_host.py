"""Host time of a micro-batch, with attention's kernels replaced by nothing: what a GPU would wait for.

    python benchmarks/bench_host.py [--layers 36] [--repetitions 40]

A tiny Qwen3 on the CPU, one tree of few tokens, one thread. In turns, in one process:

* `step`: `TreeEngine.step` with the `flex` implementation, whose operator returns empty tensors;
* `model`: transformers' own forward, loss and backward on as many tokens, attention a function that does the same;
* `compiled`, `compiled model`: both with compiled layers, whose graphs are replaced by nothing, too; `whole`: the step
  with attention inside of these graphs, one a layer;
* `attention`, `nothing`: one call of each attention function, and its backward, beside the model.

Figures are the least CPU time of several. With `--profile NAME` the functions in which a step spends most.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import save
from count_gpu import Counts, NoKernels
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from transformers import AttentionInterface

import treewise as tw
from treewise.nn.attention import TreeContext, TreeMask, flex
from treewise.nn.attention.interface import tree_attention_forward
from treewise.nn.compilation import compile_layers, decoder_layers
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.testing import tiny_model

NUM_CALLS = 200  # of attention, in one measurement
HEAD_SIZE = 16  # so few numbers that copies cost what their calls cost: a GPU's host copies nothing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--profile", choices=("step", "compiled", "whole"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    AttentionInterface.register("nothing", _attend_to_nothing)
    with mock.patch.object(flex, "_uncompiled", _no_kernels):
        contestants = _contestants(args.layers)
        if args.profile:
            _profile(contestants[args.profile], args.repetitions)
            return
        least = _least(contestants, args.repetitions)
    row = {"layers": args.layers} | {
        f"{name.replace(' ', '_')}_ms": round(1e3 * each, 3) for name, each in least.items()
    }
    print(row)
    print("written to", save("host", [row]))


def _no_kernels(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> Any:
    return NoKernels.apply(Counts(0, 0), query, key, value)


def _without_kernels(graph: Any, inputs: Any) -> Any:
    """A backend whose graphs run once, and from then on return empty tensors of the same shapes."""

    def of_graph(graph: Any, _: object) -> Any:
        shapes: list[Any] = []

        def run(given: list[Any]) -> Any:
            if not shapes:
                shapes.extend(graph(*given))
            given.clear()
            return [torch.empty_like(each) if isinstance(each, torch.Tensor) else each for each in shapes]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    compilers = {"fw_compiler": of_graph, "bw_compiler": of_graph}
    return aot_autograd(**compilers, partition_fn=min_cut_rematerialization_partition)(graph, inputs)  # as Inductor


@torch.compiler.disable
def _attend_to_nothing(_: object, query: Any, key: Any, value: Any, *__: object, **___: object) -> Any:
    return _no_kernels(query, key, value)[0].transpose(1, 2), None


def _contestants(layers: int) -> dict[str, Callable[[], object]]:
    forest = _forest()
    model, own, fused, own_fused, whole = (
        tiny_model("qwen3", num_hidden_layers=layers, head_dim=HEAD_SIZE) for _ in range(5)
    )
    engine, fused_engine, one_graph = (
        tw.TreeEngine(each, attention="flex", check=False) for each in (model, fused, whole)
    )
    for each in (own, own_fused):
        each.set_attn_implementation("nothing")
    compile_layers(fused_engine.lm, "eager")  # its settings of torch; then with a backend that runs nothing
    compile_layers(one_graph.lm, "eager", attention_inside=True)
    for module in (*decoder_layers(fused_engine.lm), *own_fused.model.layers, *decoder_layers(one_graph.lm)):
        module.compile(dynamic=True, backend=_without_kernels)
    ids = torch.as_tensor(forest.token_ids, dtype=torch.long)[None]
    context = TreeContext(TreeMask.from_layout(lay_out(plan(forest), 0)), "flex")
    layer: Any = model.model.layers[0].self_attn
    rows, config = forest.num_tokens, model.config
    size = (1, rows, config.num_attention_heads, config.head_dim)
    query, key, value = (torch.zeros(size, requires_grad=True).transpose(1, 2) for _ in range(3))
    key, value = (each[:, : config.num_key_value_heads] for each in (key, value))

    def calls(attend: Callable[..., Any], **more: object) -> Callable[[], object]:
        def run() -> None:
            for _ in range(NUM_CALLS):
                attend(layer, query, key, value, None, scaling=0.25, **more)[0].sum().backward()

        return run

    return {
        "step": lambda: engine.step(forest),
        "model": lambda: own(input_ids=ids, labels=ids, use_cache=False).loss.backward(),
        "compiled": lambda: fused_engine.step(forest),
        "whole": lambda: one_graph.step(forest),
        "compiled model": lambda: own_fused(input_ids=ids, labels=ids, use_cache=False).loss.backward(),
        "attention": calls(tree_attention_forward, treewise=context),
        "nothing": calls(_attend_to_nothing),
    }


def _forest() -> tw.Forest:
    """A prompt of 60 tokens and two answers of 29; 118 tokens."""
    rng = np.random.default_rng(0)
    prompt, *answers = np.split(rng.integers(3, 60, 118), [60, 89])
    return tw.Forest.from_trajectories([tw.Trajectory(np.concatenate([prompt, each])) for each in answers])


def _least(contestants: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """CPU seconds of each, the least of several, in turns; those of one call of attention."""
    least = dict.fromkeys(contestants, float("inf"))
    for repetition in range(repetitions + 1):
        for name, run in contestants.items():
            begin = time.process_time()
            run()
            if repetition:
                least[name] = min(least[name], time.process_time() - begin)
    return {name: each / (NUM_CALLS if name in ("attention", "nothing") else 1) for name, each in least.items()}


def _profile(run: Callable[[], object], repetitions: int) -> None:
    run()
    recorded = cProfile.Profile(time.process_time)
    with recorded:
        for _ in range(repetitions):
            run()
    pstats.Stats(recorded).sort_stats("cumulative").print_stats(45)


if __name__ == "__main__":
    main()
