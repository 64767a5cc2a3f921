"""The loss of a model that transformers computes from logits and labels: of the rows that have a label.

The function stays transformers' own (`ForCausalLMLoss`), with whatever the trainer passes on to it; it is given the
logits and labels of scored cells alone, which is all that it adds up.
"""

import inspect
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from treewise.integrations.decoder.lazy_logits import LazyLogits

_IGNORED = -100


class TreeLoss:
    """The loss function of a model, which takes logits that are not computed yet. Others it passes on.

    Once a trainer has read the logits beside the loss, they are computed whole, at once.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._had = model, vars(model).get("_loss_function")
        self._own = model.loss_function
        self._reads_logits = False

        def loss(*args: Any, **kwargs: Any) -> Any:  # no method of this object: a deep copy of the model has its own
            return self._loss(*args, **kwargs)

        self._installed = loss
        model.loss_function = loss

    @property
    def takes_rows_alone(self) -> bool:
        """Whether the model's loss is the one that adds up scored cells, and is still this one."""
        return self._own is ForCausalLMLoss and vars(self._model).get("_loss_function") is self._installed

    def remove(self) -> None:
        """Puts the model's own function back."""
        if vars(self._model).get("_loss_function") is self._installed:
            vars(self._model).pop("_loss_function")
            if self._had is not None:
                self._model.loss_function = self._had

    def _note_reading(self) -> None:
        self._reads_logits = True

    @torch.compiler.disable
    def _loss(self, *args: Any, **kwargs: Any) -> Any:
        if not (args or isinstance(kwargs.get("logits"), LazyLogits)):
            return self._own(*args, **kwargs)
        given = inspect.signature(self._own).bind(*args, **kwargs)
        logits = given.arguments["logits"]
        if not isinstance(logits, LazyLogits):
            return self._own(*args, **kwargs)
        scored = None if self._reads_logits else _scored(logits, given.arguments)
        if scored is None:
            given.arguments["logits"] = logits.tensor()
        else:
            given.arguments["logits"], given.arguments["shift_labels"] = logits.of_cells(scored[0]), scored[1]
            logits.when_read = self._note_reading
        return self._own(*given.args, **given.kwargs)


def _scored(logits: LazyLogits, arguments: dict[str, Any]) -> tuple[np.ndarray, torch.Tensor] | None:
    """Cells of the flattened batch with a label ([P] int64), and these labels ([P]); None for none, or other shapes."""
    labels, ignored = _labels(arguments)
    if labels is None or labels.shape != logits.shape[:-1]:
        return None
    labels = labels.reshape(-1)
    is_scored = labels != ignored
    cells = np.flatnonzero(np.asarray(is_scored.cpu()))
    return (cells, labels[is_scored]) if len(cells) else None


def scored_cells(arguments: dict[str, Any]) -> torch.Tensor:
    """[cells] bool of the flattened labels in arguments of a model, whether each cell predicts one; empty without."""
    labels, ignored = _labels(arguments)
    return torch.zeros(0, dtype=torch.bool) if labels is None else (labels != ignored).reshape(-1)


def _labels(arguments: dict[str, Any]) -> tuple[torch.Tensor | None, int]:
    """What each cell predicts, [B, L], and the label that stands for nothing."""
    shifted, labels, ignored = (arguments.get(name) for name in ("shift_labels", "labels", "ignore_index"))
    ignored = _IGNORED if ignored is None else ignored
    if shifted is None and labels is not None:
        shifted = nn.functional.pad(labels, (0, 1), value=ignored)[..., 1:]
    return shifted, ignored
