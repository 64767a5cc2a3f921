"""Groups of processes that are made, their timeouts, and the end of a process that waits for another in vain."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from treewise.distributed import ranks
from treewise.errors import LostRankError


def new_group() -> Any:
    """A group of all processes, for a thread beside the main one of each; None of a lone process. All ranks call it."""
    if ranks.count() == 1:
        return None
    return distributed.new_group(timeout=_timeout(_own_device()), backend="gloo")


def lost(what: str, advice: str = "") -> LostRankError:
    """The error of a process that others wait for in vain, with what to do. what, advice: sentences."""
    return LostRankError(
        f"{what} End all of them, and go on with --resume, or start again where nothing was saved; checkpoints are "
        f"untouched.{advice}"
    )


def end_now(message: object) -> None:
    """Ends this process at once, as one that lost another, whatever its main thread waits for."""
    sys.stderr.write(f"treewise: {message}\n")
    sys.stderr.flush()
    os._exit(LostRankError.exit_code)


@contextmanager
def ended_after(seconds: float, what: str) -> Iterator[None]:
    """Ends this process where what is inside has not come back by then: a request to a store whose process is stopped
    has no timeout of its own. what: as in `lost`.
    """
    timer = threading.Timer(seconds, lambda: end_now(lost(what)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def making_groups() -> Iterator[None]:
    """Around the making of a mesh, whose groups torch gives half an hour to be made: ends this process at the run's
    timeout.
    """
    seconds = _timeout(_own_device()).total_seconds()
    stopped = f"rank {ranks.own()} waited {seconds:g} s (ddp_timeout) for a group of processes: one is stopped"
    with ended_after(seconds, f"{stopped}, or its machine is gone."):
        yield


def follow_timeout(mesh: DeviceMesh) -> None:
    """Gives the groups of a mesh the timeout of the run (`ddp_timeout`); torch gives them a default one."""
    for group in mesh.get_all_groups():
        distributed_c10d._set_pg_timeout(_timeout(torch.device(mesh.device_type)), group)  # noqa: SLF001


def _own_device() -> torch.device:
    return torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")  # NCCL alone has no backend for a CPU


def _timeout(device: torch.device) -> timedelta:
    """Of the process group of the run."""
    world: Any = distributed.group.WORLD
    found: timedelta = world._get_backend(device).options._timeout  # noqa: SLF001
    return found
