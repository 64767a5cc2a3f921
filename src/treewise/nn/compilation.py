"""torch.compile of a decoder's layers, each by itself, so that trees are computed through them.

A compiled model as a whole would not help: the engine calls the decoder, which reads the tree of each micro-batch. A
layer is compiled once for all lengths, and layers of one class share their code. The attention of a tree and the mixers
of hybrids are left out of the graphs (`torch.compiler.disable`), so a layer is two graphs: what is before attention and
what is behind it; or one, with FlexAttention inside, where who compiles asks for it (`attention.inside`). Layers that
are to be sharded are compiled before, with the hooks of FSDP around their graphs; of those that tensor parallelism
divides, products with weights are left out, too.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from treewise.base import features
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn.attention.interface import ATTENDS_INSIDE
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.model_flops import head_sizes
from treewise.nn.wrapped import SUPPORTED_MODELS, base_model

# Graphs of one function: with and without gradients, trained and evaluated, of one token and of more, under autocast,
# layers that differ. torch's 8 would leave the rest uncompiled.
RECOMPILE_LIMIT = 64
# They record CUDA graphs, whose results the next call overwrites, while gateways and held micro-batches keep them.
_OVERWRITING = ("reduce-overhead", "max-autotune")
DEFAULT_BACKEND = "inductor"
# Halves that are put together (rotary positions) are computed where they are read. Else each is a kernel that writes
# them.
INDUCTOR_OPTIONS = {"force_pointwise_cat": True}


def check_compilation(backend: str, mode: str | None, known: Collection[str] | None = None) -> None:
    """Raises `ConfigError` for a backend of torch.compile that is not installed, or a mode that trees cannot use.

    known: only these backends.
    """
    installed = torch.compiler.list_backends(exclude_tags=())
    known = [name for name in installed if known is None or name in known]
    if backend not in known:
        raise ConfigError(f"torch_compile_backend={backend!r} is unknown; choose one of {', '.join(sorted(known))}.")
    if backend == "cudagraphs" or mode in _OVERWRITING:
        what = "torch_compile_backend='cudagraphs'" if backend == "cudagraphs" else f"torch_compile_mode={mode!r}"
        raise ConfigError(
            f"{what} records CUDA graphs, whose results the next micro-batch overwrites; use backend 'inductor' with "
            "mode 'default' or 'max-autotune-no-cudagraphs'."
        )
    modes = ("default", "max-autotune-no-cudagraphs")
    if mode is not None and (backend != "inductor" or mode not in modes):
        raise ConfigError(
            f"torch_compile_mode={mode!r} with torch_compile_backend={backend!r}: modes are those of 'inductor', "
            f"{' and '.join(modes)}."
        )


def compile_layers(
    lm: DecoderAndHead, backend: str = DEFAULT_BACKEND, mode: str | None = None, *, attention_inside: bool = False
) -> None:
    """Compiles the layers of a decoder in place, with dynamic lengths. Names of parameters stay as they are.

    Compilation itself runs with the first micro-batches. For the whole process, raises torch's limit of graphs for one
    function to `RECOMPILE_LIMIT`, and has torch go on within the function that broke a graph: else each function around
    attention would be a graph of its own, five for a layer.

    Raises:
        ConfigError: see `check_compilation`.
        UnsupportedModelError: the model's class does not name its layers.
    """
    check_compilation(backend, mode)
    layers = decoder_layers(lm)
    if not layers:
        raise UnsupportedModelError(
            f"{type(lm.decoder).__name__} does not name its layers (_no_split_modules), so none can be compiled; call "
            f"compile(dynamic=True) on each of them. {SUPPORTED_MODELS}"
        )
    config: Any = torch._dynamo.config  # noqa: SLF001
    config.recompile_limit = max(config.recompile_limit, RECOMPILE_LIMIT)
    config.nested_graph_breaks = True
    if attention_inside and not lm.is_recurrent and features.attention_inside.suits(lm.decoder, lm.configs):
        ATTENDS_INSIDE[lm.decoder] = head_sizes(lm.decoder.config.get_text_config())
    else:
        ATTENDS_INSIDE.pop(lm.decoder, None)
    for layer in layers:
        if any(isinstance(parameter, DTensor) for parameter in layer.parameters()):
            features.tensor_parallel.leave_out_of_graphs(layer)
        layer.compile(dynamic=True, backend=backend, **_options(backend, mode))


def _options(backend: str, mode: str | None) -> dict[str, Any]:
    """The mode, or Inductor's options, of which it takes none beside a mode."""
    if backend == "inductor" and mode in (None, "default"):
        return {"options": INDUCTOR_OPTIONS}
    return {"mode": mode}


def uncompile_layers(lm: DecoderAndHead) -> None:
    """Takes compilation off the layers: they run as they were written."""
    ATTENDS_INSIDE.pop(lm.decoder, None)
    for layer in decoder_layers(lm):
        layer._compiled_call_impl = None  # noqa: SLF001


def decoder_layers(lm: DecoderAndHead, names: tuple[str, ...] | None = None) -> list[nn.Module]:
    """The outermost modules of a decoder of the classes `names`; without names, of its layers."""
    wanted = set(names or getattr(base_model(lm.model), "_no_split_modules", None) or ())
    layers: list[nn.Module] = []
    below: set[nn.Module] = set()
    for module in lm.decoder.modules():
        if module not in below and type(module).__name__ in wanted and module is not lm.decoder:
            layers.append(module)
            below |= set(module.modules())
    return layers
