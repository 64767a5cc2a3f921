"""A transformers causal language model, split into the decoder (hidden rows) and the head (logits).

A model whose architecture cannot follow a tree is rejected by name, before any compute. What names and flags do not
show, `engine.probe` measures.
"""

from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from treewise.base import features
from treewise.errors import UnsupportedModelError
from treewise.nn.attention import install
from treewise.nn.decoder import DecoderAndHead, parameters_of
from treewise.nn.support_table import later_release
from treewise.nn.wrapped import SUPPORTED_MODELS, base_model, unwrap_model, without_adapters

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Layers that mix no tokens.
TOKENWISE_LAYERS = {"moe", "mlp"}
# Names of layers with a recurrence or a convolution, alone or beside attention.
RECURRENT_LAYERS = {"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"}
# What only layers with a recurrence or a convolution have: names of parameters and buffers, and classes without such.
RECURRENT_PARAMETERS = {"A_log", "dt_bias", "time_decay", "recurrent_param", "slope_rate"}
RECURRENT_CLASSES = {"xLSTMLayer"}
_WHOLE = (
    "has a decoder that is a whole language model with a head of its own, of which trees cannot take the decoder alone"
)
_QFORMER = "reads every text with an image, by a Q-Former that sees both"
# Families whose classes and configurations look like those that follow a tree, by `model_type`, and why they do not.
REFUSED_FAMILIES = {
    "blip-2": _WHOLE,
    "blt": "computes on patches of bytes, which another model cuts over a whole row",
    "doge": "adds a learned mask of its own to that of its attention, which a tree cannot replace",
    "gemma4_unified_assistant": "continues the hidden rows and keys of another model (shared_kv_states), not tokens",
    "git": "puts the image's tokens before the text and builds one mask for both, which a tree cannot replace",
    "idefics": "reads images by cross-attention in layers of its own, which need pixels in every forward",
    "instructblip": _QFORMER,
    "instructblipvideo": _QFORMER,
    "kosmos-2": _WHOLE,
    "kosmos-2.5": _WHOLE,
    "molmo2": "asks in its forward which tokens are images (mm_token_type_ids) on text alone, too, as a tree does not",
}


def split_model(model: nn.Module) -> DecoderAndHead:
    """Finds decoder and head, rejects layers that cannot follow a tree, and installs treewise's attention.

    Raises:
        UnsupportedModelError: naming the model, layer or setting.
    """
    inner = without_adapters(model)
    name = type(inner).__name__
    if isinstance(getattr(inner, "pretrained_model", None), nn.Module) and hasattr(inner, "v_head"):
        raise UnsupportedModelError(
            f"{name} has a value head, which trees do not compute; pass its pretrained_model. {SUPPORTED_MODELS}"
        )
    model, base = unwrap_model(model), base_model(inner)
    if base.config.model_type in REFUSED_FAMILIES:
        raise UnsupportedModelError(f"{name} {REFUSED_FAMILIES[base.config.model_type]}. {SUPPORTED_MODELS}")
    if getattr(base.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} has an encoder; only causal language models follow a tree. {SUPPORTED_MODELS}"
        )
    output = base.get_output_embeddings()
    if output is None:
        raise UnsupportedModelError(
            f"{name} has no language-model head (a classifier, a value head or a bare decoder?). {SUPPORTED_MODELS}"
        )
    decoder = _find_decoder(base)
    try:
        _refuse_layers(decoder, name)
        if not decoder._can_set_attn_implementation() and not features.legacy_layers.install(decoder):
            raise UnsupportedModelError(f"{name} does not use transformers' attention interface. {SUPPORTED_MODELS}")
    except UnsupportedModelError as error:
        later = later_release(base.config.model_type, is_recurrent=mixes_in_order(decoder))
        raise UnsupportedModelError(f"{error}{later}") from None
    configs = _attention_configs(decoder)
    install(configs)
    is_recurrent = mixes_in_order(decoder)
    if is_recurrent:
        features.recurrent.install(decoder)
    if any(isinstance(parameter, DTensor) for parameter in base.parameters()):
        features.tensor_parallel.repair_tensor_parallel(base)
    scale, softcap = _logit_scale(base.config), _softcap(base.config)
    parameters = parameters_of(type(decoder))
    return DecoderAndHead(model, base, decoder, output, scale, softcap, configs, is_recurrent, parameters)


def mixes_in_order(decoder: nn.Module) -> bool:
    """Whether a part of the model carries state from token to token, or convolves over them."""
    for module in decoder.modules():
        own = {*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))}
        if isinstance(module, nn.Conv1d) or own & RECURRENT_PARAMETERS or type(module).__name__ in RECURRENT_CLASSES:
            return True
    return False


def _find_decoder(base: PreTrainedModel) -> PreTrainedModel:
    decoder = base.get_decoder()
    if decoder is None or decoder is base:
        # Llama 4's text model returns itself; then it is the one transformers model among the children.
        inner = [child for child in base.children() if isinstance(child, PreTrainedModel)]
        if len(inner) != 1:
            raise UnsupportedModelError(
                f"{type(base).__name__} has no get_decoder() that returns its decoder. {SUPPORTED_MODELS}"
            )
        decoder = inner[0]
    if not isinstance(decoder, PreTrainedModel):  # some call their head a decoder (ModernBERT)
        decoder = base.base_model
    return decoder


def _refuse_layers(decoder: PreTrainedModel, name: str) -> None:
    config = decoder.config
    recurrent = features.recurrent if mixes_in_order(decoder) else None
    has_mixers = recurrent is not None and bool(recurrent.kinds_of(decoder))
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in ATTENTION_LAYERS | TOKENWISE_LAYERS and not (kind in RECURRENT_LAYERS and has_mixers):
            raise UnsupportedModelError(
                f"{name} layer {index} is a {kind!r} layer, which cannot follow a tree yet. {SUPPORTED_MODELS}"
            )
    if recurrent is not None:
        recurrent.refuse_unknown(decoder, name)
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        raise UnsupportedModelError(
            f"{name} uses ALiBi, whose bias depends on a token's index in memory. {SUPPORTED_MODELS}"
        )
    if not has_mixers and "position_ids" not in parameters_of(type(decoder))[0]:
        raise UnsupportedModelError(
            f"{name} takes no position_ids, which trees need for their depths. {SUPPORTED_MODELS}"
        )


def _attention_configs(decoder: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configurations that the decoder's layers read their attention implementation from."""
    configs = {id(decoder.config): decoder.config}
    for module in decoder.modules():
        config = vars(module).get("config")
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            configs[id(config)] = config
    return list(configs.values())


# Names of the factor of the logits in configurations; `engine.probe` detects a missing or wrong one.
_MULTIPLIES = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVIDES = ("logits_scaling",)
_LOGITS_SCALING_MULTIPLIES = {"hyperclovax"}  # `logits_scaling` is a factor there, a divisor elsewhere
_UNSCALED = {"aya_vision", "cohere2_vision"}  # without the scale of their language model
_UNCAPPED = {"gemma3"}  # Gemma3ForConditionalGeneration: without the cap of its language model
_SOFTCAPS = ("final_logit_softcapping", "output_logit_soft_cap", "logits_soft_cap")


def _logit_scale(config: PreTrainedConfig) -> float:
    """Factor of the logits: Cohere multiplies, Granite divides, Falcon-H1 multiplies."""
    if config.model_type in _UNSCALED:
        return 1.0
    config = config.get_text_config()
    scale = 1.0
    for attribute in (*_MULTIPLIES, *_DIVIDES):
        factor = getattr(config, attribute, None) or 1.0
        divides = attribute in _DIVIDES and config.model_type not in _LOGITS_SCALING_MULTIPLIES
        scale = scale / factor if divides else scale * factor
    return scale


def _softcap(config: PreTrainedConfig) -> float | None:
    if config.model_type in _UNCAPPED:
        return None
    config = config.get_text_config()
    return next((cap for name in _SOFTCAPS if (cap := getattr(config, name, None)) is not None), None)
