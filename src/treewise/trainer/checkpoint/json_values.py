"""Nested Python values as JSON, exactly and without pickle. Tuples stay tuples; tensors may go to a file of their own.

Optimizers, schedules and random generators have states of dicts, numbers, tuples and tensors. Any other value is an
error when it is saved.
"""

import base64
from typing import Any

import numpy as np
import torch

from treewise.errors import CheckpointError

_TAG = "__is__"


def to_plain(value: object, tensors: dict[str, torch.Tensor] | None = None, path: str = "") -> object:
    """A value that `json` can write. Tensors go into `tensors` under their path if it is given, else into the value.

    Raises:
        CheckpointError: a value of a type that cannot be saved.
    """
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, torch.Tensor):
        if tensors is not None:
            tensors[path] = value
            return {_TAG: "tensor", "name": path}
        tensor = value.detach().cpu().contiguous()
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        text = base64.b64encode(raw).decode("ascii")
        return {_TAG: "inline", "dtype": str(tensor.dtype), "shape": list(tensor.shape), "raw": text}
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        text = base64.b64encode(array.tobytes()).decode("ascii")
        return {_TAG: "array", "dtype": array.dtype.str, "shape": list(np.shape(value)), "raw": text}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value) and _TAG not in value:
        return {key: to_plain(item, tensors, f"{path}/{key}" if path else key) for key, item in value.items()}
    if isinstance(value, dict):
        pairs = [[to_plain(key), to_plain(item, tensors, f"{path}/{key}")] for key, item in value.items()]
        return {_TAG: "dict", "items": pairs}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        items = [to_plain(item, tensors, f"{path}/{index}") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: "tuple", "items": items}
    raise CheckpointError(
        f"{path or 'state'} is a {type(value).__name__}, which cannot be saved without pickle; treewise writes none."
    )


def from_plain(value: object, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """The inverse of `to_plain`."""
    if isinstance(value, list):
        return [from_plain(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: from_plain(item, tensors) for key, item in value.items()}
    if kind == "tensor":
        assert tensors is not None
        return tensors[value["name"]]
    if kind == "tuple":
        return tuple(from_plain(item, tensors) for item in value["items"])
    if kind == "dict":
        return {from_plain(key): from_plain(item, tensors) for key, item in value["items"]}
    raw = base64.b64decode(value["raw"])
    if kind == "array":
        array = np.frombuffer(raw, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
        return array if value["shape"] else array[()]
    dtype = getattr(torch, value["dtype"].removeprefix("torch."))
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(value["shape"])
