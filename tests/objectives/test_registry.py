"""Settings of named objectives come from annotations: a new field of `PolicyGradient` is a setting everywhere."""

import pickle
from dataclasses import fields, replace
from functools import partial

import pytest

import treewise as tw
from treewise.cli.config import typed_settings
from treewise.cli.keys import rl_aliases
from treewise.errors import ConfigError
from treewise.objectives.policy_gradient import PolicyGradient
from treewise.objectives.registry import (
    OBJECTIVES,
    PREFERENCES,
    determined,
    objective_named,
    setting_types,
)
from treewise.objectives.sft import checked_objective

NAMES = {name: each for name, each in OBJECTIVES.items() if name not in ("policy_gradient", "dpo")}  # with heirs
DETERMINED = {name: determined(each) for name, each in OBJECTIVES.items() if determined(each)}
FIELDS = {field.name for field in fields(PolicyGradient)} - {"usual_advantages"}  # a fact of each name, no setting


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in ("sft", "distillation", *PREFERENCES)])
def test_every_field_of_policy_gradient_is_a_setting(name):
    assert set(setting_types(name)) - {"max_length"} == FIELDS - set(DETERMINED.get(name, ()))
    assert set(rl_aliases()) >= FIELDS - {"surrogate"}


@pytest.mark.parametrize("name", DETERMINED)
def test_what_a_name_determines_is_no_setting(name):
    required = {"max_length": 4} if name == "dr_grpo" else {}
    for setting in DETERMINED[name]:
        with pytest.raises(ConfigError, match=f"objective '{name}' determines {setting}"):
            objective_named(name, **required, **{setting: None})
        with pytest.raises(TypeError, match=setting):
            OBJECTIVES[name](**required, **{setting: None})


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_is_of_its_own_class_and_no_other_name(name):
    objective = objective_named(name, **({"max_length": 4} if name == "dr_grpo" else {}))
    assert type(objective) is OBJECTIVES[name]
    assert not any(isinstance(objective, kind) for kind in set(NAMES.values()) - {type(objective)})
    assert objective == pickle.loads(pickle.dumps(objective)) == replace(objective)
    assert eval(repr(objective), {each.__name__: each for each in OBJECTIVES.values()}) == objective
    with pytest.raises(ConfigError, match=f"{type(objective).__name__} without brackets"):
        checked_objective(OBJECTIVES[name])


@pytest.mark.parametrize("given", [int, 3, "sft", []])
def test_what_is_no_objective_is_named(given):
    with pytest.raises(ConfigError, match="objective is"):
        checked_objective(given)


def test_the_upper_bound_is_the_lower_one_where_it_is_not_given():
    for make in (tw.PPO, tw.GRPO, partial(tw.DrGRPO, max_length=3)):
        assert [make(clip_low=0.1).clip_high, make(clip_high=0.3).clip_high, make(clip_low=None).clip_high] == [
            *(0.1, 0.3, None)
        ]
    assert tw.PPO(sampler_max=None).sampler_correction is None
    assert (tw.DAPO(clip_high=None).clip_high, tw.PolicyGradient(clip_high=None).clip_high) == (None, None)


def test_text_is_read_as_the_annotated_type():
    settings = {"beta": "1e-1", "clip_low": "none", "kl": "k2", "measure_entropy": "true", "dual_clip": 3}
    typed = typed_settings("grpo", settings)
    assert typed == {"beta": 0.1, "clip_low": None, "kl": "k2", "measure_entropy": True, "dual_clip": 3}
    assert objective_named("grpo", **typed).beta == 0.1
    with pytest.raises(ConfigError, match="beta must be a number"):
        typed_settings("grpo", {"beta": "much"})


@pytest.mark.parametrize(("setting", "value"), [("beta", True), ("beta", None), ("kl", 3), ("measure_entropy", 1.0)])
def test_values_of_another_type_are_errors(setting, value):
    with pytest.raises(ConfigError, match=f"objective 'grpo': {setting}={value!r} must be"):
        objective_named("grpo", **{setting: value})
