import gc
import logging
import os
import warnings

import pytest

os.environ["TINKER_TELEMETRY"] = "0"
logging.getLogger("tinker").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _sockets_of_the_sdk():
    """The SDK leaves the connection open by which it asks for its flags: collected here, not in somebody's test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def pytest_collection_modifyitems(items):
    """The collector may find them in a test of this folder, too, where they are no fault either."""
    for item in items:
        if item.path.parent.name == "serve":
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
