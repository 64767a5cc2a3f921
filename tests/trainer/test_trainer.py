"""The hooks of `TreeTrainer` in whole runs: signals, long paths, a search of hyperparameters."""

import os
import signal
import sys

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback

import treewise.trainer.trainer
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


def test_a_signal_while_a_run_starts_ends_it_at_once(make_trainer, trees, monkeypatch):
    """It was noted, and answered once the first batch was there; also where a run goes on."""
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    stopped = make_trainer(trees, callbacks=[SignalAt(signal.SIGTERM, 1, "end")], **settings)
    with pytest.raises(StoppedError, match="stopped after step 1"):
        stopped.train()
    for resumed, where in ((None, "step 0; nothing to save yet"), (True, "step 1; saved in .*checkpoint-1")):
        trainer = make_trainer(trees, folder="run" if resumed else "new", **settings)
        with monkeypatch.context() as context:
            context.setattr("treewise.trainer.trainer.print_summary", lambda *_: signal.raise_signal(signal.SIGTERM))
            context.setattr(Trainer, "train", lambda *_: pytest.fail("went on"))
            with pytest.raises(StoppedError, match=f"SIGTERM: stopped after {where}"):
                trainer.train(resume_from_checkpoint=resumed)


def test_the_command_ends_with_the_code_of_the_signal(tmp_path, monkeypatch, capsys):
    def stopped(*args, **kwargs):
        error = StoppedError("SIGTERM: stopped after step 7; saved in run/checkpoint-7.")
        error.exit_code = 143
        raise error

    monkeypatch.setattr("treewise.cli.commands.train.run", stopped)
    assert main(["train", "run.yaml"]) == 143
    assert "saved in run/checkpoint-7" in capsys.readouterr().err


@pytest.mark.parametrize("by_accelerator", [False, True])
def test_gradients_are_clipped_once_and_the_norm_is_that_before(make_trainer, trees, by_accelerator, monkeypatch):
    """Also where transformers' loop clips by its accelerator, as before 5.3."""
    monkeypatch.setattr(treewise.trainer.trainer, "clips_by_accelerator", lambda: by_accelerator)
    whole, cut = (make_trainer(trees, max_steps=1, max_grad_norm=norm, folder=str(norm)) for norm in (0.0, 1e-3))
    norms = []
    for trainer in (whole, cut):
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
        if by_accelerator:
            grads = [torch.ones(3, requires_grad=True)]
            grads[0].grad = torch.ones(3)
            assert trainer.accelerator.clip_grad_norm_(grads, 1e-3) == norms[-1]
            assert torch.equal(grads[0].grad, torch.ones(3))
    assert norms[0] == norms[1] > 0.1


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
