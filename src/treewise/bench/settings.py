"""What `treewise bench` compares and how, with the names that may be chosen; without torch, for the command's help."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

AGAINST = ("flat", "merged", "trl", "tree-recurrence", "trl-liger")  # what they are: contestants.py
USUAL = AGAINST[:-1]  # where nothing is asked for: Liger's kernels are another setting of all layers
LAYERS = ("auto", "plain", "compiled", "liger")
REFERENCES = ("auto", "flat", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is compared, and how it is measured.

    against: out of `AGAINST`. max_tokens: budgets; None: the workload's own, or a quarter of the tree. row_tokens: of a
    packed row of flat training; None: by the free memory. layers: of all contestants alike: `plain`, `compiled`, with
    kernels of `liger`, or `auto`, which is what training takes: compiled on a GPU. repetitions: after one to warm up.
    reference: of the gradient errors: `flat` is the first contestant, `float32` and `float64` a wide copy of the model
    in flat training, `auto` a float32 copy for half precision and else the first. max_seconds: of `run` for all its
    workloads, of `measure_workload` for one; no repetition begins that would take longer than is left of them.
    leaves_out: nor does the first step of a contestant, which then has no figure.
    """

    against: Sequence[str] = USUAL
    max_tokens: Sequence[int] | None = None
    attention: str = "auto"
    with_checkpointing: bool = False
    row_tokens: int | None = None
    layers: str = "auto"
    repetitions: int = 3
    reference: str = "auto"
    max_seconds: float = math.inf
    leaves_out: bool = True
