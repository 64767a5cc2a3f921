"""What a test needs of other packages: where that is missing it is skipped, by name."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

# Test files, and folders of them, that cannot be imported without some packages.
OF_PLACES = {
    "data/test_sources.py": ("datasets",),
    "engines/test_cookbook.py": ("tinker",),
    "integrations/trl": ("datasets", "peft", "trl"),
    "serve": ("orjson", "peft", "starlette", "tinker", "uvicorn"),
}
RELEASE = Version(version("transformers"))


def missing(*names: str) -> str:
    """`needs trl, datasets`; "" where all are installed."""
    absent = [each for each in names if find_spec(each) is None]
    return f"needs {', '.join(absent)}" if absent else ""


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
IMAGES = release_of("transformers", "5.18", "images")
MESHES = release_of("transformers", "5.23", "meshes")


def require(mark: pytest.MarkDecorator) -> None:
    """Skips the test that runs now, where a mark of the above would skip it."""
    if mark.args[0]:
        pytest.skip(mark.kwargs["reason"])
