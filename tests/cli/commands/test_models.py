"""`treewise models` and `treewise doctor`."""

import json
from typing import Any

import pytest

from treewise.cli.main import main
from treewise.engine.engine import TreeEngine
from treewise.engine.prepared import StepOutput
from treewise.nn.support_table import SUPPORTED, CapabilityTable

TABLE = CapabilityTable.load()


def test_all_families_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["family"] for row in found["rows"]} == {row.family for row in TABLE.rows}
    assert found["transformers"] == TABLE.transformers
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert f"{TABLE.counts()[SUPPORTED]} supported" in out
    assert "llama" in out


def test_one_family_and_its_exit_code(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    assert main(["models", "llama"]) == 0
    assert "LlamaForCausalLM): supported" in capsys.readouterr().out
    assert main(["models", "bloom"]) == 1
    assert "refused" in capsys.readouterr().out
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    adapters = tmp_path / "lora"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    for folder in (tmp_path, adapters):
        assert main(["models", str(folder)]) == 0
        assert "Qwen3ForCausalLM): supported" in capsys.readouterr().out


def test_an_unknown_family_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "lama"]) == 2
    assert "Did you mean 'llama'?" in capsys.readouterr().err


def test_doctor_checks_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["attention"]["auto"] == "cascade"
    assert facts["self-check"]["passed"]
    assert facts["self-check"]["max_tokens=6"] < 1e-5
    assert facts["self-check"]["logprob_gap"] == pytest.approx(1, abs=1e-5)
    assert main(["doctor", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("ready\n")


def test_doctor_fails_where_gradients_are_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = TreeEngine.step

    def wrong(engine: TreeEngine, *args: Any, **settings: Any) -> StepOutput:
        out = own(engine, *args, **settings)
        for parameter in engine.model.parameters():
            parameter.grad.mul_(1.001)
        return out

    monkeypatch.setattr(TreeEngine, "step", wrong)
    assert main(["doctor", "--device", "cpu"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_doctor_shows_what_a_broken_installation_raises(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise OSError("libtorch is gone")

    monkeypatch.setattr(TreeEngine, "step", broken)
    assert main(["doctor", "--device", "cpu"]) == 1
    assert "OSError: libtorch is gone" in capsys.readouterr().out
