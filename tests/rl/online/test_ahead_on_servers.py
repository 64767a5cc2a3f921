"""`max_staleness` with a server that stands in for vLLM, killed and resumed; and at 2, where versions mix."""

import json
import threading

import numpy as np
import pytest
import torch

pytest.importorskip("httpx")

from tests.rl.online.helpers import digest, new_trainer, tiny_policy
from tests.rl.online.test_ahead import RUN, SGD, logprobs_of, policy_after, rows_of
from tests.rl.online.test_continuing import SECONDS
from tests.rl.online.test_loop import Killed, raise_at
from tests.rl.samplers.stand_in import StandIn, running
from treewise.rl.online import OnlineTrainer
from treewise.rl.online.journal import Journal, journal_file
from treewise.rl.online.records import rollouts_file
from treewise.rl.samplers import ServerSampler
from treewise.rl.samplers.server_weights import Handover
from treewise.rl.tasks import RewardRunner
from treewise.trainer.step import StepRunner

pytestmark = pytest.mark.xdist_group("rl/online/test_ahead_on_servers")


def trainer_on(folder, *servers, **changes):
    urls = [each.url for each in servers]
    sampler = ServerSampler(urls, weights="reload", patience_seconds=SECONDS) if servers else None
    return new_trainer(folder, sampler=sampler, arguments_=SGD, **{**RUN, **changes})


def versions_of(trainer, first=tiny_policy):
    """By iteration, the versions whose tokens are trained; each has the log-probs of that policy. first: makes 0."""
    found = []
    for iteration in range(1, trainer.settings.iterations + 1):
        found.append(set())
        for row in rows_of(trainer, iteration):
            for version in set(row.policy_versions[row.loss_weights > 0].astype(int).tolist()):
                with torch.no_grad():
                    policy = policy_after(trainer, version) if version else first()
                    own = logprobs_of(policy, row).numpy()
                is_its = ((row.loss_weights > 0) & (row.policy_versions == version))[1:]
                np.testing.assert_allclose(row.sampler_logprobs[1:][is_its], own[is_its], atol=1e-5)
                found[-1].add(version)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with running(StandIn(model=tiny_policy())) as server:
        trainer = trainer_on(tmp_path_factory.mktemp("whole") / "run", server)
        trainer.train()
    return trainer


def assert_the_same(trainer, whole):
    assert digest(trainer.model) == digest(whole.model)
    for iteration in range(1, whole.settings.iterations + 1):
        own, other = (rollouts_file(each.folder, iteration).read_bytes() for each in (trainer, whole))
        assert own == other
    rewards = [[e["eval_reward"] for e in each.log_history if "eval_reward" in e] for each in (trainer, whole)]
    assert rewards[0] == rewards[1]


def test_a_server_samples_with_the_weights_of_the_iteration_before(undisturbed):
    assert versions_of(undisturbed) == [{0}, {0}, {1}, {2}]
    assert [each["staleness"] for each in undisturbed.log_history if "staleness" in each] == [0, 1, 1, 1]


def test_a_server_that_is_started_anew_gets_the_older_weights_that_it_had(undisturbed, tmp_path):
    with running(StandIn(model=tiny_policy(seed=3))) as one, running(StandIn(model=tiny_policy(seed=4))) as other:
        for server, turn in ((one, 7), (other, 12)):
            answers = iter(range(10**6))

            def edit(answer, server=server, turn=turn, answers=answers):
                if next(answers) == turn:
                    server.start_anew()
                return answer

            server.edit = edit
        trainer = trainer_on(tmp_path / "run", one, other)
        trainer.train()
        assert (one.num_starts, other.num_starts) == (2, 2)
    assert_the_same(trainer, undisturbed)


KILLS = {
    "reward": (RewardRunner, "rewards", 6, False),
    "a completion": (ServerSampler, "sample", 20, True),
    "weights are written": (Handover, "hand_over", 3, True),
    "weights are loaded": (Handover, "_load", 3, True),
    "within an update": (StepRunner, "end_step", 2, True),
}


@pytest.mark.representatives("a completion")
@pytest.mark.parametrize("stage", KILLS)
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(stage, undisturbed, tmp_path, monkeypatch):
    with running(StandIn(model=tiny_policy())) as server:
        first = trainer_on(tmp_path / "run", server)
        with monkeypatch.context() as patch:
            owner, name, call, after = KILLS[stage]
            raise_at(patch, owner, name, call, after=after)
            with pytest.raises(Killed):
                first.train()
        server.start_anew()
        second = trainer_on(tmp_path / "run", server)
        second.train(resume_from_checkpoint=True)
    assert_the_same(second, undisturbed)


def test_weights_are_loaded_while_the_trainer_works(undisturbed, tmp_path, monkeypatch):
    """The second load begins before the first iteration trains, and ends after it has."""
    trained, was_in_time = threading.Event(), []
    original, loads = Handover._load, []

    def load(self, *args):
        loads.append(1)
        if len(loads) == 3:  # the first weights, those for the first iteration and those for the second
            was_in_time.append(trained.wait(SECONDS))
        original(self, *args)

    train = OnlineTrainer._train_on

    def train_on(self, *args):
        logs = train(self, *args)
        trained.set()
        return logs

    monkeypatch.setattr(Handover, "_load", load)
    monkeypatch.setattr(OnlineTrainer, "_train_on", train_on)
    with running(StandIn(model=tiny_policy())) as server:
        trainer = trainer_on(tmp_path / "run", server)
        trainer.train()
    assert was_in_time == [True]
    assert_the_same(trainer, undisturbed)


# -- 2 ----------------------------------------------------------------------------------------------------------------


def held_until_two_are_ahead(monkeypatch):
    """The first update ends when iterations 1 and 2 (from 0) are sampled, and the thread waits for it."""
    original, waited = OnlineTrainer._train_on, []

    def train_on(self, *args):
        tries = range(0 if waited else int(SECONDS / 0.05))
        waited.append(True)
        with self._ahead._changed:  # which the thread does not notify when it begins to wait
            for _ in tries:
                if self._ahead._needed == 1:
                    break
                self._ahead._changed.wait(0.05)
            else:
                assert not tries
        return original(self, *args)

    monkeypatch.setattr(OnlineTrainer, "_train_on", train_on)


def kill_in_the_fourth_iteration(monkeypatch):
    """After some of its completions are in the journal."""
    original, calls = Journal.record, []

    def record(self, kind, answers):
        if "00004" in self.path.name and kind == "sample":
            calls.append(1)
            if len(calls) == 3:
                raise Killed
        original(self, kind, answers)

    monkeypatch.setattr(Journal, "record", record)


@pytest.mark.parametrize("is_on_server", [False, True], ids=["embedded", "server"])
def test_at_2_a_killed_run_keeps_what_was_sampled_and_samples_the_rest_with_the_policy_that_it_has(
    is_on_server, tmp_path, monkeypatch
):
    changes = {"iterations": 5, "max_staleness": 2, "eval_every": 0, "tokens_per_iteration": 96}
    with running(StandIn(model=tiny_policy())) as server:
        servers = [server] if is_on_server else []
        with monkeypatch.context() as patch:
            held_until_two_are_ahead(patch)
            kill_in_the_fourth_iteration(patch)
            first = trainer_on(tmp_path / "run", *servers, **changes)
            with pytest.raises(Killed):
                first.train()
        assert first.loop.iteration == 3
        lines = map(json.loads, journal_file(first.folder, 4).read_text().splitlines())
        answers = [each for line in lines for each in zip(line["names"], line["answers"], strict=True)]
        kept = [answer for name, answer in answers if name.startswith("sample")]
        second = trainer_on(tmp_path / "run", *servers, **changes)
        second.train(resume_from_checkpoint=True)
    versions = versions_of(second)
    assert versions[:4] == [{0}, {0}, {0}, {1, 2}]
    assert versions[4] <= {2, 3, 4}
    assert len(kept) > 1
    sampled = [row.token_ids.tolist() for row in rows_of(second, 4)]
    for each in kept:
        assert each["version"] == 1
        size = len(each["token_ids"])
        assert any(each["token_ids"] == ids[at : at + size] for ids in sampled for at in range(len(ids)))
    logs = [each["staleness"] for each in second.log_history if "staleness" in each]
    assert logs[:3] == [0, 1, 2]
    assert 1 < logs[3] < 2
