"""The Triton kernels that FlexAttention generates from our masks, executed by Triton's interpreter without a GPU.

They run in one process of its own, since Triton reads at its import whether it interprets. Skipped without the package
`triton` (pip install triton), and where torch is not the release whose lowering `benchmarks/flex_kernels.py` knows.
"""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from treewise.nn.attention.kernel_cases import CASES, is_within

ROOT = Path(__file__).parents[3]
(KNOWN_TORCH,) = re.findall(r'^KNOWN_TORCH = "(.*)"$', (ROOT / "benchmarks" / "flex_kernels.py").read_text(), re.M)

pytestmark = [
    pytest.mark.xdist_group("nn/attention/test_flex_kernels"),
    pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton"),
    pytest.mark.skipif(not version("torch").startswith(KNOWN_TORCH), reason=f"needs torch {KNOWN_TORCH}x"),
]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> dict[str, dict[str, tuple[float, float]]]:
    chosen = [item.callspec.params["name"] for item in request.session.items if item.path == Path(__file__)]
    file = tmp_path_factory.mktemp("kernels") / "results.json"
    script = str(ROOT / "benchmarks" / "flex_kernels.py")
    subprocess.run([sys.executable, script, "interpret", *dict.fromkeys(chosen), "--json", str(file)], cwd=ROOT)
    return json.loads(file.read_text())


@pytest.mark.representatives("whole", "all", "gateway", "broken")
@pytest.mark.parametrize("name", CASES)
def test_kernels_give_outputs_and_gradients_of_the_reference(results, name):
    """Those of cases with a deliberately wrong mask do not."""
    assert is_within(results[name]) is not CASES[name].is_broken, results[name]
