"""Sharded parameters by PyTorch's FSDP2, on the CPU (gloo) and on CUDA (NCCL).

Each decoder layer is one FSDP unit: its parameters are gathered for its forward and backward, and its gradients are
added up and scattered in its backward. Parameters outside the layers are sharded by `ends`. On a mesh each layer's part
of this rank is sharded over the ranks with batches of their own, and experts over the ranks with the same ones.

Gradients are sums over ranks, not means: losses are divided by the denominator of the whole step.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from treewise.distributed import groups, ranks
from treewise.distributed.divided_tensors import divided_dimensions, local_part, num_copies
from treewise.distributed.ends import Ends
from treewise.distributed.mesh import Mesh, broadcast, spread_experts
from treewise.distributed.parts import mesh_of
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn.compilation import decoder_layers
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.gradient_hooks import refuse_hooks

# Keys of transformers' `fsdp_config`, and one of accelerate's `ParallelismConfig`, that `ShardSettings` follows.
_KEYS = {
    "reshard_after_forward",
    "cpu_offload",
    "offload_params",
    "state_dict_type",
    "version",
    "transformer_layer_cls_to_wrap",
    "activation_checkpointing",
    "dp_replicate_size",
}
# Keys of older configurations that have no meaning in FSDP2, or only one possible value here.
_MEANINGLESS = {
    *("auto_wrap_policy", "min_num_params", "use_orig_params", "sync_module_states", "limit_all_gathers"),
    *("backward_prefetch", "forward_prefetch", "cpu_ram_efficient_loading", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"),
}


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """How a model is sharded.

    reshard_after_forward: layers are whole only during their own forward and backward; False keeps them whole from
    forward to backward. cpu_offload: shards of the layers, their gradients and the optimizer's state stay in host
    memory. whole_checkpoints: every checkpoint also holds the whole model, as `from_pretrained` reads it. layer_names:
    classes of the modules that are sharded as units; None: the model's `_no_split_modules`. dp_replicate_size: hybrid
    sharding (HSDP): as many copies of the model, each sharded over equally many ranks that follow one another.
    """

    reshard_after_forward: bool = True
    cpu_offload: bool = False
    whole_checkpoints: bool = False
    layer_names: tuple[str, ...] | None = None
    dp_replicate_size: int = 1

    def as_config(self) -> dict[str, Any]:
        """The mapping that `shard_settings` reads these from."""
        names = {"transformer_layer_cls_to_wrap": list(self.layer_names)} if self.layer_names else {}
        return {
            "reshard_after_forward": self.reshard_after_forward,
            "cpu_offload": self.cpu_offload,
            "state_dict_type": "FULL_STATE_DICT" if self.whole_checkpoints else "SHARDED_STATE_DICT",
            **({} if self.dp_replicate_size == 1 else {"dp_replicate_size": self.dp_replicate_size}),
            **names,
        }


def shard_settings(fsdp: object, config: Any) -> ShardSettings | None:
    """The settings that transformers' `fsdp` and `fsdp_config` (a mapping) stand for; None without sharding.

    Raises:
        ConfigError: FSDP1, an unsupported key, or hybrid sharding without the number of copies.
    """
    words = " ".join(map(str, fsdp)) if isinstance(fsdp, list | tuple) else str(fsdp or "")
    values = {key.removeprefix("fsdp_"): value for key, value in dict(config or {}).items()}
    unknown = set(values) - _KEYS - _MEANINGLESS
    if unknown:
        raise ConfigError(f"fsdp_config has {', '.join(sorted(unknown))}; supported: {', '.join(sorted(_KEYS))}.")
    if words.lower() in ("", "false"):
        return None
    wrong = set(words.lower().split()) - {"true", "full_shard", "hybrid_shard", "shard_grad_op", "offload", "auto_wrap"}
    if wrong:
        raise ConfigError(f"fsdp={words!r}: {', '.join(sorted(wrong))} is not supported; use full_shard.")
    if str(values.get("version", 2)) != "2":
        raise ConfigError(f"fsdp_config version={values['version']!r}: only FSDP2 is supported; use 2.")
    if values.get("activation_checkpointing"):
        raise ConfigError("fsdp_config activation_checkpointing: use the setting gradient_checkpointing instead.")
    num_copies = values.get("dp_replicate_size", 1)
    if not str(num_copies).isdigit() or int(num_copies) < 1:
        raise ConfigError(f"dp_replicate_size={num_copies!r} must be a whole number of copies of the model.")
    if "hybrid_shard" in words and int(num_copies) == 1:
        raise ConfigError(
            "hybrid_shard shards the model inside groups of processes and copies it between them; give the number of "
            "copies (of machines, usually) in fsdp_config: {dp_replicate_size: 2}."
        )
    names = values.get("transformer_layer_cls_to_wrap")
    return ShardSettings(
        reshard_after_forward=_is_true(values.get("reshard_after_forward", "shard_grad_op" not in words)),
        cpu_offload="offload" in words or _is_true(values.get("cpu_offload", values.get("offload_params", False))),
        whole_checkpoints="FULL" in str(values.get("state_dict_type", "")).upper(),
        layer_names=(names,) if isinstance(names, str) else tuple(names) if names else None,
        dp_replicate_size=int(num_copies),
    )


class ShardedModel(nn.Module):
    """A wrapper of a model whose parameters are shards, so that transformers' loop wraps it in nothing else."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)


def _own_parameters(lm: DecoderAndHead, layers: list[nn.Module]) -> dict[nn.Parameter, None]:
    """The layers' parameters in the order of the model."""
    ordered = dict.fromkeys(parameter for layer in layers for parameter in layer.parameters())
    if len(ordered) < sum(len(list(layer.parameters())) for layer in layers):
        raise UnsupportedModelError(
            f"layers of {type(lm.decoder).__name__} share parameters, of which each layer would shard its own; leave "
            "fsdp out."
        )
    return ordered


def shard(
    model: nn.Module, lm: DecoderAndHead, device: torch.device, settings: ShardSettings, dtype: torch.dtype | None
) -> Ends:
    """Shards a whole model over all ranks, in place; rank 0's parameters win.

    dtype: of the layers' computation, where it is not that of their parameters; gradients are added up in float32.

    Raises:
        ConfigError: no process group, a mesh that leaves nothing to shard over, a number of ranks that cannot hold so
            many copies, no layers found, parameters that are not sharded in the end, or hooks on gradients.
        UnsupportedModelError: layers that share parameters, or what `refuse_narrow_experts` raises.
    """
    if not distributed.is_initialized():
        raise ConfigError("sharded (fsdp) needs a process group; start the run with torchrun or accelerate launch.")
    refuse_hooks(
        model,
        "and sharding puts another parameter in its place, on which it would not run. Take it off, or change gradients "
        "after a step.",
        on_any_gradient=True,
    )
    mesh = mesh_of(model)
    axes = None if mesh is None else sharding_axes(mesh, settings.dp_replicate_size)
    data = data_mesh(device, settings.dp_replicate_size) if axes is None else axes.data
    layers = find_layers(lm, settings.layer_names)
    ordered = _own_parameters(lm, layers)
    outside = {parameter for parameter in lm.decoder.parameters() if parameter not in ordered}
    for tensor in [*ordered, *model.buffers()]:
        broadcast(tensor.data, device, mesh)
    # Buffers of the model that no unit moves.
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    policy: dict[str, Any] = {
        "reshard_after_forward": settings.reshard_after_forward,
        # On a CPU the same code runs, and moves nothing.
        "offload_policy": CPUOffloadPolicy(device.type == "cuda") if settings.cpu_offload else OffloadPolicy(),
    }
    if dtype is not None:
        refuse_narrow_experts(lm, dtype)
        # Inputs are cast by autocast, as without shards; FSDP would cast copies of the tree that travels with them.
        policy["mp_policy"] = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for layer in layers:
        for experts in spread_experts(layer):
            assert axes is not None
            experts.register_forward_hook(_without_views)
            _add_up(fully_shard(experts, mesh=axes.expert_data, **policy))
        _add_up(fully_shard(layer, mesh=data, shard_placement_fn=partial(_free_dimension, data.size(-1)), **policy))
    # The root has no parameters of its own; it makes layers share their streams and gather ahead of one another.
    decoder_class = type(lm.decoder)
    _add_up(fully_shard(lm.decoder, mesh=data, ignored_params=outside))
    # transformers looks up by the name of the decoder's class what it can return (router logits), and FSDP made a new
    # class; its hooks and its state do not depend on it.
    lm.decoder.__class__ = decoder_class
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    ends = Ends(model, inside, (data, None if axes is None else axes.data_and_tensor), device, mesh)
    check_sharded(model)
    return ends


def refuse_narrow_experts(lm: DecoderAndHead, dtype: torch.dtype) -> None:
    """Raises `UnsupportedModelError` for experts whose rows torch's grouped products do not take in a dtype.

    Those of a model in its own dtype are found by the probe, which computes in it.
    """
    if getattr(lm.decoder.config, "_experts_implementation", None) != "grouped_mm":
        return
    for name, parameter in lm.model.named_parameters():
        if "expert" not in name or parameter.dim() != 3:
            continue
        columns = local_part(parameter).shape[-1]
        if columns * dtype.itemsize % 16:
            shown = str(dtype).removeprefix("torch.")
            raise UnsupportedModelError(
                f"{name} has {columns} columns on this rank, {columns * dtype.itemsize} bytes in {shown}, and torch's "
                "grouped products take rows of whole 16 bytes; lower tp_size where it divides them, train in float32, "
                'or load the model with experts_implementation="eager".'
            )


def sharding_axes(mesh: Mesh, num_copies: int) -> Mesh:
    """The groups of a mesh to shard over: all ranks that hold the same parts, or hybrid sharding inside each copy."""
    if mesh.data.size() == 1:
        raise ConfigError(
            f"sharded=True has nothing to shard over: tp_size={mesh.tensor.size()} divides every layer among all "
            f"{ranks.count()} processes already; leave sharded (fsdp) out, or lower tp_size."
        )
    return mesh if num_copies == 1 else mesh.in_copies(num_copies)


def data_mesh(device: torch.device, num_copies: int) -> DeviceMesh:
    """All ranks in one row, or hybrid sharding: a row for each copy of the model, over which that copy is sharded."""
    num_ranks = ranks.count()
    if num_copies == 1:
        return init_device_mesh(device.type, (num_ranks,))
    if num_ranks % num_copies or num_ranks == num_copies:
        raise ConfigError(
            f"dp_replicate_size={num_copies}: {num_ranks} processes cannot hold so many sharded copies of the model; "
            "give a divisor, less than all."
        )
    names = ("dp_replicate", "dp_shard")
    with groups.making_groups():
        copies = init_device_mesh(device.type, (num_copies, num_ranks // num_copies), mesh_dim_names=names)
    groups.follow_timeout(copies)
    return copies


def _without_views(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    """FSDP gathers for the backward by a hook on the output, which an in-place operation on a view would drop."""
    del module, inputs
    return output.clone()


def _free_dimension(num_ranks: int, parameter: nn.Parameter) -> Shard | None:
    """The dimension that a parameter is sharded along: the first, or one that tensor parallelism has not divided."""
    divided = divided_dimensions(parameter.data)
    if 0 not in divided:
        return None
    free = (dim for dim in range(1, parameter.dim()) if dim not in divided)
    return next((Shard(dim) for dim in free if parameter.shape[dim] % num_ranks == 0), None)


def check_sharded(model: nn.Module) -> None:
    """Raises `ConfigError` if any parameter is whole though sharding was asked for."""
    is_on_mesh = mesh_of(model) is not None

    def is_shard(parameter: torch.Tensor) -> bool:
        axes = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
        return isinstance(parameter, DTensor) and (
            not is_on_mesh or any(axis.startswith(("fsdp", "efsdp")) for axis in axes)
        )

    whole = [name for name, parameter in model.named_parameters() if not is_shard(parameter)]
    if whole:
        raise ConfigError(f"fsdp is set, but {len(whole)} parameters are not sharded: {', '.join(whole[:5])}.")


def find_layers(lm: DecoderAndHead, names: tuple[str, ...] | None) -> list[nn.Module]:
    """The modules of a decoder that are sharded as units, outermost ones only.

    Raises:
        ConfigError: there are none.
    """
    layers = decoder_layers(lm, names)
    if not layers:
        raise ConfigError(
            f"{type(lm.decoder).__name__} does not name its layers, which are the units to shard; name their "
            "class in fsdp_config: {transformer_layer_cls_to_wrap: ...}."
        )
    return layers


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state on rank 0, in host memory; empty on other ranks. Every rank calls this. Shards are gathered.

    A tied parameter is gathered once: its names share one tensor, so that `save_pretrained` writes it once.
    """
    state = {}
    known: dict[Any, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if value not in known:
            whole = whole_tensor(value) if isinstance(value, DTensor) else value
            known[value] = whole.detach().cpu() if ranks.own() == 0 else torch.empty(0)
        if ranks.own() == 0:
            state[name] = known[value]
    return state


def whole_tensor(shard: DTensor) -> torch.Tensor:
    """A gathered tensor, on the device of its process group, also if its shards are in host memory."""
    held: Any = shard.detach().to(shard.device_mesh.device_type)
    return cast(torch.Tensor, held.full_tensor())


def gradient_norm(parameters: list[nn.Parameter], max_norm: float, device: torch.device) -> float:
    """Norm of the whole gradient, which is scaled to at most `max_norm` (0: left as it is). Every rank calls this.

    Shards may lie in host memory, where their process group cannot reach them; so every rank adds up its own, and one
    number is exchanged on `device`.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        held = local_part(grad)
        wide = torch.promote_types(held.dtype, torch.float32)
        norm_of = torch.linalg.vector_norm(held, dtype=wide) / math.sqrt(num_copies(grad))  # all copies count once
        norms.setdefault(held.device, []).append(norm_of)
    own = sum(float(torch.stack(each).double().square().sum()) for each in norms.values())
    norm = math.sqrt(ranks.sum_over(device, own)[0])
    if max_norm > 0 and norm > max_norm and math.isfinite(norm):
        for grad in grads:
            grad.mul_(max_norm / (norm + 1e-6))
    return norm


def reshard(model: nn.Module) -> None:
    """Leaves no layer whole. With `reshard_after_forward=False` one is until its backward, which an evaluation does not
    have; the model's parameters, which are saved and which an optimizer gets, would not be its shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def like_shard(whole: torch.Tensor, shard: DTensor) -> DTensor:
    """A tensor that every rank has whole, sharded like another one, without communication."""
    sharded: Any = distribute_tensor(whole, shard.device_mesh, shard.placements, src_data_rank=None)
    return cast(DTensor, sharded.to(shard.device))


def _add_up(unit: FSDPModule) -> None:
    """Sums gradients instead of averaging them, by an operation that gloo supports, too."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def _is_true(value: object) -> bool:
    return str(value).lower() in ("true", "1", "yes")
