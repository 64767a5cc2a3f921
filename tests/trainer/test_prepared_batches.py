"""Batches prepared one step ahead: the same runs as without, and the next step's plan there before it begins."""

import threading
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from tests.trainer.helpers import losses, some_trees
from treewise.trainer import TreeTrainingArguments
from treewise.trainer.batches import PreparedBatch, PreparedSteps


def plain(batches):
    return [PreparedBatch(tuple(forests), (), None) for forests in batches]


@pytest.mark.parametrize("is_ahead", [True, False])
def test_each_epoch_is_cut_into_steps(is_ahead, tmp_path):
    settings = {"gradient_accumulation_steps": 2, "prepare_ahead": is_ahead, "use_cpu": True, "report_to": "none"}
    steps = PreparedSteps(plain, TreeTrainingArguments(str(tmp_path), **settings))
    epochs = iter(["a", "b", "c"]), iter(["d"])
    found = [[list(batch.forests) for batch in steps.next_step(epochs[0], 4 + step)] for step in range(2)]
    assert found == [[["a"], ["b"]], [["c"]]]
    assert steps.next_step(epochs[0], 6) == []
    assert [list(batch.forests) for batch in steps.next_step(epochs[1], 6)] == [["d"]]


def test_an_epoch_begins_while_the_last_step_of_the_one_before_is_used(tmp_path):
    arguments = TreeTrainingArguments(str(tmp_path), gradient_accumulation_steps=2, use_cpu=True, report_to="none")
    first, second, begun, prepared = iter("abc"), iter("d"), [], []

    def epoch_from(step):
        begun.append(step)
        return second if step == 2 else None

    def prepare(batches):
        prepared.extend(batches)
        return plain(batches)

    steps = PreparedSteps(prepare, arguments, epoch_from)
    with steps.ended():
        assert len(steps.next_step(first, 0)) == 2
        assert not begun
        assert len(steps.next_step(first, 1)) == 1
        assert begun == [2]
        assert steps.next_step(first, 2) == []  # asked again, as transformers 5.2 does in an epoch that is resumed
        assert begun == [2]
        assert len(steps.next_step(second, 2)) == 1
        assert begun == [2, 3]
        other = iter("e")  # not the one that was announced
        assert len(steps.next_step(other, 3)) == 1
    assert prepared == list("abcde")


class EndsEpochs(TrainerCallback):
    """Ends an epoch in its middle and another with its last step."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step in (1, 3)


class States(TrainerCallback):
    """What a checkpoint after each step would record of the global random generators."""

    def __init__(self):
        self.states = []

    def on_step_end(self, args, state, control, **kwargs):
        numpy = np.random.get_state()[1].tobytes()  # noqa: NPY002 - the global one
        self.states.append((torch.get_rng_state().numpy().tobytes(), numpy))


@pytest.mark.parametrize(("others", "num_steps"), [((), 6), ((EndsEpochs,), 5)])
def test_losses_weights_and_random_states_are_those_of_a_run_that_prepares_nothing(make_trainer, others, num_steps):
    runs, states = [], []
    for is_ahead in (True, False):
        states.append(States())
        settings = {"max_tokens": 14, "num_train_epochs": 3, "gradient_accumulation_steps": 2}
        callbacks = [states[-1], *(each() for each in others)]
        trainer = make_trainer(some_trees(5), callbacks=callbacks, prepare_ahead=is_ahead, **settings)
        trainer.train()
        runs.append((losses(trainer), [each.detach().clone() for each in trainer.model.parameters()]))
    assert len(runs[0][0]) == num_steps
    assert runs[0][0] == runs[1][0]
    assert all(map(torch.equal, runs[0][1], runs[1][1]))
    assert states[0].states == states[1].states


def test_the_next_step_is_planned_while_a_step_computes_also_that_of_the_next_epoch(make_trainer):
    trainer = make_trainer(some_trees(8), max_tokens=14, num_train_epochs=2)
    prepared, train = trainer.runner.prepare, trainer.runner.train_batch
    events, batches, planned, step = [threading.Event() for _ in range(8)], [], [], 0

    def prepare(forests, *args):
        batches.append(prepared(forests, *args))
        events[len(batches) - 1].set()
        return batches[-1]

    def train_batch(batch):
        nonlocal step
        step += 1
        if step < 8:  # without a thread this would wait in vain
            assert events[step].wait(timeout=120), f"step {step + 1} was not prepared while step {step} ran"
            assert batches[step].ready.plan is not None
        assert batch is batches[step - 1]
        planned.append(trainer.engine.plan(batch.ready) is batch.ready.plan)
        return train(batch)

    trainer.runner.prepare, trainer.runner.train_batch = prepare, train_batch
    trainer.train()
    assert planned == [True] * 8
    assert len(batches) == 8  # none beyond the end of the run


def test_a_loader_of_a_subclass_begins_its_own_epochs(make_trainer, monkeypatch):
    settings = {"num_train_epochs": 3, "train_sampling_strategy": "sequential"}
    expected = make_trainer(some_trees(5), **settings)
    expected.train()
    trainer = make_trainer(some_trees(5), **settings)
    monkeypatch.setattr(trainer, "get_train_dataloader", partial(plain_loader, trainer.get_train_dataloader))
    trainer.train()
    assert losses(trainer) == losses(expected)


def plain_loader(get_train_dataloader):
    loader = get_train_dataloader()
    return DataLoader(loader.dataset, batch_sampler=loader.sampler_of_trees, collate_fn=loader.collate_fn)


@pytest.mark.parametrize("is_ahead", [True, False])
def test_an_error_of_a_batch_is_raised_at_its_own_step(make_trainer, is_ahead):
    class Rows(list):
        def __getitem__(self, index):
            if index == 5 and trainer.state.global_step + is_ahead >= 2:
                raise OSError("rows.jsonl:5 cannot be read")
            return super().__getitem__(index)

    trainer = make_trainer(
        Rows(some_trees(8)), num_train_epochs=1, train_sampling_strategy="sequential", prepare_ahead=is_ahead
    )
    with pytest.raises(OSError, match=r"rows.jsonl:5 cannot be read"):
        trainer.train()
    assert trainer.state.global_step == 2
    assert len(losses(trainer)) == 2


def test_a_budget_that_changed_meanwhile_plans_again(make_trainer):
    trainer = make_trainer(some_trees(8), max_tokens=40, num_train_epochs=1)
    train, budgets = trainer.runner.train_batch, []

    def train_batch(batch):
        before, step = trainer.engine.plan(batch.ready).max_tokens, len(budgets) + 1
        trainer.engine.budget.tokens = 40 - 8 * step  # as if memory had run out
        budgets.append((before, trainer.engine.plan(batch.ready).max_tokens))
        return train(batch)

    trainer.runner.train_batch = train_batch
    trainer.train()
    assert all(after == 40 - 8 * step for step, (_, after) in enumerate(budgets, 1))
    assert all(before[1] == after[0] for before, after in pairwise(budgets))


def test_an_automatic_budget_is_measured_at_the_first_step_and_planned_with_later(make_trainer):
    trainer = make_trainer(some_trees(8), max_tokens="auto", num_train_epochs=1)
    train, plans = trainer.runner.train_batch, []

    def train_batch(batch):
        plans.append(batch.ready.plan)
        return train(batch)

    trainer.runner.train_batch = train_batch
    trainer.train()
    assert plans[0] is None
    assert plans[-1].max_tokens == trainer.engine.max_tokens


def test_a_run_that_ends_within_an_epoch_leaves_no_thread_behind(make_trainer):
    before = set(threading.enumerate())
    trainer = make_trainer(some_trees(8), max_steps=2)
    trainer.train()
    assert not set(threading.enumerate()) - before
    trainer.train()  # and begins anew
