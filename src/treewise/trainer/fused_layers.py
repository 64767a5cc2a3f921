"""Layers whose kernels are fused: compiled in place, or with those of liger-kernel, as the settings of a run say.

What nobody asked to compile (`compile_layers: auto`) is tried before the first step; layers that cannot be compiled run
as before.
"""

import logging

from transformers import PreTrainedModel

from treewise.base import features
from treewise.distributed import ranks
from treewise.engine.engine import TreeEngine
from treewise.errors import UnsupportedModelError
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.wrapped import is_compiled
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.tree.forest import Forest

logger = logging.getLogger("treewise")


def fuse_layers(model: PreTrainedModel, lm: DecoderAndHead, args: TreeTrainingArguments) -> None:
    """Compiles the layers, or takes Liger's kernels for them, as the settings say."""
    if args.use_liger_kernel:
        parts = features.liger.use_liger(model, args.device)
        logger.info("liger-kernel computes %s", ", ".join(parts))
        return
    compilation = features.compilation
    backend = args.torch_compile_backend or compilation.DEFAULT_BACKEND
    if args.torch_compile:
        compilation.compile_layers(lm, backend, args.torch_compile_mode)
        return
    try:
        compilation.compile_layers(lm, backend)
    except UnsupportedModelError as error:
        logger.warning("compile_layers=auto: layers run uncompiled: %s", error)


def try_compiled(engine: TreeEngine, first: Forest) -> None:
    """Runs what nobody asked to compile through the engine's probe; every rank calls this. Layers that cannot be
    compiled, on any rank, run as before on all, which is a warning."""
    reason = ""
    try:
        engine.check(first)
    except UnsupportedModelError as error:
        if not is_compiled(engine.model):
            raise
        reason = str(error)
    reason = next(filter(None, ranks.gather_texts(reason)), "")
    if reason:
        features.compilation.uncompile_layers(engine.lm)
        engine.check(first)  # raises again where compilation is not why
        if ranks.own() == 0:
            logger.warning("compile_layers=auto: layers run uncompiled: %s", reason)
