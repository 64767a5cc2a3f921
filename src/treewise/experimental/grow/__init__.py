"""Growing a model: from a checkpoint of transformers to a larger one, on which training goes on.

configuration   the larger model's configuration, which layer each new one comes from, and what cannot be grown
widening        one rule per shape class: which axes of a tensor are wider; noise that cancels between the copies
growth_plan     which tensors the larger model has, and of what each is made
checkpoint      safetensors in, safetensors out, one tensor at a time
operators       a learned operator (Mango), fitted on trees
growth          all of it: `grow`, with logits before and after
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
