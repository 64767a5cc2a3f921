"""Collective operations of the processes of one run: work on one rank or on all, whose errors reach all; sums.

An error on one rank must not leave the others waiting in a collective operation, so results are exchanged with errors.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import distributed

from treewise import errors
from treewise.errors import TreewiseError

T = TypeVar("T")

_thread = threading.local()  # group: through which its results are exchanged, where not through that of the run


def count() -> int:
    """Processes of the run; 1 without a process group."""
    return distributed.get_world_size() if _is_started() else 1


def own() -> int:
    """The rank of this process, from 0."""
    return distributed.get_rank() if _is_started() else 0


def on_first_rank(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 alone. Every rank returns its result, which must pickle, or raises its error."""
    if count() == 1:
        return work()
    box: list[Any] = [_outcome(work) if own() == 0 else None]
    distributed.broadcast_object_list(box, src=0, group=getattr(_thread, "group", None))
    return _unpack([box[0]])[0]


def on_every_rank(work: Callable[[], T]) -> list[T]:
    """Runs `work` on each rank and returns the results of all; if it failed on any, every rank raises that error."""
    if count() == 1:
        return [work()]
    outcomes: list[Any] = [None] * count()
    distributed.all_gather_object(outcomes, _outcome(work), group=getattr(_thread, "group", None))
    return _unpack(outcomes)


def go_through(group: Any) -> None:
    """The calling thread's `on_first_rank` and `on_every_rank` go through a group of `new_group` from now on."""
    _thread.group = group


def gather_texts(own_text: str) -> list[str]:
    """A short text of every rank, in their order."""
    texts: list[Any] = [own_text]
    if _is_started():
        texts = [None] * count()
        distributed.all_gather_object(texts, own_text)
    return texts


def sum_over(device: torch.device, *values: float) -> list[float]:
    """The sum of each value over the ranks, in float64 if the device supports it."""
    if count() == 1:
        return list(values)
    dtype = torch.float32 if device.type == "mps" else torch.float64
    total = torch.tensor(values, dtype=dtype, device=device)
    distributed.all_reduce(total)
    return list(map(float, total.tolist()))


def _is_started() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def _outcome(work: Callable[[], Any]) -> tuple[Any, str | None, tuple[Any, ...]]:
    """(result, name of the error's type or None, what makes it again)."""
    try:
        return work(), None, ()
    except OSError as error:  # a disk that is full
        if error.errno is None:
            return None, type(error).__name__, (str(error),)
        return None, OSError.__name__, (error.errno, error.strerror, error.filename)
    except Exception as error:
        return None, type(error).__name__, (str(error),)


def _unpack(outcomes: list[tuple[Any, str | None, tuple[Any, ...]]]) -> list[Any]:
    for rank, (_, name, made_of) in enumerate(outcomes):
        if name is None:
            continue
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, TreewiseError):
            raise kind(*made_of)
        if name == OSError.__name__ and len(made_of) > 1:
            raise OSError(*made_of)  # of the class of its number
        raise RuntimeError(f"rank {rank}: {name}: {made_of[0]}")
    return [result for result, _, _ in outcomes]
