"""The checkpoints of a run with a `CheckpointManager` alone, without a trainer."""

from dataclasses import replace

import pytest
import torch
from transformers import TrainerState

from tests.trainer.helpers import some_trees, tiny_model
from treewise.errors import CheckpointError
from treewise.trainer import TreeTrainingArguments
from treewise.trainer.checkpoint import contents, store
from treewise.trainer.checkpoint.manager import CheckpointManager, ResumePoint
from treewise.trainer.checkpoint.weights import load_weights
from treewise.trainer.data_loader import survey


@pytest.fixture
def make_manager(tmp_path):
    def make(num_trees=2, seed=0, **settings):
        args = TreeTrainingArguments(str(tmp_path), report_to="none", use_cpu=True, seed=seed, **settings)
        data = survey(some_trees(num_trees))
        facts = {"data": data.fingerprint, "num_trees": num_trees, "model": "a model", **args.order_facts()}
        return CheckpointManager(args, lambda: facts)

    return make


def run_at(manager, step, model=None):
    """A run after one step of an optimizer."""
    model = tiny_model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return contents.RunState(manager.args, model, optimizer, schedule, TrainerState(global_step=step))


def test_what_was_saved_is_found_and_loads(make_manager, tmp_path):
    manager = make_manager()
    assert manager.find(None) is None
    run = run_at(manager, 3)
    assert manager.save(run, tmp_path, 40) == tmp_path / "checkpoint-3"
    assert manager.last_step == 3
    again = make_manager()
    assert again.find(True) == ResumePoint(tmp_path / "checkpoint-3", 3, 40)
    assert again.last_step == 3
    other = run_at(again, 3, tiny_model(seed=9))
    load_weights(other.model, tmp_path / "checkpoint-3")
    contents.load_states(tmp_path / "checkpoint-3", other.model, other.optimizer, other.scheduler)
    for one, two in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)
        for name, value in run.optimizer.state[one].items():
            assert torch.equal(value, other.optimizer.state[two][name])


@pytest.mark.parametrize(
    ("changes", "message"), [({"num_trees": 3}, "trained on other data"), ({"seed": 1}, "made with seed=0, now 1")]
)
def test_a_checkpoint_of_another_run_is_an_error(make_manager, tmp_path, changes, message):
    manager = make_manager()
    manager.save(run_at(manager, 1), tmp_path, None)
    with pytest.raises(CheckpointError, match=message):
        make_manager(**changes).find(True)


def test_old_checkpoints_are_removed_but_the_best(make_manager, tmp_path):
    manager = make_manager(save_total_limit=1)
    run = run_at(manager, 1)
    for step in (1, 2, 3):
        loop = TrainerState(global_step=step, best_global_step=1)
        manager.save(replace(run, loop=loop), tmp_path, None)
    assert loop.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert [path.name for path in store.checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-3"]


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_save_that_fails_stops_the_run_or_not(make_manager, tmp_path, monkeypatch, policy, caplog):
    def fails(*_):
        raise OSError(28, "No space left on device")

    manager = make_manager(on_save_failure=policy)
    monkeypatch.setattr(store, "publish", fails)
    if policy == "stop":
        with pytest.raises(CheckpointError, match=r"step 4 could not be saved \(No space left on device\)"):
            manager.save(run_at(manager, 4), tmp_path, None)
    else:
        assert manager.save(run_at(manager, 4), tmp_path, None) is None
        assert "The run goes on without it" in caplog.text
    assert manager.last_step == 0
    assert not list(tmp_path.iterdir())
