"""Settings of named objectives come from annotations: a new field of `PolicyGradient` is a setting everywhere."""

from dataclasses import fields

import pytest

from treewise.cli.commands import rl
from treewise.cli.objectives import typed_settings
from treewise.errors import ConfigError
from treewise.objectives.policy_gradient import PolicyGradient
from treewise.objectives.registry import DETERMINED, OBJECTIVES, PREFERENCES, objective_named, setting_types

FIELDS = {field.name for field in fields(PolicyGradient)} - {"usual_advantages"}  # a fact of each name, no setting


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in ("sft", "distillation", *PREFERENCES)])
def test_every_field_of_policy_gradient_is_a_setting(name):
    assert set(setting_types(name)) - {"max_length"} == FIELDS - set(DETERMINED.get(name, ()))
    assert set(rl.aliases()) >= FIELDS - {"surrogate"}


@pytest.mark.parametrize("name", DETERMINED)
def test_what_a_name_determines_is_no_setting(name):
    required = {"max_length": 4} if name == "dr_grpo" else {}
    for setting in DETERMINED[name]:
        with pytest.raises(ConfigError, match=f"objective '{name}' determines {setting}"):
            objective_named(name, **required, **{setting: None})


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
