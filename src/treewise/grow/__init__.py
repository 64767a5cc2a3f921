"""Growing a model: from a checkpoint of transformers to a larger one, on which training goes on.

configuration   the larger model's configuration, and what cannot be grown
tensor_roles    one rule per shape class: which axes of a tensor are wider, and which of them sum over copies
widening        width by repetition; noise that cancels between the copies
layer_map       depth: which layer each new one comes from, and which start as the identity
growth_plan     which tensors the larger model has, and of what each is made
checkpoint      safetensors in, safetensors out, one tensor at a time
operators       learned operators (LiGO, Mango)
operator_training   fits a learned operator on trees
moments         the optimizer's state, grown
function_check  logits before and after
growth          all of it: `grow`
"""

from treewise.grow.growth import GrowReport, grow

__all__ = ["GrowReport", "grow"]
