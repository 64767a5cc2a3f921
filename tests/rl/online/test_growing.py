"""A run whose rewards fail ends with the first failure, and goes on once the reward is mended."""

import logging

import pytest

from tests.rl.online.helpers import EvenBytes, digest, new_trainer
from treewise.errors import TaskError
from treewise.rl.online.journal import Journal, journals
from treewise.rl.tasks import RowsTask

ROWS = [{"prompt": f"n{i}"} for i in range(8)]


class Broken(EvenBytes):
    """No rollout of a training item has a reward until the task is mended."""

    is_mended = False

    def rewards(self, requests):
        if not self.is_mended and "/train/" in requests[0].item.key:
            raise ValueError("no answer")
        return super().rewards(requests)


def test_too_many_failures_end_the_run_and_a_mended_reward_goes_on(tmp_path):
    whole = new_trainer(tmp_path / "whole", Broken("broken"), iterations=1, max_failed=1.0)
    logs = whole.train()  # as asked
    assert logs["failed_rollouts"] == logs["num_rollouts"] > 0
    first = new_trainer(tmp_path / "run", Broken("broken"), iterations=1)
    with pytest.raises(TaskError, match=r"iteration 1: \d+ of \d+ rollouts .*test_growing.py:\d+: ValueError: no"):
        first.train()
    kinds = [len(Journal(path)._answers) for path in journals(first.folder)]
    mended = Broken("broken")
    mended.is_mended = True
    second = new_trainer(tmp_path / "run", mended, iterations=1)
    logs = second.train(resume_from_checkpoint=True)
    assert logs["failed_rollouts"] == 0
    assert kinds[0] > 2  # samples, and the rewards of the evaluation, are kept
    undisturbed = new_trainer(tmp_path / "other", EvenBytes("broken"), iterations=1)
    undisturbed.train()
    assert digest(second.model) == digest(undisturbed.model)


def test_an_evaluation_of_failures_ends_the_run_before_its_first_iteration(tmp_path):
    task = RowsTask(ROWS, [lambda **_: [float("nan")]], held_out=0.25)
    trainer = new_trainer(tmp_path, task, eval_items=2)
    with pytest.raises(TaskError, match=r"evaluation: 2 of 2 rollouts have no reward"):
        trainer.train()
    assert trainer.log_history == []


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda prompts, **_: [2.0] * len(prompts), "are 2, so nothing was learned"),
        (lambda prompts, **_: [float(p == prompts[0]) for p in prompts], "not within one, so nothing was learned"),
        (lambda completion_ids, **_: [float(sum(ids) % 2) for ids in completion_ids], None),
    ],
)
def test_an_iteration_that_teaches_nothing_says_so(reward, words, tmp_path, caplog):
    task = RowsTask(ROWS, [reward], held_out=0.0)
    changes = {"branching": "none", "branching_settings": {}, "iterations": 1, "eval_every": 0}
    with caplog.at_level(logging.WARNING):
        new_trainer(tmp_path, task, **changes).train()
    assert (words or "nothing was learned") in caplog.text if words else "nothing was learned" not in caplog.text


def test_metrics_of_reward_functions_are_logged(tmp_path):
    def reward(completion_ids, trainer_state, log_metric, **_):
        log_metric("step", trainer_state.global_step)
        return [float(sum(ids) % 2) for ids in completion_ids]

    trainer = new_trainer(tmp_path, RowsTask(ROWS, [reward], held_out=0.0), iterations=2, eval_every=0)
    trainer.train()
    assert [each["step"] for each in trainer.log_history if "rewards/reward/mean" in each] == [1, 2]
