"""`treewise verify`: exit code 0 where tree and flat agree, 1 where they do not."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cli.helpers import call, save_tiny_model, write_rows
from tests.image_models import IMAGE_TOKEN, png, seeing_model, tiny_processor
from treewise.cli.main import main
from treewise.engine import checks, step
from treewise.nn.router_loss import RouterLoss
from treewise.planning.plans import Layout, lay_out
from treewise.testing import tiny_model

TRUNK = list(range(1, 13))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    ids = [[*TRUNK, 30 + leaf, 60, 61] for leaf in range(4)]
    return write_rows(tmp_path / "rows.jsonl", [{"token_ids": each, "group": "a"} for each in ids])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model")


def test_different_is_exit_code_1_and_names_the_worst_parameter(
    rows: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leaky(*args: object) -> Layout:
        layout = lay_out(*args)
        return replace(layout, hi=np.full_like(layout.hi, layout.num_tokens))

    monkeypatch.setattr(checks, "probe", lambda *args, **kwargs: None)  # it would notice first
    monkeypatch.setattr(step, "lay_out", leaky)
    assert call("verify", rows, "--model", model) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT" in out
    assert "worst parameter: model." in out.replace("\n", " ") or "worst parameter: lm_head" in out


def test_json_and_limit(rows: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", rows, "--model", model, "--limit", 40, "--json") == 0
    out = capsys.readouterr()
    facts = json.loads(out.out)
    assert facts["passed"] is True
    assert (facts["num_trajectories"], facts["num_flat_tokens"]) == (4, 40)
    assert "comparing 4 trajectories of 1 tree, cut short to fit --limit: 40 flat tokens, 19 tree tokens" in out.err
    assert call("verify", rows, "--model", model, "--limit", 0) == 0
    assert "comparing 4 trajectories of 1 tree: 60 flat tokens, 24 tree tokens, by FLOPs 2." in capsys.readouterr().err
    assert facts["worst_parameter"] == facts["parameters"][0]["name"]


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    rows = [
        {"token_ids": [*TRUNK, 30 + end, 60, 61], "loss_weights": [0] * 12 + [1] * 3, "group": group, "reward": end % 2}
        for group in ("a", "b")
        for end in range(3)
    ]
    return write_rows(tmp_path / "rollouts.jsonl", rows)


@pytest.mark.parametrize(("objective", "loss", "num"), [("dpo", 0.6931, 4), ("kto", 0.5, 8)])
def test_preferences_are_compared_with_the_model_itself(
    objective: str, loss: float, num: int, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"token_ids": [*TRUNK, 30 + pair, 9 + good], "loss_weights": [0] * 13 + [1], "group": pair, "reward": good}
        for pair in range(3)
        for good in (0, 1)
    ]
    data = write_rows(tmp_path / "pairs.jsonl", rows)
    assert call("verify", data, "--model", model, "--objective", objective, "--limit", 40, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_trajectories"] == num  # of pairs, both rows; of labels, a mismatched row for each
    assert facts["loss_tree"] == pytest.approx(loss, abs=2e-4)


@pytest.mark.parametrize("objective", ["grpo", "gspo", "reinforce"])
def test_other_objectives_take_their_usual_advantages(
    objective: str, rollouts: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--max-tokens",
        10,
        "--tolerance",
        1e-4,
        "--json",
        "--settings",
        "{measure_entropy: true, entropy_coefficient: 1e-3}",
    )
    assert call("verify", rollouts, "--model", model, "--objective", objective, *words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["gradient_norm"] > 1e-3  # advantages are not all zero
    assert facts["num_trajectories"] == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--objective", "grpoo"), "Did you mean 'grpo'"),
        (("--objective", "grpo", "--settings", "{clip_hi: 1}"), "unknown setting 'clip_hi'"),
        (("--objective", "grpo", "--settings", "[1"), "is not valid YAML"),
        (("--objective", "grpo", "--settings", "3"), "is not a mapping"),
        (("--objective", "grpo", "--settings", "{clip_high: abc}"), "clip_high must be a number"),
        (("--objective", "grpo", "--settings", "{3: 1}"), "unknown setting '3'"),
        (("--objective", "ppo"), "has no usual advantages"),
        (("--advantages", "grpo"), "--advantages grpo: SFT takes none"),
    ],
)
def test_wrong_objectives_are_named(
    words: tuple[str, ...], message: str, rollouts: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(rollouts), "--model", str(model), *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.filterwarnings("default")  # of transformers, as it saves and loads
def test_rows_with_images_are_read_by_the_model_s_processor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeing_model("llava").save_pretrained(tmp_path / "llava")
    tiny_processor("llava").save_pretrained(tmp_path / "llava")
    (tmp_path / "a.png").write_bytes(png(1))
    ids = [[5, *[IMAGE_TOKEN] * 4, 6, 7, 8 + leaf] for leaf in range(2)]
    data = write_rows(tmp_path / "seen.jsonl", [{"token_ids": each, "images": ["a.png"], "group": "a"} for each in ids])
    assert call("verify", data, "--model", tmp_path / "llava") == 0
    assert "LlavaForConditionalGeneration" in capsys.readouterr().out
    assert call("inspect", data, "--model", tmp_path / "llava", "--json") == 0
    total = json.loads(capsys.readouterr().out)["total"]
    assert (total["num_images"], total["num_image_tokens"], total["num_flat_image_tokens"]) == (1, 4, 8)


def run_of(folder: Path, model: Path, data: Path, **keys: object) -> Path:
    settings = {"model": str(model), "data": str(data), "output_dir": str(folder / "run"), "use_cpu": True, **keys}
    (folder / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return folder / "run.yaml"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
def test_what_a_run_trains_is_compared(tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft")
    torch.manual_seed(0)
    tiny_model("mixtral", vocab_size=97, router_aux_loss_coef=0.7, output_router_logits=True).save_pretrained(
        tmp_path / "mixture"
    )
    keys = {
        "lora": {"r": 2, "target_modules": "q_proj"},
        "temperature": 0.7,
        "router_z_coefficient": 0.1,
        "max_tokens": 7,
        "weighting": "once",
    }
    config = run_of(tmp_path, tmp_path / "mixture", rows, **keys)
    assert call("verify", "--config", config, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"] == "PeftModelForCausalLM"
    assert {part["max_tokens"] for part in facts["at_budgets"]}.isdisjoint({7})
    assert facts["max_tokens"] == 7
    assert facts["at_budgets"][0]["is_cut"]
    assert all(each["norm"] > 0 for each in facts["parameters"])  # those of a fresh adapter's first factor, too
    assert {each["name"].split(".")[-3] for each in facts["parameters"]} == {"lora_A", "lora_B"}
    losses = [facts["loss_flat"]]
    for change in ({"temperature": 1.0}, {"router_z_coefficient": 0.0}, {"weighting": "per_trajectory"}):
        assert call("verify", "--config", run_of(tmp_path, tmp_path / "mixture", rows, **keys | change), "--json") == 0
        losses.append(json.loads(capsys.readouterr().out)["loss_flat"])
    assert len({round(loss, 4) for loss in losses}) == 4


def test_the_loss_on_routers_of_a_run_is_compared(
    tmp_path: Path, rows: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    tiny_model("mixtral", vocab_size=97).save_pretrained(tmp_path / "mixture")
    config = run_of(tmp_path, tmp_path / "mixture", rows, router_z_coefficient=0.1)
    terms = RouterLoss._terms

    def wrong(self: RouterLoss, sums: torch.Tensor) -> torch.Tensor:
        found = terms(self, sums)
        return found + 0.05 * (found - found.detach())

    monkeypatch.setattr(RouterLoss, "_terms", wrong)
    assert call("verify", "--config", config) == 1
    assert "gradient error" in capsys.readouterr().out
    assert call("verify", rows, "--model", tmp_path / "mixture") == 0  # without the run's setting there is none


@pytest.mark.parametrize(
    "keys",
    [
        {"objective": "grpo", "objective_settings": {"beta": 0.1, "entropy_coefficient": 0.01}, "num_train_epochs": 2},
        {"objective": "gspo", "advantages": "rloo", "bf16": True},
        {"objective": "dapo", "advantages": "dr_grpo", "merge_across_trees": False, "old_logprobs": "recompute"},
        {"objective": "reinforce", "dtype": "float64"},
    ],
    ids=lambda keys: keys["objective"],
)
def test_a_run_on_rollouts_is_compared(
    keys: dict[str, object], tmp_path: Path, rollouts: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("verify", "--config", run_of(tmp_path, model, rollouts, **keys), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["gradient_norm"] > 1e-3
    assert facts["dtype"] == ("bfloat16" if keys.get("bf16") else keys.get("dtype", "float32"))
    assert facts["num_trees"] == (2 if keys.get("merge_across_trees") is False else 1)


def test_the_objective_of_a_flag_replaces_that_of_a_run(
    tmp_path: Path, rollouts: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_of(tmp_path, model, rollouts, objective="dpo", reference=str(model))
    assert call("verify", "--config", config, "--json") == 0
    assert json.loads(capsys.readouterr().out)["loss_tree"] == pytest.approx(0.6931, abs=2e-4)
    assert call("verify", "--config", config, "--objective", "sft", "--json") == 0
    assert json.loads(capsys.readouterr().out)["loss_tree"] > 1
    assert main(["verify", "--config", str(config), "--settings", "{beta: 1}"]) == 2
