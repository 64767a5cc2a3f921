"""An environment that waits holds up nobody; what is drawn does not depend on who was ready first."""

import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tests.rl.online.helpers import TOKENIZER, new_trainer
from tests.rl.online.test_loop import Killed
from treewise.errors import TaskError
from treewise.rl.branching import Branch, RolloutTree
from treewise.rl.online import continuing
from treewise.rl.online.collector import Moment
from treewise.rl.online.continuing import Rounds, continue_all
from treewise.rl.online.journal import Journal, LoopState
from treewise.rl.online.records import rollouts_file
from treewise.rl.online.rollout import Continuation, Limits, start
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.samplers import Completion, SampleRequest
from treewise.rl.success_book import SuccessBook
from treewise.rl.tasks import Calls, EnvironmentTask

END = TOKENIZER.eos_token_id
SECONDS = 200.0  # after which a test of what waits has failed


class Scripted:
    """Turns of two tokens, a function of the request alone. kill_at: the call that ends the process instead."""

    def __init__(self, kill_at=None):
        self.kill_at, self.asked, self.num_calls = kill_at, [], 0

    def sample(self, requests):
        self.num_calls += 1
        if self.num_calls == self.kill_at:
            raise Killed
        self.asked += [each.seed for each in requests]
        return [(self.completion(each),) for each in requests]

    def completion(self, request):
        ids = np.array([33 + request.seed % 90, END], dtype=np.int32)
        return Completion(ids, np.full(2, -5, dtype=np.float32), "stop")

    def update(self, model):
        pass

    def close(self):
        pass


class Server(Scripted):
    """Answers several calls at once; the first waits until all other rollouts have ended."""

    max_concurrent = 4

    def __init__(self, num_others):
        super().__init__()
        self.others, self.lock = threading.Semaphore(0), threading.Lock()
        self.num_others = num_others

    def sample(self, requests):
        with self.lock:
            self.num_calls += 1
            is_first = self.num_calls == 1
        if is_first:
            for _ in range(self.num_others):
                assert self.others.acquire(timeout=SECONDS)
        self.others.release()
        return [(self.completion(each),) for each in requests]


class Waiting:
    """Two turns. The second of the episode with seed 0 waits until every other one has answered, if `waits`."""

    waits = True
    others = threading.Semaphore(0)
    num_others = 0
    was_alone = False
    num_made = 0

    def reset(self, seed: int) -> None:
        Waiting.num_made += 1
        self.seed, self.turn = seed, 0

    def say(self, text: str) -> str:
        """Says something.

        Args:
            text: What.
        """
        self.turn += 1
        if self.waits and self.turn == 2:
            if self.seed:
                self.others.release()
            else:
                Waiting.was_alone = all(self.others.acquire(timeout=SECONDS) for _ in range(self.num_others))
        return f"{self.turn} {text}"

    def get_reward(self) -> float:
        return float(self.seed % 4 == 0)

    def fork(self):
        copy = type(self)()
        copy.seed, copy.turn = self.seed, self.turn
        return copy


def task_of(factory=Waiting):
    return EnvironmentTask(factory, text_tool="say", max_turns=3, name="waiting")


def continuations(task, count, calls):
    chat, limits = ChatTokens(TOKENIZER, "chatml"), Limits(99, 999, (END,))
    found = []
    for index, first in enumerate(start(task, [task.item("train", i) for i in range(count)], chat, calls)):
        tree = RolloutTree(first.token_ids)
        found.append(Continuation(tree, Branch(), first.branch(len(first.token_ids)), limits, (7, index)))
    return found


def continued(sampler, task, count, folder, **changes):
    calls = Calls(SECONDS)
    rollouts = continuations(task, count, calls)
    journal = Journal(folder / "journal.jsonl")
    rounds = Rounds(
        moment=Moment("here", LoopState(SuccessBook()), journal, sampler, 0),
        branching=None,
        rewards=None,
        limits=rollouts[0]._limits,
        request=SampleRequest((0,), stop_ids=(END,)),
        **changes,
    )
    continue_all(rollouts, rounds)
    return [each.node() for each in rollouts], rounds


@pytest.fixture
def waiting(monkeypatch):
    def of(num_others, *, waits=True):
        for name, value in {"others": threading.Semaphore(0), "num_others": num_others, "waits": waits}.items():
            monkeypatch.setattr(Waiting, name, value)
        monkeypatch.setattr(Waiting, "was_alone", False)

    return of


def test_an_environment_that_waits_holds_up_nobody(waiting, tmp_path, monkeypatch):
    monkeypatch.setattr(continuing, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    waiting(5)
    nodes, rounds = continued(Scripted(), task_of(), 6, tmp_path, gather_seconds=0.0)
    assert Waiting.was_alone  # every other one had answered while it waited
    assert [each.finish for each in nodes] == ["max_turns"] * 6
    assert 0 < rounds.seconds["environments"] < rounds.seconds["sampling"]
    waiting(5, waits=False)
    again, _ = continued(Scripted(), task_of(), 6, tmp_path / "other", gather_seconds=None)
    for one, other in zip(nodes, again, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.turn_ends, other.turn_ends)


def test_a_long_observation_is_tokenized_while_others_go_on(waiting, tmp_path, monkeypatch):
    """The first of one rollout takes until all others have theirs."""
    waiting(0, waits=False)
    others, was_alone, tokenize = threading.Semaphore(0), [], ChatTokens.answer_ids

    def tokenized(self, *args):
        item, _, turn = args[-1].split(", ")  # the location
        if (item, turn) == ("waiting/train/0", "turn 0"):
            is_beside = threading.current_thread() is not threading.main_thread()
            was_alone.append(is_beside and all(others.acquire(timeout=SECONDS) for _ in range(5)))
        elif turn == "turn 1":
            others.release()
        return tokenize(self, *args)

    monkeypatch.setattr(ChatTokens, "answer_ids", tokenized)
    nodes, _ = continued(Scripted(), task_of(), 6, tmp_path, gather_seconds=0.0)
    assert was_alone == [True]
    monkeypatch.undo()
    waiting(0, waits=False)
    again, _ = continued(Scripted(), task_of(), 6, tmp_path / "other", gather_seconds=None)
    for one, other in zip(nodes, again, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.turn_ends, other.turn_ends)


@pytest.mark.parametrize("limit", [1, 64])
def test_the_calls_that_are_under_way_at_once_are_limited(limit, tmp_path):
    class Counted(Waiting):
        lock, running, most = threading.Lock(), 0, 0
        others = threading.Event()

        def say(self, text: str) -> str:
            """Says something.

            Args:
                text: What.
            """
            with self.lock:
                Counted.running += 1
                Counted.most = max(Counted.most, Counted.running)
                if Counted.running == 4:
                    self.others.set()
            if limit > 1:
                self.others.wait(SECONDS)
            with self.lock:
                Counted.running -= 1
            return text

    continued(Scripted(), task_of(Counted), 4, tmp_path, episodes_at_once=limit, gather_seconds=None)
    assert Counted.most == min(limit, 4)


def test_a_server_that_keeps_one_waiting_holds_up_nobody(waiting, tmp_path):
    waiting(0, waits=False)
    server = Server(num_others=3 * 3)
    nodes, _ = continued(server, task_of(), 4, tmp_path)
    assert [each.finish for each in nodes] == ["max_turns"] * 4
    assert server.num_calls == 12
    silent = Server(0)
    again, rounds = continued(silent, task_of(), 4, tmp_path)  # all of it is in the journal, in whatever order
    assert (silent.num_calls, rounds.moment.journal.num_replayed) == (0, 12)
    for one, other in zip(nodes, again, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


def test_a_branch_that_is_refused_is_counted_and_the_others_go_on(tmp_path):
    class Refusing(Waiting):
        waits = False

        def fork(self):
            if self.seed == 2 and self.turn == 0:
                raise TaskError("cannot be forked")
            return super().fork()

    trainer = new_trainer(
        tmp_path / "run",
        task_of(Refusing),
        sampler=Scripted(),
        iterations=1,
        eval_every=0,
        branching="none",
        branching_settings={"roots": 2},
        tokens_per_iteration=24,
        max_new_tokens=40,
    )
    logs = trainer.train()
    assert logs["refused_branches"] >= 1
    assert logs["num_rollouts"] >= 2
    assert logs["failed_rollouts"] == 0


@pytest.mark.parametrize("call", [2, 3, 5])
def test_a_run_that_is_killed_draws_what_an_undisturbed_one_does(call, waiting, tmp_path):
    """Environments of the first run wait for one another, so that its batches have another order."""
    run = {
        "iterations": 1,
        "eval_every": 1,
        "branching": "turns",
        "branching_settings": {"roots": 2},
        "trees_per_iteration": 3,
        "tokens_per_iteration": 60,
        "max_new_tokens": 40,
        "max_length": 250,
    }
    waiting(0, waits=False)
    whole = new_trainer(tmp_path / "whole", task_of(), sampler=Scripted(), gather_seconds=None, **run)
    whole.train()
    first = new_trainer(tmp_path / "run", task_of(), sampler=Scripted(call), gather_seconds=0.0, **run)
    with pytest.raises(Killed):
        first.train()
    second = new_trainer(tmp_path / "run", task_of(), sampler=Scripted(), gather_seconds=0.0, **run)
    second.train(resume_from_checkpoint=True)
    assert sorted(first.sampler.asked + second.sampler.asked) == sorted(whole.sampler.asked)  # nothing twice
    rows = [rollouts_file(each.folder, 1).read_bytes() for each in (whole, second)]
    assert rows[0] == rows[1]
