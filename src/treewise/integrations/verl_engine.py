"""verl's FSDP engines on trees.

With `use_fused_kernels`, verl's engine calls its model once for each micro-batch and reads log-probs and entropies.
Only the forward of that model is replaced: the sequences of the micro-batch become a forest, each shared token is
computed once, and both fields come back in verl's layout. Losses, metrics, clipping and the optimizer are verl's own.

verl's fused forward runs the decoder and returns log-probs and entropies of its rows. treewise calls this very function
with a stand-in for the model whose decoder returns rows that exist already, so that verl's own kernels compute every
number.

Letters: E edges, M model width.
"""

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from treewise.distributed import ranks
from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.integrations.batches.batch_forest import IGNORED, NotShareable, Rows, rows_to_forest
from treewise.integrations.batches.tree_batches import Fields, StandIn, TreeBatches, as_numpy, fields_in_rows, tensor_of
from treewise.integrations.verl_batches import relatives_together
from treewise.nn.wrapped import base_model

logger = logging.getLogger("treewise")

# How far a log-prob of the first micro-batch may be from verl's own: the largest difference in float32; in lower
# precision the median one, because it may route single tokens elsewhere.
_MAX_GAP, _MAX_MEDIAN_GAP = 1e-2, 0.1
# Arguments that define the rows, and those that belong to the head or change nothing.
_OF_THE_ROWS = ("input_ids", "attention_mask", "position_ids", "shift_labels")
_OTHERS = ("use_cache", "return_dict", "temperature", "cu_seqlens", "cu_seqlens_cpu")


class VerlBatch(Protocol):
    """verl's `TensorDict`; what of it is read."""

    def __getitem__(self, name: str, /) -> torch.Tensor: ...
    def __contains__(self, name: object, /) -> bool: ...
    def get(self, name: str, default: None, /) -> torch.Tensor | None: ...
    def select(self, *names: str) -> "VerlBatch": ...
    def cpu(self) -> "VerlBatch": ...
    def to_padded_tensor(self) -> Mapping[str, torch.Tensor]: ...


class VerlOutput(TypedDict):
    """What verl's `forward_step` returns beside the loss."""

    model_output: dict[str, torch.Tensor]
    metrics: dict[str, float | None]


class FusedOutput(Protocol):
    """What verl's fused forward returns."""

    log_probs: torch.Tensor
    entropy: torch.Tensor


Step = Callable[..., tuple[torch.Tensor | None, VerlOutput]]


def rows_of_call(kwargs: Mapping[str, object], routed_experts: np.ndarray | None = None) -> Rows | None:
    """A micro-batch as a forest; None if it has no token with a label.

    Packed (`use_remove_padding`): one row of all sequences, which begin where positions start anew, with the label of
    each token. Padded: a mask, and the next token of each row is the label. The last token of a sequence has a label,
    too (what stands next in memory), because verl computes it and drops it later. Each row and sequence begins at
    position 0, and verl's forwards keep sequences of a row apart. routed_experts: [F, layers, k] of the
    sequences one behind the other; of tokens behind them, which fill up, there are none.

    Raises:
        NotShareable: the micro-batch has to be computed by verl's own forward.
    """
    for name, value in kwargs.items():
        if value is not None and name not in (*_OF_THE_ROWS, *_OTHERS):
            raise NotShareable(f"the argument {name!r} is not supported")
    token_ids, mask, positions, labels = (tensor_of(kwargs, name) for name in _OF_THE_ROWS)
    if token_ids is None:
        raise NotShareable("it has no input_ids")
    if positions is not None and positions.shape != token_ids.shape:
        raise NotShareable(f"position_ids of shape {tuple(positions.shape)} do not fit {tuple(token_ids.shape)} tokens")
    if mask is not None and mask.shape != token_ids.shape:
        raise NotShareable(f"attention_mask of shape {tuple(mask.shape)} does not fit {tuple(token_ids.shape)} tokens")
    if labels is None:
        labels = torch.roll(token_ids, shifts=-1, dims=-1)
    if mask is not None:
        labels = labels.masked_fill(mask == 0, IGNORED)
        positions = None  # of padding they are zero; tokens of a row count on from its first
    num_real = token_ids.numel() if mask is None else int(mask.count_nonzero())
    if routed_experts is not None and len(routed_experts) < num_real:
        more = np.full((num_real - len(routed_experts), *routed_experts.shape[1:]), -1)
        routed_experts = np.concatenate([routed_experts, more])
    return rows_to_forest(
        as_numpy(token_ids), as_numpy(labels), as_numpy(mask), as_numpy(positions), routed_experts=routed_experts
    )


def recorded_experts(micro_batch: VerlBatch) -> np.ndarray | None:
    """[F, layers, k] the experts that verl's rollout recorded (`enable_rollout_routing_replay`), of the sequences of a
    micro-batch one behind the other; None where it recorded none. verl fills up with rows of zeros."""
    experts = micro_batch.get("routed_experts", None)
    if experts is None:
        return None
    table = as_numpy(torch.cat(list(experts.unbind())))
    recorded: np.ndarray = np.where((table == 0).all((1, 2), keepdims=True), -1, table)
    return recorded


def gap_to_rollout(log_probs: torch.Tensor, micro_batch: VerlBatch) -> float | None:
    """`logprob_gap` of a micro-batch: mean of `exp(|log_probs - rollout_log_probs|)` over the tokens of its response
    mask. log_probs: of all tokens, as verl's engine returns them. None: the mask has none."""
    from verl.workers.utils.padding import no_padding_2_padding

    padded: torch.Tensor = no_padding_2_padding(log_probs, micro_batch)
    found = padded.float().cpu()
    rollout = micro_batch.select("rollout_log_probs", "response_mask").cpu().to_padded_tensor()
    gaps = torch.exp((found - rollout["rollout_log_probs"]).abs())[rollout["response_mask"].bool()]
    return gaps.mean().item() if len(gaps) else None


class VerlHead:
    """verl's head at one temperature, which divides the logits; a `RowHead`."""

    names: tuple[str, ...] = ("log_probs", "entropy")
    without_gradient: tuple[str, ...] = ()

    def __init__(
        self, model: nn.Module, decoder: nn.Module, forward: Callable[..., FusedOutput], temperature: object
    ) -> None:
        self._model, self._decoder, self._forward, self._temperature = model, decoder, forward, temperature

    def __call__(self, hidden_EM: torch.Tensor, labels_E: torch.Tensor) -> Fields:
        """[E] log-probs of the labels (float32) and entropies (the model's dtype), differentiable."""
        stand_in = StandIn(self._model, self._decoder, hidden_EM[None])
        output = self._forward(
            stand_in, shift_labels=labels_E[None], temperature=self._temperature, return_dict=True, use_cache=False
        )
        return {"log_probs": output.log_probs.reshape(-1), "entropy": output.entropy.reshape(-1)}


class EngineSharing:
    """What `share_prefixes` does to one engine: `counts` are its statistics, `remove()` undoes it.

    The first micro-batch is also computed by verl's own forward, without gradients, and its log-probs compared: a model
    that fails this is an `UnsupportedModelError`.
    """

    def __init__(self, of_verl: Any, model: nn.Module, engine: TreeEngine, min_ratio: float) -> None:
        self.model, self.engine, self._of_verl = model, engine, of_verl
        self._batches = TreeBatches(engine, model, min_ratio)
        self.counts = self._batches.counts
        self._own: Callable[..., FusedOutput] = type(model).forward
        self._is_compared = False
        self._experts: np.ndarray | None = None  # of the micro-batch that runs
        self._is_measured = False  # whether the gap to the rollout was, in the batch that runs
        model.forward = MethodType(self._forward_of(), model)
        own: Callable[..., object] = type(of_verl).forward_backward_batch
        self._own_step: Step = type(of_verl).forward_step

        @functools.wraps(own)
        def forward_backward_batch(*args: object, **kwargs: object) -> object:
            self._is_measured = False
            with relatives_together(min_ratio):
                return own(of_verl, *args, **kwargs)

        @functools.wraps(self._own_step)
        def forward_step(micro_batch: VerlBatch, loss_function: object, forward_only: bool) -> object:
            return self._step(micro_batch, loss_function, trains=not forward_only)

        of_verl.forward_backward_batch, of_verl.forward_step = forward_backward_batch, forward_step

    def remove(self) -> None:
        """Computes every micro-batch by verl's own forward again."""
        self.model.__dict__.pop("forward", None)
        for name in ("forward_backward_batch", "forward_step"):
            self._of_verl.__dict__.pop(name, None)

    def __repr__(self) -> str:
        return f"EngineSharing({self.counts})"

    def _forward_of(self) -> Callable[..., Any]:
        @functools.wraps(self._own)
        def tree_forward(model: nn.Module, *args: object, **kwargs: object) -> object:
            if model is not self.model or args or not kwargs.get("return_dict") or "temperature" not in kwargs:
                return self._own(model, *args, **kwargs)  # no call of verl's engine: `generate`, an export
            return self._serve(kwargs)

        return tree_forward

    def _step(self, micro_batch: VerlBatch, loss_function: object, *, trains: bool) -> object:
        """verl's own step of a micro-batch, through its recorded experts.

        An update's metrics get `routed_otherwise`, and those of its first micro-batch `replayed_gap` and `live_gap`,
        where the rollout returned log-probs; the latter takes one more forward, which all ranks have.
        """
        experts, before = recorded_experts(micro_batch), replace(self.counts)
        is_replayed = trains and experts is not None
        live = None
        if is_replayed and not self._is_measured and "rollout_log_probs" in micro_batch:
            self._is_measured, live = True, self._live_logprobs(micro_batch)
        self._experts = experts
        try:
            loss, output = self._own_step(self._of_verl, micro_batch, loss_function, not trains)
        finally:
            self._experts = None
        if is_replayed and (num_recorded := self.counts.num_recorded - before.num_recorded):
            num_otherwise = self.counts.num_otherwise - before.num_otherwise
            output["metrics"]["routed_otherwise"] = num_otherwise / num_recorded
        if live is not None:
            gap, live_gap = (gap_to_rollout(each, micro_batch) for each in (output["model_output"]["log_probs"], live))
            output["metrics"] |= {} if gap is None else {"replayed_gap": gap, "live_gap": live_gap}
        return loss, output

    @torch.no_grad()
    def _live_logprobs(self, micro_batch: VerlBatch) -> torch.Tensor:
        """Log-probs of a micro-batch as its routers choose now, in verl's layout; it is not counted."""
        before = copy.deepcopy(self.counts)
        _, output = self._own_step(self._of_verl, micro_batch, None, forward_only=True)
        vars(self.counts).update(vars(before))
        return output["model_output"]["log_probs"]

    def _serve(self, kwargs: dict[str, object]) -> object:
        expected = None
        if not self._is_compared:
            with torch.no_grad():
                expected = self._own(self.model, **kwargs).log_probs
        # Of several ranks all compare their first micro-batch, whatever it is, because layers are gathered by all.
        self._is_compared = ranks.count() > 1
        shape = _shape_of(kwargs)
        rows = self._rows(kwargs, self._experts, whatever_size=expected is not None)
        if rows is None:
            return self._own(self.model, **kwargs)
        head = VerlHead(self.model, self.engine.lm.decoder, self._own, kwargs["temperature"])
        fields, _, computed = self._batches.fields(rows, head)
        self._batches.count(rows, rows.forest.num_trajectories, computed)
        fields = fields_in_rows(fields, rows, shape)
        if expected is not None:
            self._compare(self._live(kwargs, fields, head)["log_probs"], expected, rows)
        from verl.models.transformers.dense_common import CausalLMOutputForPPO

        return CausalLMOutputForPPO(log_probs=fields["log_probs"], entropy=fields["entropy"])

    def _rows(self, kwargs: dict[str, object], experts: np.ndarray | None, *, whatever_size: bool) -> Rows | None:
        """The rows of a call, through recorded experts; None for those that are left to verl's own forward.

        Raises:
            ConfigError: with recorded experts, which that forward would not take.
        """
        rows = self._batches.rows(
            lambda: (rows_of_call(kwargs, experts), _shape_of(kwargs).numel()),
            whatever_size=whatever_size or experts is not None,
        )
        if rows is None and experts is not None:
            raise ConfigError(
                "a micro-batch with routed_experts cannot be computed as a tree (the warning above says why), and "
                "verl's own forward would choose other experts; set "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=False."
            )
        return rows

    @torch.no_grad()
    def _live(self, kwargs: dict[str, object], fields: Fields, head: VerlHead) -> Fields:
        """The fields of a micro-batch as its routers choose now, which verl's own forward is compared with."""
        if self._experts is None:
            return fields
        rows = self._rows(kwargs, None, whatever_size=True)
        assert rows is not None
        return fields_in_rows(self._batches.fields(rows, head)[0], rows, _shape_of(kwargs))

    def _compare(self, found: torch.Tensor, expected: torch.Tensor, rows: Rows) -> None:
        """Raises `UnsupportedModelError` where the tree's log-probs are not verl's."""
        self._is_compared = True
        gaps = (found.detach() - expected).abs().reshape(-1)[torch.as_tensor(rows.cell, device=found.device)]
        is_low = torch.is_autocast_enabled(found.device.type) or any(
            parameter.dtype.itemsize < 4 for parameter in self.model.parameters() if parameter.is_floating_point()
        )
        gap, limit = (gaps.median(), _MAX_MEDIAN_GAP) if is_low else (gaps.max(), _MAX_GAP)
        if not gap.item() <= limit:
            raise UnsupportedModelError(
                f"log-probs of {type(self.model).__name__} on a tree differ from those of verl's own forward by "
                f"{gap.item():.3g} (limit {limit:g}). Leave treewise.integrations.verl out for this model, and please "
                "report it."
            )


def _shape_of(kwargs: Mapping[str, object]) -> torch.Size:
    token_ids = kwargs["input_ids"]
    assert isinstance(token_ids, torch.Tensor)
    return token_ids.shape


def share_engine(engine: Any, *, attention: str = "auto", min_ratio: float = 1.1) -> EngineSharing:
    """Makes one engine of verl compute the shared prefixes of each micro-batch once.

    Parameters:
        engine: an initialized `FSDPEngineWithLMHead`, or a `TrainingWorker` that holds one.
        attention: as in `TreeEngine`.
        min_ratio: micro-batches with fewer tokens than this for each tree token are left to verl's own forward.

    Raises:
        ConfigError: an engine of another kind or not initialized, or a setting of verl that trees cannot follow.
        UnsupportedModelError: the model cannot follow a tree (docs/models.md).
    """
    engine = getattr(engine, "engine", engine)
    _refuse_settings(engine)
    module = engine.module
    base = base_model(module.module if isinstance(module, FullyShardedDataParallel) else module)
    _refuse_head(base)
    tree_engine = TreeEngine(base, None, attention, check=False, router_aux_loss=False)
    return EngineSharing(engine, base, tree_engine, min_ratio)


def install() -> None:
    """Shares the prefixes of every engine with a language-model head that is initialized from now on.

    A second call changes nothing.

    Raises:
        ConfigError: verl is not installed, or has no such engine.
    """
    engine_class = _engine_class()
    before = engine_class.initialize
    if hasattr(before, "is_of_treewise"):
        return

    @functools.wraps(before)
    def initialize(self: Any) -> None:
        before(self)
        if self.model_config.model_type == "language_model":
            self.treewise = share_engine(self)
        else:
            logger.info(
                "verl: prefixes are not shared in a %s, only in a language_model.", self.model_config.model_type
            )

    initialize.is_of_treewise = True  # type: ignore[attr-defined]
    engine_class.initialize = initialize


def _engine_class() -> Any:
    try:
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    except ImportError as error:
        raise ConfigError(
            f"treewise.integrations.verl needs verl 0.9 with its FSDP engine, which does not import: {error}. "
            "See docs/verl.md."
        ) from error
    return FSDPEngineWithLMHead


def _refuse_settings(engine: Any) -> None:
    kind = type(engine).__name__
    if not isinstance(engine, _engine_class()) or kind != "FSDPEngineWithLMHead":
        raise ConfigError(
            f"share_prefixes takes verl's FSDPEngineWithLMHead or a TrainingWorker with one, found a {kind}. Set "
            "actor_rollout_ref.actor.strategy=fsdp2 or fsdp; of an ActorRolloutRefWorker give worker.actor and "
            "worker.ref, one call each."
        )
    if getattr(engine, "module", None) is None:
        raise ConfigError("this engine of verl has no model yet; call engine.initialize() first.")
    config, model = engine.engine_config, engine.model_config
    size = config.ulysses_sequence_parallel_size
    if size > 1:
        raise ConfigError(
            f"ulysses_sequence_parallel_size={size} cuts sequences over ranks, and a tree needs them whole: set it to "
            "1. Where rollouts share prefixes, computing these once saves memory instead."
        )
    if not model.use_fused_kernels:
        raise ConfigError(
            "verl returns log-probs instead of logits only with its fused kernels: set "
            "actor_rollout_ref.model.use_fused_kernels=True and "
            "actor_rollout_ref.model.fused_kernel_options.impl_backend=torch (or triton)."
        )
    on = {
        "model.tiled_mlp.enabled": model.tiled_mlp.get("enabled", False),
        "model.mtp.enable": model.mtp.enable,
        "model.enable_activation_offload": model.enable_activation_offload,
        "actor.router_replay": config.router_replay.mode != "disabled",
    }
    for name in (name for name, is_on in on.items() if is_on):
        raise ConfigError(
            f"actor_rollout_ref.{name} counts on forwards of flat rows, layer by layer; disable it, or leave "
            "treewise.integrations.verl out."
        )


def _refuse_head(base: nn.Module) -> None:
    """Raises for a head whose weight verl's fused forward cannot read, or a forward that is not the fused one."""
    if not hasattr(base, "_verl_fused_kernels_backend"):
        raise ConfigError(
            f"verl left the forward of {type(base).__name__} as it was, although use_fused_kernels is set: "
            "fused_kernel_options.impl_backend must be torch, triton or liger, and the family one that verl fuses."
        )
    if isinstance(base.get_output_embeddings(), FSDPModule):  # type: ignore[operator]
        raise ConfigError(
            f"verl shards the head of {type(base).__name__} as a unit of its own under strategy=fsdp2, and its fused "
            "kernels read the weight outside of that unit, which fails without treewise, too: set "
            "actor_rollout_ref.actor.strategy=fsdp (and ref), or use a model with tied embeddings."
        )
