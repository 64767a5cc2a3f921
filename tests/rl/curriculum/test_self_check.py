"""Verdicts follow intervals; reports survive JSON."""

import json

import numpy as np

from treewise.rl.curriculum.self_check import CheckReport, check_signals, is_refusable, refusal


def report(sign=1.0, varied=5):
    rng = np.random.default_rng(0)
    norms = rng.normal(size=20) ** 2
    noise = rng.normal(size=20)
    return check_signals(
        {"angle": sign * norms, "learnability": noise, "length": norms},
        {"gradient_norm": norms, "variance": rng.normal(size=20)},
        num_rollouts=160,
        num_tokens=1234,
        num_varied=varied,
    )


def test_a_signal_is_useless_where_its_interval_is_not_above_zero():
    assert report().useless == ["learnability"]
    assert report(-1.0).useless == ["angle", "learnability"]
    assert refusal("gain", report()) is None
    assert refusal("uniform", report(-1.0)) is None
    assert "draws by angle, which is useless here: its rank correlation" in (refusal("gain", report(-1.0)) or "")
    assert "All rewards within each task were equal" in (refusal("learnability", report(varied=0)) or "")
    assert [is_refusable(name) for name in ("gain", "gain_shuffled", "learnability")] == [True, False, False]


def test_a_report_survives_json_and_is_read_by_people():
    found = report(-1.0)
    assert CheckReport.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    lines = found.text().splitlines()
    assert lines[0] == "20 tasks, 160 rollouts (1,234 generated tokens); rewards differ within 5 tasks"
    assert [line.split()[0] for line in lines[2:]] == ["angle"] * 2 + ["learnability"] * 2 + ["length"] * 2
    assert lines[2].endswith("useless here")
    assert "useless" not in "".join(line for line in lines if line.startswith("length"))
