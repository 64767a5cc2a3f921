"""What a test needs of other packages: where that is missing it is skipped, by name."""

from importlib.util import find_spec

import pytest
import transformers
from packaging.version import Version

RELEASE = Version(transformers.__version__)


def packages(*names: str) -> pytest.MarkDecorator:
    missing = [each for each in names if find_spec(each) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def transformers_from(release: str, wanted: str) -> pytest.MarkDecorator:
    """wanted: what earlier releases lack."""
    return pytest.mark.skipif(Version(release) > RELEASE, reason=f"{wanted}: needs transformers {release}")


IMAGES = transformers_from("5.18", "images")
MESHES = transformers_from("5.23", "meshes")


def require(mark: pytest.MarkDecorator) -> None:
    """Skips the test that runs now, where a mark of the above would skip it."""
    if mark.args[0]:
        pytest.skip(mark.kwargs["reason"])
