"""Tokens below which a micro-batch is no faster on a GPU, because its host is still launching kernels.

A table by card, and no measurement of a run: plans depend on it, and a resumed run, like every rank, has to plan as the
run before did. Cards that nobody has measured are not in it; there, and on a CPU, every token counts alike.
"""

import torch

from treewise.nn.decoder import DecoderAndHead
from treewise.nn.model_flops import flop_model
from treewise.nn.wrapped import is_compiled
from treewise.tree.forest import Forest

# FLOPs per second that a step in bfloat16 reaches, by a part of the card's name: 289e12 of Qwen3-1.7B on an H100
# (docs/results.md), whose tensor cores H200 and GH200 share.
RATES = {"H100": 289e12, "H200": 289e12, "GH200": 289e12}
# Seconds that a host launches the kernels of one layer, forward and backward: of Qwen3-1.7B at a budget of 5,000
# tokens, where an H100 waited for it, 9.5 ms on one tree (1.42 s, 5 passes and a forward), 7.9 ms on another (1.32 s, 5
# and 3).
LAYER_SECONDS = 8.5e-3
# The same for a compiled layer, in that of a plain one: 39 of 78 ms of CPU at 36 layers with kernels replaced by
# nothing, and 45 launches of 190, at some 5 us each. Not measured on a GPU.
COMPILED_SHARE = 0.4


def least_tokens(lm: DecoderAndHead, forest: Forest) -> int:
    """For one forest; 0 where the device waits for no host, is not in the table or computes in float32."""
    if lm.device.type != "cuda" or lm.decoder.dtype not in (torch.bfloat16, torch.float16):
        return 0
    name = torch.cuda.get_device_name(lm.device)
    rate = next((rate for part, rate in RATES.items() if part in name), None)
    if rate is None:
        return 0
    share = COMPILED_SHARE if is_compiled(lm.model) else 1.0
    seconds = share * LAYER_SECONDS * lm.decoder.config.get_text_config().num_hidden_layers
    return round(seconds * rate * forest.num_tokens / flop_model(lm.model).tree(forest))
