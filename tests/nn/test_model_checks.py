"""Dropout is an error in training, and set to 0 where a measurement asks for it; tables of positions end somewhere."""

from typing import Any

import pytest

from treewise import Forest, TreeEngine
from treewise.errors import DataError, UnsupportedModelError
from treewise.nn.model_checks import refuse_dropout, zero_dropout
from treewise.objectives import SFT
from treewise.testing import tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of
from treewise.tree.trajectory import Trajectory


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


@pytest.mark.parametrize("max_tokens", [None, 32])
@pytest.mark.parametrize(
    ("family", "table"),
    [
        ("gpt2", "transformer.wpe"),
        ("opt", "decoder.embed_positions"),
        ("gptj", "transformer.rotary_emb.embed_positions"),
        ("gpt_neo", "transformer.wpe"),
        ("llama", None),
    ],
)
def test_a_path_beyond_a_table_of_positions_is_named(family: str, table: str | None, max_tokens: int | None) -> None:
    model = tiny_model(family, max_position_embeddings=64)

    def step(length: int) -> None:
        ids = [3 + number % 40 for number in range(length - 1)]
        forest = Forest.from_trajectories([Trajectory([*ids, last]) for last in (50, 51)])
        TreeEngine(model, max_tokens).step(forest, SFT())

    step(64)
    if table is None:
        step(65)
        return
    found = rf"longest path has 65 tokens, and the model a table of 64 positions \(.*{table.rpartition('.')[2]}"
    with pytest.raises(DataError, match=found):
        step(65)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3n_text", {}),
        (
            "gemma4_text",
            {
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
    ],
)
def test_shared_keys_and_values_need_checkpoints_that_are_not_reentrant(family: str, settings: dict[str, Any]) -> None:
    model = tiny_model(family, **settings).train()
    items = [Trajectory([5, 6, 7, *tail]) for tail in ([8, 9], [10, 11, 12], [13])]
    _, _, expected = flat_sft(model, items)  # before any checkpoint
    model.gradient_checkpointing_enable({"use_reentrant": True})
    for engine in (TreeEngine(model), TreeEngine(model, check=False)):
        assert engine.evaluate(items).loss > 0
        with pytest.raises(
            UnsupportedModelError, match=r"layers.2.self_attn .* reads keys .*; set use_reentrant=False"
        ):
            engine.step(items)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.zero_grad()
    engine.step(items)
    assert gradient_error(gradients_of(model), expected) < expected.tolerance
