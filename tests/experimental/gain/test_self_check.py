"""Ranks and correlations against plain loops; verdicts follow intervals, and reports survive JSON."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.errors import DataError
from treewise.experimental.gain.self_check import (
    CheckReport,
    check_signals,
    correlation,
    ranks,
    spearman,
)

VALUES = st.lists(st.integers(0, 5), min_size=3, max_size=12)


@given(values=VALUES)
def test_ranks_by_counting(values):
    naive = [sum(b < a for b in values) + (sum(b == a for b in values) - 1) / 2 for a in values]
    np.testing.assert_array_equal(ranks(np.array(values)), naive)


@given(pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=12))
def test_spearman_is_the_correlation_of_ranks(pairs):
    a, b = np.array(pairs, dtype=float).T
    expected = 0.0
    if len(set(a)) > 1 and len(set(b)) > 1:
        expected = np.corrcoef(ranks(a), ranks(b))[0, 1]
    assert spearman(a, b) == pytest.approx(expected, abs=1e-12)


def test_the_interval_is_that_of_resampled_tasks():
    rng = np.random.default_rng(0)
    signal = rng.normal(size=40)
    target = signal + 0.5 * rng.normal(size=40)
    found = correlation(signal, target, num_samples=400, seed=1)
    drawn = np.random.default_rng(1).integers(0, 40, (400, 40))
    naive = [np.corrcoef(ranks(signal[each]), ranks(target[each]))[0, 1] for each in drawn]
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(naive, [0.025, 0.975])))
    assert found.is_above_zero
    assert not correlation(-signal, target).is_above_zero
    assert str(found).startswith("+0.")


def test_noise_is_seldom_above_zero():
    rng = np.random.default_rng(2)
    above = [correlation(rng.normal(size=30), rng.normal(size=30), 200).is_above_zero for _ in range(100)]
    assert sum(above) <= 10


def test_constant_values_predict_nothing_and_others_are_refused():
    found = correlation(np.ones(5), np.arange(5))
    assert (found.value, found.low, found.is_above_zero, found.is_measurable) == (0, 0, False, True)
    found = correlation(np.arange(5), np.ones(5))
    assert (found.is_above_zero, found.is_measurable, str(found)) == (False, False, "not measurable")
    for wrong in (np.nan, np.inf):
        with pytest.raises(DataError, match="1 of 3 values are not finite"):
            correlation(np.array([1, wrong, 2]), np.arange(3))
    with pytest.raises(DataError, match="2 tasks; a rank"):
        correlation(np.arange(2), np.arange(2))


def report(sign=1.0, varied=5):
    rng = np.random.default_rng(0)
    norms = rng.normal(size=20) ** 2
    noise = rng.normal(size=20)
    return check_signals(
        {"angle": sign * norms, "intra": noise, "length": norms},
        norms,
        num_rollouts=160,
        num_tokens=1234,
        num_varied=varied,
    )


def test_a_signal_is_useless_where_its_interval_is_not_above_zero():
    assert report().useless == ["intra"]
    assert report(-1.0).useless == ["angle", "intra"]
    assert report().refusal() is None
    assert "draws by angle, which is useless here: its rank correlation" in (report(-1.0).refusal() or "")


def test_where_rewards_differ_nowhere_nothing_is_called_useless():
    """It was `+0.00 [+0.00, +0.00] useless here`, which says that something was measured."""
    found = report(varied=0)
    assert found.useless == []
    assert found.not_measurable == ["angle", "intra"]
    lines = found.text().splitlines()
    assert lines[2] == "angle    not measurable"
    assert lines[-1].startswith("not measurable here: angle, intra; rewards differ within no task")
    assert "useless" not in found.text()
    assert "+0.00" not in found.text()
    assert found.to_dict()["not_measurable"] == ["angle", "intra"]
    reason = found.refusal()
    assert reason is not None
    assert reason.startswith(
        "curriculum 'gain' draws by angle, whose worth is not measurable here, over 20 tasks: rewards"
    )


def test_a_report_survives_json_and_is_read_by_people():
    found = report(-1.0)
    assert CheckReport.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    lines = found.text().splitlines()
    assert lines[0] == "20 tasks, 160 rollouts (1,234 generated tokens); rewards differ within 5 tasks"
    assert [line.split()[0] for line in lines[2:-1]] == ["angle", "intra", "length"]
    assert lines[2].endswith("useless here")
    assert lines[-1] == "useless here: angle, intra; the interval is not above zero."
    assert "useless" not in "".join(line for line in lines if line.startswith("length"))
