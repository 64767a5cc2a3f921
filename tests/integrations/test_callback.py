"""The callback: a trainer that is built by others shares while it trains, and its model is as before afterwards."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer

from tests.integrations.batches.test_accumulation import ROWS, assert_same, collate, model_of, three_steps
from treewise.errors import ConfigError
from treewise.integrations.callback import SharePrefixes


def train(tmp_path, *callbacks):
    args = three_steps(tmp_path, per_device_train_batch_size=4)
    trainer = Trainer(model_of(), args, train_dataset=ROWS, data_collator=collate, callbacks=[*callbacks])
    trainer.train()
    logs = [{"loss": entry["loss"]} for entry in trainer.state.log_history if "loss" in entry]
    return logs, trainer.model.state_dict(), trainer.model


def test_shares_while_it_trains(tmp_path, caplog):
    callback = SharePrefixes(max_tokens=20)
    found = train(tmp_path, callback)
    assert_same(found, train(tmp_path))
    assert callback.sharing.counts.num_calls == 3
    assert "forward" not in vars(found[2].model)
    assert any("share ratio" in record.message for record in caplog.records)


def test_a_wrong_setting_is_an_error_before_the_first_step(tmp_path):
    with pytest.raises(ConfigError, match="max_tokens=-1"):
        train(tmp_path, SharePrefixes(max_tokens=-1))


def test_a_reference_model_shares_too(caplog):
    """Of a trainer that has one: by the callback's first argument."""
    model, reference = model_of(), model_of()
    callback = SharePrefixes(SimpleNamespace(ref_model=reference), max_tokens=20)
    batch = collate(ROWS[:4])
    with torch.no_grad():
        expected = reference(**batch).loss.item()
        callback.on_train_begin(None, None, None, model=model)
        assert reference(**batch).loss.item() == pytest.approx(expected, rel=1e-6)
    callback.on_train_end(None, None, None)
    assert [record.args[0].counts.num_calls for record in caplog.records] == [0, 1]
    assert "forward" not in {*vars(model.model), *vars(reference.model)}
