"""Without hypothesis the strategies say what to install; everything else works."""

import subprocess
import sys

import pytest

from treewise import testing

CODE = """
import sys
sys.modules["hypothesis"] = None
from treewise import testing
testing.tiny_model
testing.trajectories
"""


@pytest.mark.exhaustive
def test_hypothesis_is_missing() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].endswith(
        "ConfigError: random trees need the hypothesis package: pip install 'hypothesis>=6.136'"
    )


@pytest.mark.parametrize("name", testing.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(testing, name).__module__.startswith("treewise.")
