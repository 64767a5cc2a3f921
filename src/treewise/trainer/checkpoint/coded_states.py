"""States of optimizers that keep several tensors for one: codes of 8 bits, scales, tables that all parameters share.

torchao has them in a tensor of a class of its own (`exp_avg`), which is saved as its parts (`exp_avg.codes`) and what
it is (`exp_avg.is`); bitsandbytes in a dict below the parameter's entries, which is saved as entries.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from treewise.errors import CheckpointError

# Tensors made of others: modules of torchao by the name of a class.
COMPOSED = {
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}


def in_parts(entries: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's entries without tensors that are made of others, and dicts."""
    found: dict[str, Any] = {}
    for entry, value in entries.items():
        if type(value).__name__ in COMPOSED:
            parts, facts = value.__tensor_flatten__()
            found |= {f"{entry}.{part}": getattr(value, part) for part in parts}
            found[f"{entry}.is"] = [type(value).__name__, *map(_plain, facts)]
        elif isinstance(value, dict):
            found |= value
        else:
            found[entry] = value
    return found


def _plain(fact: object) -> object:
    return str(fact) if isinstance(fact, torch.dtype) else tuple(fact) if isinstance(fact, torch.Size) else fact


def whole(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `in_parts`; optimizers take what was in a dict without it, too.

    Raises:
        CheckpointError: parts of a class that is not known.
    """
    found = {entry: value for entry, value in entries.items() if "." not in entry}
    for entry in [each.removesuffix(".is") for each in entries if each.endswith(".is")]:
        name, *facts = entries[f"{entry}.is"]
        if name not in COMPOSED:
            raise CheckpointError(f"optimizer.json: {entry} is a {name}, which no optimizer of this version keeps.")
        kind: Any = getattr(importlib.import_module(COMPOSED[name]), name)
        own = {each.removeprefix(f"{entry}."): value for each, value in entries.items() if each.startswith(f"{entry}.")}
        facts = [getattr(torch, fact.removeprefix("torch.")) if isinstance(fact, str) else fact for fact in facts]
        found[entry] = kind.__tensor_unflatten__(own, facts)
    return found


def apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of which none lies where another one does, which a file could not hold."""
    seen: set[int] = set()
    found = {}
    for name, each in tensors.items():
        place = each.untyped_storage().data_ptr()
        found[name] = each.clone() if place in seen else each
        seen.add(place)
    return found
