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
