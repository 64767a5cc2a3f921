"""Watchdogs of three ranks on a store in memory: reasons, who answers, and which errors are collective operations'."""

import re
import threading
import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from tests.trainer.forked_ranks import free_port
from treewise.distributed import watchdog
from treewise.distributed.watchdog import Watchdog
from treewise.errors import ConfigError, LostRankError, StoppedError

TIMED_OUT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 7000ms for recv operation"
SECONDS = 120  # after which a test of what waits has failed
REFUSED = (
    "Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:152] timed out connecting: SO_ERROR: Connection "
    "refused, remote=[127.0.0.1]:15257$1"
)
CLOSED = "[gloo/transport/tcp/pair.cc:535] Connection closed by peer [127.0.0.1]:7"


@pytest.fixture
def watched(monkeypatch):
    """The watchdogs of ranks 0 and 1, which share a store; rank 2 is stopped."""
    monkeypatch.setattr(watchdog, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", SECONDS)
    monkeypatch.setattr(watchdog.ranks, "count", lambda: 3)
    monkeypatch.setattr(watchdog.ranks, "own", lambda: int(threading.current_thread().name == "1"))
    store, each = HashStore(), (Watchdog(7), Watchdog(7))
    threads = [threading.Thread(target=one._watch, args=(store,), name=str(rank)) for rank, one in enumerate(each)]
    for thread in threads:
        thread.start()

    def now():
        """The time for answers is over once rank 0 has that of rank 1, or has asked and rank 1 has left."""
        has_left = each[1]._is_over.is_set() and each[1]._own_failure is None
        is_over = 1 in each[0]._locations or (each[0]._has_asked and has_left)
        return time.monotonic() + SECONDS * is_over

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(sleep=time.sleep, monotonic=now))
    monkeypatch.setattr(watchdog, "_ANSWER_SECONDS", SECONDS)
    yield each
    for one, thread in zip(each, threads, strict=True):
        one.__exit__(None, None, None)
        thread.join(SECONDS)


def test_at_a_timeout_a_process_that_lives_gives_its_line_and_a_stopped_one_is_named(watched):
    with pytest.raises(LostRankError) as caught, watched[0].explaining():
        raise RuntimeError(TIMED_OUT)
    message = str(caught.value)
    assert "waited 7 s (ddp_timeout) for another process. Rank 2 does not answer" in message
    assert re.search(r"Rank 1 is at .*watchdog\.py:\d+ \([^)]+\)\.", message)  # the main thread of this process


def test_a_closed_connection_names_the_process_that_is_gone(watched):
    with pytest.raises(LostRankError) as caught, watched[0].explaining():
        raise RuntimeError(CLOSED)
    assert "another process: rank 2 failed: its process was gone (killed?). End all" in str(caught.value)


def test_the_reason_of_a_process_that_failed_reaches_the_others(watched):
    watched[1].__exit__(ConfigError, ConfigError("no such key"), None)
    with pytest.raises(LostRankError) as caught, watched[0].explaining():
        raise RuntimeError(CLOSED)
    assert "another process: rank 0 failed: ConfigError: no such key. End all" in str(
        caught.value
    )  # the test is rank 0


def test_a_process_that_does_not_end_by_itself_is_ended_with_the_reason(watched, monkeypatch, capfd):
    ended = threading.Event()
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(watchdog.groups.os, "_exit", lambda code: ended.set() if code == 3 else None)
    watched[1].__exit__(ConfigError, ConfigError("no such key"), None)
    assert ended.wait(SECONDS)
    assert "treewise: rank 0 failed: ConfigError: no such key; rank 0 ends, too" in capfd.readouterr().err


def test_a_run_that_is_stopped_by_a_signal_has_not_failed(watched):
    watched[1].__exit__(StoppedError, StoppedError("saved", 15), None)
    with pytest.raises(LostRankError, match="does not answer"), watched[0].explaining():
        raise RuntimeError(TIMED_OUT)


def test_errors_that_are_not_of_collective_operations_stay_as_they_are(watched):
    with pytest.raises(RuntimeError, match="the moon is full") as caught, watched[0].explaining():
        raise RuntimeError("the moon is full")
    assert not isinstance(caught.value, LostRankError)


@pytest.mark.parametrize("error", [CLOSED, TIMED_OUT])
def test_without_an_answer_of_the_store_the_process_that_holds_it_is_named(monkeypatch, error):
    monkeypatch.setattr(watchdog, "_ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(watchdog.ranks, "count", lambda: 4)
    monkeypatch.setattr(watchdog.ranks, "own", lambda: 1)
    with pytest.raises(LostRankError) as caught, Watchdog(7).explaining():
        raise RuntimeError(error)
    assert re.findall(r"(?i)rank ([02-9])", str(caught.value)) == ["0"]


def test_a_store_that_does_not_answer_ends_the_process_at_the_timeout(monkeypatch, capfd):
    ended, asked = threading.Event(), threading.Event()
    monkeypatch.setattr(watchdog, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(watchdog.groups.os, "_exit", lambda code: ended.set() if code == 3 else None)
    watch = Watchdog(0.05)
    watch._exchange = lambda store: asked.wait()  # as a request to a process that is stopped
    watch._thread = threading.Thread(target=watch._watch, args=(HashStore(),))
    watch._thread.start()
    threading.Thread(target=watch._watch_store).start()
    assert ended.wait(SECONDS)
    asked.set()
    watch.__exit__(None, None, None)
    assert "had no answer from rank 0 for 0.05 s (ddp_timeout): it is stopped" in capfd.readouterr().err


def test_a_group_that_does_not_come_about_ends_the_process(monkeypatch, capfd):
    ended = threading.Event()
    monkeypatch.setattr(watchdog.groups.os, "_exit", lambda code: ended.set() if code == 3 else None)
    with watchdog.groups.ended_after(0.01, "rank 1 waited."):
        assert ended.wait(SECONDS)
    assert "treewise: rank 1 waited. End all of them" in capfd.readouterr().err


def test_a_process_that_never_comes_is_a_lost_rank(monkeypatch):
    monkeypatch.setattr(watchdog, "GRACE_SECONDS", SECONDS)  # the end of this process, were it slow
    port = str(free_port())
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LostRankError, match=r"rank 0 waited 0\.3 s \(ddp_timeout\) for rank 1 to start: "):
        watchdog.start_group(0.3)


def test_a_process_that_is_gone_while_they_start_was_not_waited_for(monkeypatch):
    def refused(*_args, **_kwargs):
        raise RuntimeError(REFUSED)

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(watchdog, "rendezvous", lambda *_args, **_kwargs: iter([(HashStore(), 0, 2)]))
    monkeypatch.setattr(watchdog.distributed, "init_process_group", refused)
    with pytest.raises(LostRankError, match="rank 0 lost the connection to rank 1 while they started: its process was"):
        watchdog.start_group(SECONDS)
