"""The script of `make gpu` that compares attention's kernels, on a CPU."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import attention_kernels
from benchmarks.attention_kernels import CASES, num_wrong_pairs
from treewise.nn.attention import needs
from treewise.nn.attention.kernel_cases import _with_a_wrong_key
from treewise.nn.attention.mask import LayerRule
from treewise.nn.attention.needs import WINDOWS
from treewise.nn.attention.reference import reference_attention

CPU = torch.device("cpu")


def test_every_pair_is_looked_at_in_both_directions():
    window = replace(CASES[WINDOWS], shape=(3, 20, 7), rule=LayerRule(0.2, window=9))
    for case in (replace(CASES[""], shape=(3, 20, 7)), replace(CASES["gateway"], shape=(3, 30, 17)), window):
        mask = case.mask()
        assert num_wrong_pairs(reference_attention, mask, case.rule, 16, CPU) == (0, 0)
        wider = replace(case.rule, window=(case.rule.window or 20) - 1)
        assert min(num_wrong_pairs(other(wider), mask, case.rule, 16, CPU)) > 0
    mask = CASES[""].mask()
    assert num_wrong_pairs(reference_attention, mask, LayerRule(0.2), 16, CPU, given=_with_a_wrong_key(mask)) == (1, 1)


def other(rule: LayerRule):
    """Attention that ignores the rule that it is given."""
    return lambda query, key, value, mask, _: reference_attention(query, key, value, mask, rule)


def test_a_run_is_saved_and_adopted_only_where_it_passed(tmp_path, monkeypatch, capsys):
    """With a stand-in: cascade's name, whose process fails at the end of its time."""
    out = tmp_path / "found.json"
    words = ["run", "--device", "cpu", "--size", "tiny", "--seconds", "100", "--kernels", "cascade", "flash"]
    assert attention_kernels.main([*words, "--out", str(out)]) == 0
    found = json.loads(out.read_text())["kernels"]
    assert found["flash"]["skipped"].startswith("attention='flash' runs on CUDA, and the model is on cpu")
    size = found["cascade"]["sizes"]["16"]
    assert set(size["right"]) == set(CASES)
    assert size["backwards"] == {"times": 5, "changed": 0, "beyond": 0}
    assert size["lengths"]["graphs"] == 0
    assert "cascade, heads of 16: 6 of 6 right" in capsys.readouterr().out

    kernel = {**found["cascade"], "packages": {"torch": "2.14.1"}, "capability": [9, 0]}
    right = {"sizes": {"128": {**size, "speed": 1.4}, "64": {"right": {}}}}
    file = tmp_path / "kernels-card.json"
    wrong = {"passed": False, "why": "a race"}
    file.write_text(json.dumps({"kernels": {"flash": kernel | right, "cudnn": kernel | wrong}}))
    (tmp_path / "measured.json").write_text('{"rows": []}\n')
    monkeypatch.setattr(attention_kernels.resources, "files", lambda _: tmp_path)
    assert attention_kernels.main(["adopt", str(file)]) == 0
    (row,) = json.loads((tmp_path / "measured.json").read_text())["rows"]
    assert (row["kernel"], row["speed"], row["head_sizes"], row["result"]) == ("flash", 1.4, [128, 128], file.name)
    assert WINDOWS in row["features"]
    assert "cudnn: not adopted, a race" in capsys.readouterr().out
    needs.measured.cache_clear()
    place = needs.Place("cuda", (9, 0), "bfloat16")
    assert needs._row_of("flash", place, (128, 128), row["packages"]) == row
    needs.measured.cache_clear()


def test_a_race_and_a_process_that_dies_do_not_pass(tmp_path, monkeypatch):
    assert not attention_kernels._is_right({"right": {}, "backwards": {"beyond": 1}})
    assert not attention_kernels._is_right({"right": {"": {"passed": False}}})
    assert not attention_kernels._is_right({"right": {}, "lengths": {"graphs": 1}})
    assert attention_kernels._is_right({"right": {"": {"passed": True}}})
    monkeypatch.setattr(attention_kernels, "__file__", str(Path(__file__).parent / "nothing.py"))
    out = tmp_path / "found.json"
    words = ["run", "--device", "cpu", "--size", "tiny", "--seconds", "20", "--kernels", "cascade", "--out", str(out)]
    assert attention_kernels.main(words) == 1
    assert "ended with code 2" in json.loads(out.read_text())["kernels"]["cascade"]["why"]
