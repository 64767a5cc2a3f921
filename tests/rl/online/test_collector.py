"""Another collector takes the place of rollout trees: its groups are credited, counted, reported and checked alike."""

import numpy as np
import pytest

from tests.rl.online.helpers import TOKENIZER, EvenBytes, arguments, digest, settings, tiny_policy
from treewise.errors import DataError, TaskError
from treewise.rl.online import OnlineTrainer
from treewise.rl.online.collector import Collected, Group, HeldOut
from treewise.rl.online.records import rollouts_file
from treewise.rl.tasks.rewards import RewardTally
from treewise.tree.trajectory import Trajectory

PROMPT = [5, 6, 7]


class Flat:
    """Four rollouts of three tokens for each item, by their seed alone; the first of each group has no reward.

    num_lost: tokens of each group that are in no row and counted nowhere.
    """

    def __init__(self, num_lost=0):
        self.num_lost, self.is_closed, self.moments = num_lost, False, []

    def prompt_ids(self, item):
        return PROMPT

    def expected_size(self, num_groups, budget, state):
        return num_groups, "group"

    def collect(self, requests, moment):
        self.moments.append(moment)
        groups = [self.group(each) for each in requests]
        failed = [reward is None for each in groups for reward in each.rewards]
        return Collected(groups, RewardTally(len(failed), sum(failed), "no answer"), {"sampling": 1.5}, ["look here"])

    def group(self, request):
        rng = np.random.default_rng(request.seed)
        ids = rng.integers(3, 50, (4, 3)).tolist()
        rewards = [None, *(float(sum(own) % 2) for own in ids[1:])]
        rows = [
            Trajectory(
                [*PROMPT, *own],
                [0.0] * 3 + [1.0] * 3,
                sampler_logprobs=np.zeros(6),
                reward=reward,
                group=request.item.key,
                rollout=number,
            )
            for number, (own, reward) in enumerate(zip(ids, rewards, strict=True))
            if reward is not None
        ]
        known = [row.reward for row in rows]
        return Group(
            request, PROMPT, rows, rewards, [3] * 4, float(np.mean(known)), 3, 12 + self.num_lost,
            num_failed=3, counts={"calls": 2}, means={"waits": [1.0, 2.0]},
        )  # fmt: skip

    def evaluate(self, items, moment, seed):
        return [HeldOut(each.key, "?", "!", 1.0, 3) for each in items], RewardTally(len(items))

    def facts(self):
        return {"collector": "one's own"}

    def close(self):
        self.is_closed = True


def run_of(folder, collector, **changes):
    own = settings(logprob_gap_limit=1e9, **changes)
    return OnlineTrainer(tiny_policy(), EvenBytes(), TOKENIZER, own, arguments(folder), collector=collector)


def test_groups_of_another_collector_are_trained_counted_and_reported(tmp_path, caplog):
    collector = Flat()
    trainer = run_of(tmp_path / "run", collector)
    before = digest(trainer.model)
    logs = trainer.train()
    assert digest(trainer.model) != before
    assert (logs["sampled_tokens"], logs["trained_tokens"], logs["failed_tokens"]) == (24, 18, 6)
    assert (logs["num_rollouts"], logs["failed_rollouts"], logs["rollout_length"]) == (8, 2, 3)
    assert (logs["calls"], logs["waits"], logs["seconds_sampling"], logs["eval_pass@1"]) == (4, 1.5, 1.5, 1)
    assert "iteration 2: look here" in caplog.text
    assert [(each.where, each.version) for each in collector.moments] == [("iteration 1", 0), ("iteration 2", 1)]
    assert collector.is_closed
    assert len(rollouts_file(trainer.folder, 2).read_text().splitlines()) == 6
    assert (trainer.loop.num_rollouts, trainer.loop.num_sampled) == (16, 48)


def test_a_token_that_a_collector_loses_is_an_error(tmp_path):
    with pytest.raises(DataError, match="the sampler gave 26 tokens and 0 were drawn from candidates, but 24 are"):
        run_of(tmp_path / "run", Flat(num_lost=1), iterations=1, eval_every=0).train()


def test_a_collector_of_which_too_many_rollouts_fail_ends_the_run_after_what_it_warned_of(tmp_path, caplog):
    with pytest.raises(TaskError, match=r"iteration 1: 2 of 8 rollouts without reward.*The first: no answer"):
        run_of(tmp_path / "run", Flat(), iterations=1, eval_every=0, max_failed=0.2).train()
    assert "iteration 1: look here" in caplog.text
