"""Trees through compiled layers: gradients of flat training, graphs that do not grow with the trees."""

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from treewise import Forest, Trajectory, TreeEngine
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn.compilation import check_compilation, compile_layers, decoder_layers, uncompile_layers
from treewise.nn.wrapped import is_compiled, uncompiled
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")


def trees(count: int, seed: int = 0) -> list[list[Trajectory]]:
    rng = np.random.default_rng(seed)

    def tokens(most: int) -> np.ndarray:
        return rng.integers(3, 60, rng.integers(1, most))

    trunks = [tokens(9) for _ in range(count)]
    return [[Trajectory(np.concatenate([trunk, tokens(20)])) for _ in range(rng.integers(2, 4))] for trunk in trunks]


def check(
    model: nn.Module, flat_model: nn.Module, budgets: Sequence[int | None], count: int = 1, seed: int = 0
) -> None:
    """Probes, then steps at each budget, against flat training of each trajectory alone by the uncompiled model."""
    for rows in trees(count, seed):
        _, _, expected = flat_sft(flat_model, rows)
        for budget in budgets:
            model.zero_grad()
            TreeEngine(model, budget).step(Forest.from_trajectories(rows))
            found = gradients_of(model)
            assert found.keys() == expected.keys()
            assert gradient_error(found, expected) < expected.tolerance


def compiled(model: nn.Module, backend: str = "aot_eager") -> tuple[nn.Module, nn.Module]:
    """The model with compiled layers, and a copy without."""
    plain = copy.deepcopy(model)
    torch.compiler.reset()
    compile_layers(TreeEngine(model).lm, backend)
    return model, plain


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.exhaustive
def test_no_tree_is_compiled_again_after_the_first() -> None:
    """Micro-batches of one token and of more, with and without gradients; the probe runs three backwards."""
    model, plain = compiled(tiny_model(num_hidden_layers=1))
    names = list(plain.state_dict())
    before = num_graphs()
    check(model, plain, (None, 1))
    first = num_graphs()
    assert first > before
    check(model, plain, (None, 1, 6), count=4, seed=1)
    assert num_graphs() == first
    assert list(model.state_dict()) == names
    with uncompiled(model):
        model(input_ids=torch.arange(5)[None], use_cache=False)
    assert num_graphs() == first


def test_a_layer_is_two_graphs_and_no_length_makes_another() -> None:
    """Before attention and behind it, for each kind of call (one token or more, with gradients and without, the first
    layer and later ones), for all layers of a class and 14 drawn lengths."""
    made: list[object] = []
    model = tiny_model(num_hidden_layers=3)
    torch.compiler.reset()
    lm = TreeEngine(model).lm
    compile_layers(lm, "eager")

    def backend(graph, _):
        made.append(graph)
        return graph.forward

    for layer in decoder_layers(lm):
        layer.compile(dynamic=True, backend=backend)
    counts = []
    for number, rows in enumerate(trees(14)):
        forest = Forest.from_trajectories(rows)
        for budget in (None, 2 + number):
            TreeEngine(model, budget, check=False).step(forest)
        counts.append(len(made))
    assert counts == [8] * 14


def test_layers_that_are_uncompiled_run_as_before() -> None:
    model, _ = compiled(tiny_model(num_hidden_layers=1))
    assert is_compiled(model)
    uncompile_layers(TreeEngine(model).lm)
    before = num_graphs()
    TreeEngine(model, check=False).step(Forest.from_trajectories(trees(1)[0]))
    assert num_graphs() == before
    assert not is_compiled(model)


def test_compiled_parts_of_layers_are_probed() -> None:
    """AOTAutograd overwrites what a compiled part saved for its backward, so no graph of the probe runs twice."""
    model = tiny_model(num_hidden_layers=1)
    plain = copy.deepcopy(model)
    model.model.layers[0].mlp.compile(dynamic=True, backend="aot_eager")
    check(model, plain, (None,))


@pytest.mark.exhaustive
def test_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What torch keeps between processes, by graphs alone, has the widths of the processor that it was made for.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, plain = compiled(tiny_model(num_hidden_layers=1), "inductor")
    check(model, plain, (None, 6), count=2)


@pytest.mark.parametrize(
    ("backend", "mode", "message"),
    [
        ("inductr", None, "torch_compile_backend='inductr' is unknown; choose one of aot_eager"),
        ("inductor", "reduce-overhead", "mode='reduce-overhead' records CUDA graphs"),
        ("cudagraphs", None, "backend='cudagraphs' records CUDA graphs"),
        ("aot_eager", "default", "modes are those of 'inductor'"),
        ("inductor", "fast", "mode='fast' with torch_compile_backend='inductor'"),
    ],
)
def test_settings_that_trees_cannot_use(backend: str, mode: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_compilation(backend, mode)


def test_a_model_that_does_not_name_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(type(model), "_no_split_modules", None)
    lm = TreeEngine(model).lm
    monkeypatch.setattr(model, "_no_split_modules", None, raising=False)
    with pytest.raises(UnsupportedModelError, match="does not name its layers"):
        compile_layers(lm, "eager")
