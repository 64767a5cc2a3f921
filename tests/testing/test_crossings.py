"""Drawn settings: every pair meets, wrong draws are found and shrunk, and a fixed minute of draws is equal."""

import pytest

from treewise import TreeEngine
from treewise.errors import ConfigError
from treewise.testing import crossings
from treewise.testing.crossings import Crossings, Rule, WrongError

SETTINGS = {"a": tuple(range(12)), "b": (0, 1, 2, 3), "c": (False, True), "d": ("none", "one", "two")}
RULES = (Rule(("a", "b"), lambda a, b: a != 11 or b == 0), Rule(("b", "c"), lambda b, c: b != 3 or c))


def some_crossings(check=lambda draw: None):
    return Crossings(SETTINGS, RULES, check, str, {("c", True): 10.0})


def test_every_allowed_pair_meets_and_no_rule_is_broken():
    space = some_crossings()
    draws = [draw for draw, _ in zip(space.draws(1), range(100), strict=False)]
    assert all(space.allows(draw) for draw in draws)
    assert space.num_uncovered(draws) == 0
    assert space.num_uncovered(draws[:20]) > 0
    # Of 100 draws the rare value has those that its pairs need: 12 values of `a`, and those with b = 3.
    assert sum(draw["c"] for draw in draws) < 45


def test_outcomes_are_counted_and_a_wrong_draw_is_shrunk():
    def check(draw):
        if draw["a"] == 2 and draw["d"] == "two":
            raise WrongError("off by 1")
        if draw["a"] == 3:
            raise ConfigError("no")
        if draw["a"] == 4:
            raise crossings.ImpossibleError("no such thing")
        if draw["a"] == 5:
            raise KeyError("raw")

    lines = []
    report = crossings.run(some_crossings(check), 1, num_draws=200, log=lines.append)
    assert report.counts.total() == 200
    assert set(report.counts) == {"equal", "refused", "impossible", "wrong"}
    assert set(report.reasons["refused"]) == {"ConfigError"}
    (shrunk,) = {line.partition(", 'seed'")[0] for line in lines if line.startswith("shrunk:\n{'a': 2")}
    assert shrunk == "shrunk:\n{'a': 2, 'b': 0, 'c': False, 'd': 'two'"
    assert any("KeyError: 'raw'" in line for line in lines)


@pytest.mark.parametrize("interface", ["step", "logprobs", "trainer"])
def test_a_weights_gradient_that_is_5_percent_off_is_found(monkeypatch, interface):
    space = crossings.training()
    draw = {**space.defaults, "seed": 1, "interface": interface}
    assert space.judge(draw).kind == "equal"
    original = TreeEngine.__init__

    def broken(self, model, *args, **kwargs):
        original(self, model, *args, **kwargs)
        next(model.parameters()).register_hook(lambda gradient: 1.05 * gradient)

    monkeypatch.setattr(TreeEngine, "__init__", broken)
    outcome = space.judge(draw)
    assert outcome.kind == "wrong"
    assert "embed_tokens.weight is off by 5.0e-02" in outcome.reason
    # What differs is the first parameter's gradient alone, so this draw needs none of its other settings.
    wilder = {**draw, "interface": "step", "variant": "tied", "budget": "tiny", "trained": "embeddings", "clip": 0.0}
    assert space.shrunk(wilder) == {**space.defaults, "seed": 1}
