"""One base model, and the weights that each client trains on it.

A slot is a place for adapters of one shape (rank, kinds of layers) in the model. Every client of that shape has
parameters, gradients and an optimizer of its own, which are put into the slot while its requests run; the modules stay
the same, so the engine's checks of the model hold for all clients. With full fine-tuning the slot is all weights.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tinker import types
from torch import nn

from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError, NonFiniteError, UnsupportedModelError
from treewise.nn.adapters import adapter_folder
from treewise.nn.device import chosen_device
from treewise.nn.gradients import gradients_set_aside
from treewise.nn.load_model import load_processor, load_weights
from treewise.nn.vision import image_token_of
from treewise.rl.samplers import Sampler, TransformersSampler, sampler_named
from treewise.serve.losses import Row, RowsLoss
from treewise.serve.settings import ServeSettings
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

COUNTS = ("flat_tokens", "tree_tokens", "computed_tokens")  # of a computed forest
ALPHA = 32  # of every adapter, as the API has it: rates do not depend on the rank
_ATTENTION = ("attn", "attention", "mixer", "mamba", "conv", "rwkv", "delta")  # parts of a layer that mix tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """What a client asked to be trained. rank 0: all weights."""

    rank: int
    mlp: bool = True
    attn: bool = True
    unembed: bool = True

    @property
    def name(self) -> str:
        """Of its slot."""
        parts = [part for part in ("mlp", "attn", "unembed") if getattr(self, part)]
        return "_".join([f"r{self.rank}", *parts]) if self.rank else "full"


@dataclass(slots=True, eq=False)
class Weights:
    """A client's parameters by name, and the optimizer that trains them (None: they are only sampled from)."""

    shape: Shape
    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW | None = None

    def forget(self, *, with_moments: bool) -> None:
        """Drops gradients, and what the optimizer remembers, too."""
        for each in self.parameters.values():
            each.grad = None
        if with_moments:
            self.optimizer = torch.optim.AdamW(self.parameters.values())


@dataclass(slots=True)
class _Slot:
    """Parameters as they were made, and every module and attribute where each of them stands."""

    blank: dict[str, nn.Parameter]
    places: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)


class ServedModel:
    """The base model; one thread calls it.

    model, tokenizer: in place of those that the settings name; the processor of a model that takes images.
    """

    def __init__(self, settings: ServeSettings, model: Any = None, tokenizer: Any = None) -> None:
        if model is None:
            if adapter_folder(settings.model) is not None:
                raise ConfigError(f"{settings.model} holds adapters; serve its base model, or merge them into it.")
            model = load_weights(settings.model, None, settings.dtype)
            tokenizer = load_processor(settings.model, None, required=False)
        device = chosen_device(None if settings.device == "auto" else settings.device)
        self.settings, self.processor, self.tokenizer = settings, tokenizer, getattr(tokenizer, "tokenizer", tokenizer)
        self.base = model.to(device).eval().requires_grad_(settings.train == "full")
        self.model: Any = self.base
        self.vocabulary = int(self.base.get_input_embeddings().weight.shape[0])
        config = self.base.config.get_text_config()
        self.image_token = image_token_of(self.base.config)
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        self._slots: dict[str, _Slot] = {}
        self._gives_adapters = False
        self._sampler: Sampler
        self._layers = _layers(self.base)  # before adapters stand around them
        if settings.train == "full":
            self._slots["full"] = _slot_of(self.base, set(self.base.parameters()))
        if settings.sampler != "transformers":
            ways = {"weights": "adapter" if settings.train == "lora" else "reload"}
            ways |= {
                "weights_folder": str(Path(settings.folder) / "server_weights"),
                **(settings.sampler_settings or {}),
            }
            if ways["weights"] == "fixed":
                raise ConfigError("sampler_settings.weights=fixed: clients sample from weights of their own.")
            self._sampler = sampler_named(settings.sampler, ways, self.model)
            self._gives_adapters = ways["weights"] == "adapter"
        self._handed: object = ()  # the weights that servers hold; not a client's, nor the base model's
        self._renew()

    def _renew(self) -> None:
        """The first adapter changes what the model is."""
        self.engine = TreeEngine(self.model, self.settings.budget, self.settings.attention, processor=self.processor)
        if self.settings.sampler == "transformers":
            self._sampler = TransformersSampler(self.model, processor=self.processor)

    @cached_property
    def blank(self) -> Weights | None:
        """What is sampled from as the base model. For servers that are given adapters, one that changes nothing: a vLLM
        on a CPU lets an adapter of the head act on requests without one (seen with 0.32).
        """
        return self.new_weights(Shape(1, unembed=False), 0) if self._gives_adapters else None

    def sampler_of(self, weights: Weights | None) -> Sampler:
        """What continues prompts with the weights that the model is `using`: this process, or servers, which are given
        them where they hold others.

        Raises:
            ConfigError: weights that cannot be handed over in the way that was chosen. SamplerError: a server is away.
        """
        if self._handed != weights:
            self._handed = ()  # also if what follows fails
            self._sampler.update(self.model)
            self._handed = weights
        return self._sampler

    def close(self) -> None:
        """Gives servers' connections back, and removes what was written for them."""
        self._sampler.close()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a continuation where a client names none."""
        ids = getattr(getattr(self.base, "generation_config", None), "eos_token_id", None)
        if ids is None:
            ids = getattr(self.tokenizer, "eos_token_id", None)
        return tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),)

    # -- weights ------------------------------------------------------------------------------------------------------

    def new_weights(self, shape: Shape, seed: int) -> Weights:
        """As a run begins: adapters that change nothing yet, A drawn from the seed; or the base model's weights.

        Raises:
            ConfigError: nothing to train.
        """
        slot = self._slot(shape)
        generator = torch.Generator().manual_seed(seed)
        made: dict[str, nn.Parameter] = {}
        for name, blank in slot.blank.items():
            value = torch.empty_like(blank, device="cpu")
            if not shape.rank:
                value = blank.detach().clone()
            elif "lora_A" in name or "lora_embedding_A" in name:
                nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
            else:
                nn.init.zeros_(value)
            made[name] = nn.Parameter(value.to(blank.device))
        return Weights(shape, made, torch.optim.AdamW(made.values()))

    def _slot(self, shape: Shape) -> _Slot:
        if shape.name not in self._slots:
            if self.settings.train == "full":
                raise ConfigError("this server trains all weights; adapters were asked for.")
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(
                r=shape.rank, lora_alpha=ALPHA, target_modules=_targets(self._layers, shape), task_type="CAUSAL_LM"
            )
            before = {id(each) for each in self.model.parameters()}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of peft about tied heads
                if self.model is self.base:
                    self.model = get_peft_model(self.base, config, adapter_name=shape.name)
                    self._renew()
                else:
                    self.model.add_adapter(shape.name, config)
            self.model.eval()
            own = {each for each in self.model.parameters() if id(each) not in before}
            self._slots[shape.name] = _slot_of(self.model, own)
        return self._slots[shape.name]

    @contextmanager
    def using(self, weights: Weights | None) -> Iterator[None]:
        """Inside, the model has these weights; None: it is the base model."""
        if weights is None and self.settings.train == "lora":
            with self.model.disable_adapter() if self.model is not self.base else nullcontext(), torch.no_grad():
                yield
            return
        slot = self._slots["full"] if weights is None else self._slot(weights.shape)
        if weights is not None and weights.shape.rank and self.model.active_adapter != weights.shape.name:
            self.model.set_adapter(weights.shape.name)
        _put(slot, slot.blank if weights is None else weights.parameters)
        try:
            yield
        finally:
            _put(slot, slot.blank)

    # -- computing ----------------------------------------------------------------------------------------------------

    def compute(
        self, weights: Weights | None, rows: Sequence[Row], *, gradients: bool
    ) -> tuple[RowsLoss, dict[str, int]]:
        """The losses of rows as one forest; gradients are added to those that the weights have. A call that raises adds
        none.

        Raises:
            NonFiniteError: a loss that is not a number; names the first datum.
        """
        items = [Trajectory(row.token_ids, images=row.images) for row in rows]
        groups = [items] if self.settings.share == "all" else [[item] for item in items]
        forests = [Forest.from_trajectories(group) for group in groups]
        loss = RowsLoss(rows)
        with self.using(weights), gradients_set_aside(self.model) if gradients else nullcontext():
            out = self.engine.step(forests, loss) if gradients else self.engine.evaluate(forests, loss)
            if not math.isfinite(out.loss):
                is_wrong = ~np.isfinite(np.add.reduceat(loss.losses, loss.bounds[:-1]))
                raise NonFiniteError(f"the loss is not a number, first at datum {is_wrong.argmax()} of the forest.")
        return loss, {name: getattr(out, f"num_{name}") for name in COUNTS}

    def optimize(self, weights: Weights, adam: types.AdamParams) -> float:
        """One step of AdamW by the gradients that were added up; returns their norm before clipping (0: there are
        none, and nothing changes).

        Raises:
            NonFiniteError: gradients that are not numbers. They are dropped, and the weights stay as they were.
        """
        assert weights.optimizer is not None
        owned = [each for each in weights.parameters.values() if each.grad is not None]
        if not owned:
            return 0.0
        norm = float(nn.utils.clip_grad_norm_(owned, adam.grad_clip_norm or math.inf))
        try:
            if not math.isfinite(norm):
                raise NonFiniteError("the gradients are not numbers; they were dropped, the weights are as before.")
            for group in weights.optimizer.param_groups:
                group |= {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps}
                group["weight_decay"] = adam.weight_decay
            weights.optimizer.step()
        finally:
            weights.optimizer.zero_grad(set_to_none=True)
        return norm


def _slot_of(model: nn.Module, own: set[nn.Parameter]) -> _Slot:
    ids = {id(each) for each in own}
    slot, names = _Slot({}), dict[int, str]()
    for prefix, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in ids:
                name = names.setdefault(id(parameter), f"{prefix}.{key}" if prefix else key)
                slot.blank[name] = parameter
                slot.places.setdefault(name, []).append((module, key))
    return slot


def _put(slot: _Slot, parameters: dict[str, nn.Parameter]) -> None:
    for name, places in slot.places.items():
        for module, key in places:
            setattr(module, key, parameters[name])


def _layers(base: Any) -> dict[str, str]:
    """The linear layers that adapters may go to, by name, each with its kind: in the decoder those of modules that mix
    tokens are `attn`, all others `mlp`; the head is `unembed`; others (of a tower) are ``."""
    inner, head = {id(each) for each in (base.get_decoder() or base).modules()}, base.get_output_embeddings()
    found = {}
    for name, module in base.named_modules():
        if isinstance(module, nn.Linear):
            mixes = any(part in name.lower() for part in _ATTENTION)
            own = ("attn" if mixes else "mlp") if id(module) in inner else ""
            found[name] = "unembed" if module is head else own
    return found


def _targets(layers: dict[str, str], shape: Shape) -> list[str]:
    """What a shape adapts, as the ends of names where these are the ends of no other layer's."""
    wanted = {name for name, kind in layers.items() if kind and getattr(shape, kind)}
    if not wanted:
        raise UnsupportedModelError("the model has no linear layer of the kinds that were asked for.")
    ends = {name.rpartition(".")[2] for name in wanted}
    return sorted(ends if {name for name in layers if name.rpartition(".")[2] in ends} == wanted else wanted)
