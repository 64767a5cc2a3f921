"""verl's fused forward, called with the hidden rows of a tree.

With `use_fused_kernels` verl replaces the forward of a model's class by one that runs the decoder and returns log-probs
and entropies of its rows. treewise calls this very function with a stand-in for the model whose decoder returns rows
that exist already, so that verl's own kernels compute every number.

Letters: E edges, M model width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from treewise.integrations.tree_batches import Fields


class VerlHead:
    """verl's head at one temperature, which divides the logits; a `RowHead`."""

    names: tuple[str, ...] = ("log_probs", "entropy")
    without_gradient: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, decoder: nn.Module, forward: Callable[..., Any], temperature: float) -> None:
        self._model, self._decoder, self._forward, self._temperature = model, decoder, forward, temperature

    def __call__(self, hidden_EM: torch.Tensor, labels_E: torch.Tensor) -> Fields:
        """[E] log-probs of the labels (float32) and entropies (the model's dtype), differentiable."""
        stand_in = _StandIn(self._model, self._decoder, hidden_EM[None])
        output = self._forward(
            stand_in, shift_labels=labels_E[None], temperature=self._temperature, return_dict=True, use_cache=False
        )
        return {name: getattr(output, name).reshape(-1) for name in self.names}


class _StandIn:
    """Takes the model's place in verl's forward: every attribute is the model's, but its decoder returns given rows."""

    def __init__(self, model: nn.Module, decoder: nn.Module, hidden: torch.Tensor) -> None:
        self._model, self._decoder, self._hidden = model, decoder, hidden

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        return self._rows if value is self._decoder else value

    def _rows(self, *_: Any, **__: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self._hidden)
