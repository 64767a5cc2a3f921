import logging
import os

import pytest

os.environ["TINKER_TELEMETRY"] = "0"
os.environ["TREEWISE_SERVE_TEST"] = "1"


@pytest.fixture(autouse=True)
def _no_warnings_of_the_sdk(recwarn):
    """Threads of the SDK warn of its own deprecations."""
    logging.getLogger("tinker").setLevel(logging.ERROR)
