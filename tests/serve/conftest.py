import logging
import os

import pytest

os.environ["TINKER_TELEMETRY"] = "0"
logging.getLogger("tinker").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _sockets_of_the_sdk():
    yield
    from tests.serve.servers import collect_sockets  # after the SDK's settings above

    collect_sockets()


def pytest_collection_modifyitems(items):
    """The collector may find them in a test of this folder, too, where they are no fault either."""
    for item in items:
        if item.path.parent.name == "serve":
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
