"""`treewise plan`: what the planner says, with bytes and time for a model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import call, save_tiny_model, write_rows
from tests.needs import MESHES
from treewise.cli.main import main
from treewise.testing import tiny_model

TRUNK = list(range(1, 21))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    ids = [[*TRUNK, 30 + leaf, *range(60, 70)] for leaf in range(4)]
    return write_rows(tmp_path / "rows.jsonl", [{"token_ids": each, "group": "a"} for each in ids])


@pytest.mark.parametrize("flag", ["--max_tokens", "--max-tokens"])
def test_the_description_is_printed(flag: str, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("plan", rows, flag, 16) == 0
    out = capsys.readouterr().out
    assert "16 tokens" in out
    assert "recomputed tokens" in out
    assert "--model" in out


def test_json_agrees_with_the_shapes_of_the_model(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(tmp_path / "model")
    assert call("plan", rows, "--max_tokens", 16, "--hold", "never", "--model", model, "--memory", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_tree_tokens"] == 64
    assert facts["num_open_tokens"] == facts["num_recomputed_tokens"] == 20
    assert facts["num_computed_tokens"] == 84
    # 2 layers, 2 key-value heads of 8, keys and values, float32 for them and for their gradients.
    assert facts["bytes_per_gateway_token"] == 2 * 2 * 8 * 2 * 8
    assert facts["bytes_gateways"] == 16 * facts["bytes_per_gateway_token"]  # at the fullest pass; 20 at most
    # A window keeps these of every token, and hidden rows of 32 with gradients, in memory that doubles.
    assert facts["bytes_window"] == 64 * (facts["bytes_per_gateway_token"] + 2 * 32 * 8)
    assert facts["bytes_window_graphs"] > 64 * 64 * 4  # logits are a part of it
    assert facts["budgets"] == []
    assert 64 / 124 < facts["relative_time"] < 84 / 124
    # 20 of 64 tokens have a second forward, at most a third of what they cost.
    assert 1.05 < facts["relative_tree_time"] < 1 + 20 / 64 / 3


def test_a_model_that_was_counted_before_needs_neither_torch_nor_transformers(rows: Path, tmp_path: Path) -> None:
    """Importing them takes seconds: `plan` on token rows did that before it read anything."""
    words = ["plan", str(rows), "--model", str(save_tiny_model(tmp_path / "model")), "--max_tokens", "16"]
    program = f"import sys; from treewise.cli.main import main; main({words}); print(sorted(sys.modules))"
    environment = os.environ | {"TREEWISE_CACHE": str(tmp_path / "cache")}
    for is_first in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert "time / flat" in done.stdout
        for name in ("torch", "transformers"):
            assert (f"'{name}'" in done.stdout) == is_first


def test_without_a_budget_the_memory_of_others_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And gradient checkpointing of a run's configuration is part of the prediction."""
    model = save_tiny_model(tmp_path / "model")
    rows = [{"token_ids": [*range(3, 60), *[10 + leaf] * 60], "group": "a"} for leaf in range(6)]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    quick = ("plan", data, "--model", model)
    assert call(*quick) == 0
    assert "--memory predicts it" in (out := capsys.readouterr().out)
    assert "recomputed" in out.split("budgets")[1]
    assert call(*quick, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["bytes_peak"], {each["bytes_step"] for each in facts["budgets"]}) == (None, {None})
    arguments = (*quick, "--memory", "--json")
    assert call(*arguments) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_micro_batches"] == 1
    assert [each["max_tokens"] for each in facts["budgets"]] == [None, 256, 128]
    whole, half, quarter = (each["bytes_step"] for each in facts["budgets"])
    assert whole > half > quarter
    assert facts["budgets"][0]["recomputed_share"] == 0
    assert facts["bytes_peak"] == facts["bytes_weights"] + whole
    assert call(*arguments[:-1]) == 0
    assert "peak of a step" in capsys.readouterr().out
    run = tmp_path / "run.yaml"
    run.write_text(f"model: {model}\ndata: {data}\noutput_dir: {tmp_path}\nactivation_checkpointing: true\n")
    assert main(["plan", "--config", str(run), "--memory", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_activations"] < facts["bytes_activations"]


@pytest.mark.slow
def test_what_a_run_asks_of_a_step_is_part_of_its_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Autocast, the loss of routers, and the entropy that runs on rollouts measure."""
    model = tmp_path / "model"
    tiny_model("qwen3_moe", num_experts=64, vocab_size=2000).save_pretrained(model)
    data = write_rows(tmp_path / "rows.jsonl", [{"token_ids": [*range(3, 60), leaf], "group": "a"} for leaf in (7, 8)])
    peaks = []
    for more in ("", "bf16: true", "router_z_coefficient: 0.1", "objective: grpo"):
        run = tmp_path / "run.yaml"
        run.write_text(f"model: {model}\ndata: {data}\noutput_dir: {tmp_path}\n{more}\n")
        assert main(["plan", "--config", str(run), "--memory", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        peaks.append(facts["bytes_activations"] + facts["bytes_others"])
    plain, *others = peaks
    assert plain not in others
    assert others[1] > plain
    assert others[2] > plain


def test_whether_a_step_fits_into_one_gpu(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the prediction of its peak on a GPU, with the adapters and the optimizer of a run's configuration."""
    model = save_tiny_model(tmp_path / "model")
    arguments = ("plan", rows, "--model", model)

    def facts(*words: object) -> dict:
        assert call(*arguments, *words, "--json") == 0
        return json.loads(capsys.readouterr().out)

    found = facts("--gpu_memory", "1GiB")
    peak, weights = found["bytes_peak"], found["bytes_weights"]
    assert found["gpu"] == {
        "gpu_bytes": 2**30,
        "bytes_peak": peak,
        "bytes_weights": weights,
        "fits": True,
        "max_tokens": None,
    }
    assert found["bytes_allocator"] == 0  # of a process on a CPU
    assert facts("--gpu_memory", int(peak / 0.9) + 2)["gpu"]["fits"]
    assert not facts("--gpu_memory", int(peak / 0.9) - 2)["gpu"]["fits"]
    assert call(*arguments, "--gpu_memory", "1GiB") == 0
    assert "one GPU: " in (out := capsys.readouterr().out)
    assert "fit into 90% of 1.00 GiB" in out
    assert call(*arguments, "--gpu_memory", int(weights / 0.9) - 2) == 0
    assert "do not fit into 90% of" in (out := " ".join(capsys.readouterr().out.split()))
    assert "without any token: lora, an optim of 8 bits, or --mesh fsdp=N" in out
    run = tmp_path / "run.yaml"
    parameters = weights // 16  # in float32, with gradients and AdamW's two moments
    for more, of_trained in (("optim: adamw_bnb_8bit", 4 + 2), ("optim: sgd", 4), ("optim: adamw_torch", 12)):
        run.write_text(f"model: {model}\ndata: {rows}\noutput_dir: {tmp_path}\n{more}\n")
        assert main(["plan", "--config", str(run), "--gpu_memory", "1GiB", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["gpu"]["bytes_weights"] == (4 + of_trained) * parameters
    for more, each in (("float32_gradients: true", 10), ("float32_gradients: true\noptim: adamw_torch_8bit", 8)):
        run.write_text(f"model: {model}\ndata: {rows}\noutput_dir: {tmp_path}\n{more}\n")
        assert main(["plan", "--config", str(run), "--gpu_memory", "1GiB", "--json", "--dtype", "bfloat16"]) == 0
        assert json.loads(capsys.readouterr().out)["gpu"]["bytes_weights"] == each * parameters
    run.write_text(f"model: {model}\ndata: {rows}\noutput_dir: {tmp_path}\nlora: {{r: 2}}\n")
    assert main(["plan", "--config", str(run), "--gpu_memory", "1GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"]["bytes_weights"] < 5 * parameters


def test_a_budget_that_would_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_model(tmp_path / "model")
    rows = [{"token_ids": [*range(3, 60), *[10 + leaf] * 60], "group": "a"} for leaf in range(6)]
    arguments = ("plan", write_rows(tmp_path / "rows.jsonl", rows), "--model", model)
    assert call(*arguments, "--gpu_memory", "1GiB", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    steps = {each["max_tokens"]: each["bytes_step"] for each in facts["budgets"]}
    size = int((facts["bytes_weights"] + steps[128]) / 0.9) + 2
    assert call(*arguments, "--gpu_memory", size, "--json") == 0
    assert json.loads(capsys.readouterr().out)["gpu"]["max_tokens"] == 128
    assert call(*arguments, "--gpu_memory", size) == 0
    assert "it would at a budget of 128" in " ".join(capsys.readouterr().out.split())
    assert call(*arguments, "--gpu_memory", size, "--max_tokens", 256) == 0
    assert "lower --max_tokens, or activation_checkpointing" in " ".join(capsys.readouterr().out.split())


@MESHES
def test_a_mesh_and_the_memory_of_a_gpu(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_model(tmp_path / "model")
    arguments = ("plan", rows, "--max_tokens", 16, "--model", model, "--mesh", "tp=2,fsdp=2")
    assert call(*arguments, "--gpu_memory", "1GiB") == 0
    assert "fits into 90% of 1.00 GiB" in capsys.readouterr().out
    assert call(*arguments, "--gpu_memory", "60000") == 0
    assert "does not fit" in capsys.readouterr().out
    assert call(*arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["mesh"]["processes"] == 4
