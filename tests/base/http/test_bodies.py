"""Bodies of requests that are too large, too many, too slow, or that do not end; and what they name."""

import asyncio
import json
import math
import socket
import threading
import time

import pytest
import tinker
from starlette.exceptions import HTTPException
from starlette.requests import Request

from tests.serve.servers import KEY, RATE, call, running
from treewise.base.http import bodies
from treewise.base.http.bodies import Bodies, BodyLimits, BodyRefusedError
from treewise.serve.wire import named_in
from treewise.testing.families import tiny_model

pytestmark = pytest.mark.xdist_group("test_serve_bodies")
MB = 1 << 20


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with running(folder, tiny_model("llama"), max_request_mb=1, max_uploads_mb=2) as found:
        yield found


def request_of(parts, hold=None):
    """A request whose body comes in these parts, and whose end in time, or once `hold` is set."""
    waiting = [{"type": "http.request", "body": part, "more_body": True} for part in parts]

    async def receive():
        if waiting:
            return waiting.pop(0)
        if hold is not None:
            await hold.wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def made(seconds=120.0):
    return Bodies(BodyLimits(1, 2, seconds))


async def read(found, request, key="key", refusal=None):
    async with found.read(request, key, refusal) as body:
        return body, found.num_bytes


def refused(found, request, refusal=None):
    with pytest.raises(HTTPException) as said:
        asyncio.run(read(found, request, refusal=refusal))
    assert found.num_bytes == 0
    return said.value


def test_a_body_counts_while_its_request_runs():
    found = made()
    assert asyncio.run(read(found, request_of([b"x" * 1000]))) == (b"x" * 1000, 0)
    body, num_bytes = asyncio.run(read(found, request_of([b"x" * (MB // 2), b"y" * (MB // 2)])))
    assert body == b"x" * (MB // 2) + b"y" * (MB // 2)
    assert MB - num_bytes == bodies._SMALL
    assert found.num_bytes == 0


def test_what_is_too_large_is_read_to_its_end_and_not_kept():
    """With its beginning and its end, where it names what it is about."""
    found, request = made(), request_of([b"start", *[b"x" * (MB // 4)] * 40, b"end"])
    error = refused(found, request)
    assert isinstance(error, BodyRefusedError)
    assert (error.status_code, error.ends[:5], error.ends[-3:]) == (413, b"start", b"end")
    assert len(error.ends) <= 2 * bodies.KEPT_ENDS


def test_a_refusal_by_its_head_is_raised_once_the_body_was_read():
    request = request_of([b"x" * MB] * 3)
    assert refused(made(), request, HTTPException(401, "no")).status_code == 401
    assert request._stream_consumed


def test_a_body_beyond_what_may_be_under_way_is_refused_and_small_ones_are_not():
    """Until another one ends. Each is counted by what came of it, not by what it announced."""
    found = made()

    async def crowd():
        ends = asyncio.Event()
        waiting = [asyncio.create_task(read(found, request_of([b"x" * MB], ends))) for _ in range(2)]
        while found.num_bytes < 2 * (MB - bodies._SMALL):
            await asyncio.sleep(0)
        statuses = []
        for size in (MB // 2, bodies._SMALL):
            try:
                body, _ = await read(found, request_of([b"y" * size]))
                statuses.append(len(body))
            except BodyRefusedError as error:
                statuses.append(error.status_code)
        ends.set()
        await asyncio.gather(*waiting)
        body, _ = await read(found, request_of([b"y" * MB]))
        return [*statuses, len(body)]

    assert asyncio.run(crowd()) == [503, bodies._SMALL, MB]
    assert found.num_bytes == 0


@pytest.mark.parametrize("slow", ["idle", "late"])
def test_a_body_that_does_not_end_has_its_time(slow, monkeypatch):
    monkeypatch.setattr(bodies, "IDLE_SECONDS", 0.01 if slow == "idle" else math.inf)
    found = made(120.0 if slow == "idle" else 0.01)
    error = refused(found, request_of([b"x" * MB], asyncio.Event()))
    assert (error.status_code, "max_request_seconds" in error.detail) == (408, True)


def test_bodies_under_way_are_waited_for_and_so_are_those_that_broke_off(monkeypatch):
    """Of their key; not small ones, nor those that came to their end."""
    found = made()

    async def watched():
        ends, seen = asyncio.Event(), []
        task = asyncio.create_task(read(found, request_of([b"x" * MB], ends)))
        while not found.num_bytes:
            await asyncio.sleep(0)
        seen.append((found.uploaded("key"), found.uploaded("other")))
        ends.set()
        await task
        return [*seen, found.uploaded("key")]

    assert asyncio.run(watched()) == [(math.inf, 0.0), 0.0]
    monkeypatch.setattr(bodies, "IDLE_SECONDS", 0.01)
    refused(found, request_of([b"x" * MB], asyncio.Event()))
    assert 0 < found.uploaded("key") - time.monotonic() <= bodies._RETRY_SECONDS
    assert not found._under_way


RUN = "4c9ab6b0-1111-2222-3333-444455556666:train:0"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (json.dumps({"model_id": RUN, "seq_id": 7, **RATE}).encode(), (RUN, 7)),
        (b'{"seq_id" : 7,"model_id":"%s","adam_params":{"learning_rate":NaN' % RUN.encode(), (RUN, 7)),
        (b'{"model_id": "%s", "path": "%s", "seq_id": 12}' % (RUN.encode(), b"x" * MB), (RUN, 12)),
        (b'{"model_id": "%s", "seq_id": 3, "user_metadata": {"a": "%s' % (RUN.encode(), b"x" * MB), (RUN, 3)),
        (b'{"model_id": "%s", "user_metadata": {"a": "\\"seq_id\\": 3"}}' % RUN.encode(), None),
        (b'{"model_seq_id": 3, "session_id": "a"}', None),
        (b'{"model_id": "%s", "seq_id": "3"}' % RUN.encode(), None),
        (b'{"model_id": 5, "seq_id": 3}', None),
        (b"\n" + bytes([len(RUN)]) + RUN.encode() + b"\x10\xac\x02\x1a\xff" + b"x" * 100, (RUN, 300)),
        (b"\n" + bytes([len(RUN)]) + RUN.encode() + b"\x10" + b"\xff" * 20, None),
        (call(), None),
        (b"", None),
        (b"\n", None),
        (b"\xff" * 100, None),
    ],
)
def test_what_a_refused_body_names(body, named):
    assert named_in(body) == named


def half(address, path, length, start, key=KEY):
    host, port = address.url.removeprefix("http://").split(":")
    lines = f"POST /api/v1/{path} HTTP/1.1", f"Host: {host}", f"X-API-Key: {key}", f"Content-Length: {length}", "", ""
    made = socket.create_connection((host, int(port)))
    made.sendall("\r\n".join(lines).encode() + start)
    return made


def status_of(connection):
    with connection:
        return int(connection.recv(12).split()[1])


def test_clients_that_do_not_end_are_answered_and_others_go_on(address, monkeypatch):
    """Of many that send most of a body, as many as fit hold memory; the others hear so, and small requests pass."""
    monkeypatch.setattr(bodies, "IDLE_SECONDS", 1.0)
    crowd = [half(address, "optim_step", MB, b"x" * (MB - 100)) for _ in range(8)]
    assert address.ask("/api/v1/healthz") == (200, {"status": "ok"})
    answers = [None] * len(crowd)

    def wait(index):
        answers[index] = status_of(crowd[index])

    threads = [threading.Thread(target=wait, args=(index,)) for index in range(len(crowd))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == {408}
    status, said = address.ask("/api/v1/optim_step", b"x" * (MB // 2))
    assert (status, bool(said["error"])) == (400, True)


def test_the_sdk_sends_again_what_found_no_room(address):
    client = tinker.ServiceClient(base_url=address.url, api_key=KEY)
    run = client.create_lora_training_client(base_model="tiny", rank=2, seed=0).result()
    holders = [half(address, "optim_step", MB, b"x" * (MB - 100), "tml-other") for _ in range(2)]
    while address.ask("/api/v1/optim_step", b"x" * (MB // 2))[0] != 503:
        # One that came while this was asked may have found no room itself.
        holders.append(half(address, "optim_step", MB, b"x" * (MB - 100), "tml-other"))
    saved = run.save_state("large", user_metadata={"a": "x" * (MB // 2)})
    assert address.ask("/api/v1/optim_step", b"x" * (MB // 2))[0] == 503
    for each in holders:
        each.close()
    assert saved.result(100).path == f"tinker://{run.model_id}/weights/large"
    client.close("success").result()


def test_a_sender_of_too_much_hears_why(address):
    """Once it has sent it; with a length that it announces, or in chunks."""
    status, said = address.ask("/api/v1/optim_step", b"x" * (MB + 1))
    assert (status, "max_request_mb" in said["error"]) == (413, True)
    host, port = address.url.removeprefix("http://").split(":")
    head = f"POST /api/v1/optim_step HTTP/1.1\r\nHost: {host}\r\nX-API-Key: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode())
        for _ in range(40):
            connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 413"
