"""Dropout is an error in training, and set to 0 where a measurement asks for it."""

import pytest

from treewise.errors import UnsupportedModelError
from treewise.nn.model_checks import refuse_dropout, zero_dropout
from treewise.testing import tiny_model


@pytest.mark.parametrize(
    ("family", "settings", "first"),
    [
        ("gpt2", {"embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}, "transformer.drop.p, 0.1"),
        ("seed_oss", {"attention_dropout": 0.25}, "model.layers.0.self_attn.attention_dropout, 0.25"),
    ],
)
def test_every_dropout_is_set_to_zero_and_named(family: str, settings: dict[str, float], first: str) -> None:
    model = tiny_model(family, **settings)
    with pytest.raises(UnsupportedModelError, match="set it to 0"):
        refuse_dropout(model)
    note = zero_dropout(model)
    assert note is not None
    assert first in note
    refuse_dropout(model)
    assert zero_dropout(model) is None
