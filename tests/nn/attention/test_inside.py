"""Attention within the graph of a compiled layer: one graph a layer, whatever the tree; gradients of flat training."""

import copy
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch
from torch._inductor import compile_fx, config
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from tests.nn.test_compilation import trees
from treewise import Forest, Trajectory, TreeEngine
from treewise.nn.attention.inside import suits
from treewise.nn.attention.interface import ATTENDS_INSIDE
from treewise.nn.compilation import compile_layers, decoder_layers, uncompile_layers
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of

NUM_TREES = 14
operators = import_module("torch._higher_order_ops.flex_attention")  # beside a function of its name


def compiled_into(made: list[object], model: torch.nn.Module) -> None:
    """Layers whose graphs run as they were traced; they are added to `made`."""

    def backend(graph: torch.fx.GraphModule, _: object):
        made.append(graph)
        return graph.forward

    torch.compiler.reset()
    lm = TreeEngine(model).lm
    compile_layers(lm, "eager", attention_inside=True)
    for layer in decoder_layers(lm):
        layer.compile(dynamic=True, backend=backend)


def compiled_layer() -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model of one layer whose graph is traced with its backward, and the same uncompiled."""
    model = tiny_model("qwen3", num_hidden_layers=1)
    plain = copy.deepcopy(model)
    torch.compiler.reset()
    compile_layers(TreeEngine(model).lm, "aot_eager", attention_inside=True)
    return model, plain


def step(model: torch.nn.Module, rows: list[Trajectory], budget: int | None = None) -> None:
    model.zero_grad()
    TreeEngine(model, budget, attention="flex", check=False).step(Forest.from_trajectories(rows))


def test_a_layer_is_one_graph_and_no_tree_makes_another() -> None:
    """For all layers, and 14 drawn trees; the last has more blocks of queries than the least."""
    made: list[object] = []
    model = tiny_model("qwen3", num_hidden_layers=3)
    plain = copy.deepcopy(model)
    compiled_into(made, model)
    rng = np.random.default_rng(0)
    long = [Trajectory(np.concatenate([np.arange(3, 43), rng.integers(3, 60, 150)])) for _ in range(2)]
    for rows in (*trees(NUM_TREES - 1), long):
        step(model, rows)
        assert len(made) == 1
        _, _, expected = flat_sft(plain, rows)
        assert gradient_error(gradients_of(model), expected) < expected.tolerance


def test_its_graph_has_an_operator_and_its_gradients_are_those_of_flat_training() -> None:
    """Traced with its backward."""
    model, plain = compiled_layer()
    [rows] = trees(1, seed=3)
    _, _, expected = flat_sft(plain, rows)
    step(model, rows)
    assert gradient_error(gradients_of(model), expected) < expected.tolerance


class _Dense(torch.fx.Interpreter):
    """A graph in which torch's own dense forms stand in for FlexAttention, of which Inductor has no backward on a CPU
    ("torch.compile on CPU only supports inference", `flex_cpu.py`)."""

    def call_function(self, target, args, kwargs):
        dense = {operators.flex_attention: operators.sdpa_dense}
        dense[operators.flex_attention_backward] = operators.sdpa_dense_backward
        return super().call_function(dense.get(target, target), args, kwargs)


@pytest.mark.exhaustive
def test_gradients_by_inductor_are_those_of_flat_training() -> None:
    """All of the graph, forward and backward, in Inductor's own kernels, for trees of several lengths."""
    graphs: list[list[str]] = []

    def lowered(graph: torch.fx.GraphModule, inputs: list[object], **settings: object):
        graphs.append([str(node.target) for node in graph.graph.nodes if "flex_attention" in str(node.target)])
        table = select_decomp_table()
        dense = make_fx(_Dense(graph).run, decomposition_table=table, _allow_non_fake_inputs=True)(*inputs)
        return compile_fx.compile_fx_inner(dense, inputs, **settings)

    model = tiny_model("qwen3", num_hidden_layers=1)
    plain = copy.deepcopy(model)
    torch.compiler.reset()
    lm = TreeEngine(model).lm
    compile_layers(lm, "eager", attention_inside=True)
    for layer in decoder_layers(lm):
        layer.compile(dynamic=True, backend=partial(compile_fx.compile_fx, inner_compile=lowered))
    for seed in range(3):
        [rows] = trees(1, seed=seed)
        with config.patch(force_disable_caches=True):  # of an earlier run of this test
            step(model, rows)
        _, _, expected = flat_sft(plain, rows)
        assert gradient_error(gradients_of(model), expected) < expected.tolerance
    assert graphs == [["flex_attention"], ["flex_attention_backward"]]  # one graph, forward and backward


@pytest.mark.exhaustive
def test_a_budget_has_gateways_which_stay_outside() -> None:
    model, plain = compiled_layer()
    [rows] = trees(1, seed=3)
    _, _, expected = flat_sft(plain, rows)
    for budget in (4, None):
        step(model, rows, budget)
        assert gradient_error(gradients_of(model), expected) < expected.tolerance


def test_of_layers_that_are_uncompiled_none_attends_inside() -> None:
    lm = TreeEngine(tiny_model("qwen3", num_hidden_layers=1)).lm
    compile_layers(lm, "eager", attention_inside=True)
    assert lm.decoder in ATTENDS_INSIDE
    uncompile_layers(lm)
    assert lm.decoder not in ATTENDS_INSIDE
    compile_layers(lm, "eager")  # nor where nobody asked
    assert lm.decoder not in ATTENDS_INSIDE


@pytest.mark.parametrize(
    ("family", "does"), [("qwen3", True), ("llama", True), ("gemma3_text", False), ("mistral", False)]
)
def test_windows_stay_outside(family: str, does: bool) -> None:
    lm = TreeEngine(tiny_model(family)).lm
    assert suits(lm.decoder, lm.configs) is does
