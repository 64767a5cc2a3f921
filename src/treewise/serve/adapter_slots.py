"""The weights of many on one model: each has parameters and an optimizer of its own, which take turns in it.

A slot is a place for adapters of one shape (rank, kinds of layers) in the model, or for all of its weights. The modules
stay the same whoever's parameters stand in them, so what was checked of the model holds for all.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn.wrapped import named_modules

if TYPE_CHECKING:
    from treewise.nn.wrapped import AdaptedModel

ALPHA = 32  # of every adapter: learning rates do not depend on the rank
_MIXERS = ("attn", "attention", "mixer", "mamba", "conv", "rwkv", "delta")  # parts of a layer that mix tokens
# Types of models on whose `out_proj` PEFT takes no adapter: kernels of Mamba read its weight past the module.
_WITHOUT_OUT_PROJ = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


@dataclass(frozen=True, slots=True)
class Shape:
    """What is trained: adapters of a rank on the kinds of linear layers, see `Slots`. rank 0: all weights."""

    rank: int
    mlp: bool = True
    attn: bool = True
    unembed: bool = True

    @property
    def name(self) -> str:
        """The name of the slot, `full` for all weights: `r8_mlp_attn`."""
        parts = [part for part in ("mlp", "attn", "unembed") if getattr(self, part)]
        return "_".join([f"r{self.rank}", *parts]) if self.rank else "full"


@dataclass(slots=True, eq=False)
class OwnedWeights:
    """Somebody's parameters by name, and the optimizer that trains them (None: they are only sampled from)."""

    shape: Shape
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW | None = None

    def forget(self, *, with_moments: bool) -> None:
        """Drops gradients, and what the optimizer remembers, too."""
        for parameter in self.parameters.values():
            parameter.grad = None
        if with_moments:
            self.optimizer = torch.optim.AdamW(self.parameters.values())


@dataclass(slots=True)
class _Slot:
    """Parameters as they were made, and every module and attribute where each of them stands."""

    blank: dict[str, nn.Parameter]
    places: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)


class Slots:
    """A model with places for weights. Kinds of linear layers: of the decoder's, those of modules that mix tokens are
    `attn`, all others `mlp`; the head is `unembed`.

    model: the base model, from the first adapter on within PEFT's.
    """

    def __init__(self, base: PreTrainedModel, *, trains_all: bool) -> None:
        self.base, self.trains_all = base.requires_grad_(trains_all), trains_all
        self._adapted: AdaptedModel | None = None
        self._layers = _layers(base)  # before adapters stand around them
        self._slots = {"full": _slot_of(base, set(base.parameters()))} if trains_all else {}

    @property
    def model(self) -> nn.Module:
        """The base model, from the first adapter on within PEFT's."""
        return self.base if self._adapted is None else self._adapted

    def new_weights(self, shape: Shape, seed: int) -> OwnedWeights:
        """Adapters that change nothing yet, A drawn from the seed; or a copy of the base model's weights.

        Raises:
            ConfigError: adapters, where all weights are trained. UnsupportedModelError: the model has no such layer.
        """
        generator, made = torch.Generator().manual_seed(seed), dict[str, nn.Parameter]()
        for name, blank in self._slot(shape).blank.items():
            value = blank.detach().clone() if not shape.rank else torch.zeros_like(blank, device="cpu")
            if "lora_A" in name or "lora_embedding_A" in name:
                nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
            made[name] = nn.Parameter(value.to(blank.device))
        return OwnedWeights(shape, made, torch.optim.AdamW(made.values()))

    def _slot(self, shape: Shape) -> _Slot:
        if shape.name not in self._slots:
            if self.trains_all:
                raise ConfigError("all weights are trained here; adapters were asked for.")
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(
                r=shape.rank, lora_alpha=ALPHA, target_modules=_targets(self._layers, shape), task_type="CAUSAL_LM"
            )
            before = {id(parameter) for parameter in self.model.parameters()}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of peft about tied heads
                if self._adapted is None:
                    self._adapted = get_peft_model(self.base, config, adapter_name=shape.name)
                else:
                    self._adapted.add_adapter(shape.name, config)
            self.model.eval()
            own = {parameter for parameter in self.model.parameters() if id(parameter) not in before}
            self._slots[shape.name] = _slot_of(self.model, own)
        return self._slots[shape.name]

    @contextmanager
    def using(self, weights: OwnedWeights | None) -> Iterator[None]:
        """Inside, the model has these weights; None: it is the base model."""
        if weights is None and not self.trains_all:
            with nullcontext() if self._adapted is None else self._adapted.disable_adapter(), torch.no_grad():
                yield
            return
        slot = self._slots["full"] if weights is None else self._slot(weights.shape)
        if self._adapted is not None and weights is not None and self._adapted.active_adapter != weights.shape.name:
            self._adapted.set_adapter(weights.shape.name)
        _put(slot, slot.blank if weights is None else weights.parameters)
        try:
            yield
        finally:
            _put(slot, slot.blank)


def _slot_of(model: nn.Module, own: set[nn.Parameter]) -> _Slot:
    ids = {id(parameter) for parameter in own}
    slot, names = _Slot({}), dict[int, str]()
    for prefix, module in named_modules(model):
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in ids:
                name = names.setdefault(id(parameter), f"{prefix}.{key}" if prefix else key)
                slot.blank[name] = parameter
                slot.places.setdefault(name, []).append((module, key))
    return slot


def _put(slot: _Slot, parameters: dict[str, nn.Parameter]) -> None:
    for name, places in slot.places.items():
        for module, key in places:
            module._parameters[key] = parameters[name]  # noqa: SLF001 - `setattr` looks elsewhere first


def _layers(base: PreTrainedModel) -> dict[str, str]:
    """The linear layers by name, each with its kind; those of no kind (of a tower) have ``."""
    inner, head = {id(module) for module in (base.get_decoder() or base).modules()}, base.get_output_embeddings()
    left_out, found = "out_proj" if base.config.model_type in _WITHOUT_OUT_PROJ else None, {}
    for name, module in named_modules(base):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] != left_out:
            own = ("attn" if any(part in name.lower() for part in _MIXERS) else "mlp") if id(module) in inner else ""
            found[name] = "unembed" if module is head else own
    return found


def _targets(layers: dict[str, str], shape: Shape) -> list[str]:
    """What a shape adapts, as the ends of names where these are the ends of no other layer's."""
    wanted = {name for name, kind in layers.items() if kind and getattr(shape, kind)}
    if not wanted:
        raise UnsupportedModelError("the model has no linear layer of the kinds that were asked for.")
    ends = {name.rpartition(".")[2] for name in wanted}
    return sorted(ends if {name for name in layers if name.rpartition(".")[2] in ends} == wanted else wanted)
