"""A resumed run follows its own settings; those that it cannot follow are errors by name."""

import pytest
import torch

from tests.trainer.helpers import some_trees, tiny_model
from treewise.errors import CheckpointError
from treewise.trainer.checkpoint import store


@pytest.fixture
def resume(make_trainer):
    """Trains two steps of four with some settings, and goes on with others; returns the second trainer."""

    def train(
        then=None,
        now=None,
    ):
        common = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "max_tokens": 40}
        first = make_trainer(some_trees(4), **{**common, "max_steps": 2, **(then or {})})
        first.train()
        second = make_trainer(some_trees(4), model=tiny_model(seed=9), **{**common, **(then or {}), **(now or {})})
        second.train(resume_from_checkpoint=str(store.checkpoints(first.args.output_dir)[-1]))
        return second

    return train


def test_changed_settings_apply_from_the_next_step_on(resume, capsys):
    changed = {"learning_rate": 4e-3, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_epsilon": 1e-6, "save_steps": 1}
    trainer = resume({"lr_scheduler_type": "constant"}, changed)
    for group, decay in zip(trainer.optimizer.param_groups, (0.1, 0.0), strict=True):
        assert (group["lr"], group["weight_decay"], group["eps"]) == (4e-3, decay, 1e-6)
        assert tuple(group["betas"]) == (0.8, 0.999)
    assert [each["learning_rate"] for each in trainer.state.log_history if "loss" in each][2:] == [4e-3, 4e-3]
    assert [path.name for path in store.checkpoints(trainer.args.output_dir)][-2:] == ["checkpoint-3", "checkpoint-4"]
    err = capsys.readouterr().err
    for line in ("learning_rate: 0.01 -> 0.004", "weight_decay: 0.0 -> 0.1", "save_steps: 2 -> 1"):
        assert f"changed since checkpoint-2: {line}" in err
    assert "do not match" not in err


def test_a_changed_rate_scales_a_schedule(resume):
    trainer = resume({"lr_scheduler_type": "linear"}, {"learning_rate": 4e-3})
    assert [each["learning_rate"] for each in trainer.state.log_history if "loss" in each][2:] == [2e-3, 1e-3]


REFUSED = {
    "optimizer": ({}, {"optim": "sgd"}, r"checkpoint-2: optim: AdamW -> SGD: .* Resume with AdamW"),
    "its arguments": ({}, {"optim_args": "momentum=0.9"}, r"optim_args: None -> momentum=0\.9"),
    "schedule": ({}, {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "lr_scheduler_type: Lam"),
    "rate of a state": (
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1},
        {"learning_rate": 1e-3},
        r"learning_rate: 0\.01 -> 0\.001 \(a reduce_lr_on_plateau schedule continues from the saved rate\)",
    ),
    "metric": ({"metric_for_best_model": "eval_loss"}, {"metric_for_best_model": "eval_b"}, "eval_loss -> eval_b"),
}


@pytest.mark.representatives("optimizer", "schedule")
@pytest.mark.parametrize(("then", "now", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_change_is_an_error_by_name(make_trainer, trees, then, now, message):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "eval_dataset": trees[:1]}
    first = make_trainer(trees, **settings, **then)
    first.train()
    second = make_trainer(trees, **{**settings, "max_steps": 3}, **{**then, **now})
    with pytest.raises(CheckpointError, match=message):
        second.train(resume_from_checkpoint=True)


def test_a_schedule_of_torch_goes_on_from_its_own_rate(make_trainer, trees):
    def trainer(rate, max_steps):
        made = make_trainer(trees, max_steps=max_steps, save_strategy="steps", save_steps=2)
        made.optimizer = torch.optim.SGD(made.model.parameters(), lr=rate)
        made.lr_scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 1)
        return made

    trainer(0.1, 2).train()
    with pytest.raises(CheckpointError, match=r"learning rate: \[0\.1\] -> \[0\.2\]: a StepLR continues from"):
        trainer(0.2, 3).train(resume_from_checkpoint=True)
