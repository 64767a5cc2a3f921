"""Requests of many rollouts: together where the sampler works in the process, each on its own where servers do."""

import math
import threading
from concurrent.futures import Future
from contextlib import contextmanager

import pytest

from tests.rl.agents.helpers import END, Speaker
from treewise.errors import SamplerError
from treewise.rl.samplers.batching import Batcher
from treewise.rl.samplers.protocol import TextStops


def asked(batcher, number, order=(), **more):
    """What came of a request, once it did."""
    future = Future()
    request = TextStops((1, number), stop_ids=(END,), seed=number, max_new_tokens=50, **more)
    batcher.submit(request, future.set_result, order)
    return future


@contextmanager
def served(speaker, **more):
    batcher = Batcher(speaker, **{"gather_seconds": 0.0, **more}).serve()
    try:
        yield batcher
    finally:
        batcher.close()


def test_a_batch_is_due_once_nobody_is_left_or_its_first_has_waited(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("treewise.rl.samplers.batching.time.monotonic", lambda: now[0])
    speaker = Speaker(["a"] * 5)
    for seconds, left in ((3.0, 3.0), (None, math.inf)):
        batcher = Batcher(speaker, gather_seconds=seconds)
        assert batcher.seconds_left(0) is batcher.seconds_left(2) is None
        found = [asked(batcher, 0)]
        assert batcher.seconds_left(0) == 0.0
        assert batcher.seconds_left(2) == batcher.seconds_left(None) == left
        now[0] += 2.0
        found.append(asked(batcher, 1))
        assert batcher.seconds_left(1) == left - 2.0
        now[0] += 2.0
        assert batcher.seconds_left(1) == (0.0 if seconds else math.inf)
        batcher.sample()
        assert batcher.seconds_left(0) is None
        assert all(each.done() for each in found)
    assert speaker.num_batches == 2


def test_no_batch_depends_on_who_came_first():
    speaker = Speaker(["a"] * 3)
    batcher = Batcher(speaker)
    for number in (2, 0, 1):
        asked(batcher, number, (number,))
    batcher.sample()
    assert [prefix[-1] for prefix, *_ in speaker.seen] == [0, 1, 2]


def test_what_comes_meanwhile_is_of_the_next_batch():
    speaker = Speaker(["a"] * 2)
    batcher = Batcher(speaker, gather_seconds=None)
    request = TextStops((1, 0), stop_ids=(END,), max_new_tokens=50)
    later = []
    batcher.submit(request, lambda _: later.append(asked(batcher, 1)))
    batcher.sample()
    assert not later[0].done()
    assert batcher.num_open == 1
    assert batcher.seconds_left(0) == 0.0


def test_who_samples_gets_what_the_sampler_raises_and_who_is_told_raises():
    batcher, calls = Batcher(Speaker([KeyboardInterrupt()])), []
    batcher.submit(TextStops((1,)), calls.append)
    with pytest.raises(KeyboardInterrupt):
        batcher.sample()
    batcher.close()
    assert not calls

    class Choosy(Speaker):
        def sample(self, requests):
            calls.append(len(requests))
            return super().sample(requests)

    def told(_):
        raise ValueError("over")

    batcher = Batcher(Choosy(["a"] * 2))
    for _ in range(2):
        batcher.submit(TextStops((1,)), told)
    with pytest.raises(ValueError, match="over"):
        batcher.sample()
    assert calls == [2]


def test_what_comes_while_the_sampler_works_is_the_next_batch():
    speaker = Speaker(["a"] * 9, block=threading.Event())
    with served(speaker) as batcher:
        first = asked(batcher, 0)
        while not speaker.num_batches:
            threading.Event().wait(0.001)
        others = [asked(batcher, number) for number in range(1, 9)]
        assert batcher.num_open == 9
        speaker.block.set()
        for each in (first, *others):
            each.result(60)
        assert speaker.num_batches == 2
        assert batcher.num_open == 0


@pytest.mark.parametrize("gather_seconds", [600.0, None])
def test_a_batch_waits_for_no_episode_that_has_ended(gather_seconds):
    speaker = Speaker(["a"] * 2)
    with served(speaker, gather_seconds=gather_seconds) as batcher:
        batcher.expect(3)
        found = [asked(batcher, number) for number in range(2)]
        with pytest.raises(TimeoutError):
            found[0].result(0.05)
        batcher.expect(2)
        assert [each.result(60).num_tokens for each in found] == [2, 2]
        assert speaker.num_batches == 1


def test_servers_get_each_request_at_once():
    class Server(Speaker):
        max_concurrent = 4

    server = Server(["a"] * 4, block=threading.Event())
    batcher = Batcher(server)
    found = [asked(batcher, number) for number in range(4)]
    assert batcher.seconds_left(0) is None
    while server.num_batches < 4:
        threading.Event().wait(0.001)
    server.block.set()
    assert all(each.result(60).num_tokens == 2 for each in found)
    batcher.close()


def test_an_error_is_an_answer_and_the_next_batch_goes_on():
    with served(Speaker([ValueError("bad weights"), "a"])) as batcher:
        assert "bad weights" in str(asked(batcher, 0).result(60))
        assert asked(batcher, 1).result(60).num_tokens == 2


def test_one_requests_fault_is_no_others():
    class Choosy(Speaker):
        def sample(self, requests):
            if any(request.seed == 3 for request in requests):
                raise ValueError("not this one")
            return Speaker.sample(self, requests)

    with served(Choosy(["a"] * 5), gather_seconds=60.0) as batcher:
        batcher.expect(6)
        found = [asked(batcher, number).result for number in range(6)]
        errors = [result if isinstance(result := each(60), BaseException) else None for each in found]
    assert [str(error) if error else None for error in errors] == [None, None, None, "not this one", None, None]


def test_an_end_does_not_wait_for_a_server():
    class Server(Speaker):
        max_concurrent = 2

    server = Server(block=threading.Event())
    batcher = Batcher(server)
    found = [asked(batcher, number) for number in range(5)]
    while server.num_batches < 2:
        threading.Event().wait(0.001)
    batcher.close()
    assert all("closed" in str(each.result(1)) for each in found)
    server.block.set()  # what comes then is nobody's
    for thread in batcher._threads:
        thread.join()
    assert batcher.num_open == 0


def test_nobody_samples_for_a_call_that_is_over():
    speaker = Speaker()
    with served(speaker) as batcher:
        assert "nobody waits" in str(asked(batcher, 0, is_cancelled=lambda: True).result(60))
    assert not speaker.seen


def test_what_waits_when_it_closes_is_answered():
    batcher = Batcher(Speaker(["a"]), gather_seconds=None).serve()
    batcher.expect(2)
    waits = asked(batcher, 0)
    batcher.close()
    assert all("closed" in str(each.result(1)) for each in (waits, asked(batcher, 1)))


def test_what_follows_a_call_that_came_during_the_end_is_done():
    """Who ends its episode waits for it: it was lost, and a failed run ended a minute later."""
    batcher, done = Batcher(Speaker(), gather_seconds=0.0).serve(), []
    batcher.close()
    late = asked(batcher, 0)
    late.add_done_callback(lambda future: batcher.beside(done.append, future))
    assert isinstance(late.result(0), SamplerError)
    assert done == [late]
