"""Meshes of processes: tensor, expert and data parallelism by transformers' own layers, combined with trees.

Ranks of a tensor-parallel group (`tp_size`) hold parts of the same layers and compute one batch together. Ranks of an
expert-parallel group (`ep_size`, a multiple of `tp_size`) each hold some experts of every mixture, whole, and send one
another tokens. All other ranks have batches of their own, and their gradients are added up. transformers builds the
meshes and replaces the forwards of layers; it would also apply its own FSDP2, whose units the engine does not enter, so
`load_on_mesh` asks it for the rest alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from treewise.distributed import groups, ranks
from treewise.distributed.divided_tensors import local_part, sum_gradients
from treewise.distributed.parts import mesh_of
from treewise.distributed.same_plan import differing
from treewise.distributed.watchdog import join_as_launched
from treewise.errors import ConfigError, DataError, UnsupportedModelError, num
from treewise.nn.tensor_parallel import require_meshes


@dataclass(frozen=True, slots=True)
class Mesh:
    """The groups that this rank is in.

    tensor: ranks with parts of the same layers and the same batch. expert: ranks that hold all experts together.
    data: ranks that hold the same parts of layers, with batches of their own. expert_data: ranks with the same experts.
    data_and_tensor: both axes, of all ranks.
    """

    tensor: DeviceMesh
    expert: DeviceMesh
    data: DeviceMesh
    expert_data: DeviceMesh
    data_and_tensor: DeviceMesh

    @property
    def is_first_of_batch(self) -> bool:
        """Whether this rank speaks for the ranks that compute its batch."""
        return self.tensor.get_local_rank() == 0

    @property
    def sizes(self) -> str:
        """Both sizes, as settings are given."""
        return f"tp_size={self.tensor.size()}, ep_size={self.expert.size()}"

    @property
    def needs_lockstep(self) -> bool:
        """Whether ranks with different batches exchange tokens within their passes."""
        return self.expert.size() > self.tensor.size()

    def refuse_held_passes(self, hold: str) -> None:
        """Raises `ConfigError` for `hold="always"`. Tokens return to their rank in the backward of the pass that sent
        them, so both are one turn of all ranks.
        """
        if hold == "always":
            raise ConfigError(
                f"hold='always' cannot be combined with {self.sizes}: with ep_size > tp_size ranks would run backwards "
                "of passes that they did not compute together; use auto or never."
            )

    def data_of(self, parameter: torch.Tensor) -> DeviceMesh:
        """The ranks whose gradients of a parameter are to be added up."""
        return self.expert_data if _is_expert(parameter) else self.data

    def in_copies(self, num_copies: int) -> "Mesh":
        """The same groups for hybrid sharding: their axes of data have a row for each copy of the model.

        Raises:
            ConfigError: the copies do not divide the ranks that hold the same parts, or the groups of experts.
        """
        sizes = {"parts of layers": self.data.size(), "experts": self.expert_data.size()}
        for name, size in sizes.items():
            if size % num_copies:
                fitting = [str(each) for each in range(1, size + 1) if not any(n % each for n in sizes.values())]
                raise ConfigError(
                    f"dp_replicate_size={num_copies} does not divide the {num(size, 'process', 'processes')} with the "
                    f"same {name} ({self.sizes}, {ranks.count()} processes); choose {' or '.join(fitting)}, "
                    "or change tp_size or ep_size."
                )
        dense = _in_rows(self.data_and_tensor, "fsdp", num_copies)
        experts = _in_rows(self.expert_data, "efsdp", num_copies)
        return replace(self, data_and_tensor=dense, data=dense["fsdp_copies", "fsdp_shards"], expert_data=experts)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds gradients up over the ranks with batches of their own."""
        for parameter in parameters:
            held_alike = self.data_of(parameter)
            if held_alike.size() > 1:
                sum_gradients([parameter], held_alike.get_group())


class _Loaded(Protocol):
    """What of transformers' configuration of a mesh is read."""

    fsdp_size: int
    dp_replicate_size: int
    dp_size: int
    pp_size: int


def mesh_loaded(manager: Any, config: _Loaded) -> Mesh:
    """The mesh that transformers loaded a model on (`parts.mesh_of`), by its manager and its configuration of it."""
    if config.dp_size > 1 or config.pp_size > 1:
        raise UnsupportedModelError(
            f"the model was loaded with fsdp_size={config.fsdp_size}, dp_replicate_size={config.dp_replicate_size}, "
            f"pp_size={config.pp_size}: transformers' own FSDP2 and pipelines call whole models, and trees call their "
            "decoder. Load it with treewise.distributed.mesh.load_on_mesh(folder, tp_size=..., ep_size=...), whose "
            "other ranks get batches of their own."
        )
    axes: tuple[Any, ...] = ("tp", "ep", "fsdp", "efsdp", ("fsdp", "tp"))
    return Mesh(*(manager.get_mesh(axis) for axis in axes))


def _in_rows(mesh: DeviceMesh, axis: str, num_rows: int) -> DeviceMesh:
    """The mesh with one axis in two; FSDP2 asks for parts of the mesh that a model was loaded on."""
    sizes, names = (num_rows, mesh[axis].size() // num_rows), (f"{axis}_copies", f"{axis}_shards")
    with groups.making_groups():
        divided: DeviceMesh = mesh._unflatten(axis, sizes, names)  # noqa: SLF001
    groups.follow_timeout(divided)
    return divided


class _WithoutFsdp(DistributedConfig):
    """transformers' configuration for ranks with batches of their own that it leaves whole: `fsdp_size` counts them."""

    @property
    def dp_size(self) -> int:
        return 1


def load_on_mesh(folder: str, *, tp_size: int = 1, ep_size: int = 1, **options: object) -> PreTrainedModel:
    """A causal language model of which each process reads only its part; all processes of the run call this.

    Every `tp_size` neighbouring processes compute one batch together; all others have batches of their own.

    Parameters:
        folder: as `from_pretrained` takes it.
        tp_size: processes that share each layer.
        ep_size: processes that share the experts of a mixture: a multiple of `tp_size` that divides their number.
        options: of `from_pretrained` (`dtype`, ...).

    Raises:
        ConfigError: sizes that do not fit the processes, or a model without a plan for them; says which to change.
    """
    require_meshes()
    join_as_launched()
    check_mesh_sizes(tp_size, ep_size, ranks.count())
    from transformers.distributed.utils import initialize_distributed_mesh

    config = _WithoutFsdp(tp_size=tp_size, ep_size=ep_size, fsdp_size=ranks.count() // tp_size)
    loaded = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(loaded), None)
    if kind is None:
        raise ConfigError(f"{folder}: {loaded.model_type} is not a causal language model; only those load on a mesh.")

    def prepare(cls: type, distributed_config: DistributedConfig, device_map: object = None) -> tuple[object, ...]:
        del cls, device_map
        with groups.making_groups():
            device, manager = initialize_distributed_mesh(distributed_config)
        for axes in (("fsdp", "tp"), ("efsdp", "ep")) if manager is not None else ():
            groups.follow_timeout(manager.get_mesh(axes))
        return distributed_config, device, manager

    def make(cls: type, *args: object, **settings: object) -> object:
        del cls
        return kind(*args, **settings)

    # transformers makes no mesh for ep_size alone unless it applies FSDP2; everything else is the model's own class, of
    # which this one makes an instance.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__new__": make}
    loader: Any = type(kind.__name__, (kind,), {**names, "prepare_distribute_model": classmethod(prepare)})
    try:
        return loader.from_pretrained(folder, distributed_config=config, trust_remote_code=False, **options)
    except ValueError as error:
        raise ConfigError(f"tp_size={tp_size}, ep_size={ep_size}: {' '.join(str(error).split())}") from error


def check_mesh_sizes(tp_size: int, ep_size: int, num_ranks: int) -> None:
    """Raises `ConfigError` for sizes that do not fit the number of processes, or that transformers has no mesh for."""
    for name, size in (("tp_size", tp_size), ("ep_size", ep_size)):
        if size < 1:
            raise ConfigError(f"{name}={size}; give 1 or more processes.")
    if tp_size > 1 or ep_size > 1:
        require_meshes()
    if num_ranks % tp_size:
        raise ConfigError(
            f"tp_size={tp_size} does not divide the {num(num_ranks, 'process', 'processes')}; change one of the two."
        )
    if ep_size > 1 and (ep_size % tp_size or num_ranks % ep_size):
        fitting = [str(each) for each in range(tp_size, num_ranks + 1, tp_size) if num_ranks % each == 0]
        raise ConfigError(
            f"ep_size={ep_size} must be a multiple of tp_size={tp_size} and divide the "
            f"{num(num_ranks, 'process', 'processes')}; choose "
            f"one of {', '.join(fitting)}."
        )


def spread_experts(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer whose own parameters are experts that ranks hold together."""
    return [module for module in layer.modules() if any(map(_is_expert, module.parameters(recurse=False)))]


def _is_expert(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def broadcast(tensor: torch.Tensor, device: torch.device, mesh: Mesh | None) -> None:
    """Makes a tensor equal on all ranks that hold the same part of it; the first one's wins. All of them call this."""
    held = local_part(tensor)
    moved = held.to(device)
    if mesh is None:
        distributed.broadcast(moved, 0)
    else:
        distributed.broadcast(moved, group=mesh.data_of(tensor).get_group(), group_src=0)
    if moved is not held:
        held.copy_(moved)


def copy_first(model: nn.Module, device: torch.device) -> None:
    """Makes a model equal on all ranks that hold the same parts of it; all ranks of the run call this."""
    if ranks.count() > 1:
        mesh = mesh_of(model)
        for tensor in [*model.parameters(), *model.buffers()]:
            broadcast(tensor.data, device, mesh)


def check_same_rows(mesh: Mesh, *tensors: torch.Tensor) -> None:
    """Compares the rows that a trainer of others gives to the ranks with parts of the same layers; all call this.

    Raises:
        DataError: a rank has other ones, on every rank.
    """
    state = blake2b(digest_size=16)
    for tensor in tensors:
        state.update(repr(tensor.shape).encode() + np.ascontiguousarray(tensor.detach().cpu()).tobytes())
    others = differing(mesh.tensor.get_group(), state.hexdigest())
    if others:
        raise DataError(
            f"ranks that compute one batch together (tp_size={mesh.tensor.size()}) have different rows: {others}. "
            "Trainers of TRL that sample seed every process differently: call transformers.set_seed(args.seed) after "
            "the trainer is built, on all processes."
        )
