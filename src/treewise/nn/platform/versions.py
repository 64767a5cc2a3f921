"""Which releases are installed, which of torch the tests of a release run with, and its parts that are not public.

Imports no torch by itself: commands ask for versions before they need it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any

from packaging.specifiers import SpecifierSet

from treewise.errors import ConfigError

logger = logging.getLogger("treewise")

# What the tests of a release run with; pyproject.toml admits later ones, too.
TESTED_TORCH = ">=2.11,<2.14"


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def untested_torch(release: str) -> str | None:
    """Words on a release of torch (`2.15.0+cu130`) that no test has run with; None of a tested one."""
    if SpecifierSet(TESTED_TORCH, prereleases=True).contains(release.partition("+")[0]):
        return None
    return f"{release}: tests run with torch {TESTED_TORCH}"


def part_of_torch(path: str) -> Any:
    """`torch.PATH`, one of the parts that are not public.

    Raises:
        ConfigError: this torch lacks it; names what the tests run with.
    """
    import torch

    try:
        return attrgetter(path)(torch)
    except AttributeError as error:
        raise ConfigError(
            f"torch {torch.__version__} has no torch.{path}, which treewise needs; install torch {TESTED_TORCH}."
        ) from error


@contextmanager
def untested_torch_named() -> Iterator[None]:
    """Around what depends on parts of torch that are not public: errors inside name a torch that no test ran with."""
    try:
        yield
    except Exception as error:
        import torch

        if untested := untested_torch(torch.__version__):
            error.add_note(f"torch {untested}")
        raise


@cache
def warn_of_untested_torch() -> None:
    """A warning, once, where no test ran with this torch."""
    import torch

    if untested := untested_torch(torch.__version__):
        logger.warning("torch %s; compare gradients by `treewise verify`, and see `treewise doctor`.", untested)
