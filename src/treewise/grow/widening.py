"""Width by repetition, as in Net2Net (arXiv 1511.05641) and bert2BERT (arXiv 2110.07143), with noise that cancels.

Copies that are exactly alike get the same gradients and never part. So noise is added where a tensor sums over
copies, and its mean over the copies of one unit is taken away: their inputs are equal, so the sum is what it was.
"""

import zlib
from dataclasses import dataclass

import torch

from treewise.grow.tensor_roles import Role, TensorRole


@dataclass(frozen=True, slots=True)
class Widening:
    """Factors of a growth in width.

    Attributes:
        width: copies of each unit.
        experts: copies of each expert.
        embedding_scale: what the embedding is multiplied by (a model that scales its embedding by the square root of
            the hidden size would otherwise scale it more).
        final_norm_scale: what the last norm's output is multiplied by, where the head is tied to the embedding and so
            cannot be divided by the number of copies.
        norm_offset: 1 where a norm multiplies by 1 + weight, else 0.
        noise: standard deviation of the noise, in those of the tensor.
        seed: of the noise.
    """

    width: int
    experts: int = 1
    embedding_scale: float = 1.0
    final_norm_scale: float = 1.0
    norm_offset: float = 0.0
    noise: float = 0.0
    seed: int = 0


def widened(name: str, tensor: torch.Tensor, role: TensorRole, rule: Widening, copy: int = 0) -> torch.Tensor:
    """A tensor of the small model in the size of the large one.

    Parameters:
        name: of the small model's tensor; the noise depends on it.
        tensor: [out] or [out, in], as stored.
        role: from `role_of`.
        rule: factors, noise.
        copy: which copy of its expert this is, 0 outside of experts.

    Returns:
        [width * out] or [width * out, width * in] (vocabulary, positions and sizes of heads keep their length), in the
        dtype of `tensor`.
    """
    exact = tensor.to(torch.float64)
    kind = role.role
    if kind in (Role.EMBEDDING, Role.POSITIONS):
        scale = rule.embedding_scale if kind is Role.EMBEDDING else 1.0
        return (exact.repeat(1, rule.width) * scale).to(tensor.dtype)
    if kind is Role.FINAL_NORM:
        # A bias has no offset: the norm's output, scale * (offset + weight) + bias, is scaled as a whole.
        offset = rule.norm_offset if name.endswith(".weight") else 0.0
        return ((exact.repeat(rule.width) + offset) * rule.final_norm_scale - offset).to(tensor.dtype)
    if kind is Role.FIXED:
        return tensor
    if kind is Role.VECTOR:
        return repeat_blocks(exact, role.blocks, rule.width).to(tensor.dtype)
    if kind is Role.HEAD:
        rows = exact
    elif kind is Role.ROUTER:
        rows = exact.repeat(rule.experts, 1)
    else:
        rows = repeat_blocks(exact, role.blocks, rule.width)
    wide = rows.repeat(1, rule.width) / rule.width
    return (wide + cancelling_noise(name, exact, wide, role, rule, copy)).to(tensor.dtype)


def repeat_blocks(tensor: torch.Tensor, blocks: tuple[int, ...], times: int) -> torch.Tensor:
    """Repeats each block of the first axis as a whole: [sum(blocks), ...] -> [times * sum(blocks), ...]."""
    rest = (1,) * (tensor.dim() - 1)
    return torch.cat([part.repeat(times, *rest) for part in tensor.split(list(blocks))])


def cancelling_noise(
    name: str, small: torch.Tensor, wide: torch.Tensor, role: TensorRole, rule: Widening, copy: int
) -> torch.Tensor:
    """Noise for a wide matrix [out, in] that changes no sum over copies of a unit, nor over copies of an expert."""
    is_expert_output = role.expert is not None and role.adds_to_residual and rule.experts > 1
    if rule.noise == 0 or (rule.width == 1 and not is_expert_output):
        return torch.zeros(())
    generator = torch.Generator().manual_seed((rule.seed << 32) ^ zlib.crc32(name.encode()))
    num_copies = rule.experts if role.expert is not None else 1
    scale = rule.noise * float(small.std()) / rule.width
    noise = torch.randn(num_copies, wide.shape[0], rule.width, small.shape[1], generator=generator, dtype=wide.dtype)
    if rule.width > 1:
        noise = noise - noise.mean(2, keepdim=True)
    elif is_expert_output:
        noise = noise - noise.mean(0, keepdim=True)
    return scale * noise[copy].flatten(1)
