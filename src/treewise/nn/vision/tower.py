"""Images in a model: its processor's tensors, its vision tower, and how its own forward takes features that were
computed before.

A model of images and text embeds its tokens, replaces the placeholders by the features of images, and calls its
decoder. transformers' models take these features as `mm_encoder_outputs`, so tower and decoder run apart: the tower
once for each image, the decoder for each micro-batch, both by the model's own code.

Where positions are of three axes, a model numbers an image's tokens by row and column, and goes on after it with less
than the number of its tokens. The positions of a trajectory are whatever the model's own function gives for it alone. A
shared token has one position on the tree, so all trajectories through it must agree.

Letters: R feature rows, one for each placeholder token of an image; M model width; A axes of positions; T tree tokens;
L tokens of one trajectory; n tokens of a row.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from treewise.base.shapes import Float, Int
from treewise.errors import ConfigError, DataError, UnsupportedModelError
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.support_table import own_table
from treewise.nn.wrapped import SUPPORTED_MODELS, base_model
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan

PixelInputs = dict[str, torch.Tensor]  # of some images, by the names of the model's arguments
# [R, M] rows for the embeddings, then those for each decoder layer that takes some (Qwen3-VL's deepstack).
Features = tuple[torch.Tensor, ...]
IMAGE_FEATURES, _POSITIONS = "get_image_features", "get_rope_index"  # functions of models that take images
_TOKEN_NAMES = ("image_token_id", "image_token_index")
EVERYWHERE, IN_WINDOWS = "everywhere", "in windows"
# Where images attend both ways, by family and its setting use_bidirectional_attention.
_BOTH_WAYS: dict[tuple[str, str | bool | None], str] = {
    **{(family, setting): EVERYWHERE for family in ("gemma3", "shieldgemma2") for setting in (None, False)},
    ("gemma4", "vision"): IN_WINDOWS,
}


def pixel_inputs(processor: object, images: Sequence[Any]) -> PixelInputs:
    """The tensors of some images (PIL), by the names of the model's arguments.

    processor: the model's processor, or its image processor.

    Raises:
        ConfigError: a processor that takes no images.
    """
    process = getattr(processor, "image_processor", processor)
    if process is None or not callable(process) or not hasattr(process, "model_input_names"):
        raise ConfigError(
            f"processor is a {type(processor).__name__}, which takes no images; give the model's processor "
            "(transformers.AutoProcessor.from_pretrained)."
        )
    made = process(images=list(images), return_tensors="pt")
    return {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}


def row_arguments(
    model: PreTrainedModel, processor: object, images: Sequence[Any], token_ids: Int[Tensor, " n"]
) -> dict[str, torch.Tensor]:
    """What a flat row gives to the model's own forward beside its token ids.

    images: of the row, in order (PIL). token_ids: [n] int64.
    """
    known = inspect.signature(type(model).forward).parameters
    made = {name: value.to(token_ids.device) for name, value in pixel_inputs(processor, images).items()}
    types = torch.eq(token_ids, image_token_of(model.config) or -1).long()[None]
    made |= {"mm_token_type_ids": types, "token_type_ids": types}
    return {name: value for name, value in made.items() if name in known}


def image_token_of(config: PreTrainedConfig) -> int | None:
    """The token that stands for a part of an image; None for a model of text."""
    values = (getattr(config, name, None) for name in _TOKEN_NAMES)
    return next((value for value in values if isinstance(value, int)), None)


def image_features_of(module: nn.Module) -> Callable[..., ModelOutput]:
    """The function of a model that runs its tower; it has one where `hasattr(module, IMAGE_FEATURES)`."""
    own: Callable[..., ModelOutput] = getattr(module, IMAGE_FEATURES)
    return own


def feature_rows(output: ModelOutput) -> torch.Tensor | Sequence[torch.Tensor]:
    """What a model's own forward takes of the output of `get_image_features`: Fuyu's and Llama 4's read it unpooled."""
    rows = getattr(output, "pooler_output", None)
    return output.last_hidden_state if rows is None else rows


@dataclass(eq=False)
class VisionModel:
    """The vision part of a model.

    module: has `get_image_features`, and a forward that takes `mm_encoder_outputs`. image_token: the placeholder.
    parameters: those outside of the decoder. both_ways: where the tokens of an image see all of it: nowhere (""), in
    all layers (`EVERYWHERE`), or in those with a window (`IN_WINDOWS`).
    """

    module: PreTrainedModel
    image_token: int
    parameters: tuple[nn.Parameter, ...]
    both_ways: str = ""
    _is_joined: bool = False  # whether the model has the features of all images as one tensor

    @property
    def is_trained(self) -> bool:
        """Whether a tower or a projector has a trained parameter."""
        return any(parameter.requires_grad for parameter in self.parameters)

    def encode(self, images: Sequence[PixelInputs], num_rows: Sequence[int], names: Sequence[str]) -> Features:
        """The features of some images, one after the other, in the present grad mode.

        images: of equal shapes but for the first axis. num_rows: placeholder tokens of each. names: for messages.

        Raises:
            UnsupportedModelError: the tower gives another number of rows than there are placeholders.
        """
        device = self.module.device
        features_of = image_features_of(self.module)
        known = inspect.signature(features_of).parameters
        joined = {name: join([image[name] for image in images], name, known).to(device) for name in images[0]}
        output = features_of(**{name: value for name, value in joined.items() if name in known}, return_dict=True)
        rows = feature_rows(output)
        self._is_joined = isinstance(rows, torch.Tensor)
        features = (_rows_of(rows), *(_rows_of(each) for each in getattr(output, "deepstack_features", None) or ()))
        if any(len(feature) != sum(num_rows) for feature in features):
            raise UnsupportedModelError(
                f"{type(self.module).__name__} gives {len(features[0])} feature rows for {', '.join(names[:3])}, whose "
                f"placeholders (token {self.image_token}) are {sum(num_rows)}. Was another processor used for the data?"
            )
        return features

    def arguments(self, features: Features) -> dict[str, Any]:
        """How the module's forward takes these rows, in the order of a micro-batch's placeholders."""
        first, deep = features[0], features[1:]
        rows = first[None] if self._is_joined else [first]
        output = SimpleNamespace(
            pooler_output=rows,
            last_hidden_state=rows,
            deepstack_features=[(each,) for each in deep],
            router_logits=None,  # of Granite Docling's density router, which takes no part in the log-probs
        )
        return {"mm_encoder_outputs": {"image": output}}


def join(tensors: Sequence[torch.Tensor], name: str, arguments: Collection[str]) -> torch.Tensor:
    """The tensors of several images as one. arguments: of the tower; MiniCPM's takes all patches in one row."""
    return torch.cat(list(tensors), dim=-1 if name == "pixel_values" and "target_sizes" in arguments else 0)


def vision_model(lm: DecoderAndHead) -> VisionModel:
    """The vision part of a model.

    Raises:
        UnsupportedModelError: the model takes no images, or none whose features were computed before.
    """
    base = base_model(lm.model)
    module, token = base.base_model, image_token_of(base.config)
    name = type(base).__name__
    if token is None or not isinstance(module, PreTrainedModel) or not hasattr(module, IMAGE_FEATURES):
        sees = getattr(base.config, "vision_config", None) is not None
        reason = "has no features of images that stand for placeholder tokens" if sees else "takes no images"
        raise UnsupportedModelError(f"{name} {reason}. {SUPPORTED_MODELS}")
    if "mm_encoder_outputs" not in inspect.signature(type(module).forward).parameters:
        raise UnsupportedModelError(
            f"{name} takes images only as pixels, as all models of transformers before 5.18 do, so their features "
            f"cannot be shared by branches. {SUPPORTED_MODELS}"
        )
    refuse_unsupported(base)
    in_decoder = {id(parameter) for parameter in lm.decoder.parameters()}
    outside = tuple(each for each in module.parameters() if id(each) not in in_decoder)
    return VisionModel(module, token, outside, _both_ways(base))


def _both_ways(base: PreTrainedModel) -> str:
    """Where the tokens of an image see those after them in it: nowhere (""), `EVERYWHERE` or `IN_WINDOWS`.

    Raises:
        UnsupportedModelError: a setting that is not known of this family.
    """
    setting = getattr(base.config.get_text_config(), "use_bidirectional_attention", None)
    kind = _BOTH_WAYS.get((base.config.model_type, setting))
    if setting and kind is None:
        raise UnsupportedModelError(
            f"{type(base).__name__}: images under use_bidirectional_attention={setting!r} are not supported, as its "
            f"mask lets them see beyond its windows. {SUPPORTED_MODELS}"
        )
    return kind or ""


def refuse_unsupported(base: PreTrainedModel) -> None:
    """Raises if a family's images do not equal flat training, or were not tried against it.

    Raises:
        UnsupportedModelError: with the reason.
    """
    row = own_table().find(base.config.model_type)
    if row is None or row.image_error is None:
        reason = (row and row.image_reason) or "they were not tried against flat training"
        raise UnsupportedModelError(
            f"{type(base).__name__}: images of {base.config.model_type!r} are not supported ({reason}), only text. "
            f"{SUPPORTED_MODELS}"
        )


def _rows_of(parts: torch.Tensor | Sequence[torch.Tensor]) -> Float[Tensor, "R M"]:
    if isinstance(parts, torch.Tensor):
        return parts.reshape(-1, parts.shape[-1])
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


# -- positions --------------------------------------------------------------------------------------------------------


def tree_positions(
    module: nn.Module, image_token: int, forest: Forest, pixels_of: Callable[[ImageSpan], PixelInputs]
) -> np.ndarray | None:
    """[A, T] int64, the position ids of all tree tokens; None for a model without a function of its own for the tokens
    of images, whose positions are depths. pixels_of: the tensors of an image.

    Raises:
        DataError: the model's function fails on a trajectory.
        UnsupportedModelError: trajectories disagree in the position of a token that they share.
    """
    if not hasattr(module, _POSITIONS):
        return None
    rows = []
    for index, item in enumerate(forest.trajectories):
        pixels = [pixels_of(image) for image in item.images]
        try:
            rows.append(_row_positions(module, image_token, item.token_ids, pixels))
        except (RuntimeError, ValueError, IndexError, StopIteration) as error:
            raise DataError(
                f"{forest.source_of(index)}: {type(module).__name__} cannot number its tokens ({error}); are its "
                "images apart, with at least one token between?"
            ) from error
    num_axes = max((len(row) for row in rows if row.ndim == 2), default=1)
    positions = np.zeros((num_axes, forest.num_tokens), dtype=np.int64)
    for path, row in zip(forest.paths, rows, strict=True):
        positions[:, path] = row
    for index, (path, row) in enumerate(zip(forest.paths, rows, strict=True)):
        differs = (positions[:, path] != row).any(0)
        if differs.any():
            raise UnsupportedModelError(
                f"{forest.source_of(index)}: {type(module).__name__} gives token {int(np.argmax(differs))} another "
                "position than in a trajectory that shares it; a shared token has one position on a tree."
            )
    return positions


def _row_positions(module: nn.Module, image_token: int, token_ids: np.ndarray, images: list[PixelInputs]) -> np.ndarray:
    """[A, L] int64 positions of one trajectory, or [L] where it has no image."""
    if not images:
        return np.arange(len(token_ids))
    ids = torch.from_numpy(token_ids.astype(np.int64))[None]
    given: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == image_token).int()}
    given["attention_mask"] = torch.ones_like(ids)
    given |= {name: torch.cat([image[name] for image in images]) for name in images[0] if name != "pixel_values"}
    number: Callable[..., tuple[torch.Tensor, object]] = getattr(module, _POSITIONS)
    known = inspect.signature(number).parameters
    positions, _ = number(**{name: value for name, value in given.items() if name in known})
    found: np.ndarray = positions[:, 0].cpu().numpy()
    return found
