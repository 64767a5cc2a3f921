"""benchmarks/layer_kernels.py: what a compiled layer launches, held by a count."""

from benchmarks.layer_kernels import counting_backend
from tests.nn.test_compilation import trees
from treewise import Forest, TreeEngine
from treewise.nn.compilation import compile_layers, decoder_layers
from treewise.testing import tiny_model


def test_a_compiled_layer_launches_few_kernels(tmp_path, monkeypatch):
    """Seven products forward, fourteen backward, and twelve fused loops; uncompiled it is some 150 operations."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # of graphs whose compilation is left
    launched = []
    lm = TreeEngine(tiny_model("qwen3", num_hidden_layers=3)).lm
    compile_layers(lm, "eager")
    for layer in decoder_layers(lm):
        layer.compile(dynamic=True, backend=counting_backend(launched.append))
    engine, forest = TreeEngine(lm.model, check=False), Forest.from_trajectories(trees(1)[0])
    engine.step(forest)
    launched.clear()
    engine.step(forest)
    names = [name for graph in launched for name in graph]
    assert sum(bool(graph) for graph in launched) == 3 * 4  # two graphs a layer, forward and backward
    assert sum(name.startswith("extern_kernels.") for name in names) == 3 * 21
    assert len(names) <= 3 * 33
