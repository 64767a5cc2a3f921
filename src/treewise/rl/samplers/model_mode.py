"""Puts a model that is being trained into the state for sampling, and back, whatever happens in between."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from treewise.nn.compilation import uncompiled


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """No dropout, no gradient checkpointing, no graph, no compiled layers; afterwards every module is as it was
    before, also after an error."""
    training: list[Any] = [module for module in model.modules() if module.training]
    checkpointed: list[Any] = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", False) is True
    ]
    try:
        model.eval()
        for module in checkpointed:
            module.gradient_checkpointing = False
        with torch.no_grad(), uncompiled(model):
            yield
    finally:
        for module in training:
            module.training = True
        for module in checkpointed:
            module.gradient_checkpointing = True
