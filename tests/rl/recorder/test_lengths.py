"""How long a row may become: one rule for environments, agents and `record`."""

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from treewise.errors import ConfigError
from treewise.rl.recorder import lengths
from treewise.rl.recorder.lengths import longest_row

OF_64 = SimpleNamespace(config=LlamaConfig(max_position_embeddings=64))


@pytest.mark.parametrize(("given", "followed", "most"), [(None, None, 64), (9, None, 9), (9, 8, 8), (None, 80, 64)])
def test_the_least_of_positions_setting_and_training(given, followed, most, monkeypatch):
    monkeypatch.setattr(lengths, "length_limit", lambda _: None if followed is None else (followed, "why"))
    assert longest_row(OF_64, given) == most


def test_a_length_beyond_the_positions_is_an_error(monkeypatch):
    monkeypatch.setattr(lengths, "length_limit", lambda _: None)
    with pytest.raises(ConfigError, match="max_length=65 is beyond the 64 positions"):
        longest_row(OF_64, 65)


def test_a_model_without_a_limit_has_none(monkeypatch):
    monkeypatch.setattr(lengths, "length_limit", lambda _: None)
    assert longest_row(SimpleNamespace(config=None)) is None
