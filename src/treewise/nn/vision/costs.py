"""What tower and projector cost for an image, by its feature rows.

The tower runs forward and backward on `meta` tensors: shapes alone, for images of two sizes. Tensors of integers keep
their values, as towers cut images into windows and sequences by them. FLOPs are torch's own counts of each product
(`torch.utils.flop_counter`), whatever the family's modules are; its `FlopCounterMode` alone does not do, as no tower
that looks at its integers runs on `meta`. From the two counts FLOPs are `a * rows + b * rows**2`: weights see each
patch, attention pairs of patches. For a tower that takes squares of one size (tiles), `b` is 0.

Image processors make the tensors of an image; here they are made without one (`pixel_forms`). Where the names of a
tower's arguments leave a choice, several forms are tried; the tower refuses all but its own. One that refuses all is
named with its reason.

Letters: I images, R feature rows of one.
"""

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedConfig, PreTrainedModel

from treewise.errors import UnsupportedModelError
from treewise.nn.tower_flops import PerRow, VisionCosts
from treewise.nn.vision.tower import IMAGE_FEATURES, PixelInputs, feature_rows, image_features_of, image_token_of
from treewise.nn.wrapped import base_model, named_modules

if TYPE_CHECKING:
    from torch._ops import OpOverload

logger = logging.getLogger("treewise")
Form = dict[str, torch.Tensor | tuple[int, ...]]  # arguments of one image; of pixels the shape alone
# Merged sides of the images that are counted: at least the windows of Qwen2.5-VL.
MERGED_SIDES = (4, 8)
_aten = torch.ops.aten
_ATTENTION = {_aten.bmm, _aten.baddbmm}
# Comparisons of pixels find none of a special value: Idefics drops images that are all 0.
_COMPARISONS = {_aten.eq: False, _aten.ne: True}
# What towers raise for the form of another: of shapes, of arguments that are missing, of values that are no integers.
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_costs_of: dict[tuple[object, ...], VisionCosts] = {}


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


def vision_costs(model: PreTrainedModel, activations_per_linear: float) -> VisionCosts | None:
    """The costs of a transformers model's tower; None for a model without one. `meta` tensors will do.

    activations_per_linear: values kept for the backward, per input and output of a linear layer.
    """
    base = base_model(model)
    config, module, token = base.config, base.base_model, image_token_of(base.config)
    if token is None or config.get_text_config() is config or not hasattr(module, IMAGE_FEATURES):
        return None
    assert isinstance(module, PreTrainedModel)
    not_seen = {
        id(parameter)
        for part in (model.get_decoder(), model.get_output_embeddings())
        for parameter in part.parameters()
    }
    seen = [
        (name, tuple(each.shape), each.requires_grad)
        for name, each in model.named_parameters()
        if id(each) not in not_seen
    ]
    key = (type(module), config.to_json_string(), tuple(seen), activations_per_linear)
    if key not in _costs_of:
        is_trained = any(requires_grad for _, _, requires_grad in seen)
        try:
            counts = count_tower(module)
        except UnsupportedModelError as error:
            counts = []
            logger.warning("%s: %s, so costs and plans leave images out.", type(model).__name__, error)
        _costs_of[key] = _fitted(token, counts, activations_per_linear * is_trained)
    return _costs_of[key]


def _fitted(token: int, counts: Sequence[TowerCount], activations_per_linear: float) -> VisionCosts:
    if not counts:
        return VisionCosts(token)
    last = counts[-1]
    return VisionCosts(
        image_token=token,
        linear=_per_row(counts, lambda each: each.linear),
        linear_backward=_per_row(counts, lambda each: each.linear_backward),
        attention=_per_row(counts, lambda each: each.attention),
        is_attention_trained=last.attention_backward > 0,
        activation_values=activations_per_linear * last.values / last.rows,
    )


def _per_row(counts: Sequence[TowerCount], flops_of: Callable[[TowerCount], float]) -> PerRow:
    first, last = counts[0], counts[-1]
    slope = flops_of(last) / last.rows
    if first is last:
        return slope, 0.0
    square = max(0.0, (slope - flops_of(first) / first.rows) / (last.rows - first.rows))
    return slope - square * last.rows, square


# -- the tensors of an image ------------------------------------------------------------------------------------------


def pixel_forms(
    config: PreTrainedConfig, arguments: Mapping[str, Parameter], sides: Sequence[int], merged_side: int
) -> Iterator[Form]:
    """Forms of one square image: those of the arguments without a default first, then with the others.

    arguments: of the model's `get_image_features`. sides: in pixels, for towers that take whole images. merged_side:
    in feature rows, for towers that take patches.
    """
    required = {name for name, each in arguments.items() if each.default is Parameter.empty}
    for known in dict.fromkeys((frozenset(required), frozenset(arguments))):
        yield from _patches(config, known, merged_side)
        for side, num_tiles in itertools.product(sides, (None, 1, 2)):
            tiles = () if num_tiles is None else (num_tiles,)
            more: Form = {
                "image_sizes": torch.tensor([[side, side]]),
                "pixel_attention_mask": torch.ones(1, *tiles, *(side, side) * len(tiles), dtype=torch.bool),
                "high_res_pixel_values": (1, 3, side, side),
            }
            taken = {name: each for name, each in more.items() if name in known}
            yield {"pixel_values": (1, *tiles, 3, side, side), **taken}
            if num_tiles and "pixel_attention_mask" in known:  # of which those of the mask count
                mask = torch.ones(1, num_tiles, dtype=torch.bool)
                yield {"pixel_values": (1, num_tiles, 3, side, side), "pixel_attention_mask": mask}
    yield {"pixel_values": (1, merged_side**2, 3 * _patch_sizes(config)[0] ** 2)}


def drawn(form: Form, draw: Callable[[tuple[int, ...]], torch.Tensor]) -> PixelInputs:
    """The tensors of an image of a form. draw: pixels of a shape."""
    return {name: draw(each) if isinstance(each, tuple) else each for name, each in form.items()}


def _patch_sizes(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Pixels of a patch's side, frames of a patch, and patches of a feature row's side."""
    vision = getattr(config, "vision_config", None) or config
    merges = ("spatial_merge_size", "merge_kernel_size", "pooling_kernel_size", "merge_size")
    merge = next(
        (value for where, name in itertools.product((vision, config), merges) if (value := getattr(where, name, None))),
        2,
    )
    patch = getattr(vision, "patch_size", None) or 4
    frames = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", None) or 1
    return _first(patch), _first(frames), _first(merge)


def _patches(config: PreTrainedConfig, known: frozenset[str], merged_side: int) -> Iterator[Form]:
    """An image that is cut into patches before the tower."""
    patch, frames, merge = _patch_sizes(config)
    side, target = merge * merged_side, 4 * merged_side
    shapes = {
        "image_grid_thw": torch.tensor([[1, side, side]]),
        "spatial_shapes": torch.tensor([[side, side]]),
        "target_sizes": torch.tensor([[target, target]]),
        "image_merge_sizes": torch.tensor([merge]),
        "image_position_ids": torch.cartesian_prod(torch.arange(side), torch.arange(side))[None],
    }
    found: Form = {name: shapes[name] for name in shapes.keys() & known}
    if not found:
        return
    if "pixel_attention_mask" in known:
        found["pixel_attention_mask"] = torch.ones(1, side**2, dtype=torch.long)
    of_patches: tuple[tuple[int, ...], ...] = ((1, side**2, 3 * patch**2), (1, side**2, 3 * (patch * merge) ** 2))
    if "image_grid_thw" in found:
        of_patches = ((side**2, 3 * frames * patch**2), (side**2, 3 * patch**2), (side**2, 3, patch, patch))
    if "target_sizes" in found:
        of_patches = ((1, 3, patch, target**2 * patch),)
    for shape in of_patches:
        yield {"pixel_values": shape, **found}


def _first(value: int | Sequence[int]) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)  # type: ignore[arg-type]


# -- counting on shapes -----------------------------------------------------------------------------------------------


def count_tower(module: PreTrainedModel) -> list[TowerCount]:
    """Counts of images of different sizes, by rows; one for a tower of one size.

    module: has `get_image_features`. It is not called itself: another of its class and configuration is.

    Raises:
        UnsupportedModelError: it takes no form of pixels without data; with what it raised for the first.
    """
    refusals: list[Exception] = []
    known = signature(image_features_of(module)).parameters
    with _Counting() as counting, _IntegersWithValues(), torch.enable_grad():
        with torch.device("meta"):
            tower = _without_weights(module)
        counts: dict[int, TowerCount] = {}
        for merged_side in MERGED_SIDES:
            for form in pixel_forms(tower.config, known, _sides(tower.config, known, merged_side), merged_side):
                try:
                    count = _count(counting, tower, form, known)
                except _REFUSALS as error:
                    refusals.append(error)
                    continue
                counts.setdefault(count.rows, count)
                break
    if not counts:
        why = f"{type(refusals[0]).__name__}: {' '.join(str(refusals[0]).split())}"
        raise UnsupportedModelError(f"its vision tower takes none of {len(refusals)} forms of pixels ({why})")
    return [counts[rows] for rows in sorted(counts)]


def _sides(config: PreTrainedConfig, known: Mapping[str, Parameter], merged_side: int) -> list[int]:
    """Pixels of the side of an image that a tower takes whole."""
    patch, _, merge = _patch_sizes(config)
    own = getattr(getattr(config, "vision_config", None), "image_size", None)
    sides = [] if own is None else [_first(own)]
    any_size = patch * merge * merged_side
    return [any_size, *sides] if "image_sizes" in known else [*sides, any_size]


def _without_weights(module: PreTrainedModel) -> PreTrainedModel:
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
    layers = dict(named_modules(tower))
    for name in is_trained:
        if is_trained[name] and name not in own:
            above = itertools.accumulate(name.split("."), "{}.{}".format)
            last = [layers[path] for path in above if path in layers][-1:]
            for layer in last:
                layer.register_forward_hook(_with_gradient)
    return tower


def _with_gradient(_layer: nn.Module, _given: object, output: object) -> object:
    return output + torch.zeros((), device="meta", requires_grad=True) if isinstance(output, torch.Tensor) else output


def _count(counting: "_Counting", tower: PreTrainedModel, form: Form, known: Mapping[str, Parameter]) -> TowerCount:
    count = counting.count = TowerCount()
    counting.is_backward = False
    made = drawn(form, lambda shape: torch.empty(shape, dtype=tower.dtype, device="meta"))
    arguments = {name: value for name, value in made.items() if name in known}
    output = image_features_of(tower)(**arguments, return_dict=True)
    rows: list[torch.Tensor] = tree_leaves(feature_rows(output))
    features = [*rows, *tree_leaves(getattr(output, "deepstack_features", None))]
    count.rows = sum(row.numel() // row.shape[-1] for row in rows)
    trained = [feature for feature in features if isinstance(feature, torch.Tensor) and feature.requires_grad]
    counting.is_backward = True
    if trained:
        torch.autograd.backward(trained, [torch.ones_like(each) for each in trained])
    return count


class _IntegersWithValues(TorchFunctionMode):
    """`torch.tensor` keeps its values, whatever device it is for."""

    def __torch_function__(
        self,
        function: Callable[..., object],
        _types: object,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> object:
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
        self,
        function: "OpOverload",
        _types: object,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> object:
        keywords = keywords or {}
        tensors = [each for each in tree_leaves((arguments, keywords)) if isinstance(each, torch.Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            arguments = _with_places(function, arguments)
            arguments, keywords = tree_map_only(torch.Tensor, lambda each: each.to("meta"), (arguments, keywords))
        elif _makes_integers(function, tensors, arguments, keywords):
            keywords = keywords | {"device": torch.device("cpu")}
        output = function(*arguments, **keywords)
        packet = function.overloadpacket
        if packet in _COMPARISONS and output.is_meta:
            return torch.full(output.shape, _COMPARISONS[packet])
        if packet in flop_registry:
            self._add(packet, arguments, output, flop_registry[packet](*arguments, **keywords, out_val=output))
        return output

    def _add(self, packet: object, arguments: tuple[Any, ...], output: torch.Tensor, flops: float) -> None:
        count = self.count
        if packet in _ATTENTION:
            count.attention += 0 if self.is_backward else flops
            count.attention_backward += flops if self.is_backward else 0
        elif self.is_backward:
            count.linear_backward += flops
        else:
            count.linear += flops
            given: torch.Tensor = arguments[1] if packet is _aten.addmm else arguments[0]
            count.values += given.numel() + output.numel()


def _with_places(function: "OpOverload", arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Masks with values as the indices of their places, whose number is a shape."""
    if function.overloadpacket not in (_aten.index, _aten.index_put, _aten.index_put_):
        return arguments
    indices: list[torch.Tensor | None] = []
    masks: Sequence[torch.Tensor | None] = arguments[1]
    for each in masks:
        if each is not None and each.dtype == torch.bool and not each.is_meta:
            indices += torch.nonzero(each, as_tuple=True)
        else:
            indices.append(each)
    return arguments[0], indices, *arguments[2:]


def _makes_integers(
    function: "OpOverload", tensors: list[torch.Tensor], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> bool:
    """Whether a new tensor for the device of the weights holds integers, which keep their values."""
    device = keywords.get("device")
    if device is None or torch.device(device).type != "meta":
        return False
    dtype = keywords.get("dtype") or (tensors[0].dtype if tensors else None)
    if dtype is not None:
        return not dtype.is_floating_point
    return function.overloadpacket is _aten.arange and not any(isinstance(argument, float) for argument in arguments)
