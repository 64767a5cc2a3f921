"""The vision tower of a model, and how its own forward takes features that were computed before.

A model of images and text embeds its tokens, replaces the placeholders by the features of images, and calls its
decoder. transformers' models take these features as `mm_encoder_outputs`, so tower and decoder run apart: the tower
once for each image, the decoder for each micro-batch, both by the model's own code.

Letters: R feature rows, one for each placeholder token of an image; M model width; T tokens of a micro-batch.
"""

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from treewise.errors import UnsupportedModelError
from treewise.nn.model import SUPPORTED_MODELS, DecoderAndHead, base_model
from treewise.nn.support_table import own_table
from treewise.nn.vision.pixels import PixelInputs, feature_rows, image_token_of
from treewise.shapes import Float

# [R, M] rows for the embeddings, then those for each decoder layer that takes some (Qwen3-VL's deepstack).
Features = tuple[torch.Tensor, ...]
EVERYWHERE, IN_WINDOWS = "everywhere", "in windows"
# Where images attend both ways, by family and its setting use_bidirectional_attention.
_BOTH_WAYS: dict[tuple[str, str | bool | None], str] = {
    **{(family, setting): EVERYWHERE for family in ("gemma3", "shieldgemma2") for setting in (None, False)},
    ("gemma4", "vision"): IN_WINDOWS,
}


@dataclass(eq=False)
class VisionModel:
    """The vision part of a model.

    module: has `get_image_features`, and a forward that takes `mm_encoder_outputs`. image_token: the placeholder.
    parameters: those outside of the decoder. both_ways: where the tokens of an image see all of it: nowhere (""), in
    all layers (`EVERYWHERE`), or in those with a window (`IN_WINDOWS`).
    """

    module: Any
    image_token: int
    parameters: tuple[nn.Parameter, ...]
    both_ways: str = ""
    _is_joined: bool = False  # whether the model has the features of all images as one tensor

    @property
    def is_trained(self) -> bool:
        """Whether a tower or a projector has a trained parameter."""
        return any(each.requires_grad for each in self.parameters)

    def encode(self, images: Sequence[PixelInputs], num_rows: Sequence[int], names: Sequence[str]) -> Features:
        """The features of some images, one after the other, in the present grad mode.

        images: of equal shapes but for the first axis. num_rows: placeholder tokens of each. names: for messages.

        Raises:
            UnsupportedModelError: the tower gives another number of rows than there are placeholders.
        """
        device = self.module.device
        known = inspect.signature(self.module.get_image_features).parameters
        joined = {name: join([each[name] for each in images], name, known).to(device) for name in images[0]}
        output = self.module.get_image_features(
            **{name: value for name, value in joined.items() if name in known}, return_dict=True
        )
        rows = feature_rows(output)
        self._is_joined = isinstance(rows, torch.Tensor)
        features = (_rows_of(rows), *(_rows_of(each) for each in getattr(output, "deepstack_features", None) or ()))
        if any(len(each) != sum(num_rows) for each in features):
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
    base: Any = base_model(lm.model)
    module, token = base.base_model, image_token_of(base.config)
    name = type(base).__name__
    if token is None or not hasattr(module, "get_image_features"):
        sees = getattr(base.config, "vision_config", None) is not None
        reason = "has no features of images that stand for placeholder tokens" if sees else "takes no images"
        raise UnsupportedModelError(f"{name} {reason}. {SUPPORTED_MODELS}")
    if "mm_encoder_outputs" not in inspect.signature(type(module).forward).parameters:
        raise UnsupportedModelError(
            f"{name} takes images only as pixels, so their features cannot be shared by branches. {SUPPORTED_MODELS}"
        )
    refuse_unsupported(base)
    in_decoder = {id(each) for each in lm.decoder.parameters()}
    outside = tuple(each for each in module.parameters() if id(each) not in in_decoder)
    return VisionModel(module, token, outside, _both_ways(base))


def _both_ways(base: Any) -> str:
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


def refuse_unsupported(base: Any) -> None:
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


def _rows_of(parts: Any) -> Float[Tensor, "R M"]:
    if isinstance(parts, torch.Tensor):
        return parts.reshape(-1, parts.shape[-1])
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in parts])
