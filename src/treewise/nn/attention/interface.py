"""The one attention function that treewise registers with transformers, under the name `"treewise"`.

Tree metadata arrives as the keyword argument `treewise` of the model's forward, never through globals, so a
recomputation by gradient checkpointing finds the same arguments. Some models drop keyword arguments on the way to
their layers; all pass the attention mask on, so the empty mask that replaces theirs carries the same context. The name
stays installed: a forward without a tree (generation, evaluation) goes to the implementation that the model had before,
which the name itself carries.
"""

import sys
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import register_constant
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import override

from treewise.base import features
from treewise.errors import UnsupportedModelError
from treewise.nn.attention import mask_audit
from treewise.nn.attention.gateway import NOTHING, Carried, Gateway, GatewayRead, carry, inject
from treewise.nn.attention.implementations import IMPLEMENTATIONS, unknown_attention
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.platform.tensors import autocast_dtype

NAME = "treewise"
# Decoders whose compiled layers hold their attention where a micro-batch allows it (`nn.compilation`), with numbers of
# heads of queries and of keys, sizes of keys and of values.
ATTENDS_INSIDE: "WeakKeyDictionary[nn.Module, tuple[int, int, int, int]]" = WeakKeyDictionary()
# Arguments that models give to attention and that change nothing here: positions are already in queries and keys.
_HARMLESS = {"position_ids", "position_embeddings", "cache_position", "output_attentions", "use_cache", "cu_seq_lens_q"}
_KNOWN = _HARMLESS | {"dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal"}


class AttentionName(str):
    """The name `"treewise"`, with the implementation that the model had before."""

    previous: str

    def __new__(cls, previous: str) -> "AttentionName":
        name = super().__new__(cls, NAME)
        name.previous = previous
        return name

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return AttentionName, (self.previous,)

    @override
    def startswith(self, *given: Any) -> bool:
        """As a text's. transformers asks, and the Dynamo of torch 2.11 traces no method of C of a subclass."""
        return NAME.startswith(*given)


register_constant(AttentionName)  # nor, in 2.11, a look-up by one: no layer could be compiled


class TreeContext:
    """What the layers of one micro-batch need, given to the model's forward as `treewise=`.

    No dataclass: FSDP2, where it casts what layers are given, would hand them a copy.

    impl: a name of `IMPLEMENTATIONS`. reads: gateway rows in front of the own keys. writes: the gateway to fill.
    injects: the gateway whose collected gradients are added in the backward. rows: segments and schedule of recurrent
    layers, for models that have some (`nn.recurrent.TreeRows`). exchange: with the ranks that compute other tokens of
    the micro-batch (`distributed.context.ContextExchange`). routes: the experts of its tokens that were recorded
    (`nn.routing.RecordedRoutes`). carried:
    the layers whose keys, values and states carry gradients to what is above the micro-batch, or to other ranks, as the
    walk decided. inside: what layers read whose graphs hold their attention (`inside.Inside`). is_done: the forward is
    over; later calls of attention recompute.

    Raises:
        ConfigError: an unknown implementation.
    """

    def __init__(
        self,
        mask: TreeMask,
        impl: str,
        reads: tuple[GatewayRead, ...] = (),
        writes: Gateway | None = None,
        injects: Gateway | None = None,
        rows: Any = None,
        exchange: Any = None,
        routes: Any = None,
        carried: Carried = NOTHING,
        inside: Any = None,
    ) -> None:
        self.mask, self.impl, self.reads, self.writes, self.injects = mask, impl, reads, writes, injects
        self.rows, self.exchange, self.routes, self.carried, self.inside = rows, exchange, routes, carried, inside
        self.is_done = False
        self._num_calls: dict[nn.Module, int] = {}
        if impl not in IMPLEMENTATIONS:
            raise unknown_attention(impl)
        run = IMPLEMENTATIONS[impl].run
        self.run = resolve_name(run) if isinstance(run, str) else run

    def empty_mask(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """[1, 1, 0, 0], the attention mask to give to the model: a prepared one, so that it builds none of its own.

        A model that computes something from it fails with an error of shapes.
        """
        mask = torch.empty(1, 1, 0, 0, device=device, dtype=dtype)
        mask.treewise = self  # type: ignore[attr-defined]
        return mask

    def next_call(self, module: nn.Module) -> tuple[nn.Module, int]:
        """Names one call of a layer (layer, index), the same in every forward; layers may be called several times.

        Raises:
            UnsupportedModelError: such a layer is recomputed by gradient checkpointing, whose order is unknown.
        """
        num_calls = self._num_calls.get(module, 0)
        if not (self.reads or self.writes or self.injects or self.exchange):
            return module, 0  # nothing is kept under this name
        if not self.is_done:
            self._num_calls[module] = num_calls + 1
            return module, num_calls
        if num_calls > 1:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends {num_calls} times in one forward, which cannot be combined with both "
                "gradient checkpointing and a budget; turn one of them off."
            )
        return module, 0


def install(configs: list[PreTrainedConfig]) -> None:
    """Puts the name into model configurations; a second call changes nothing."""
    AttentionInterface.register(NAME, tree_attention_forward)
    AttentionMaskInterface.register(NAME, _previous_mask)
    for config in configs:
        current = config._attn_implementation  # noqa: SLF001
        if not isinstance(current, AttentionName):
            config._attn_implementation_internal = AttentionName(current or "eager")  # noqa: SLF001


def tree_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    treewise: TreeContext | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention contract: [1, H, T, D] in, ([1, T, H, D], weights) out."""
    context = context_of(module, attention_mask, treewise)
    if context is None:
        if mask_audit.is_observing():
            mask_audit.record(module, layer_rule(module, query, kwargs), attention_mask)
        return _previous_attention(module)(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is not None and attention_mask.numel() > 0:
        raise UnsupportedModelError(
            f"{type(module).__name__} builds a mask of its own ({list(attention_mask.shape)}), which a tree cannot "
            "replace."
        )
    if context.inside is not None and _is_plain(module, kwargs):
        scaling = kwargs.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return context.inside.attend(query, key, value, scaling), None
    return attend(module, query, key, value, context, kwargs), None


def _is_plain(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether a layer asks for nothing but causal attention, where no layer of the model has a window by its
    configuration. Traced, so without `layer_rule`, which reads the number of a layer."""
    unusual = any(kwargs.get(each) for each in ("dropout", "softcap", "sliding_window"))
    unusual = unusual or kwargs.get("s_aux") is not None or kwargs.get("is_causal") is False
    unusual = unusual or getattr(module, "is_causal", True) is False
    return not unusual and all(each in _KNOWN for each in kwargs) and not hasattr(module, "attn_temperature_tuning")


def context_of(
    module: nn.Module, attention_mask: torch.Tensor | None, by_keyword: TreeContext | None = None
) -> TreeContext | None:
    """The tree of a layer's call: given by keyword, or carried by the empty mask; None for a forward without a tree.

    Raises:
        UnsupportedModelError: the empty mask came without its tree.
    """
    context = by_keyword if by_keyword is not None else getattr(attention_mask, "treewise", None)
    if context is None and attention_mask is not None and attention_mask.numel() == 0:
        raise UnsupportedModelError(
            f"{type(module).__name__} lost the tree that the model's forward was given. With gradient checkpointing "
            "set use_reentrant=False."
        )
    return context


@torch.compiler.disable
def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: TreeContext,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """[1, T, H, D of the values]: attention of one layer under the tree.

    query: [1, H, T, D]; key, value: [1, Hkv, T, D]. kwargs: what the model gives to its attention (`layer_rule`).
    """
    rule = layer_rule(module, query, kwargs)
    sinks = kwargs.get("s_aux")
    call = context.next_call(module)
    dtype = autocast_dtype(query.device.type)  # which kernels that are called directly bypass
    if vars(module).get("attn_temperature_tuning"):
        query = features.depth_scaling.rescaled_for_depth(module, query, context.mask)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if context.carried is not NOTHING and context.carried.includes(*call):
        key, value = carry(key, value)
    reads = context.reads
    if context.exchange is not None:
        key, value = context.exchange.exchanged(key, value, call, context.writes, context.injects)
        reads = (*reads, context.exchange.read) if len(context.exchange.rows) else reads
    else:
        if context.writes is not None:
            context.writes.write(call, key, value)
        if context.injects is not None:
            key, value = inject(key, value, context.injects, call)
    out = context.run(query, key, value, context.mask.of_layer(rule), rule, sinks, reads, call)
    if context.exchange is not None:
        out = context.exchange.kept(out, call)
    return out.transpose(1, 2).contiguous()


def layer_rule(module: nn.Module, query: torch.Tensor, kwargs: dict[str, Any]) -> LayerRule:
    """Scaling, window, chunk and score cap of a layer, from its call ([1, H, T, D] queries) and its configuration.

    Raises:
        UnsupportedModelError: dropout, non-causal attention, or a tensor argument that is unknown here.
    """
    name = type(module).__name__
    if kwargs.get("dropout"):
        raise UnsupportedModelError(f"{name} has active attention dropout ({kwargs['dropout']}); set it to 0.")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} is not causal, so it cannot follow a tree.")
    for argument, passed in kwargs.items():
        if argument not in _KNOWN and isinstance(passed, torch.Tensor):
            raise UnsupportedModelError(f"{name} passes the tensor {argument!r} to attention, which is unknown here.")
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    # Some models give their window only to their mask (Phi-3.5-MoE).
    window, chunk = kwargs.get("sliding_window", getattr(config, "sliding_window", None)), None
    if config is not None and kinds is not None and getattr(module, "layer_idx", None) is not None:
        kind = kinds[module.layer_idx]
        if kind == "sliding_attention":
            window = window if window is not None else config.sliding_window
        elif kind == "full_attention":
            window = None
        elif kind == "chunked_attention":
            chunk = config.attention_chunk_size
    scaling = kwargs.get("scaling")
    return LayerRule(
        scaling=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        window=window,
        chunk=chunk,
        softcap=kwargs.get("softcap"),
    )


def _previous_attention(module: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    previous = module.config._attn_implementation.previous  # type: ignore[union-attr]  # noqa: SLF001
    if previous == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[previous]


def _previous_mask(*args: object, config: PreTrainedConfig, **kwargs: object) -> object:
    previous = config._attn_implementation.previous  # noqa: SLF001
    if previous not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    if not mask_audit.is_observing():
        return ALL_MASK_ATTENTION_FUNCTIONS[previous](*args, config=config, **kwargs)
    kwargs["allow_is_causal_skip"] = False  # a mask that is left out cannot be audited
    mask = ALL_MASK_ATTENTION_FUNCTIONS[previous](*args, config=config, **kwargs)
    if isinstance(mask, torch.Tensor):
        mask.mask_function = kwargs.get("mask_function")  # type: ignore[attr-defined]
    return mask
