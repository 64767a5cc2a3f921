"""What stands around a transformers model or its layers: torch.compile, DistributedDataParallel, PEFT's adapters."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from treewise.errors import UnsupportedModelError

if TYPE_CHECKING:
    from peft import PeftConfig
    from typing_extensions import TypeIs

    class AdaptedModel(nn.Module):
        """What is read of PEFT's model around one of transformers."""

        peft_config: dict[str, PeftConfig]
        active_adapter: str
        active_peft_config: PeftConfig
        add_adapter: Callable[[str, PeftConfig], None]
        set_adapter: Callable[[str], None]
        disable_adapter: Callable[[], AbstractContextManager[None]]

        def get_base_model(self) -> nn.Module:
            """The model that has the adapters in its layers."""


SUPPORTED_MODELS = "Supported models: docs/models.md."  # ends messages about a model

# Adapters of PEFT whose result for a token is not a function of its path, and why.
_ROW_ADAPTERS = {
    "ALORA": "acts from the last alora_invocation_tokens of a row on, and a shared token is part of several rows",
    "LILY": "routes by a mean over all tokens of a row, of which a shared token has several",
    "POLY": "needs the task_ids of each row",
    "PVERA": "draws random numbers for each row",
    "SHADOW": "runs a second model beside the layers, which does not follow a tree",
    "XLORA": "mixes its adapters by a first pass over each row",
    "ADAPTION_PROMPT": "adds prompt tokens to the attention of its layers",
}


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and DistributedDataParallel, with PEFT's adapters.

    Trees change shape at every step, and the engine calls the decoder, so neither wrapper would help.
    """
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in getattr(model, "_modules", ()):  # a torch.compile'd module holds the original there
            model = model.get_submodule("_orig_mod")
        else:
            return model


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()`, whose types torch leaves out."""
    yield from model.named_modules()


def is_compiled(model: nn.Module) -> bool:
    """Whether modules of a model are compiled in place."""
    return any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules())


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Inside, compiled layers of a model run as they were written: rows of other kinds would be compiled, too."""
    with torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext():
        yield


# Products of experts (`experts_implementation` of transformers) that tests hold against flat training.
TRIED_EXPERTS = ("eager", "grouped_mm", "batched_mm")
_EXPERTS = "_experts_implementation_internal"  # of a configuration; the setter changes those inside of it, too


def untried_experts(model: nn.Module) -> dict[int, tuple[PreTrainedConfig, str]]:
    """Configurations whose experts run by an implementation that no test has tried, and its name, by id."""
    configs = [vars(module).get("config") for module in model.modules()]
    found = ((each, getattr(each, _EXPERTS, None)) for each in configs if isinstance(each, PreTrainedConfig))
    return {id(config): (config, name) for config, name in found if name not in (None, *TRIED_EXPERTS)}


@contextmanager
def experts_in_loops(model: nn.Module) -> Iterator[None]:
    """Inside, experts of an implementation that no test has tried run one after the other, as their classes say."""
    untried = list(untried_experts(model).values())
    try:
        for config, _ in untried:
            config.__dict__[_EXPERTS] = "eager"
        yield
    finally:
        for config, name in untried:
            config.__dict__[_EXPERTS] = name


def is_peft(model: object) -> "TypeIs[AdaptedModel]":
    """Whether PEFT's adapters are around a model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


# On parameters of adapters: of their own size; where that is zero, by the factor of their layer: at LoRA's 32 of rank 1
# more makes a tiny model a function of the adapter alone, which rounding moves by 1e-3.
_NOISE = 0.05


def adapter_parameters(model: nn.Module) -> dict[int, float]:
    """Ids of parameters of modules within adapter layers, apart from the layers that these adapt; each with the largest
    factor of its layer's result (LoRA's alpha over rank; 1 where there is none)."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "adapter_layer_names")]
    adapted = {
        id(parameter)
        for layer in layers
        if isinstance(getattr(layer, "base_layer", None), nn.Module) and not hasattr(layer.base_layer, "base_layer")
        for parameter in layer.base_layer.parameters()
    }
    factors = [max(map(abs, dict(getattr(layer, "scaling", {})).values()), default=1.0) for layer in layers]
    found = {
        id(each): factor
        for layer, factor in zip(layers, factors, strict=True)
        for each in layer.parameters()
        if each.is_floating_point()
    }
    return {key: factor for key, factor in found.items() if key not in adapted}


def stirred(data: torch.Tensor, seed: int, factor: float) -> torch.Tensor:
    """A parameter of an adapter with noise: a fresh adapter is the identity, which hides faults. factor: of its layer's
    result (`adapter_parameters`)."""
    if isinstance(data, DTensor):  # parts of an adapter may have any noise; whole ones have the same on all ranks
        part = stirred(data.to_local(), seed, factor)
        mesh, places = data.device_mesh, data.placements
        return DTensor.from_local(part, mesh, places, run_check=False, shape=data.shape, stride=data.stride())
    generator = torch.Generator(data.device).manual_seed(seed)
    noise = torch.randn(data.shape, generator=generator, device=data.device, dtype=torch.float32)
    size = data.float().square().mean().sqrt().nan_to_num()
    return (data.float() + noise * torch.where(size > 0, _NOISE * size, _NOISE / max(factor, 1.0))).to(data.dtype)


@torch.no_grad()
def stir_adapters(model: nn.Module) -> None:
    """Adds noise to the adapters of a model, in place."""
    factors = adapter_parameters(model)
    trained = [each for each in model.parameters() if each.requires_grad and id(each) in factors]
    for seed, parameter in enumerate(trained):
        parameter.copy_(stirred(parameter.detach(), seed, factors[id(parameter)]))


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside torch.compile, DistributedDataParallel and PEFT.

    Raises:
        UnsupportedModelError: a model of another library than transformers, or adapters as in `without_adapters`.
    """
    base = without_adapters(model)
    if not isinstance(base, PreTrainedModel):
        hint = " Load it first: AutoModelForCausalLM, of adapters peft.AutoPeftModelForCausalLM, .from_pretrained(...)."
        hint = "" if isinstance(base, nn.Module) else hint
        raise UnsupportedModelError(f"{type(base).__name__} is not a transformers model.{hint} {SUPPORTED_MODELS}")
    return base


def without_adapters(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DistributedDataParallel and PEFT, of transformers or not.

    Raises:
        UnsupportedModelError: an adapter that learns a prompt, whose result for a token depends on its whole row, or
            that is to be tied to another.
    """
    model = unwrap_model(model)
    if not is_peft(model):
        return model
    for adapter, config in model.peft_config.items():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"adapter {adapter!r} learns a prompt ({config.peft_type}), which changes every depth; use LoRA."
            )
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if getattr(config, "alora_invocation_tokens", None) is not None:
            kind = "ALORA"
        if kind in _ROW_ADAPTERS:
            raise UnsupportedModelError(f"adapter {adapter!r} ({kind}) {_ROW_ADAPTERS[kind]}; use LoRA.")
        if getattr(config, "target_modules_to_tie", None):  # PEFT's note of what ensure_weight_tying means
            raise UnsupportedModelError(
                f"adapter {adapter!r} is to be tied between the embeddings and the head (ensure_weight_tying), and "
                "PEFT ties such adapters only until the model is moved or saved. Name embed_tokens in modules_to_save "
                "in place of target_modules, which it ties for good, or leave ensure_weight_tying out."
            )
    return model.get_base_model()


def num_embeddings(model: nn.Module) -> int:
    """Tokens that have an embedding. model: a transformers model as in `base_model`; its decoder will do."""
    return weight_of(base_model(model).get_input_embeddings()).shape[0]


def weight_of(module: nn.Module) -> torch.Tensor:
    """The weight of a model's own layer, without what adapters add."""
    weight = innermost(module).weight
    assert isinstance(weight, torch.Tensor), f"{type(module).__name__} has no weight"
    return weight


def innermost(module: nn.Module) -> nn.Module:
    """The model's own layer below PEFT's adapters and wrappers. One with trained tokens makes a whole table at each
    look at its `weight`."""
    while True:
        below = getattr(module, "original_module", None)  # modules_to_save, trainable_token_indices
        base_layer: Callable[[], object] | None = getattr(module, "get_base_layer", None)
        if below is None and base_layer is not None:
            below = base_layer()
        if not isinstance(below, nn.Module) or below is module:
            return module
        module = below
