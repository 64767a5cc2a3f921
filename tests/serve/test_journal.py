"""Servers that are killed: nothing that was acknowledged is lost, nothing is trained twice, and clients go on."""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from tests.damage import no_room
from tests.serve.servers import KEY, Address, running, tree_of_data
from tests.trainer.forked_ranks import free_port
from treewise.errors import ConfigError, DiskError
from treewise.serve.journal import REFUSED, QueuedRequest, RequestJournal
from treewise.testing.families import tiny_model

pytestmark = pytest.mark.xdist_group("test_serve_journal")
ADAM = types.AdamParams(learning_rate=1e-2)
SERVERS = Path(__file__).with_name("forked_servers.py")


def train(client, num_steps, begins=lambda number: None):
    """A run of steps, each with a named checkpoint; what the client saw of each step."""
    run = client.create_lora_training_client(base_model="tiny", rank=4, seed=1).result()
    seen = []
    for number in range(num_steps):
        begins(number)
        data = tree_of_data("cross_entropy", seed=number)
        call = run.forward_backward(data, "cross_entropy")
        norm = run.optim_step(ADAM).result().metrics["grad_norm:mean"]
        path = run.save_state(f"step-{number}").result().path
        seen.append((norm, call.result().metrics["loss:sum"], path))
    last = run.forward(tree_of_data("cross_entropy"), "cross_entropy").result()
    logprobs = np.concatenate([each["logprobs"].to_numpy() for each in last.loss_fn_outputs])
    return run, seen, logprobs


class Killer(threading.Thread):
    """Starts a server again each time that it kills it, after so many seconds of its life."""

    def __init__(self, folder, port, num_kills, seconds=(0.05, 1.5), **settings):
        super().__init__(daemon=True)
        self.port, self.num_kills, self.num_killed, self.seconds = port, num_kills, 0, seconds
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", SERVERS, str(folder), str(port), json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.is_done, self.may_kill, self.has_killed = (threading.Event() for _ in range(3))
        self.draw = random.Random(0)

    def is_up(self):
        try:
            return Address(f"http://127.0.0.1:{self.port}").ask("/api/v1/healthz")[0] == 200
        except OSError:
            return False

    def run(self):
        while True:
            self.process.stdin.write("start\n")
            self.process.stdin.flush()
            pid = int(self.process.stdout.readline())
            while not self.is_up():
                self.is_done.wait(0.02)
            self.may_kill.wait()
            self.is_done.wait(self.draw.uniform(*self.seconds) if self.num_killed < self.num_kills else None)
            os.kill(pid, signal.SIGKILL)
            self.process.stdout.readline()
            if self.is_done.is_set():
                break
            self.num_killed += 1
            self.has_killed.set()

    def end(self):
        self.is_done.set()
        self.may_kill.set()
        self.join()
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [2, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_a_server_that_is_killed_again_and_again_loses_nothing(num_kills, tmp_path):
    with running(tmp_path / "undisturbed", tiny_model("llama"), max_tokens="24") as address:
        client = tinker.ServiceClient(base_url=address.url, api_key=KEY)
        _, wanted, logprobs = train(client, 4 if num_kills < 10 else 24)
        client.close("success").result()
    port = free_port()
    killer = Killer(tmp_path / "killed", port, num_kills, max_starts=1000)
    killer.start()

    def begins(number):
        killer.may_kill.set()  # not before: the SDK asks for a run once, and gives up where the connection ends
        if number == len(wanted) - 1:  # a fast machine ends its steps before the first kill
            assert killer.has_killed.wait(600)

    try:
        client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key=KEY)
        run, seen, after = train(client, len(wanted), begins)
        assert [each[:2] for each in seen] == [each[:2] for each in wanted]
        assert np.array_equal(after, logprobs)
        saved = {each.tinker_path for each in client._rest_client().list_checkpoints(run.model_id).result().checkpoints}
        assert {path for _, _, path in seen} <= saved
        again = client.create_training_client_from_state_with_optimizer(seen[-1][2]).result()
        output = again.forward(tree_of_data("cross_entropy"), "cross_entropy").result()
        assert np.array_equal(
            np.concatenate([each["logprobs"].to_numpy() for each in output.loss_fn_outputs]), logprobs
        )
        client.close("success").result()
    finally:
        killer.end()


def test_what_runs_again_after_a_restart(tmp_path):
    """Requests without an answer, and those whose effect no snapshot holds; an answer is written once."""
    journal = RequestJournal(tmp_path / "journal.sqlite")
    journal.put("model", "m", "s", {})
    for seq in range(4):
        for body in (b"{}", b"other"):
            journal.add(QueuedRequest(f"m:{seq}", "m", seq, "optim_step"), body)
        assert journal.body(f"m:{seq}") == b"{}"
    journal.answer("m:0", "application/json", b"0")
    journal.answer("m:1", "application/json", b"1")
    journal.answer("m:1", "application/json", b"again")
    journal.begin(journal.works()[1:3])
    journal.snapshot("m", 0)
    journal.close()
    journal = RequestJournal(tmp_path / "journal.sqlite")
    assert journal.find("m:1") == ("optim_step", "application/json", b"1")
    assert journal.body("m:1") == b"{}"
    assert [(work.seq, work.batch, work.is_answered, work.begun) for work in journal.works()] == [
        (1, 1, True, 0),
        (2, 1, False, 1),
        (3, None, False, 0),
    ]
    journal.close()


def test_a_refused_request_is_written_with_its_answer(tmp_path):
    """One statement, so that a kill leaves none that would run; it is done, and stays until a snapshot is beyond it."""
    journal = RequestJournal(tmp_path / "journal.sqlite")
    journal.put("model", "m", "s", {})
    work = QueuedRequest("m:1", "m", 1, "optim_step")
    journal.refuse(work, b"no")
    journal.refuse(work, b"again")
    journal.add(work, b"{}")
    assert journal.find("m:1") == ("optim_step", REFUSED, b"no")
    assert [(each.seq, each.is_answered, each.is_done) for each in journal.works()] == [(1, True, True)]
    journal._all("UPDATE requests SET answered = 0")
    journal.forget()
    assert journal.last_seq("m") == 1
    journal.snapshot("m", 1)
    journal.forget()
    assert journal.find("m:1") is None
    assert (journal.last_seq("m"), journal.last_seq("none")) == (1, -1)
    journal.close()


def test_owners_are_those_of_sessions(tmp_path):
    journal = RequestJournal(tmp_path / "journal.sqlite")
    for session, key in (("a", "first"), ("b", "second"), ("c", "first")):
        journal.put("session", session, key, {})
        journal.put("model", f"{session}:train:0", session, {})
    assert [journal.key_of(name) for name in ("a", "a:train:0", "b:sample:3:7", "d:train:0")] == [
        "first",
        "first",
        "second",
        None,
    ]
    assert journal.names_of("model", "first") == ["c:train:0", "a:train:0"]
    assert journal.names("session", "second") == ["b"]
    journal.close()


def filled(path):
    journal = RequestJournal(path)
    journal.put("session", "s", "key", {})
    for number in range(20):
        journal.put("model", f"s:train:{number}", "s", {"number": number})
        work = QueuedRequest(f"s:train:{number}:0", f"s:train:{number}", 0, "create")
        journal.add(work, b"{}" * 7 * number)
        journal.begin([work])
        journal.answer(work.id, "application/json", b"1" * number)
    return journal


def rows(journal):
    return [journal._all(f"SELECT * FROM {table} ORDER BY id") for table in ("facts", "requests")]


def test_a_journal_with_a_flipped_bit_is_read_as_it_was_or_not_at_all(tmp_path):
    """Checksums of rows, and SQLite's own look at its pages; bits of no row are no damage."""
    journal = filled(tmp_path / "journal.sqlite")
    wanted = rows(journal)
    journal.close()
    content, draw, outcomes = (tmp_path / "journal.sqlite").read_bytes(), random.Random(0), []
    for number in range(200):
        flipped, path = bytearray(content), tmp_path / f"{number}.sqlite"
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            again = RequestJournal(path)
        except ConfigError as error:
            outcomes.append(str(error))
        else:
            assert rows(again) == wanted
            again.close()
    assert 20 < len(outcomes) < 180
    assert all(each.startswith(f"{tmp_path}/") and "Put back a copy" in each for each in outcomes)


def test_a_row_that_is_not_what_was_written_is_named(tmp_path):
    filled(tmp_path / "journal.sqlite").close()
    database = sqlite3.connect(tmp_path / "journal.sqlite")
    database.executescript("DROP TRIGGER facts_UPDATE; UPDATE facts SET number = 3 WHERE id = 's:train:4'")
    database.close()
    with pytest.raises(ConfigError, match="facts: 's:train:4' is not what was written"):
        RequestJournal(tmp_path / "journal.sqlite")


def test_a_journal_of_another_version_is_named(tmp_path):
    database = sqlite3.connect(tmp_path / "journal.sqlite")
    database.executescript("CREATE TABLE facts (kind TEXT, id TEXT)")
    database.close()
    with pytest.raises(ConfigError, match="of another version of treewise"):
        RequestJournal(tmp_path / "journal.sqlite")


# -- a full disk ------------------------------------------------------------------------------------------------------


def test_a_write_without_room_changes_nothing_and_names_the_bytes(tmp_path):
    path = tmp_path / "journal.sqlite"
    journal = RequestJournal(path)
    journal.put("session", "a", "owner", {"kept": True})
    with no_room(path.stat().st_size):
        with pytest.raises(DiskError, match=r"sqlite cannot be written \(.*\): 2.00 MiB needed, .* free on its"):
            journal.put("session", "a", "owner", "x" * (2 << 20))
        with pytest.raises(DiskError):
            journal.add(QueuedRequest("a:1", "a", 1, "sample"), b"y" * (2 << 20))
    assert journal.get("session", "a") == {"kept": True}
    assert journal.find("a:1") is None
    journal.add(QueuedRequest("a:1", "a", 1, "sample"), b"y" * (2 << 20))
    assert len(journal.body("a:1")) == 2 << 20


def test_a_write_may_wait_for_room(tmp_path):
    """As SQLite says it of a database that may have no more pages; of this thread's writes alone."""
    journal, errors = RequestJournal(tmp_path / "journal.sqlite"), []
    work = QueuedRequest("a:1", "a", 1, "sample", begun=4)
    journal.add(work, b"")
    journal._all("PRAGMA max_page_count=1")  # as many as there are

    def room(error):
        errors.append(str(error))
        if len(errors) == 3:
            journal._all("PRAGMA max_page_count=100000")

    with journal.waiting_for_room(room):
        other = threading.Thread(target=lambda: errors.append(_error_of(journal)))
        other.start()
        other.join()
        journal.answer("a:1", "m", b"z" * (1 << 20))
        for _ in range(3):  # as where it was committed, and SQLite's checkpoint had no room
            journal.begin([work])
    assert all("database or disk is full" in each for each in errors)
    assert len(errors) == 3
    assert journal.find("a:1").answer == b"z" * (1 << 20)
    journal.add(QueuedRequest("a:2", "a", 2, "sample", begun=4), b"")
    for _ in range(3):
        journal.begin([QueuedRequest("a:2", "a", 2, "sample", begun=4)])
    assert [each.begun for each in journal.works() if each.id == "a:2"] == [5]


def _error_of(journal):
    with pytest.raises(DiskError) as caught:
        journal.put("session", "b", "owner", "x" * (1 << 20))
    return str(caught.value)


def test_a_start_without_room_says_so(tmp_path):
    with no_room(100), pytest.raises(DiskError, match=r"journal.sqlite cannot be written"):
        RequestJournal(tmp_path / "journal.sqlite")
    RequestJournal(tmp_path / "journal.sqlite").close()
