"""`treewise profile`: one table, one trace, the same facts as JSON."""

import json

import pytest

from treewise.cli.main import main
from treewise.engine import profiling
from treewise.testing import tiny_model


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("profile")
    tiny_model(num_hidden_layers=1).save_pretrained(folder / "model")
    rows = [{"token_ids": [*range(1, 20), *range(last, last + 9)], "group": "a"} for last in (20, 30, 40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["profile", str(folder / "rows.jsonl"), "--model", str(folder / "model"), "--device", "cpu", "--steps", "1"]


def test_tree_beside_flat_as_json(arguments, capsys, tmp_path) -> None:
    assert main([*arguments, "--json", "--trace", str(tmp_path / "new" / "trace.json")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["tree_tokens"], facts["flat_tokens"]) == (19 + 27, 3 * 28)
    flops = {name: facts[name]["parts"][profiling.PROJECTIONS]["flops"] for name in ("tree", "flat")}
    assert flops["flat"] / flops["tree"] == 84 / 46
    assert json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]


def test_the_table(arguments, capsys) -> None:
    assert main([*arguments, "--no_flat"]) == 0
    out = capsys.readouterr().out
    assert "46 tree tokens of 84 flat ones; mean of 1 step\n" in out
    assert profiling.HEAD in out
    assert "flat, s" not in out


def test_dropout_is_set_to_zero_and_named(arguments, capsys, tmp_path) -> None:
    tiny_model("gpt2", num_hidden_layers=1, resid_pdrop=0.1, attn_pdrop=0.1).save_pretrained(tmp_path / "model")
    assert main([*arguments, "--model", str(tmp_path / "model"), "--json"]) == 0
    captured = capsys.readouterr()
    assert "dropout is set to 0 for this measurement, in 3 places" in captured.err
    assert json.loads(captured.out)["flat"]["seconds"] > 0


def test_adapters_and_the_automatic_budget_of_a_configuration(arguments, capsys, tmp_path) -> None:
    data, model = arguments[1], arguments[3]
    lines = [f"data: {data}", f"model: {model}", "max_tokens: auto", "lora: {r: 2, target_modules: [q_proj]}"]
    (tmp_path / "run.yaml").write_text("\n".join([*lines, f"output_dir: {tmp_path / 'out'}", ""]))
    words = ["profile", "--config", str(tmp_path / "run.yaml"), "--device", "cpu", "--steps", "1"]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["trained_parameters"] == 2 * (32 + 32)
    assert facts["max_tokens_setting"] == "auto"
    assert facts["max_tokens"] >= 46
    assert main([*words, "--no_flat"]) == 0
    assert f"max_tokens: auto chose {facts['max_tokens']:,} tokens" in capsys.readouterr().out
    assert main([*words, "--max_tokens", "20", "--no_flat", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_tokens"] == 20


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--limit", "-1"], "--limit is -1"),
        (["--trace", "/dev/null/trace.json"], "--trace /dev/null/trace.json"),
    ],
)
def test_wrong_numbers_are_refused(arguments, capsys, flags, message) -> None:
    assert main([*arguments, *flags]) == 2
    assert message in capsys.readouterr().err
