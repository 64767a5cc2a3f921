"""Does a grown model compute what the small one did? Logits of both on the same random tokens."""

from pathlib import Path
from typing import Any

import torch

TOLERANCE = 1e-5  # float32, of the largest logit
NUM_ROWS, LENGTH = 2, 24


def largest_difference(small: Any, grown: Any) -> float:
    """The largest difference of logits, divided by the largest logit of the small model (at least 1).

    Parameters:
        small, grown: models of transformers with one vocabulary, on one device; both are left in evaluation mode.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, small.config.vocab_size, (NUM_ROWS, LENGTH), generator=generator).to(small.device)
    with torch.no_grad():
        before = small.eval()(input_ids=tokens, use_cache=False).logits.float()
        after = grown.eval()(input_ids=tokens, use_cache=False).logits.float()
    return float((after - before).abs().max() / before.abs().max().clamp(min=1.0))


def load_whole(folder: Path) -> Any:
    """A checkpoint in float32 with the attention that transformers itself checks against.

    Raises:
        OSError, ValueError: what transformers raises for a damaged folder.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, attn_implementation="eager"
    )
