"""A causal language model as its two halves: the decoder (hidden rows) and the head (logits).

Letters: T tokens of a micro-batch, M model width, V vocabulary, E experts.
"""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from treewise.base import features
from treewise.errors import UnsupportedModelError
from treewise.nn.attention import AttentionName, TreeContext, carry
from treewise.nn.attention.interface import ATTENDS_INSIDE
from treewise.nn.lm_head import AnyHead, Head
from treewise.nn.platform.tensors import to_device
from treewise.nn.wrapped import SUPPORTED_MODELS, innermost, num_embeddings, weight_of


@dataclass(frozen=True, slots=True)
class DecoderAndHead:
    """The two halves of a causal language model.

    model: without torch.compile and DDP around it, with PEFT. base: without PEFT. decoder: token ids to hidden rows.
    output: the layer from hidden rows to logits; `scale` and `softcap` are what the model does to its result (see
    `lm_head.Head`). configs: those that the decoder's layers read their attention from. is_recurrent: whether layers
    carry states from token to token. forward_parameters: of the decoder (see `parameters_of`).
    """

    model: nn.Module
    base: PreTrainedModel
    decoder: PreTrainedModel
    output: nn.Module
    scale: float
    softcap: float | None
    configs: list[PreTrainedConfig]
    is_recurrent: bool
    forward_parameters: tuple[frozenset[str], bool]

    @property
    def is_current(self) -> bool:
        """Whether the model still has the head and the attention that it had when it was split.

        A resized vocabulary or an adapter replaces the head; `set_attn_implementation` replaces the attention.
        """
        names = [config._attn_implementation for config in self.configs]
        return self.base.get_output_embeddings() is self.output and all(type(name) is AttentionName for name in names)

    @property
    def num_embeddings(self) -> int:
        """Tokens that have an embedding."""
        return num_embeddings(self.decoder)

    @property
    def num_logits(self) -> int:
        """Logits of a row.

        Raises:
            UnsupportedModelError: a head without a number of outputs.
        """
        layer = innermost(self.output)
        weight, num_tokens = getattr(layer, "weight", None), getattr(layer, "out_features", None)
        if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.is_floating_point():
            return weight.shape[0]  # PEFT makes the copy of a tied head as a layer of `M` outputs, and merges it so
        if not isinstance(num_tokens, int):
            raise UnsupportedModelError(
                f"the head is a {type(self.output).__name__} without out_features, not a linear layer. "
                f"{SUPPORTED_MODELS}"
            )
        return num_tokens

    @property
    def device(self) -> torch.device:
        """Where token ids have to be."""
        embeddings = self.decoder.get_input_embeddings()
        first = next(embeddings.parameters(), None)  # `weight` of an adapter is computed; FSDP1 has no parameter there
        return (weight_of(embeddings) if first is None else first).device

    def head(self, temperature: float = 1.0) -> AnyHead:
        """The head with its present weights, adapters included; `temperature` divides the logits."""
        adapted = features.adapted_head if type(self.output).__module__.startswith("peft.") else None
        layer: Any = self.output if adapted is None else adapted.active_module(self.output)
        if isinstance(getattr(layer, "weight", None), DTensor):
            shard = features.tensor_parallel.vocabulary_shard(layer)
            if shard is not None:
                local, bias = layer.weight.to_local(), None if layer.bias is None else layer.bias.to_local()
                return Head(local, bias, self.scale, self.softcap, temperature, shard=shard)
        plain: tuple[torch.Tensor, torch.Tensor | None] | None = None
        if not has_hooks(self.output):
            plain = plain_weight(layer) if adapted is None else adapted.weight_with_adapters(layer)
        if plain is None:
            scaling = self.scale, self.softcap, temperature
            head: AnyHead = features.module_head.ModuleHead(self.output, self.num_logits, *scaling)
            return head
        parts = () if adapted is None else adapted.trained_parts(layer)
        return Head(*plain, self.scale, self.softcap, temperature, parts=parts)

    @property
    def collects_parts(self) -> bool:
        """Whether a head that collects its gradients has smaller ones: see `Head.parts`."""
        adapted = features.adapted_head if type(self.output).__module__.startswith("peft.") else None
        return adapted is not None and bool(adapted.trained_parts(adapted.active_module(self.output)))


def run_decoder(
    lm: DecoderAndHead,
    token_ids: np.ndarray,
    depth: np.ndarray,
    context: TreeContext,
    *,
    with_router_logits: bool = False,
    inside: tuple[nn.Module, dict[str, Any]] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Forward of one micro-batch: [T, M] hidden rows, and the router logits of each layer with a router ([T, E]).

    token_ids, depth: [T] integers. with_router_logits: without it the second result is empty. inside: a part of the
    model that calls the decoder, and further arguments of it (images).

    Raises:
        UnsupportedModelError: router logits of a model that returns none, or none with a graph.
    """
    device = lm.device
    if (heads := ATTENDS_INSIDE.get(lm.decoder)) is not None:
        context.inside = features.attention_inside.prepared(context, heads, device, lm.decoder.dtype)
    module, further = (lm.decoder, {}) if inside is None else inside
    names, takes_any = lm.forward_parameters if inside is None else parameters_of(type(module))
    arguments: dict[str, Any] = {"treewise": context} if takes_any else {}
    if "position_ids" in names:  # others have no attention, so no positions
        arguments["position_ids"] = to_device(depth, device, torch.long)[None]
    if "attention_mask" in names:
        arguments["attention_mask"] = context.empty_mask(device, lm.decoder.dtype)
    if with_router_logits:
        arguments["output_router_logits"] = True
    input_ids = to_device(token_ids, device, torch.long)[None]
    with _carried_input(lm) if context.carried.from_input else nullcontext():
        output = module(input_ids=input_ids, use_cache=False, **{**arguments, **further})
    context.is_done = True
    hidden = output.last_hidden_state[0]
    return hidden, features.router_loss.router_logits(lm, output, hidden) if with_router_logits else ()


@contextmanager
def _carried_input(lm: DecoderAndHead) -> Iterator[None]:
    """Inside, input rows require gradients: reentrant checkpoints and sharded layers look at nothing else."""
    embedding = lm.decoder.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda _module, _inputs, rows: carry(rows)[0])
    try:
        yield
    finally:
        hook.remove()


def parameters_of(kind: Any) -> tuple[frozenset[str], bool]:
    """Names of a forward's parameters, and whether it takes keyword arguments that it does not name."""
    parameters = inspect.signature(kind.forward).parameters
    return frozenset(parameters), any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def plain_weight(output: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight ([V, M]) and bias ([V]) of a linear layer; None for one that computes something else."""
    is_linear = isinstance(output, nn.Linear) and type(output).forward is nn.Linear.forward
    if not is_linear or has_hooks(output) or not output.weight.is_floating_point():
        return None
    return output.weight, output.bias


def has_hooks(module: nn.Module) -> bool:
    """Whether something may change what the module's own class computes."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def all_modules(model: nn.Module) -> list[nn.Module]:
    """`model.modules()`, in its order, without a generator in a generator for each level: a fifth of the time, for what
    looks at all of them in each step."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            waiting += [*module._modules.values()][::-1]
    return list(found)


def all_parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of modules themselves, each once, in the order of `model.parameters()`."""
    of_each = (module._parameters.values() for module in modules)
    return list({id(value): value for values in of_each for value in values if value is not None}.values())
