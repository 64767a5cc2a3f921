"""benchmarks/layer_kernels.py: what a compiled layer launches, held by a count."""

import numpy as np
import pytest

from benchmarks.count_gpu import CountedGraphs, count_step
from benchmarks.layer_kernels import counting_backend
from tests.nn.test_compilation import trees
from treewise import Forest, Trajectory, TreeEngine
from treewise.nn.compilation import compile_layers, decoder_layers
from treewise.testing import tiny_model


@pytest.mark.exhaustive
def test_a_compiled_layer_launches_few_kernels(tmp_path, monkeypatch):
    """Seven products forward, fourteen backward, and twelve fused loops; uncompiled it is some 150 operations."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # of graphs whose compilation is left
    launched = []
    lm = TreeEngine(tiny_model("qwen3", num_hidden_layers=3)).lm
    compile_layers(lm, "eager")
    backend = counting_backend(launched.append)  # one, by which layers share what is compiled
    for layer in decoder_layers(lm):
        layer.compile(dynamic=True, backend=backend)
    engine, forest = TreeEngine(lm.model, check=False), Forest.from_trajectories(trees(1)[0])
    engine.step(forest)
    launched.clear()
    engine.step(forest)
    names = [name for graph in launched for name in graph]
    assert sum(bool(graph) for graph in launched) == 3 * 4  # two graphs a layer, forward and backward
    assert sum(name.startswith("extern_kernels.") for name in names) == 3 * 21
    assert len(names) <= 3 * 33


@pytest.mark.exhaustive
@pytest.mark.parametrize(("max_tokens", "passes"), [(None, 1), (40, 6)])
def test_a_step_with_compiled_layers_launches_less_than_half(max_tokens, passes, tmp_path, monkeypatch):
    """On tensors without data, counted where no graph is: attention, copies of keys and values, sums of gradients."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    forest, launches = Forest.from_trajectories(turns()), {}
    for graphs in (None, CountedGraphs(counting_backend)):
        of_layers = [
            count_step(tiny_model("qwen3", num_hidden_layers=layers), forest, max_tokens, graphs=graphs)
            for layers in (1, 3)
        ]
        assert {each.passes for each in of_layers} == {passes}
        launches[graphs is None] = (of_layers[1].kernels - of_layers[0].kernels) / 2 / passes  # of a layer
    assert launches[True] <= 170
    assert launches[False] <= 62


def test_layers_and_steps_that_are_counted_share_their_graphs():
    """Each is lowered by Inductor once, which takes a minute for a layer as wide as Qwen3-8B's: not for each of its 36
    layers and each row of a table."""
    made = []

    def without_kernels(add, around):
        def backend(graph, _):
            made.append(graph)
            return graph.forward

        return backend

    graphs, forest = CountedGraphs(without_kernels), Forest.from_trajectories(turns())
    counts = []
    for layers, max_tokens in ((2, None), (4, None), (2, 40), (4, 40)):
        count_step(tiny_model("qwen3", num_hidden_layers=layers), forest, max_tokens, graphs=graphs)
        counts.append(len(made))
    assert counts[0] > 0
    assert counts[1] == counts[0]  # 2 and 4 layers
    assert counts[3] == counts[2]  # and passes without gradients


def turns():
    """A prompt of 60 tokens and two answers of 29."""
    prompt, *answers = np.split(np.random.default_rng(0).integers(3, 60, 118), [60, 89])
    return [Trajectory(np.concatenate([prompt, each])) for each in answers]
