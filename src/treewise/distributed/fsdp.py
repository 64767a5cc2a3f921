"""Sharded parameters by PyTorch's FSDP2, on the CPU (gloo) and on CUDA (NCCL).

Each decoder layer is one FSDP unit: its parameters are gathered for its forward and backward, and its gradients are
added up and scattered in its backward. Parameters outside the layers (embedding, last norm, head: `Ends`) are sharded
here. The engine calls the decoder and uses the head's weight apart from any module's forward, for many micro-batches,
so these parameters are gathered once for all micro-batches of a batch, and their gradients scattered once after it.

Gradients are sums over ranks, not means: losses are divided by the denominator of the whole step.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from treewise.distributed import ranks
from treewise.distributed.mesh import local_part, mesh_of, num_copies
from treewise.errors import ConfigError
from treewise.nn.model import DecoderAndHead, base_model

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


def shard_settings(fsdp: Any, config: Any) -> ShardSettings | None:
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Ends:
    """The parameters outside the layers: shards, and whole while `whole` is entered."""

    def __init__(self, model: nn.Module, inside: set[nn.Parameter], mesh: Any, device: torch.device) -> None:
        self._owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        self._is_whole = False
        outside: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter not in inside:
                    outside.setdefault(parameter, []).append((module, name))  # several modules: a tied parameter
        for parameter, owners in outside.items():
            placement = Shard(0) if parameter.dim() else Replicate()
            # From rank 0: its parameters win, as under DistributedDataParallel.
            placements = [*[Replicate()] * (mesh.ndim - 1), placement]
            data = distribute_tensor(parameter.data.to(device), mesh, placements, src_data_rank=0)
            shard = nn.Parameter(data, requires_grad=parameter.requires_grad)
            self._owners[shard] = owners
            _put(owners, shard)

    @contextmanager
    def whole(self, trains: bool) -> Iterator[None]:
        """Gathers the parameters; afterwards adds the ranks' gradients up into the shards' `.grad` where `trains`.

        A collective: every rank enters and leaves at the same time.
        """
        if self._is_whole:
            yield
            return
        gathered = {shard: _gathered(shard) for shard in self._owners}
        for shard, owners in self._owners.items():
            _put(owners, gathered[shard])
        self._is_whole = True
        try:
            yield
            if trains:
                for shard, parameter in gathered.items():
                    if shard.requires_grad:
                        _add_gradient(shard, parameter.grad)
        finally:
            self._is_whole = False
            for shard, owners in self._owners.items():
                _put(owners, shard)


def shard(
    model: nn.Module, lm: DecoderAndHead, device: torch.device, settings: ShardSettings, dtype: torch.dtype | None
) -> Ends:
    """Shards a whole model over all ranks, in place; rank 0's parameters win.

    dtype: of the layers' computation, where it is not that of their parameters; gradients are added up in float32.

    Raises:
        ConfigError: no process group, a model on a mesh, one that cannot hold so many copies, no layers found, or
            parameters that are not sharded in the end.
    """
    if not distributed.is_initialized():
        raise ConfigError("fsdp needs a process group; start the run with torchrun or accelerate launch.")
    if mesh_of(model) is not None:
        raise ConfigError("sharded=True cannot be combined with tp_size or ep_size yet; leave sharded (fsdp) out.")
    mesh = _mesh(device, settings.dp_replicate_size)
    layers = find_layers(lm, settings.layer_names)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    outside = {parameter for parameter in lm.decoder.parameters() if parameter not in inside}
    for tensor in [*inside_in_order(layers), *model.buffers()]:
        _broadcast(tensor.data, device)
    # Buffers of the model that no unit moves.
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    policy: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": settings.reshard_after_forward,
        # On a CPU the same code runs, and moves nothing.
        "offload_policy": CPUOffloadPolicy(device.type == "cuda") if settings.cpu_offload else OffloadPolicy(),
    }
    if dtype is not None:
        # Inputs are cast by autocast, as without shards; FSDP would cast copies of the tree that travels with them.
        policy["mp_policy"] = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    for layer in layers:
        _add_up(fully_shard(layer, **policy))
    # The root has no parameters of its own; it makes layers share their streams and gather ahead of one another.
    decoder_class = type(lm.decoder)
    _add_up(fully_shard(lm.decoder, mesh=mesh, ignored_params=outside))
    # transformers looks up by the name of the decoder's class what it can return (router logits), and FSDP made a new
    # class; its hooks and its state do not depend on it.
    lm.decoder.__class__ = decoder_class
    ends = Ends(model, {parameter for layer in layers for parameter in layer.parameters()}, mesh, device)
    check_sharded(model)
    return ends


def _mesh(device: torch.device, num_copies: int) -> DeviceMesh:
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
    return init_device_mesh(device.type, (num_copies, num_ranks // num_copies), mesh_dim_names=names)


def check_sharded(model: nn.Module) -> None:
    """Raises `ConfigError` if any parameter is whole though sharding was asked for."""
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if whole:
        raise ConfigError(f"fsdp was asked for, but {len(whole)} parameters are whole: {', '.join(whole[:5])}.")


def find_layers(lm: DecoderAndHead, names: tuple[str, ...] | None) -> list[nn.Module]:
    """The modules of a decoder that are sharded as units, outermost ones only.

    Raises:
        ConfigError: there are none.
    """
    wanted = set(names or getattr(base_model(lm.model), "_no_split_modules", None) or ())
    layers: list[nn.Module] = []
    below: set[nn.Module] = set()
    for module in lm.decoder.modules():
        if module not in below and type(module).__name__ in wanted and module is not lm.decoder:
            layers.append(module)
            below |= set(module.modules())
    if not layers:
        raise ConfigError(
            f"no layers of {type(lm.decoder).__name__} are known to shard; name their class in fsdp_config: "
            "{transformer_layer_cls_to_wrap: ...}."
        )
    return layers


def inside_in_order(layers: list[nn.Module]) -> list[nn.Parameter]:
    """Parameters of the layers, each once, in the order of the model."""
    return list({parameter: None for layer in layers for parameter in layer.parameters()})


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state on rank 0; empty on other ranks. Every rank calls this. Shards are gathered, and what training
    changes is copied, into host memory.

    A tied parameter is gathered once: its names share one tensor, so that `save_pretrained` writes it once.
    """
    state = {}
    known: dict[Any, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if value not in known:
            whole = whole_tensor(value) if isinstance(value, DTensor) else value
            known[value] = copy_of_changing(whole) if ranks.own() == 0 else torch.empty(0)
        if ranks.own() == 0:
            state[name] = known[value]
    return state


def copy_of_changing(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory (of a shard, a shard) where training may change the tensor; a frozen parameter itself."""
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        return tensor.detach()
    return tensor.detach().to("cpu", copy=True)


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


def like_shard(whole: torch.Tensor, shard: DTensor) -> DTensor:
    """A tensor that every rank has whole, sharded like another one, without communication."""
    sharded: Any = distribute_tensor(whole, shard.device_mesh, shard.placements, src_data_rank=None)
    return cast(DTensor, sharded.to(shard.device))


def _add_up(unit: Any) -> None:
    """Sums gradients instead of averaging them, by an operation that gloo supports, too."""
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)


def _gathered(shard: nn.Parameter) -> nn.Parameter:
    assert isinstance(shard.data, DTensor)
    return nn.Parameter(shard.data.full_tensor(), requires_grad=shard.requires_grad)


def _add_gradient(shard: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Adds the sum of the ranks' gradients; a rank without one contributes zeros."""
    held = shard.data
    assert isinstance(held, DTensor)
    own = torch.zeros(held.shape, dtype=held.dtype, device=held.to_local().device) if grad is None else grad
    total = DTensor.from_local(own, held.device_mesh, [Partial()] * held.device_mesh.ndim, run_check=False)
    summed = total.redistribute(held.device_mesh, held.placements)
    shard.grad = summed if shard.grad is None else shard.grad + summed


def _put(owners: list[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    for module, name in owners:
        module._parameters[name] = parameter


def _broadcast(tensor: torch.Tensor, device: torch.device) -> None:
    moved = tensor.to(device)
    distributed.broadcast(moved, 0)
    if moved is not tensor:
        tensor.copy_(moved)


def _is_true(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")
