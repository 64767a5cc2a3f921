"""Shapes cost nothing outside of tests: nothing is imported, and annotations are plain array types."""

import subprocess
import sys

import pytest

CODE = """
import sys
from torch import Tensor
import treewise.objectives, treewise.nn.attention.reference
from treewise.base.shapes import Float
assert Float[Tensor, "T M"] is Tensor
assert "jaxtyping" not in sys.modules
assert "beartype" not in sys.modules
"""


@pytest.mark.exhaustive
def test_nothing_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
