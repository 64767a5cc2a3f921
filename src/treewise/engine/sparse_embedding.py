"""Sparse gradients of the input embedding while a walk trains several micro-batches on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from treewise.nn.model import DecoderAndHead


@contextmanager
def sparse_embedding_gradients(lm: DecoderAndHead) -> Iterator[None]:
    """On a CPU, each micro-batch's gradient of the input embedding has the rows of its tokens, not the vocabulary's.

    `.grad` itself stays dense. Embeddings of another kind (adapters, shards) stay as they are.
    """
    module = lm.decoder.get_input_embeddings()
    weight = module.weight
    is_plain = isinstance(module, nn.Embedding) and type(weight) is nn.Parameter and weight.device.type == "cpu"
    if not is_plain or module.sparse or not weight.requires_grad:
        yield
        return
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    module.sparse = True
    try:
        yield
    finally:
        module.sparse = False
