"""The notebook for a T4, its cells executed one after the other on a CPU with a tiny model of Qwen3's kind."""

import gzip
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).parents[2]
FIXTURE = ROOT / "tests" / "data" / "fixtures" / "smollm2"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
RUN = """
import json, sys
names = {}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
assert names["attention"] == "auto"
"""


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in FIXTURE.iterdir():
        data = path.read_bytes()
        (folder / path.name.removesuffix(".gz")).write_bytes(gzip.decompress(data) if path.suffix == ".gz" else data)
    torch.manual_seed(0)
    tokens = len(AutoTokenizer.from_pretrained(folder))
    config = Qwen3Config(vocab_size=tokens, num_attention_heads=2, num_key_value_heads=1, **SIZES)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_it_trains_and_ends_in_equality(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    settings = {"TREEWISE_MODEL": str(model_folder), "TREEWISE_STEPS": "2", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", RUN, str(ROOT / "examples" / "t4.ipynb")]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | settings, capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"tokens: [\d,]+ alone, [\d,]+ as a tree: \d\.\d\d times fewer", done.stdout)
    assert re.search(r"gradients differ by \d\.\de-\d\d of their norm", done.stdout)
    assert (tmp_path / "runs" / "t4" / "adapter_config.json").is_file()


def test_it_takes_nothing_that_a_t4_lacks() -> None:
    """15 GiB, no bfloat16, no kernels of FlexAttention."""
    notebook = json.loads((ROOT / "examples" / "t4.ipynb").read_text(encoding="utf-8"))
    code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    assert "bfloat16" not in code
    assert "dtype=torch.float32" in code
    assert "set_per_process_memory_fraction" in code
    assert '"reference"' in code
