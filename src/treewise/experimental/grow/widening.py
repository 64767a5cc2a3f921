"""Width by repetition, as in Net2Net (arXiv 1511.05641) and bert2BERT (arXiv 2110.07143), with noise that cancels.

One rule per shape class, read from a tensor's name in the checkpoint: which axes grow, and how. An axis of *units*
(hidden, inner, heads times head size) grows by repeating all its units in their order: unit `j` of the wider axis is a
copy of unit `j mod n`. Heads stay whole, because they are the slow index of their axis, and grouped key heads stay with
their query heads. What a tensor sums over, its input axis, is divided by the number of copies.

Copies that are exactly alike get the same gradients and never part. So noise is added where a tensor sums over
copies, and its mean over the copies of one unit is taken away: their inputs are equal, so the sum is what it was.
"""

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch
from transformers import PreTrainedConfig

from treewise.errors import UnsupportedModelError

LAYER = re.compile(r"(?P<head>.*\blayers\.)(?P<layer>\d+)(?P<tail>\..*)")
EMBEDDINGS = ("embed_tokens", "embed_in")
POSITIONS = ("embed_positions",)
HEADS = ("lm_head", "embed_out")
FINAL_NORMS = ("norm", "final_layer_norm")  # outside of the layers
ROUTERS = ("gate", "router")
# Matrices whose result is added to the residual stream.
RESIDUAL_OUTPUTS = ("o_proj", "out_proj", "dense", "dense_4h_to_h", "down_proj", "c_proj", "fc2", "w2")
BLOCK_VALUES = 1 << 20  # of a wide tensor that are made at once, in float64


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
        adds_to_residual: its result is added to the residual stream.
    """

    role: Role
    blocks: tuple[int, ...]
    module: str
    adds_to_residual: bool


def role_of(
    name: str, shape: tuple[int, ...], config: PreTrainedConfig, grown_shape: tuple[int, ...] | None = None
) -> TensorRole:
    """The role of a tensor of a checkpoint.

    Parameters:
        name: its name in the file.
        shape: its shape there.
        config: the small model's configuration.
        grown_shape: its shape in the grown model where that is known by the same name; tells what keeps its size.

    Raises:
        UnsupportedModelError: no rule covers this tensor.
    """
    module, _, kind = name.rpartition(".")
    module = module.rpartition(".")[2]
    role = _role(name, module, kind, shape)
    if role is Role.VECTOR and grown_shape == shape:
        role = Role.FIXED
    if role is None:
        raise UnsupportedModelError(f"{name} {list(shape)}: no growth rule covers this tensor.")
    blocks = _blocks(module, shape[0], config) if role in (Role.LINEAR, Role.VECTOR) else ()
    blocks = blocks or shape[:1]
    if sum(blocks) != shape[0]:
        raise UnsupportedModelError(f"{name} has {shape[0]} rows, its parts {sum(blocks)}; no rule covers it.")
    return TensorRole(role, blocks, module, module in RESIDUAL_OUTPUTS)


def _role(name: str, module: str, kind: str, shape: tuple[int, ...]) -> Role | None:
    in_layer = LAYER.fullmatch(name) is not None
    if kind not in ("weight", "bias"):
        return None
    if len(shape) == 1:
        if module in HEADS:
            return None  # a bias over the vocabulary
        return Role.FINAL_NORM if not in_layer and module in FINAL_NORMS else Role.VECTOR
    if len(shape) != 2:
        return None
    if not in_layer:
        for modules, role in ((EMBEDDINGS, Role.EMBEDDING), (POSITIONS, Role.POSITIONS), (HEADS, Role.HEAD)):
            if module in modules:
                return role
        return None
    return Role.ROUTER if module in ROUTERS and "mlp.gate_proj" not in name else Role.LINEAR


def _blocks(module: str, num_rows: int, config: PreTrainedConfig) -> tuple[int, ...]:
    """Sizes of the parts of a fused projection; empty for others. Parts that alternate head by head need none."""
    if module == "gate_up_proj":
        return (num_rows // 2, num_rows // 2)
    if module == "qkv_proj":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return (config.num_attention_heads * size, *[config.num_key_value_heads * size] * 2)
    return ()


# -- wider tensors ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Widening:
    """Factors of a growth in width.

    Attributes:
        width: copies of each hidden unit, of each head and of each inner unit.
        embedding_scale: what the embedding is multiplied by (a model that scales its embedding by the square root of
            the hidden size would otherwise scale it more).
        final_norm_scale: what the last norm's output is multiplied by, where the head is tied to the embedding and so
            cannot be divided by the number of copies.
        norm_offset: 1 where a norm multiplies by 1 + weight, else 0.
        noise: standard deviation of the noise, in those of the tensor.
        seed: of the noise.
    """

    width: int
    embedding_scale: float = 1.0
    final_norm_scale: float = 1.0
    norm_offset: float = 0.0
    noise: float = 0.0
    seed: int = 0

    def factors(self, role: TensorRole) -> tuple[int, int]:
        """How often the first axis of a tensor is repeated, and its last one (1 for vectors)."""
        if role.role is Role.FIXED:
            return 1, 1
        if role.role in (Role.EMBEDDING, Role.POSITIONS, Role.HEAD, Role.ROUTER):
            return 1, self.width
        return self.width, self.width if role.role is Role.LINEAR else 1

    def grown_shape(self, role: TensorRole, shape: tuple[int, ...]) -> tuple[int, ...]:
        """[out] or [out, in] of the large model."""
        rows, columns = self.factors(role)
        return (shape[0] * rows, *(length * columns for length in shape[1:]))


def widened(
    name: str, tensor: torch.Tensor, role: TensorRole, rule: Widening, *, is_silent: bool = False
) -> torch.Tensor:
    """A tensor of the small model in the size of the large one (`rule.grown_shape`), in its own dtype.

    Parameters:
        name: of the small model's tensor; the noise depends on it.
        tensor: [out] or [out, in], as stored.
        role: from `role_of`.
        rule: factors, noise.
        is_silent: the branch that the tensor is in adds nothing yet, so that its noise need not cancel.
    """
    return torch.cat(list(_blocks_of_rows(name, tensor, role, rule, is_silent=is_silent)))


def _blocks_of_rows(
    name: str, tensor: torch.Tensor, role: TensorRole, rule: Widening, *, is_silent: bool
) -> Iterator[torch.Tensor]:
    """[rows, in of the large model], some rows after the other: in float64 a whole tensor may be too large."""
    rows, columns = rule.factors(role)
    source = repeat_blocks(torch.arange(tensor.shape[0]), role.blocks, rows)
    width = (tensor.shape[1] if tensor.dim() > 1 else 1) * columns
    deviation = float(tensor.std()) if role.role in (Role.HEAD, Role.ROUTER, Role.LINEAR) else 0.0
    for number, part in enumerate(source.split(max(1, BLOCK_VALUES // width))):
        exact = tensor[part].to(torch.float64)
        if tensor.dim() == 1:
            if role.role is Role.FINAL_NORM:
                # A bias has no offset: the norm's output, scale * (offset + weight) + bias, is scaled as a whole.
                offset = rule.norm_offset if name.endswith(".weight") else 0.0
                exact = (exact + offset) * rule.final_norm_scale - offset
            yield exact.to(tensor.dtype)
            continue
        wide = exact.repeat(1, columns)
        if role.role in (Role.EMBEDDING, Role.POSITIONS):
            yield (wide * (rule.embedding_scale if role.role is Role.EMBEDDING else 1.0)).to(tensor.dtype)
            continue
        noise = noise_of(f"{name} {number}", wide.shape, columns, rule, is_silent=is_silent)
        yield (wide / columns + deviation / columns * noise).to(tensor.dtype)


def repeat_blocks(tensor: torch.Tensor, blocks: tuple[int, ...], times: int) -> torch.Tensor:
    """Repeats each block of the first axis as a whole: [sum(blocks), ...] -> [times * sum(blocks), ...]."""
    rest = (1,) * (tensor.dim() - 1)
    return torch.cat([part.repeat(times, *rest) for part in tensor.split(list(blocks))])


def noise_of(name: str, shape: torch.Size, columns: int, rule: Widening, *, is_silent: bool) -> torch.Tensor:
    """Noise of unit deviation times `rule.noise` for rows of a wide matrix, [rows, in], or a zero.

    It changes no sum over the `columns` copies of an input; of a silent branch it is free.
    """
    if rule.noise == 0 or rule.width == 1:
        return torch.zeros(())
    generator = torch.Generator().manual_seed((rule.seed << 32) ^ zlib.crc32(name.encode()))
    drawn = torch.randn(shape[0], columns, shape[1] // columns, generator=generator, dtype=torch.float64)
    if not is_silent:
        drawn = drawn - drawn.mean(1, keepdim=True)
    return rule.noise * drawn.flatten(1)
