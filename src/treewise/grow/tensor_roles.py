"""One rule per shape class, read from a tensor's name in the checkpoint: which axes grow, and how.

An axis of *units* (hidden, inner, heads times head size) grows by repeating all its units in their order: unit `j` of
the wider axis is a copy of unit `j mod n`. Heads stay whole, because they are the slow index of their axis, and
grouped key heads stay with their query heads. What a tensor sums over, its input axis, is divided by the number of
copies.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from treewise.errors import UnsupportedModelError

LAYER = re.compile(r"(?P<head>.*\blayers\.)(?P<layer>\d+)(?P<tail>\..*)")
EXPERT = re.compile(r"(?P<head>.*\bexperts\.)(?P<expert>\d+)(?P<tail>\..*)")
INNER = re.compile(r".*\.(mlp|block_sparse_moe|fc1|fc2)\..*")  # names of tensors with an axis of inner units
EMBEDDINGS = ("embed_tokens", "embed_in")
POSITIONS = ("embed_positions",)
HEADS = ("lm_head", "embed_out")
FINAL_NORMS = ("norm", "final_layer_norm")  # outside of the layers
ROUTERS = ("gate", "router")
# Matrices whose result is added to the residual stream.
RESIDUAL_OUTPUTS = ("o_proj", "out_proj", "dense", "dense_4h_to_h", "down_proj", "c_proj", "fc2", "w2")


class Role(Enum):
    """The shape class of a tensor."""

    EMBEDDING = "embedding"  # [V, M]
    POSITIONS = "positions"  # [P, M], added to the embedding
    HEAD = "head"  # [V, M]
    ROUTER = "router"  # [experts, M]
    LINEAR = "linear"  # [out, in]
    VECTOR = "vector"  # [out]: norms and biases
    FINAL_NORM = "final norm"  # [M]
    FIXED = "fixed"  # [head size]: norms of heads, shared by all heads


@dataclass(frozen=True, slots=True)
class TensorRole:
    """What growth needs of a tensor.

    Attributes:
        role: its shape class.
        blocks: sizes of the parts that lie side by side on the first axis (fused projections), each grown on its own.
        module: last name of the module that holds it.
        layer: index of its layer, None outside.
        expert: index of its expert, None outside.
        adds_to_residual: its result is added to the residual stream.
        is_inner: one of its axes is of inner units, those of an MLP or an expert, and no axis of heads.
    """

    role: Role
    blocks: tuple[int, ...]
    module: str
    layer: int | None
    expert: int | None
    adds_to_residual: bool
    is_inner: bool


def role_of(name: str, shape: tuple[int, ...], config: Any, grown_shape: tuple[int, ...] | None = None) -> TensorRole:
    """The role of a tensor of a checkpoint.

    Parameters:
        name: its name in the file.
        shape: its shape there.
        config: the small model's configuration.
        grown_shape: its shape in the grown model where that is known by the same name; tells what keeps its size.

    Raises:
        UnsupportedModelError: no rule covers this tensor.
    """
    in_layer, in_expert = LAYER.fullmatch(name), EXPERT.fullmatch(name)
    layer = int(in_layer["layer"]) if in_layer else None
    expert = int(in_expert["expert"]) if in_expert else None
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    role = _role(name, module, kind, shape, layer)
    if role is Role.VECTOR and grown_shape == shape:
        role = Role.FIXED
    if role is None:
        raise UnsupportedModelError(f"{name} {list(shape)}: no growth rule covers this tensor.")
    blocks = _blocks(module, shape[0], config) if role in (Role.LINEAR, Role.VECTOR) else ()
    blocks = blocks or shape[:1]
    if sum(blocks) != shape[0]:
        raise UnsupportedModelError(f"{name} has {shape[0]} rows, its parts {sum(blocks)}; no rule covers it.")
    is_inner = INNER.fullmatch(name) is not None
    return TensorRole(role, blocks, module, layer, expert, module in RESIDUAL_OUTPUTS, is_inner)


def _role(name: str, module: str, kind: str, shape: tuple[int, ...], layer: int | None) -> Role | None:
    if kind not in ("weight", "bias"):
        return None
    if len(shape) == 1:
        if module in HEADS:
            return None  # a bias over the vocabulary
        return Role.FINAL_NORM if layer is None and module in FINAL_NORMS else Role.VECTOR
    if len(shape) != 2:
        return None
    if layer is None:
        for modules, role in ((EMBEDDINGS, Role.EMBEDDING), (POSITIONS, Role.POSITIONS), (HEADS, Role.HEAD)):
            if module in modules:
                return role
        return None
    return Role.ROUTER if module in ROUTERS and "mlp.gate_proj" not in name else Role.LINEAR


def _blocks(module: str, num_rows: int, config: Any) -> tuple[int, ...]:
    """Sizes of the parts of a fused projection; empty for others. Parts that alternate head by head need none."""
    if module == "gate_up_proj":
        return (num_rows // 2, num_rows // 2)
    if module == "qkv_proj":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return (config.num_attention_heads * size, *[config.num_key_value_heads * size] * 2)
    return ()
