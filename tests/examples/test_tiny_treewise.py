"""The file that explains the idea computes flat gradients, alone; a mistake in any of its ideas is noticed."""

import ast
import importlib
import re
import runpy
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import numpy as np
import pytest
import torch

from treewise.engine import step

PATH = Path(__file__).parents[2] / "examples" / "tiny_treewise.py"
SOURCE = PATH.read_text(encoding="utf-8")


def test_it_computes_flat_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(PATH), run_name="__main__")
    assert "243 tokens flat, 103 on the tree" in capsys.readouterr().out


def test_it_imports_torch_and_numpy_alone() -> None:
    modules = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(SOURCE))
        for name in (
            [each.name for each in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert modules == {"collections", "dataclasses", "functools", "math", "numpy", "torch"}


def test_the_modules_that_it_names_exist() -> None:
    named = set(re.findall(r"treewise(?:\.[a-z_]+)+", SOURCE)) - {"treewise.py"}
    assert len(named) >= 10
    for name in named:
        importlib.import_module(name)


@pytest.fixture
def tiny() -> ModuleType:
    spec = spec_from_file_location("tiny_treewise", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def siblings_see_one_another(tiny: ModuleType) -> None:
    tiny.visible = lambda tree, rows, keys: np.asarray(keys)[None, :] <= np.asarray(rows)[:, None]


def keys_end_early(tiny: ModuleType) -> None:
    visible = tiny.visible

    def shorter(tree, rows, keys):
        mask = visible(tree, rows, keys)
        mask[-1, 0] = False
        return mask

    tiny.visible = shorter


def positions_of_the_order(tiny: ModuleType) -> None:
    prefix_tree = tiny.prefix_tree

    def in_order(sequences):
        tree = prefix_tree(sequences)
        tree.depth = np.minimum(np.arange(len(tree.depth)), tiny.MAX_LENGTH - 1)
        return tree

    tiny.prefix_tree = in_order


def gradients_of_the_first_sequence_alone(tiny: ModuleType) -> None:
    restore = tiny.restore
    tiny.restore = lambda logprobs, tree: [
        each.detach() if i else each for i, each in enumerate(restore(logprobs, tree))
    ]


def gateway_without_gradients(tiny: ModuleType) -> None:
    backward = torch.autograd.backward

    def forgetful(outputs, gradients=None):
        backward(outputs[:1], gradients and gradients[:1])

    tiny.torch = type("Torch", (), {"__getattr__": lambda self, name: getattr(torch, name)})()
    tiny.torch.autograd = type("Autograd", (), {"backward": staticmethod(forgetful), "grad": torch.autograd.grad})


MISTAKES = [
    siblings_see_one_another,
    keys_end_early,
    positions_of_the_order,
    gradients_of_the_first_sequence_alone,
    gateway_without_gradients,
]


@pytest.mark.parametrize("make", MISTAKES)
def test_a_mistake_is_noticed(tiny: ModuleType, make: Callable[[ModuleType], None]) -> None:
    make(tiny)
    with pytest.raises(AssertionError, match=r"away from those of flat training|loss .*, flat "):
        tiny.main()


def test_it_and_the_step_name_each_others_parts(tiny: ModuleType) -> None:
    named = re.findall(r"`([\w.]+)` of (treewise(?:\.[a-z_]+)+)", SOURCE)
    assert len(named) >= 6
    for name, module in named:
        assert resolve_name(f"{module}:{name}")
    paragraph = str(step.__doc__).partition("tiny_treewise.py")[2].partition("\n\n")[0]
    of_the_example = re.findall(r"`(\w+)`", paragraph)
    assert of_the_example == ["tree_backward", "run", "partition"]
    assert all(callable(getattr(tiny, name)) for name in of_the_example)
