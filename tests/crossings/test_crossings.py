"""Drawn settings: every pair meets, wrong draws are found and shrunk, and a fixed minute of draws is equal."""

from dataclasses import replace

import numpy as np
import pytest

from tests import crossings
from tests.crossings.drawing import Crossings, ImpossibleError, Rule, WrongError, run
from tests.needs import IMAGES
from treewise import TreeEngine
from treewise.advantages import group_tree
from treewise.errors import ConfigError
from treewise.rl import update
from treewise.rl.samplers import transformers_sampler

SETTINGS = {"a": tuple(range(12)), "b": (0, 1, 2, 3), "c": (False, True), "d": ("none", "one", "two")}
RULES = (Rule(("a", "b"), lambda a, b: a != 11 or b == 0), Rule(("b", "c"), lambda b, c: b != 3 or c))


def some_crossings(check=lambda draw: None):
    return Crossings(SETTINGS, RULES, check, {("c", True): 10.0})


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
            raise ImpossibleError("no such thing")
        if draw["a"] == 5:
            raise KeyError("raw")

    lines = []
    report = run(some_crossings(check), 1, num_draws=200, log=lines.append)
    assert report.counts.total() == 200
    assert set(report.counts) == {"equal", "refused", "impossible", "wrong"}
    assert {why for kind, why in report.reasons if kind == "refused"} == {"ConfigError"}
    (shrunk,) = {line.partition(":\n")[2].partition(", 'seed'")[0] for line in lines if ":\n{'a': 2" in line}
    assert shrunk == "{'a': 2, 'b': 0, 'c': False, 'd': 'two'"
    assert any("KeyError: 'raw'" in line for line in lines)


NUM_DRAWS = 40


@IMAGES
@pytest.mark.representatives("0")
@pytest.mark.parametrize("part", range(8))
def test_forty_draws_are_equal_or_refused(part):
    """The first draws of seed 0 in one process; `make crossings` has the others."""
    space = crossings.training()
    space = replace(space, settings={**space.settings, "processes": ("one",), "compiled": (False,)})
    lines = []
    size = NUM_DRAWS // 8
    report = run(space, 0, num_draws=size, skip=part * size, log=lines.append)
    assert not report.counts["wrong"], "\n".join(lines)
    assert report.counts["equal"] >= size // 3, report


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"trained": "last_layer"}, "equal"), ({"trained": "lora_tokens"}, "equal"), ({"family": "zamba2"}, "refused")],
    ids=str,
)
def test_two_processes_judge_a_draw(changes, kind):
    space = crossings.training()
    outcome = space.judge({**space.defaults, "seed": 1, "interface": "trainer", "processes": "sharded", **changes})
    assert outcome.kind == kind, outcome.text


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


ONLINE = {"branching": "lcr", "candidates": 6, "top_k": 4, "objective": "reinforce", "mini_batches": 3, "seed": 5}


@pytest.mark.parametrize(
    "draw",
    [
        ONLINE,
        {"branching": "segments", "credit": "tree_path_mean", "beta": 0.1, "epochs": 2, "seed": 3},
        {"branching": "random", "objective": "gspo", "mini_batches": 3, "drop_flat_groups": True, "seed": 4},
        {"branching": "random", "replay": "exact", "epochs": 2, "mini_batches": 3, "budget": 12, "seed": 6},
        {"agent": "talking", "replay": "exact", "credit": "siblings", "mini_batches": 3, "epochs": 2, "seed": 7},
        {"agent": "editing", "replay": "by_tokens", "beta": 0.1, "budget": 12, "seed": 8},
    ],
)
def test_the_online_loop_is_the_plain_loop_on_its_rollouts(draw):
    space = crossings.online_loop()
    outcome = space.judge({**space.defaults, **draw})
    assert outcome.kind == "equal", outcome.text


@pytest.mark.parametrize("fault", ["objective", "candidates", "draws"])
def test_a_fault_of_the_online_loop_is_found(monkeypatch, fault):
    """Advantages of another objective, candidates from before top-k, and children that count once."""
    draw = dict(ONLINE)
    if fault == "objective":
        monkeypatch.setattr(update, "method_of", lambda *_: "grpo")
    elif fault == "candidates":
        draw_tokens = transformers_sampler.draw_tokens

        def uncut(logits, rules, keys, num_top=0, **options):
            top = logits.float().log_softmax(-1).topk(max(num_top, 1))
            drawn = draw_tokens(logits, rules, keys, num_top=num_top, **options)
            return replace(drawn, top_ids=top.indices, top_logprobs=top.values) if num_top else drawn

        monkeypatch.setattr(transformers_sampler, "draw_tokens", uncut)
    else:
        draw |= {"branching": "none", "credit": "value_steps"}
        counted = group_tree._num_draws_and_arrivals

        def once(*given):
            draws, arrivals = counted(*given)
            return np.ones_like(draws), arrivals

        monkeypatch.setattr(group_tree, "_num_draws_and_arrivals", once)
    space = crossings.online_loop()
    assert space.judge({**space.defaults, **draw}).kind == "wrong"
