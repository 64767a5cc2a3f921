"""What must hold before a forest is trained: no dropout, tokens that the model has, and probes, each once a model."""

from typing import Any

import numpy as np
import torch
from torch import nn

from treewise.engine.gradient_probe import probe_gradients
from treewise.engine.probe import probe, probe_images, text_ids
from treewise.nn.device import to_device
from treewise.nn.model import DecoderAndHead
from treewise.nn.model_checks import refuse_dropout, refuse_lengths, refuse_placeholders, refuse_tokens
from treewise.nn.router_loss import RouterLossRule, check_router_loss
from treewise.tree.forest import Forest

_ROWS, _IMAGES, _GRADIENTS = "rows", "images", "gradients"


class StepChecks:
    """Checks one model with each forest that it is to train.

    Parameters:
        model: as the engine was given it.
        has_probes: whether the model is probed.
    """

    def __init__(self, model: nn.Module, *, has_probes: bool) -> None:
        self._model, self._has_probes = model, has_probes
        self.renew()

    def renew(self) -> None:
        """Has all probes run again, because the model has changed."""
        self._due = {_ROWS, _IMAGES, _GRADIENTS} if self._has_probes else set()

    def check(
        self, lm: DecoderAndHead, impl: str, forest: Forest, router_rule: RouterLossRule | None, processor: Any
    ) -> None:
        """Raises what `TreeEngine.check` raises.

        lm: the model, split. impl: the attention that will run. router_rule: of the losses that steps add; None: none.
        processor: the model's, for a probe with an image of the forest; None: none is probed yet.
        """
        text = text_ids(forest)
        refuse_dropout(self._model)
        refuse_tokens(lm, forest)
        refuse_placeholders(lm, np.where(forest.images.covers(forest.num_tokens), -1, forest.token_ids))
        refuse_lengths(lm.decoder, int(forest.depth.max()) + 1, "the longest path", "Shorten the trajectories")
        if _ROWS in self._due:
            probe(lm, impl, text)
            if router_rule is not None and router_rule.aux_coefficient:
                check_router_loss(lm.model, router_rule, to_device(text[:12], lm.device, torch.long))
            self._due.remove(_ROWS)
        if _IMAGES in self._due and len(forest.images) and processor is not None:
            probe_images(lm, impl, forest, processor)
            self._due.remove(_IMAGES)
        if _GRADIENTS in self._due and torch.is_grad_enabled():
            probe_gradients(lm, impl, text)
            self._due.remove(_GRADIENTS)
