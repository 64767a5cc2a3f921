"""Whose a warning is: pyproject.toml makes errors of warnings in treewise and its tests, and of no one else's.

Which code a warning is about is told by the frame that it names (`stacklevel`). Libraries often warn without one, and
then name themselves, also where treewise called what is deprecated; `name_callers` lets those name their caller. What
the garbage collector destroys names whatever code runs at that moment, often ours: `pardon_collections`.
"""

import gc
import sys
import warnings
from functools import wraps
from types import FrameType
from typing import Any

OURS = ("treewise", "tests")


def name_callers() -> None:
    """From now on a warning without a `stacklevel` names the caller, where that is treewise or a test."""
    plain = warnings.warn

    @wraps(plain)
    def warn(
        message: Any, category: type[Warning] | None = None, stacklevel: int = 1, source: Any = None, **more: Any
    ) -> None:
        warning = sys._getframe(1)
        names_caller = stacklevel <= 1 and not _is_ours(warning) and _is_ours(warning.f_back)
        level = 2 if names_caller or more else 1  # `skip_file_prefixes` counts from the caller
        plain(message, category, max(level, stacklevel) + 1, source, **more)

    warnings.warn = warn


def pardon_collections() -> None:
    """From now on a warning during a collection, whose frame is anybody's, is no error (an SDK's open socket)."""
    ignored = ("ignore", None, Warning, None, 0)

    def follow(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            warnings.filters.insert(0, ignored)
        elif ignored in warnings.filters:
            warnings.filters.remove(ignored)

    gc.callbacks.append(follow)


def _is_ours(frame: FrameType | None) -> bool:
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in OURS
