"""A float64 oracle: transformers' own modelling code with every float32 in it read as float64.

transformers computes norms, rotations and recurrences in float32 whatever the model's dtype, so a float64 model alone
is no oracle. Here the modelling module is compiled a second time from its source, under another name, with wider casts.
"""

import copy
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from transformers import PreTrainedModel


def widened(model: PreTrainedModel) -> PreTrainedModel:
    """A float64 copy of a model whose code never casts to less."""
    module = _wide_module(type(model).__module__)
    config = copy.deepcopy(model.config)
    config._experts_implementation_internal = "eager"  # the grouped kernel knows no float64
    twin = getattr(module, type(model).__name__)(config).double()
    twin.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    for (name, wide), value in zip(twin.named_buffers(), dict(model.named_buffers()).values(), strict=True):
        if not wide.is_floating_point() or name in twin.state_dict():
            continue
        wide.copy_(value.double())  # made in float32 in both, such as inverse frequencies
    for part in twin.modules():
        if hasattr(part, "decay_factors"):  # MiniMax keeps what follows from its slopes
            factors = part.decay_factors(part.slope_rate)
            for name, factor in zip(("query_decay", "key_decay", "diagonal_decay"), factors, strict=True):
                getattr(part, name).copy_(factor)
    return twin.train(model.training)


def _wide_module(name: str) -> ModuleType:
    wide_name = name + "_in_float64"
    if wide_name not in sys.modules:
        path = importlib.import_module(name).__file__
        source = Path(path).read_text()
        source = re.sub(r"\btorch\.float32\b|\btorch\.float\b", "torch.float64", source)
        source = re.sub(r"\.float\(\)", ".double()", source)
        # Layers of other families, too: Nemotron-H's norm is Zamba2's before transformers 5.20.
        source = re.sub(r"(?<=from )\.\.\.(models\.\w+\.modeling_\w+)", _wide_of_other, source)
        source = source.replace("@auto_docstring", "@(lambda *a, **k: a[0] if a else (lambda each: each))")
        spec = importlib.util.spec_from_loader(wide_name, loader=None)
        module = importlib.util.module_from_spec(spec)
        module.__package__ = name.rpartition(".")[0]
        module.__file__ = path  # transformers looks there for what a model supports
        sys.modules[wide_name] = module
        exec(compile(source, wide_name, "exec"), module.__dict__)
    return sys.modules[wide_name]


def _wide_of_other(found: re.Match[str]) -> str:
    return _wide_module(f"transformers.{found[1]}").__name__
