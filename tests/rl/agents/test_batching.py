"""Requests of many threads: together where the sampler works in the process, each on its own where servers do."""

import threading

import pytest

from tests.rl.agents.helpers import END, Speaker
from treewise.errors import SamplerError
from treewise.rl.agents.batching import Batcher, WatchedRequest


def request(number, **more):
    return WatchedRequest((1, number), stop_ids=(END,), seed=number, max_new_tokens=50, **more)


def test_what_comes_while_the_sampler_works_is_the_next_batch():
    speaker = Speaker(["a"] * 9, block=threading.Event())
    batcher = Batcher(speaker, gather_seconds=0.0)
    first = batcher.submit(request(0))
    while not speaker.num_batches:
        threading.Event().wait(0.001)
    others = [batcher.submit(request(number)) for number in range(1, 9)]
    assert batcher.num_waiting == 9
    speaker.block.set()
    found = [each.result(60) for each in (first, *others)]
    assert speaker.num_batches == 2
    assert batcher.num_sampled == sum(each.num_tokens for each in found)
    assert batcher.num_waiting == 0
    batcher.close()


def test_servers_get_each_request_at_once():
    class Server(Speaker):
        max_concurrent = 4

    server = Server(["a"] * 4, block=threading.Event())
    batcher = Batcher(server)
    asked = [batcher.submit(request(number)) for number in range(4)]
    while server.num_batches < 4:
        threading.Event().wait(0.001)
    server.block.set()
    assert all(each.result(60).num_tokens == 2 for each in asked)
    batcher.close()


def test_an_error_is_raised_where_the_answer_is_waited_for():
    batcher = Batcher(Speaker([ValueError("bad weights"), "a"]), gather_seconds=0.0)
    with pytest.raises(ValueError, match="bad weights"):
        batcher.submit(request(0)).result(60)
    assert batcher.submit(request(1)).result(60).num_tokens == 2
    batcher.close()


def test_one_requests_fault_is_no_others():
    class Choosy(Speaker):
        def sample(self, requests):
            if any(request.seed == 3 for request in requests):
                raise ValueError("not this one")
            return Speaker.sample(self, requests)

    batcher = Batcher(Choosy(["a"] * 5), gather_seconds=60.0)
    batcher.num_expected = 6
    asked = [batcher.submit(request(number)) for number in range(6)]
    found = [each.exception(60) for each in asked]
    assert [str(error) if error else None for error in found] == [None, None, None, "not this one", None, None]
    batcher.close()


def test_an_end_does_not_wait_for_a_server():
    class Server(Speaker):
        max_concurrent = 2

    server = Server(block=threading.Event())
    batcher = Batcher(server)
    asked = [batcher.submit(request(number)) for number in range(5)]
    while server.num_batches < 2:
        threading.Event().wait(0.001)
    batcher.close()
    assert all("closed" in str(each.exception(1)) for each in asked)
    server.block.set()  # what comes then is nobody's
    for thread in batcher._threads:
        thread.join()
    assert batcher.num_waiting == 0


def test_nobody_samples_for_a_call_that_is_over():
    speaker = Speaker()
    batcher = Batcher(speaker)
    with pytest.raises(SamplerError, match="nobody waits"):
        batcher.submit(request(0, is_cancelled=lambda: True)).result(60)
    assert not speaker.seen
    batcher.close()


def test_nothing_is_sampled_while_the_sampler_is_held():
    speaker = Speaker(["a"])
    batcher = Batcher(speaker)
    with batcher.held():
        asked = batcher.submit(request(0))
        with pytest.raises(TimeoutError):
            asked.result(0.05)
        assert not speaker.num_batches
    assert asked.result(60).num_tokens == 2
    batcher.close()


def test_what_waits_when_it_closes_is_answered():
    batcher = Batcher(Speaker(["a"]))
    batcher.close()
    with pytest.raises(SamplerError, match="closed"):
        batcher.submit(request(0)).result(1)


def test_what_follows_a_call_that_came_during_the_end_is_done():
    """Who ends its episode waits for it: it was lost, and a failed run ended a minute later."""
    batcher, done = Batcher(Speaker(), gather_seconds=0.0), []
    batcher.close()
    late = batcher.submit(request(0))
    late.add_done_callback(lambda future: batcher.beside(done.append, future))
    with pytest.raises(SamplerError):
        late.result(0)
    assert done == [late]
