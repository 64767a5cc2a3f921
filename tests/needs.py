"""What a test needs of other packages: where that is missing it is skipped, by name."""

import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

# Test files, and folders of them, that cannot be imported without some packages.
OF_PLACES = {
    "data/test_sources.py": ("datasets",),
    "clients": ("orjson", "peft", "starlette", "tinker", "uvicorn"),
    "integrations/trl": ("datasets", "peft", "trl>=1.16"),
    "serve": ("orjson", "peft", "starlette", "tinker", "uvicorn"),
}
# Families with recurrent layers that follow a tree with every transformers.
_OF_ANY_RELEASE = {"minimax", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
RELEASE = Version(version("transformers"))


def missing(*names: str) -> str:
    """`needs trl>=1.16, datasets`; "" where all are installed."""
    absent = [each for each in names if not _is_there(Requirement(each))]
    return f"needs {', '.join(absent)}" if absent else ""


def _is_there(wanted: Requirement) -> bool:
    is_there = find_spec(wanted.name) is not None
    return is_there and (not wanted.specifier or wanted.specifier.contains(version(wanted.name), prereleases=True))


def missing_at(path: Path) -> str:
    """The same of what the tests at a path import."""
    own = path.relative_to(Path(__file__).parent)
    places = (own.as_posix(), *(each.as_posix() for each in own.parents))
    return missing(*(name for place in places for name in OF_PLACES.get(place, ())))


def packages(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(missing(*names)), reason=missing(*names))


def release_of(package: str, release: str, wanted: str) -> pytest.MarkDecorator:
    """wanted: what earlier releases lack."""
    is_there = not missing(package) and Version(version(package)) >= Version(release)
    return pytest.mark.skipif(not is_there, reason=f"{wanted}: needs {package} {release}")


def is_installed(name: str) -> bool:
    """As a distribution with metadata, not only on the path."""
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


INSTALLED = pytest.mark.skipif(
    not is_installed("treewise"), reason="needs treewise installed, not run from its sources"
)
EXPERTS = release_of("transformers", "5.4", "products of experts of others")
GEMMA_2 = release_of("transformers", "5.4", "Gemma 2 under another default device")
GEMMA_3 = release_of("transformers", "5.6", "Gemma 3 with its tower on text alone")
KERNELS = release_of("transformers", "5.7", "kernels for experts")
TIED_LORA = release_of("peft", "0.19", "adapters that are tied")
FUSED_HEAD = release_of("trl", "1.16", "the fused head")
LOSS_OF_TRL = pytest.mark.skipif(
    not missing("trl==1.15.*") and find_spec("triton") is None, reason="TRL 1.15 trains with triton alone: needs triton"
)
RECURRENT = release_of("transformers", "5.15", "recurrent layers that call their functions by name")
ROUTERS = release_of("transformers", "5.19", "routers of all mixtures")
IMAGES = release_of("transformers", "5.18", "images")
MESHES = release_of("transformers", "5.23", "meshes")


def require(mark: pytest.MarkDecorator) -> None:
    """Skips the test that runs now, where a mark of the above would skip it."""
    if mark.args[0]:
        pytest.skip(mark.kwargs["reason"])


def later_release(error: Exception) -> str:
    """Why a test fails where an older transformers lacks a family, or has other layers of it, which treewise refuses
    with the release in its message; empty for any other error."""
    if isinstance(error, KeyError):
        from treewise.nn.support_table import own_table

        is_family = any(row.family == error.args[0] for row in own_table().rows)
        return f"{error.args[0]}: needs a later transformers" if is_family else ""
    found = re.search(r"(\S+) follows a tree with transformers (\S+):", str(error))
    if found is None or found[1] in _OF_ANY_RELEASE:
        return ""
    return f"{found[1]}: needs transformers {found[2]}"


def program(name: str) -> pytest.MarkDecorator:
    """A command of the system."""
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"needs {name}")
