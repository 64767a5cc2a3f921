"""The checkpoints of a run: with a `CheckpointManager` alone, and written by a thread while a trainer goes on."""

import os
import signal
import threading
from concurrent import futures

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.trainer.helpers import in_child, losses, some_trees, tiny_model
from treewise.errors import CheckpointError, StoppedError
from treewise.testing.families import tiny_model as family_model
from treewise.trainer.checkpoint import contents, store
from treewise.trainer.checkpoint.store import read_manifest

# -- written by a thread ----------------------------------------------------------------------------------------------

EVERY = {"save_strategy": "steps", "save_steps": 1, "max_tokens": 40}


def with_adapters():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(tiny_model(), peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


MODELS = {"whole": tiny_model, "adapters": with_adapters, "tied": lambda: family_model("gemma")}


class OneStepLater(TrainerCallback):
    """Holds each write until the next step of the optimizer has changed what must have been copied."""

    def __init__(self, monkeypatch, num_steps):
        self.is_changed = [threading.Event() for _ in range(num_steps)]
        write = contents.write

        def held(saved, *args):
            if saved.step < num_steps:
                assert self.is_changed[saved.step].wait(60)
            return write(saved, *args)

        monkeypatch.setattr(contents, "write", held)

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.is_changed[state.global_step].set()


@pytest.mark.representatives("adapters")
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_files_are_those_of_a_save_that_training_waits_for(make_trainer, trees, monkeypatch, make_model, tmp_path):
    waited = make_trainer(trees, model=make_model(), folder="waited", max_steps=3, **EVERY)
    waited.train()
    callback = OneStepLater(monkeypatch, 3)
    settings = {"max_steps": 3, "async_checkpoints": True, **EVERY}
    trainer = make_trainer(trees, model=make_model(), folder="async", callbacks=[callback], **settings)
    trainer.train()
    assert losses(waited) == losses(trainer)
    timed = {"trainer_state.json", "training_args.json"}  # tokens per second; the setting itself
    for step in (1, 2, 3):
        one, two = (read_manifest(tmp_path / run / f"checkpoint-{step}")["files"] for run in ("waited", "async"))
        assert one.keys() == two.keys()
        assert {name for name in one if one[name] != two[name]} <= timed


class Waits(TrainerCallback):
    """Ends the write in flight before the next step ends."""

    def on_step_begin(self, args, state, control, **kwargs):
        if self.checkpoints._in_flight is not None:
            futures.wait([self.checkpoints._in_flight])


def failing_at(monkeypatch, step):
    publish = store.publish

    def fail(folder, facts):
        if facts["step"] == step:
            raise OSError(28, "No space left on device")
        return publish(folder, facts)

    monkeypatch.setattr(store, "publish", fail)


@pytest.mark.parametrize(("failing", "last_step"), [(2, 3), (4, 4)], ids=["next step", "end"])
def test_an_error_of_the_thread_is_raised_at_the_next_step_or_at_the_end(
    make_trainer, trees, monkeypatch, failing, last_step, tmp_path
):
    failing_at(monkeypatch, failing)
    callback = Waits()
    trainer = make_trainer(trees, max_steps=4, async_checkpoints=True, callbacks=[callback], **EVERY)
    callback.checkpoints = trainer._checkpoints
    with pytest.raises(CheckpointError, match=rf"step {failing} could not be saved \(No space left on device\)"):
        trainer.train()
    assert trainer.state.global_step == last_step
    good = [store.step_of(each) for each in store.checkpoints(tmp_path / "run")]
    assert good == [step for step in range(1, last_step + 1) if step < failing]
    assert not list((tmp_path / "run").glob(".checkpoint-*"))


def test_a_kill_while_a_checkpoint_is_in_flight_leaves_the_one_before(make_trainer, trees, monkeypatch, tmp_path):
    settings = {"max_steps": 4, "async_checkpoints": True, **EVERY}
    whole = make_trainer(trees, folder="whole", **settings)
    whole.train()
    publish = store.publish

    def killed(folder, facts):
        if facts["step"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return publish(folder, facts)

    trainer = make_trainer(trees, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(store, "publish", killed)
        _, status = os.waitpid(in_child(trainer.train, 60), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    newest, _ = store.newest(tmp_path / "run")
    assert newest == tmp_path / "run" / "checkpoint-1"
    resumed = make_trainer(trees, model=tiny_model(seed=9), **settings)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    for left, right in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_signal_waits_for_the_checkpoint_in_flight_and_saves_its_own_step(make_trainer, trees, tmp_path):
    class Signal(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = make_trainer(trees, max_steps=4, async_checkpoints=True, callbacks=[Signal()], **EVERY)
    with pytest.raises(StoppedError, match=r"stopped after step 2; saved in .*checkpoint-2"):
        trainer.train()
    assert [store.step_of(each) for each in store.checkpoints(tmp_path / "run")] == [1, 2]
    read_manifest(tmp_path / "run" / "checkpoint-2")


def test_the_best_model_is_loaded_from_a_checkpoint_that_was_in_flight(make_trainer, tmp_path):
    trees = some_trees()
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_total_limit": 1}
    settings = {"max_steps": 3, "async_checkpoints": True, "eval_dataset": trees[:2], **best, **EVERY}
    trainer = make_trainer(trees, **settings)
    trainer.train()
    assert trainer.state.best_global_step == 3
    saved = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    for one, two in zip(saved.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, two)
