"""The connections between processes, without processes: who answers, and which errors are collective operations'."""

import re
import socket
import threading

import pytest

from treewise.distributed import watchdog
from treewise.distributed.watchdog import Watchdog
from treewise.errors import LostRankError


@pytest.fixture
def connected(monkeypatch):
    """A watch with connections to two others: to rank 1, which lives, and to rank 2, which is stopped."""
    monkeypatch.setattr(watchdog, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(watchdog.ranks, "count", lambda: 3)
    (asking, asked), ends = (Watchdog(), Watchdog()), [*socket.socketpair(), *socket.socketpair()]
    monkeypatch.setattr(watchdog.ranks, "own", lambda: 1)  # what the one that is asked says of itself
    asking._sockets, asked._sockets = {1: ends[0], 2: ends[2]}, {0: ends[1]}
    threads = [threading.Thread(target=each._listen) for each in (asking, asked)]
    for thread in threads:
        thread.start()
    yield asking
    ends[3].sendall(b'{"end": null}\n')  # all leave in peace
    for each in (asking, asked):
        each.__exit__(None, None, None)
    for thread in threads:
        thread.join(5)
    for each in ends:
        each.close()


def test_a_process_that_lives_says_where_it_is_and_a_stopped_one_is_named(connected):
    with pytest.raises(LostRankError) as caught, connected.explaining(7):
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 7000ms for recv operation")
    said = str(caught.value)
    assert "waited 7 s (ddp_timeout) for another process. Rank 2 does not answer" in said
    assert re.search(r"Rank 1 is at .*watchdog\.py:\d+ \((_roll_call|_send)\)\.", said)  # this thread


def test_errors_that_are_not_of_collective_operations_stay_as_they_are(connected):
    with pytest.raises(RuntimeError, match="the moon is full") as caught, connected.explaining(7):
        raise RuntimeError("the moon is full")
    assert not isinstance(caught.value, LostRankError)
