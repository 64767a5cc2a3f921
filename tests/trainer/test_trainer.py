"""The hooks of `TreeTrainer` in whole runs: signals, long paths, a search of hyperparameters."""

import os
import signal
import sys

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from tests.trainer.helpers import losses, tiny_model
from treewise.cli.main import main
from treewise.errors import StoppedError
from treewise.trainer import TreeTrainer
from treewise.tree.trajectory import Trajectory


def test_a_path_beyond_the_models_positions_is_named_and_not_cut(make_trainer, trees, caplog):
    long = Trajectory(np.arange(200) % 50 + 3, source="long.jsonl:7")
    trainer = make_trainer([*trees, [long]], max_steps=1)
    trainer.train()
    assert "long.jsonl:7 has 200 tokens, the model was made for 128" in caplog.text


# -- signals ----------------------------------------------------------------------------------------------------------


class SignalAt(TrainerCallback):
    def __init__(self, number, step, moment):
        self.number, self.step, self.moment = number, step, moment

    def _maybe(self, state, moment):
        if state.global_step == self.step and moment == self.moment:
            os.kill(os.getpid(), self.number)

    def on_step_begin(self, args, state, control, **kwargs):
        self._maybe(state, "begin")

    def on_step_end(self, args, state, control, **kwargs):
        self._maybe(state, "end")

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._maybe(state, "optimizer")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._maybe(state, "updated")

    def on_save(self, args, state, control, **kwargs):
        self._maybe(state, "save")


def signal_in_backward(trainer, number, step):
    """The signal comes while step `step + 1` is in its backward."""

    def send(gradient):
        if trainer.state.global_step == step:
            os.kill(os.getpid(), number)
        return gradient

    trainer.model.model.layers[0].mlp.up_proj.weight.register_hook(send)


@pytest.mark.representatives("backward-2")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["begin", "end", "optimizer", "updated", "save", "backward"])
def test_a_signal_saves_the_run_which_then_ends_like_an_undisturbed_one(make_trainer, trees, number, moment):
    # Saved at step 5 alone, so that what the signal saves is all that there is.
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2 if moment == "save" else 5}
    whole = make_trainer(trees, folder="whole", **settings)
    whole.train()
    callbacks = [] if moment == "backward" else [SignalAt(number, 2, moment)]
    before = signal.getsignal(number)
    stopped = make_trainer(trees, callbacks=callbacks, **settings)
    if moment == "backward":
        signal_in_backward(stopped, number, 3)
    with pytest.raises(
        StoppedError, match=rf"{number.name}: stopped after step \d; saved in .*checkpoint-\d"
    ) as caught:
        stopped.train()
    assert caught.value.exit_code == 128 + number
    assert stopped.state.global_step in (2, 3)
    assert signal.getsignal(number) == before
    resumed = make_trainer(trees, model=tiny_model(seed=9), **settings)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole)
    for left, right in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_a_signal_before_the_first_step_is_over_saves_nothing(make_trainer, trees):
    trainer = make_trainer(trees, max_steps=2)
    signal_in_backward(trainer, signal.SIGTERM, 0)
    with pytest.raises(StoppedError, match="stopped after step 0; nothing to save"):
        trainer.train()
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_the_command_ends_with_the_code_of_the_signal(tmp_path, monkeypatch, capsys):
    def stopped(*args, **kwargs):
        error = StoppedError("SIGTERM: stopped after step 7; saved in run/checkpoint-7.")
        error.exit_code = 143
        raise error

    monkeypatch.setattr("treewise.cli.commands.train.run", stopped)
    assert main(["train", "run.yaml"]) == 143
    assert "saved in run/checkpoint-7" in capsys.readouterr().err


def test_hyperparameters_are_searched(make_trainer, trees):
    """transformers writes the result of a trial into `trainer.objective`; the loss must not be looked up there."""
    pytest.importorskip("optuna")
    args = make_trainer(trees, max_steps=1, max_tokens=40, eval_strategy="steps", eval_steps=1, eval_dataset=trees).args
    trainer = TreeTrainer(
        args=args, model_init=lambda _=None: tiny_model(), train_dataset=trees[:2], eval_dataset=trees[:2]
    )
    best = trainer.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", [1e-6, 0.03])},
        backend="optuna",
        n_trials=2,
        direction="minimize",
        sampler=sys.modules["optuna"].samplers.GridSampler({"learning_rate": [1e-6, 0.03]}),
    )
    assert best.hyperparameters == {"learning_rate": 0.03}
    alone = make_trainer(trees[:2], folder="alone", max_steps=1, max_tokens=40, learning_rate=0.03)
    alone.train()
    assert best.objective == pytest.approx(alone.evaluate(trees[:2])["eval_loss"], rel=1e-6)
