"""What a tower and its projector compute for an image, counted on tensors without values.

The tower runs forward and backward on `meta` tensors: shapes alone. Tensors of integers keep their values, as towers
cut images into windows and sequences by them. FLOPs are torch's own counts of each product
(`torch.utils.flop_counter`), whatever the family's modules are.
"""

import copy
import itertools
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from treewise.nn.vision.pixel_forms import Form, patch_sizes, pixel_forms
from treewise.nn.vision.pixels import PixelInputs, feature_rows

# Merged sides of the images that are counted: at least the windows of Qwen2.5-VL.
MERGED_SIDES = (4, 8)
_aten = torch.ops.aten
_ATTENTION = {_aten.bmm, _aten.baddbmm}
# Comparisons of pixels find none of a special value: Idefics drops images that are all 0.
_COMPARISONS = {_aten.eq: False, _aten.ne: True}


@dataclass(slots=True)
class TowerCount:
    """One image: its feature rows; FLOPs of products with weights, forward and backward, and of attention, forward
    and backward; inputs and outputs of the former, in values.
    """

    rows: int = 0
    linear: float = 0.0
    linear_backward: float = 0.0
    attention: float = 0.0
    attention_backward: float = 0.0
    values: float = 0.0


def count_tower(module: Any) -> list[TowerCount]:
    """Counts of images of different sizes, by rows; one for a tower of one size; none where no form of pixels is taken.

    module: has `get_image_features`. It is not called itself: another of its class and configuration is.
    """
    known = signature(module.get_image_features).parameters
    with _Counting() as counting, _IntegersWithValues(), torch.enable_grad():
        with torch.device("meta"):
            tower = _without_weights(module)
        counts: dict[int, TowerCount] = {}
        for merged_side in MERGED_SIDES:
            for form in pixel_forms(tower.config, known, _sides(tower.config, known, merged_side), merged_side):
                try:
                    count = _count(counting, tower, form, known)
                except Exception:  # whatever a tower raises for the form of another
                    continue
                counts.setdefault(count.rows, count)
                break
    return [counts[rows] for rows in sorted(counts)]


def _sides(config: Any, known: Any, merged_side: int) -> list[int]:
    """Pixels of the side of an image that a tower takes whole."""
    patch, _, merge = patch_sizes(config)
    own = getattr(getattr(config, "vision_config", None), "image_size", None)
    sides = [] if own is None else [int(own[0] if isinstance(own, list | tuple) else own)]
    any_size = patch * merge * merged_side
    return [any_size, *sides] if "image_sizes" in known else [*sides, any_size]


def _without_weights(module: Any) -> Any:
    """A model like this one on `meta`, with attention by torch's own products, trained where this one is.

    Where adapters are trained, gradients pass through the layer that they are on; their own products are left out.
    """
    config = copy.deepcopy(module.config)
    vision: Any = getattr(config, "vision_config", None) or config
    is_eager = vision._attn_implementation == "eager"  # noqa: SLF001
    vision._attn_implementation = "eager" if is_eager else "sdpa"  # noqa: SLF001
    tower = type(module)(config)
    is_trained = {name.replace(".base_layer", ""): each.requires_grad for name, each in module.named_parameters()}
    own = dict(tower.named_parameters())
    for name, parameter in own.items():
        parameter.requires_grad_(is_trained.get(name, False))
    layers = dict(tower.named_modules())
    for name in is_trained:
        if is_trained[name] and name not in own:
            above = itertools.accumulate(name.split("."), "{}.{}".format)
            last = [layers[path] for path in above if path in layers][-1:]
            for layer in last:
                layer.register_forward_hook(_with_gradient)
    return tower


def _with_gradient(_layer: Any, _given: Any, output: Any) -> Any:
    return output + torch.zeros((), device="meta", requires_grad=True) if isinstance(output, torch.Tensor) else output


def _count(counting: "_Counting", tower: Any, form: Form, known: Any) -> TowerCount:
    count = counting.count = TowerCount()
    counting.is_backward = False
    made: PixelInputs = form(lambda *shape: torch.empty(shape, dtype=tower.dtype, device="meta"))
    arguments = {name: value for name, value in made.items() if name in known}
    output = tower.get_image_features(**arguments, return_dict=True)
    rows = tree_leaves(feature_rows(output))
    features = [*rows, *tree_leaves(getattr(output, "deepstack_features", None))]
    count.rows = sum(each.numel() // each.shape[-1] for each in rows)
    trained = [each for each in features if isinstance(each, torch.Tensor) and each.requires_grad]
    counting.is_backward = True
    if trained:
        torch.autograd.backward(trained, [torch.ones_like(each) for each in trained])
    return count


class _IntegersWithValues(TorchFunctionMode):
    """`torch.tensor` keeps its values, whatever device it is for."""

    def __torch_function__(
        self, function: Any, _types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = dict(keywords or {})
        if function is torch.tensor:
            keywords.pop("device", None)
        return function(*arguments, **keywords)


class _Counting(TorchDispatchMode):
    """Runs operations with any `meta` tensor on shapes alone, all others as they are, and counts products."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.is_backward = TowerCount(), False

    def __torch_dispatch__(
        self, function: Any, _types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        tensors = [each for each in tree_leaves((arguments, keywords)) if isinstance(each, torch.Tensor)]
        if any(each.is_meta for each in tensors):
            arguments = _with_places(function, arguments)
            arguments, keywords = tree_map_only(torch.Tensor, _as_meta, (arguments, keywords))
        elif _makes_integers(function, tensors, arguments, keywords):
            keywords = keywords | {"device": torch.device("cpu")}
        output = function(*arguments, **keywords)
        packet = function.overloadpacket
        if packet in _COMPARISONS and output.is_meta:
            return torch.full(output.shape, _COMPARISONS[packet])
        if packet in flop_registry:
            self._add(packet, arguments, output, flop_registry[packet](*arguments, **keywords, out_val=output))
        return output

    def _add(self, packet: Any, arguments: tuple[Any, ...], output: Any, flops: float) -> None:
        count = self.count
        if packet in _ATTENTION:
            count.attention += 0 if self.is_backward else flops
            count.attention_backward += flops if self.is_backward else 0
        elif self.is_backward:
            count.linear_backward += flops
        else:
            count.linear += flops
            given = arguments[1] if packet is _aten.addmm else arguments[0]
            count.values += given.numel() + output.numel()


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to("meta")


def _with_places(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Masks with values as the indices of their places, whose number is a shape."""
    if function.overloadpacket not in (_aten.index, _aten.index_put, _aten.index_put_):
        return arguments
    indices: list[torch.Tensor | None] = []
    for each in arguments[1]:
        is_mask = each is not None and each.dtype == torch.bool and not each.is_meta
        indices += torch.nonzero(each, as_tuple=True) if is_mask else (each,)
    return arguments[0], indices, *arguments[2:]


def _makes_integers(function: Any, tensors: list[torch.Tensor], arguments: Any, keywords: dict[str, Any]) -> bool:
    """Whether a new tensor for the device of the weights holds integers, which keep their values."""
    device = keywords.get("device")
    if device is None or torch.device(device).type != "meta":
        return False
    dtype = keywords.get("dtype") or (tensors[0].dtype if tensors else None)
    if dtype is not None:
        return not dtype.is_floating_point
    return function.overloadpacket is _aten.arange and not any(isinstance(each, float) for each in arguments)
