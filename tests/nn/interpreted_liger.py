"""Gradients of trees through liger-kernel's modules, without a GPU: its kernels run in Triton's interpreter.

    python -m tests.nn.interpreted_liger qwen3 gemma2

Writes, for each family, the parts that were taken, and for whole trees and a budget the distance of the gradient from
flat training by plain layers beside what is allowed, as JSON. What the interpreter lacks is replaced: numbers reach
kernels as Python's, without the methods of a tensor; `rsqrt` and `tanh` are NVIDIA's.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np
import torch
import triton
from liger_kernel.ops import geglu, layer_norm, rms_norm
from triton import language as tl
from triton.runtime import interpreter

from tests.nn.test_compilation import trees
from treewise import Forest, TreeEngine
from treewise.nn.liger import use_liger
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of


@triton.jit
def _rsqrt(x):
    return 1 / tl.sqrt(x)


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


def complete_the_interpreter() -> None:
    """Adds what it lacks, for this process."""
    converted = interpreter._implicit_cvt

    def as_tensor(argument):
        if isinstance(argument, float):
            handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return converted(argument)

    interpreter._implicit_cvt = as_tensor
    rms_norm.rsqrt = layer_norm.rsqrt = _rsqrt
    geglu.tanh = _tanh


def errors_of(family: str) -> dict[str, list]:
    """The probe compares, too; flat training comes first, for rotary functions are replaced for the process."""
    (rows,) = trees(1)
    model = tiny_model(family, num_hidden_layers=2)
    _, _, expected = flat_sft(model, rows)
    tolerance = expected.tolerance
    found: dict[str, list] = {"parts": use_liger(model, torch.device("cuda")), "errors": []}
    for budget in (None, 9):
        model.zero_grad()
        TreeEngine(model, budget).step(Forest.from_trajectories(rows))
        found["errors"].append([gradient_error(gradients_of(model), expected), tolerance])
    return found


if __name__ == "__main__":
    complete_the_interpreter()
    json.dump({family: errors_of(family) for family in sys.argv[1:]}, sys.stdout)
