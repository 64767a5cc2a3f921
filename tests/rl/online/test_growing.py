"""A run whose rewards fail ends with the first failure, and goes on once the reward is mended. Trees go through their
rounds by themselves, and to the same rollouts.
"""

import json
import logging
import threading
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from tests.rl.online.helpers import EvenBytes, digest, new_trainer, tiny_policy
from tests.rl.online.test_continuing import END, SECONDS, Scripted
from tests.rl.online.test_loop import Killed
from treewise.errors import TaskError
from treewise.rl.online.journal import Journal, journals
from treewise.rl.online.records import rollouts_file
from treewise.rl.samplers import TransformersSampler
from treewise.rl.tasks import EnvironmentTask, RowsTask

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
    with pytest.raises(TaskError, match=r"evaluation: 2 of 2 rollouts without reward"):
        trainer.train()
    assert trainer.log_history == []


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda prompts, **_: [2.0] * len(prompts), "is 2, so nothing was learned"),
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


# -- rounds -----------------------------------------------------------------------------------------------------------


class Held:
    """The first call of `held` in the episodes of seed 0 waits until the others have had `num_others` rewards."""

    held, num_others, was_in_time = "", 0, None
    rewarded: ClassVar = Counter()
    changed = threading.Condition()

    def reset(self, seed: int) -> None:
        self.seed, self.total, self.counts = seed, 0, Held.rewarded  # those of the run that began the episode

    def say(self, text: str) -> str:
        """Says something.

        Args:
            text: What.
        """
        self._wait("say")
        self.total += sum(map(ord, text))
        return text

    def get_reward(self) -> float:
        self._wait("get_reward")
        with self.changed:
            self.counts[self.seed] += 1
            self.changed.notify_all()
        return float(self.total % 2)

    def _wait(self, call):
        with self.changed:
            if (self.seed, self.held, Held.was_in_time) == (0, call, None):
                Held.was_in_time = False
                Held.was_in_time = self.changed.wait_for(
                    lambda: sum(self.counts.values()) - self.counts[0] >= self.num_others, SECONDS
                )

    def fork(self):
        copy = type(self)()
        copy.seed, copy.total, copy.counts = self.seed, self.total, self.counts
        return copy


ROUNDS = {
    "iterations": 1,
    "eval_every": 0,
    "branching": "turns",
    "branching_settings": {"roots": 2},
    "trees_per_iteration": 3,
    "tokens_per_iteration": 72,
    "max_new_tokens": 40,
    "max_length": 250,
    "reward_timeout": SECONDS,
}


def run_held(folder, sampler, held="", num_others=0, resume=None, environment=Held, **changes):
    """A run, of which tree 0 waits for so many rewards of the others; the rewards of each tree."""
    Held.held, Held.num_others, Held.rewarded, Held.was_in_time = held, num_others, Counter(), None
    task = EnvironmentTask(environment, text_tool="say", max_turns=3, name="held")
    model = tiny_policy(max_position_embeddings=512)
    trainer = new_trainer(folder, task, model=model, sampler=sampler(model), **{**ROUNDS, **changes})
    trainer.train(resume_from_checkpoint=resume)
    return trainer, Held.rewarded.copy()


class Alone(TransformersSampler):
    """Turns of three tokens, of which the last is the end whatever was drawn; each request is a batch of its own."""

    def __init__(self, model):
        super().__init__(model, isolate_requests=True)

    def sample_in_parts(self, requests, done):
        def ended(number, completions):
            ids = np.array([*completions[0].token_ids[:-1] % 200, END], dtype=np.int32)
            done(number, (replace(completions[0], token_ids=ids, finish_reason="stop"),))

        super().sample_in_parts([replace(each, max_new_tokens=3, stop_ids=()) for each in requests], ended)


@pytest.mark.parametrize("held", ["say", "get_reward"])
@pytest.mark.parametrize("sampler", [lambda _: Scripted(), Alone], ids=["scripted", "transformers"])
def test_a_tree_that_waits_holds_up_no_round_of_another(held, sampler, tmp_path):
    whole, rewarded = run_held(tmp_path / "whole", sampler, gather_seconds=None)
    num_others = sum(rewarded.values()) - rewarded[0]
    assert num_others > 2 * ROUNDS["branching_settings"]["roots"]  # which have more than one round
    trainer, again = run_held(tmp_path / "run", sampler, held, num_others)
    assert Held.was_in_time
    assert again == rewarded
    assert rollouts_file(trainer.folder, 1).read_bytes() == rollouts_file(whole.folder, 1).read_bytes()
    assert digest(trainer.model) == digest(whole.model)


class Unequal(Held):
    """Episodes of one tree end with their first turn, those of the others with their third."""

    @property
    def done(self):
        return self.seed == 2


class Batches(Scripted):
    """Remembers which trees share a batch."""

    def __init__(self):
        super().__init__()
        self.trees = []

    def sample(self, requests):
        self.trees.append(sorted(each.tree for each in requests))
        return super().sample(requests)


def test_requests_of_trees_in_different_rounds_share_a_batch(tmp_path):
    rounds = {"branching": "none", "branching_settings": {"roots": 1}, "gather_seconds": None}
    trainer, _ = run_held(tmp_path / "run", lambda _: Batches(), environment=Unequal, **rounds)
    first, second, third = trainer.sampler.trees[:3]
    assert first == second == third  # one tree is in its third round, the others in the last turn of their first
    assert len(set(first)) == 3


class KilledWhileOneWaits(Scripted):
    """Ends the process at the first call after so many rewards while tree 0 waits."""

    def __init__(self, num_rewards):
        super().__init__()
        self.num_rewards = num_rewards

    def sample(self, requests):
        if Held.was_in_time is False and sum(Held.rewarded.values()) >= self.num_rewards:
            raise Killed
        return super().sample(requests)


@pytest.mark.parametrize("num_rewards", [0, 1, 5])
def test_a_run_that_is_killed_while_one_tree_waits_draws_what_an_undisturbed_one_does(num_rewards, tmp_path):
    whole, rewarded = run_held(tmp_path / "whole", lambda _: Scripted(), gather_seconds=None)
    first = KilledWhileOneWaits(num_rewards)
    with pytest.raises(Killed):
        run_held(tmp_path / "run", lambda _: first, "say", 10**6, gather_seconds=0.0)
    assert Held.was_in_time is False  # it waits still, and the others have gone on
    lines = [json.loads(line) for path in journals(tmp_path / "run") for line in path.read_text().splitlines()]
    num_recorded = sum(name.startswith("reward ") for line in lines for name in line["names"])
    with Held.changed:
        Held.num_others = 0
        Held.changed.notify_all()
    second, again = run_held(tmp_path / "run", lambda _: Scripted(), resume=True, gather_seconds=0.0)
    assert sorted(first.asked + second.sampler.asked) == sorted(whole.sampler.asked)  # nothing twice
    assert sum(again.values()) == sum(rewarded.values()) - num_recorded
    assert num_recorded > 0 or num_rewards < 5  # a tree goes on once those of its round are recorded
    rows = [rollouts_file(each.folder, 1).read_bytes() for each in (whole, second)]
    assert rows[0] == rows[1]
