"""The examples of docs/trl.md run, on a tiny model."""

import runpy
from pathlib import Path

import pytest

from tests.integrations.trl.helpers import model_for_trl, tiny_tokenizer

# TRL still uses a name that transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def run_example(tmp_path):
    model_for_trl().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")

    def run(name, *arguments):
        main = runpy.run_path(str(EXAMPLES / name))["main"]
        return main(["--model", str(tmp_path / "model"), "--output", str(tmp_path / "run"), "--cpu", *arguments])

    return run


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("trl_grpo.py", ["--steps", "1", "--generations", "4", "--completion", "4"]),
        ("trl_dpo.py", ["--steps", "1"]),
        ("trl_sft_tools.py", ["--steps", "1", "--batch", "2", "--max_tokens", "1500"]),
    ],
)
def test_examples(run_example, capsys, name, arguments):
    sharing = run_example(name, *arguments)
    assert sharing.counts.num_calls > 0
    assert sharing.counts.num_left == 0
    assert sharing.counts.share_ratio > 1.5
    assert "Sharing(" in capsys.readouterr().out
