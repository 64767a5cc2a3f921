"""What a tree changes of a model that transformers spread over ranks by tensor parallelism (`DistributedConfig`).

transformers replaces the forwards of layers: attention runs on local heads, and hidden rows are whole and equal on all
ranks of a group. Two of its ways do not fit here. Its head gathers the logits of the whole vocabulary on every rank;
`VocabularyShard` exchanges three numbers of each row and one of each edge instead. And it adds up the gradients of
parameters that are whole on every rank but see the rank's own heads alone (norms of queries and keys) in a hook that
reduces the sum of all backwards so far, again in every backward; `_SummedParameters` reduces each backward's own part.

Letters: R rows, E edges, M model width, V vocabulary, v its part on this rank.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from treewise.base.shapes import Context
from treewise.errors import ConfigError, UnsupportedModelError, pip_install
from treewise.nn.wrapped import named_modules

AXIS = "tp"  # transformers' name of the axis of tensor parallelism
_MODULE = "transformers.distributed.tensor_parallel"
_PARTIAL_GRADIENTS = "replicated_with_grad_allreduce"  # transformers' name of the style
# Activation functions with parameters, which no plan names (Apertus): they see the columns of their rank alone.
_LEARNED_ACTIVATIONS = {"XIELUActivation"}


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's part of a vocabulary. mesh: of the group. first: its first token. num_tokens: V."""

    mesh: DeviceMesh
    first: int
    num_tokens: int

    @property
    def num_local_tokens(self) -> int:
        """v of the rank with the largest part."""
        return math.ceil(self.num_tokens / self.mesh.size())

    def local(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[E] int64 columns of this rank, any valid one where the token belongs to another rank; [E] bool: its own."""
        start, size = self.first, min(self.num_local_tokens, self.num_tokens - self.first)
        return (target - start).clamp(0, size - 1), (target >= start) & (target < start + size)

    def combined(
        self, target: torch.Tensor, lse: torch.Tensor, mean: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values over the vocabulary from those of each rank's part, the same to the bit on all ranks.

        target: [E] logits of targets, 0 where another rank has them. lse: [R] log-sum-exp of the logits. mean: [R] (or
        empty) mean logit under the softmax.
        """
        own = torch.cat([target, lse, mean])
        of_ranks = list(own.new_empty(self.mesh.size(), len(own)))
        distributed.all_gather(of_ranks, own, group=self.mesh.get_group())
        parts: tuple[torch.Tensor, ...] = torch.stack(of_ranks).split([len(target), len(lse), len(mean)], dim=1)
        targets, lses, means = parts
        lse = torch.logsumexp(lses, dim=0)
        if len(mean):
            mean = (torch.exp(lses - lse) * means).sum(0)
        return targets.sum(0), lse, mean

    def add_up(self, hidden_grad: torch.Tensor) -> None:
        """Adds the ranks' gradients of hidden rows up ([R, M]), in place: each has that of its part of the head."""
        distributed.all_reduce(hidden_grad, group=self.mesh.get_group())

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        """[.., V] from [.., v]; without gradients, for comparisons."""
        shape = (*logits.shape[:-1], self.num_tokens)
        stride = torch.empty(shape, device="meta").stride()
        spread: Any = DTensor.from_local(
            logits.contiguous(), self.mesh, [Shard(-1)], run_check=False, shape=torch.Size(shape), stride=stride
        )
        whole: torch.Tensor = spread.full_tensor()
        return whole


def vocabulary_shard(layer: nn.Module) -> VocabularyShard | None:
    """The part of the vocabulary that a head of transformers' tensor parallelism holds; None for any other layer.

    Raises:
        UnsupportedModelError: a rank has no token.
    """
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, DTensor) or weight.device_mesh.mesh_dim_names != (AXIS,):
        return None
    mesh, is_plain = weight.device_mesh, _is_of_transformers(layer) and type(layer).forward is nn.Linear.forward
    has_hooks = vars(layer)["_forward_hooks"] or vars(layer)["_forward_pre_hooks"]
    if not is_plain or has_hooks or weight.placements != (Shard(0),):
        return None
    num_tokens = weight.shape[0]
    size = math.ceil(num_tokens / mesh.size())
    if size * (mesh.size() - 1) >= num_tokens:
        raise UnsupportedModelError(
            f"a vocabulary of {num_tokens} tokens leaves one of {mesh.size()} ranks without any; lower tp_size."
        )
    return VocabularyShard(mesh, size * mesh.get_local_rank(), num_tokens)


def tensor_parallel_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh of the ranks that hold parts of the same layers; None where no parameter is spread in this way."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and AXIS in (parameter.device_mesh.mesh_dim_names or ()):
            mesh = parameter.device_mesh
            return mesh if mesh.ndim == 1 else mesh[AXIS]
    return None


def require_meshes() -> None:
    """Raises `ConfigError` for a transformers before 5.23: its meshes are others, or compute no mixture of experts."""
    if not hasattr(DistributedConfig, "dp_size"):
        needed, found = pip_install("transformers>=5.23"), transformers.__version__
        raise ConfigError(f"meshes (tp_size, ep_size) need {needed}; found {found}.")


def key_heads_per_rank(plan: Any, num_heads: int, num_ranks: int) -> int | None:
    """Heads of keys of each rank under a plan of transformers; None where ranks cannot share them evenly.

    Raises:
        ConfigError: a transformers whose meshes are others.
    """
    require_meshes()
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    heads: int | None = get_kv_heads_per_rank(plan, num_heads, num_ranks)
    return heads


def repair_tensor_parallel(base: PreTrainedModel) -> None:
    """Makes sizes of adapters, and gradients of parameters that see this rank's heads alone, right.

    base: a transformers model. A second call changes nothing, nor does one without tensor parallelism.

    Raises:
        UnsupportedModelError: the heads of keys cannot be divided among the ranks.
    """
    mesh, plan = tensor_parallel_mesh(base), getattr(base, "tp_plan", None) or {}
    if mesh is None:
        return
    config = base.config.get_text_config()
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if key_heads_per_rank(plan, num_heads, mesh.size()) is None:
        raise UnsupportedModelError(
            f"{type(base).__name__} has {num_heads} heads of keys, which {mesh.size()} ranks cannot share evenly; "
            "choose a tp_size that divides them."
        )
    names = {name for name, style in plan.items() if style == _PARTIAL_GRADIENTS}
    for name, module in named_modules(base):
        if isinstance(module, nn.Linear) and isinstance(module.weight, DTensor):
            # transformers' forward reads the whole layer's sizes there, and PEFT's adapters have those of a part.
            module.out_features, module.in_features = module.weight.shape
        has_hook = with_wildcards(name) in names and _is_of_transformers(module)
        if has_hook or type(module).__name__ in _LEARNED_ACTIVATIONS:
            module.forward = _SummedParameters(module, type(module).forward, mesh)
            _remove_hooks_of_transformers(module)


def leave_out_of_graphs(layer: nn.Module) -> None:
    """Products with parts of weights run uncompiled: torch 2.13 traces no DTensor of a dynamic length (it recurses
    without end). What is between them is compiled."""
    for module in layer.modules():
        if _is_of_transformers(module):
            module.forward = torch.compiler.disable(module.forward)


def _remove_hooks_of_transformers(module: nn.Module) -> None:
    """Removes the hooks that a forward with gradients left before: gradients would be added up twice."""
    for parameter in module.parameters(recurse=False):
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", "") == _MODULE]:
            del hooks[key]


class _SummedParameters:
    """A forward whose parameters' gradients are added up over a group in each backward."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], mesh: DeviceMesh) -> None:
        self._module, self._forward, self._mesh = module, forward, mesh

    @torch.compiler.disable
    def __call__(self, *args: object, **kwargs: object) -> object:
        table: dict[str, nn.Parameter | torch.Tensor | None] = vars(self._module)["_parameters"]
        group = self._mesh.get_group()
        own = {name: each for name, each in table.items() if each is not None}
        table.update({name: _SumBackward.apply(each, group) for name, each in own.items()})
        try:
            return self._forward(self._module, *args, **kwargs)
        finally:
            table.update(own)


class _SumBackward(torch.autograd.Function):
    """Identity whose backward adds the gradient up over a group."""

    @staticmethod
    def forward(ctx: Context, tensor: torch.Tensor, group: distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Context, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone()
        distributed.all_reduce(total, group=ctx.group)
        return total, None


def _is_of_transformers(module: nn.Module) -> bool:
    """Whether the forward is the one that transformers' tensor parallelism put in."""
    return getattr(vars(module).get("forward"), "__module__", "") == _MODULE


def with_wildcards(name: str) -> str:
    """A parameter's or module's name as transformers' plans have it: `*` for the numbers of layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
