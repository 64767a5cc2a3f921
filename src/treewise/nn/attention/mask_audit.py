"""Compares the arguments of a layer's attention with the mask that its model builds for it.

Most models give a layer's window twice: as an argument (or in `layer_types`), and in the mask. A tree replaces the
mask, so a window that is only in the mask would be lost, without any effect until a sequence is longer. transformers
builds masks from functions of two positions; here they are evaluated far apart, without a forward of that length.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from treewise.errors import UnsupportedModelError
from treewise.nn.attention.mask import LayerRule

# (batch, head, query, key) -> whether the query sees the key; transformers' form.
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_QUERY = 2**21 + 12345


@dataclass(frozen=True, slots=True)
class Observation:
    """One call of attention without a tree: the layer, its rule, and the function behind its mask."""

    module: nn.Module
    rule: LayerRule
    mask_function: MaskFunction | None


_log: ContextVar[list[Observation] | None] = ContextVar("treewise_observations", default=None)


@contextmanager
def observe_masks() -> Iterator[list[Observation]]:
    """Forwards inside leave an observation for every call of attention."""
    token = _log.set([])
    try:
        yield _log.get()  # type: ignore[misc]
    finally:
        _log.reset(token)


def is_observing() -> bool:
    """Whether forwards are being observed now."""
    return _log.get() is not None


def record(module: nn.Module, rule: LayerRule, attention_mask: object) -> None:
    """Records one call of attention."""
    log = _log.get()
    assert log is not None
    log.append(Observation(module, rule, getattr(attention_mask, "mask_function", None)))


def check_masks(observations: list[Observation]) -> None:
    """Raises where a mask hides or shows other keys than the layer's rule.

    Masks that are not built from transformers' mask functions cannot be evaluated and pass.

    Raises:
        UnsupportedModelError: with the layer and the distance.
    """
    for observation in observations:
        if observation.mask_function is None:
            continue
        distance = _distances(observation.rule)
        key = _QUERY - distance
        zero = torch.zeros((), dtype=torch.long, device="cpu")
        try:
            with _OnHost():
                answer = observation.mask_function(zero, zero, torch.full_like(key, _QUERY), key)
            shown = torch.as_tensor(answer).expand(len(key))
        except IndexError:  # it indexes a value per token (images), and these positions are beyond the last one
            continue
        expected = _sees(observation.rule, key)
        if not torch.equal(shown, expected):
            at = int(torch.nonzero(shown != expected)[0])
            verb = "shows" if shown[at] else "hides"
            raise UnsupportedModelError(
                f"the model's mask {verb} {type(observation.module).__name__} the key {int(distance[at])} tokens back, "
                f"which is not in the arguments of its attention ({observation.rule}). A tree would give other results."
            )


class _OnHost(TorchDispatchMode):
    """Operations inside run on the CPU, also those on tensors of a GPU that a mask function looks into.

    Positions are far beyond these tensors. On the CPU that is an `IndexError`; on a GPU it would end the process's use
    of the device.
    """

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, _on_host, (args, kwargs or {}))
        return func(*args, **kwargs)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.cpu()


def _distances(rule: LayerRule) -> torch.Tensor:
    """Distances where windows and chunks may end: powers of two, and the rule's own ends, one more and one less."""
    ends = [2**power for power in range(22)]
    if rule.window is not None:
        ends.append(rule.window)
    if rule.chunk is not None:
        ends.append(_QUERY % rule.chunk)
    near = {end + step for end in ends for step in (-1, 0, 1)}
    return torch.tensor(sorted(each for each in near if 0 <= each <= _QUERY), device="cpu")


def _sees(rule: LayerRule, key: torch.Tensor) -> torch.Tensor:
    seen = key <= _QUERY
    if rule.window is not None:
        seen &= _QUERY - key < rule.window
    if rule.chunk is not None:
        seen &= key // rule.chunk == _QUERY // rule.chunk
    return seen
