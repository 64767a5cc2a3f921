"""Models and tensors of which processes hold parts: what this one holds, and gradients that are added up."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from treewise.base.features import feature
from treewise.distributed import ranks
from treewise.errors import DataError
from treewise.nn.gradients import zeros_of
from treewise.nn.wrapped import base_model
from treewise.planning.plans import Plan
from treewise.tree.trajectory import update_with_content


def mesh_of(model: nn.Module) -> Any:
    """The mesh that transformers loaded a model on (`mesh.Mesh`); None for a model that every process has whole.

    Raises:
        ConfigError: an older transformers divided it.
        UnsupportedModelError: transformers also sharded it by FSDP2, or spread its layers over a pipeline.
    """
    base: Any = base_model(model)
    manager, config = getattr(base, "_mesh_manager", None), getattr(base.config, "distributed_config", None)
    if getattr(base, "_device_mesh", None) is not None:
        feature("tensor_parallel").require_meshes()
    return None if manager is None or config is None else feature("mesh").mesh_loaded(manager, config)


@contextmanager
def as_whole_model(model: nn.Module) -> Iterator[None]:
    """Inside, `save_pretrained` writes the tensors that it is given; it would gather them on all processes."""
    config: Any = base_model(model).config
    held = getattr(config, "distributed_config", None)
    if held is not None:
        config.distributed_config = None
    try:
        yield
    finally:
        if held is not None:
            config.distributed_config = held


def take_over(model: nn.Module) -> None:
    """Makes transformers' loop treat a model on a mesh like any other: it would keep no checkpoints to resume from."""
    base: Any = base_model(model)
    if getattr(base, "_mesh_manager", None) is not None:
        vars(base).update(_is_distributed_loading_by_transformers=False, _tp_size=None)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient divided as its parameter is: torch leaves that of a divided embedding whole on each rank."""
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        return grad.redistribute(parameter.device_mesh, parameter.placements)
    return grad


def sum_gradients(parameters: Iterable[nn.Parameter], group: distributed.ProcessGroup | None = None) -> None:
    """Adds up the gradients of ranks that hold the same parameters; one without a gradient contributes zeros. All call
    this after a step. group: of these ranks; None: all of the run.
    """
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = zeros_of(parameter)
            parameter.grad = placed_like(parameter.grad, parameter)
            distributed.all_reduce(local_part(parameter.grad), group=group)


def divided_dimensions(tensor: torch.Tensor) -> set[int]:
    """The dimensions along which processes hold parts of a tensor."""
    if not isinstance(tensor, DTensor):
        return set()
    of_placements: list[Any] = [each for each in tensor.placements if not each.is_replicate()]
    return {each.dim % tensor.dim() for each in of_placements}


def num_copies(tensor: torch.Tensor) -> int:
    """Processes that hold the same elements of a tensor."""
    if not isinstance(tensor, DTensor):
        return ranks.count()
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return ranks.count() // math.prod(size for size, placement in sizes if not placement.is_replicate())


def check_same_plan(group: distributed.ProcessGroup, plan: Plan, key: str) -> None:
    """Compares a plan and the values of its trajectories over the ranks that compute it together; all call this.

    group: of these ranks. key: the setting that made them.

    Raises:
        DataError: a rank has another one, on every rank.
    """
    others, size = differing(group, _digest(plan)), distributed.get_world_size(group)
    if others:
        raise DataError(
            f"ranks that compute one batch together ({key}={size}) have different trees or budgets: {others}. Give all "
            "of them the same trajectories in the same order and the same max_tokens."
        )


def differing(group: distributed.ProcessGroup, digest: str) -> str:
    """Which ranks of a group have another digest than its first one, in words; all call this."""
    digests: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(digests, digest, group=group)
    others = [str(index) for index, each in enumerate(digests) if each != digests[0]]
    return f"number {', '.join(others)} of the group differs from number 0" if others else ""


def _digest(plan: Plan) -> str:
    forest = plan.forest
    schedule = [(step.action, step.micro_batch) for step in plan.schedule]
    state = blake2b(repr((plan.max_tokens, schedule)).encode(), digest_size=16)
    for name, array in {"parent": forest.parent, "token_ids": forest.token_ids, **forest.tree_streams}.items():
        state.update(name.encode())
        state.update(np.ascontiguousarray(array).data)
    update_with_content(state, () if forest.tree_streams else forest.trajectories)
    return state.hexdigest()
