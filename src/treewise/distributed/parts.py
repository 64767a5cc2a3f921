"""Models that transformers divided among processes: their mesh, and what it would do with them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from treewise.base import features
from treewise.nn.wrapped import base_model, without_adapters

if TYPE_CHECKING:
    from treewise.distributed.mesh import Mesh


def mesh_of(model: nn.Module) -> "Mesh | None":
    """The mesh that transformers loaded a model on (`mesh.Mesh`); None for a model that every process has whole.

    Raises:
        ConfigError: an older transformers divided it.
        UnsupportedModelError: transformers also sharded it by FSDP2, or spread its layers over a pipeline.
    """
    base = without_adapters(model)
    manager = getattr(base, "_mesh_manager", None)
    config = getattr(getattr(base, "config", None), "distributed_config", None)  # a model of others may have none
    if getattr(base, "_device_mesh", None) is not None:
        features.tensor_parallel.require_meshes()
    return None if manager is None or config is None else features.mesh.mesh_loaded(manager, config)


@contextmanager
def as_whole_model(model: nn.Module) -> Iterator[None]:
    """Inside, `save_pretrained` writes the tensors that it is given; it would gather them on all processes."""
    config = base_model(model).config
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
    base = without_adapters(model)
    if getattr(base, "_mesh_manager", None) is not None:
        vars(base).update(_is_distributed_loading_by_transformers=False, _tp_size=None)
