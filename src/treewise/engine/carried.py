"""What a gradient has to reach above a micro-batch: decided once for a walk, from the plan and what is trained.

No layer is asked whether its own tensors require a gradient: a piece of text under an image, an expert without tokens
or a recurrence whose decay alone is trained would say no, and the gradient would stop there.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from treewise.errors import UnsupportedModelError
from treewise.nn.attention import ANCHOR, EVERYTHING, NOTHING, Carried
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.guest import Guest

# Names in decoders. Layers and last norms of other names count as what is before the layers: exact, at a higher cost.
_LAYERS = {"layers", "h", "block", "blocks"}
_LAST_NORMS = {"norm", "norm_f", "ln_f", "final_norm", "final_layernorm", "final_layer_norm"}


def carried_by(lm: DecoderAndHead, *, with_images: bool) -> Carried:
    """Which layers carry gradients to gateways.

    with_images: input rows may hold features of images, so a tower that is trained counts.
    """
    if _is_trained(lm.decoder.get_input_embeddings()):
        return EVERYTHING
    # In the order in which they run; none where they do not stand in one list of a known name.
    lists = [each for name, each in lm.decoder.named_children() if name in _LAYERS]
    layers = list(lists[0]) if len(lists) == 1 and isinstance(lists[0], nn.ModuleList) else []
    after = [lm.output, *(each for name, each in lm.decoder.named_children() if name in _LAST_NORMS)]
    known = {parameter for each in (*layers, *after) for parameter in each.parameters()}
    if not with_images:
        known.update(tower_parameters(lm))
    if any(each.requires_grad and each not in known for each in lm.model.parameters()):
        return EVERYTHING
    first = next((index for index, layer in enumerate(layers) if _is_trained(layer)), None)
    if first is None:
        return NOTHING
    at_or_after = {module for layer in layers[first:] for module in layer.modules()}
    before = {module for layer in layers[:first] for module in layer.modules()} - at_or_after
    return Carried(from_layer=True, before=frozenset(before))


def tower_parameters(lm: DecoderAndHead) -> list[nn.Parameter]:
    """The parameters of a model's towers and projectors; none of a model of text."""
    inside = set(lm.decoder.parameters())
    return [parameter for parameter in lm.base.base_model.parameters() if parameter not in inside]


def reaches_a_parameter(root: torch.Tensor) -> bool:
    """Whether a backward from a tensor ends in a leaf that is trained, not only at what is carried above."""
    nodes, seen = [root.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", ANCHOR) is not ANCHOR:
            return True
        nodes += [each for each, _ in node.next_functions]
    return False


def refuse_no_gradient(lm: DecoderAndHead, guests: Iterable[Guest]) -> None:
    """Raises `UnsupportedModelError`, for a walk in which nothing required a gradient; but trees of text do not reach a
    tower, which may be all that is trained.
    """
    if any(guest.brings_images for guest in guests) or not any(
        parameter.requires_grad for parameter in tower_parameters(lm)
    ):
        raise UnsupportedModelError(
            f"nothing that {type(lm.model).__name__} computes on a tree requires a gradient, so a backward would do "
            "nothing. Are the trained parameters in use (an adapter that is active and not disabled)?"
        )


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
