"""One run per folder, held by a lock that ends with its process."""

import contextlib
import errno
import json
import os
import signal

import pytest

from tests.trainer.helpers import in_child
from treewise import TreeTrainingArguments
from treewise.base.durable import own_file
from treewise.errors import ConfigError, LostRankError
from treewise.trainer.checkpoint import store
from treewise.trainer.run_context import NAME, RunLock, entered_run
from treewise.trainer.signals import StopSignals


@pytest.fixture
def other_run(tmp_path):
    """The process id of another run in the folder `run`."""
    read, write = os.pipe()

    def hold():
        RunLock(tmp_path / "run").take()
        os.write(write, b"held")
        signal.pause()

    child = in_child(hold)
    assert os.read(read, 4) == b"held"
    yield child
    os.close(read)
    os.close(write)
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_folder_in_use_is_refused_with_its_holder(make_trainer, trees, other_run):
    with pytest.raises(ConfigError, match=rf"in use by process {other_run} on .* \(since 20"):
        make_trainer(trees, max_steps=1).train()


def test_whether_a_folder_is_in_use_is_known_before_it_is_taken(other_run, tmp_path):
    with pytest.raises(ConfigError, match=f"in use by process {other_run}"):
        RunLock(tmp_path / "run").check()
    for free in ("free", "absent/folder", "run/.treewise.lock"):
        RunLock(tmp_path / free).check()
        assert not (tmp_path / "free").exists()
    os.kill(other_run, signal.SIGKILL)
    os.waitpid(other_run, 0)
    RunLock(tmp_path / "run").check()
    with RunLock(tmp_path / "run") as own:
        own.check()


def test_a_killed_runs_workers_do_not_keep_its_lock(tmp_path):
    read, write = os.pipe()

    def hold():
        with RunLock(tmp_path):
            worker = in_child(signal.pause)
            os.write(write, f"{worker}\n".encode())
            signal.pause()

    run = in_child(hold)
    worker = int(os.read(read, 20))
    try:
        with pytest.raises(ConfigError, match=f"in use by process {run}"):
            RunLock(tmp_path).take()  # the worker gave up its share alone
        os.kill(run, signal.SIGKILL)
        os.waitpid(run, 0)
        os.kill(worker, 0)
        with RunLock(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_a_forked_process_leaves_the_file_of_the_lock(tmp_path):
    with RunLock(tmp_path) as lock:
        os.waitpid(in_child(lock.release), 0)
        assert (tmp_path / NAME).exists()


def test_the_lock_of_a_killed_run_is_stale(make_trainer, trees, other_run, tmp_path):
    os.kill(other_run, signal.SIGKILL)
    os.waitpid(other_run, 0)
    assert (tmp_path / "run" / NAME).exists()
    make_trainer(trees, max_steps=1).train()
    assert not (tmp_path / "run" / NAME).exists()


def test_without_locks_of_the_file_system_a_dead_holder_is_stale_and_a_live_or_remote_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr("treewise.trainer.run_context.fcntl", None)
    with RunLock(tmp_path):
        holder = json.loads((tmp_path / NAME).read_text())
    dead = in_child(lambda: None)
    os.waitpid(dead, 0)
    (tmp_path / NAME).write_text(json.dumps({**holder, "pid": dead}))
    with RunLock(tmp_path):
        pass
    for change in ({}, {"host": "elsewhere", "pid": dead}):
        (tmp_path / NAME).write_text(json.dumps({**holder, **change}))
        with pytest.raises(ConfigError, match="If that run is gone, remove"):
            RunLock(tmp_path).take()


def test_a_lock_whose_file_is_removed_in_the_very_moment_is_taken_anew(tmp_path, monkeypatch):
    lock = RunLock._lock

    def after_the_last_holder_left(self, descriptor):
        monkeypatch.setattr(RunLock, "_lock", lock)
        (tmp_path / NAME).unlink()
        lock(self, descriptor)

    monkeypatch.setattr(RunLock, "_lock", after_the_last_holder_left)
    with RunLock(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_one_process_may_hold_a_folder_twice(tmp_path):
    with RunLock(tmp_path):
        with RunLock(tmp_path):
            pass
        assert (tmp_path / NAME).exists()
    assert not (tmp_path / NAME).exists()


def test_what_a_killed_run_left_aside_is_cleared_and_said(make_trainer, trees, tmp_path, caplog):
    store.new_folder(tmp_path / "run", 4)
    make_trainer(trees, max_steps=1).train()
    assert "checkpoint-4: never finished" in caplog.text
    assert not list((tmp_path / "run").glob(".checkpoint*"))


def test_a_run_writes_through_no_link_of_its_folder(tmp_path):
    (tmp_path / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=rf"{NAME} is a link"):
        RunLock(tmp_path).take()
    (tmp_path / "log.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"log\.jsonl is a link"), own_file(tmp_path / "log.jsonl", "a"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_run_enters_no_folder_that_leads_out_of_its_own(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rollouts").symlink_to(tmp_path / "outside")
    args, signals = TreeTrainingArguments(output_dir=str(tmp_path / "run")), StopSignals(may_abandon=False)
    with pytest.raises(ConfigError, match="rollouts is a link"), entered_run(args, signals, "rollouts"):
        pass
    with entered_run(args, signals, "journal"):
        pass


def test_the_loss_of_another_process_is_named_while_the_folder_is_entered(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def watching(_):
        try:
            yield
        except RuntimeError as error:
            raise LostRankError("rank 1 is gone") from error

    def lose(_):
        raise RuntimeError("gloo: Connection reset by peer")

    monkeypatch.setattr("treewise.distributed.watchdog.watching", watching)
    monkeypatch.setattr("treewise.trainer.run_context.ranks.count", lambda: 2)
    monkeypatch.setattr("treewise.trainer.run_context.ranks.on_first_rank", lose)
    args, signals = TreeTrainingArguments(output_dir=str(tmp_path / "run")), StopSignals(may_abandon=False)
    with pytest.raises(LostRankError, match="rank 1 is gone"), entered_run(args, signals):
        pass


def test_an_error_of_the_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match="Input/output") as caught, own_file(tmp_path / "log.jsonl", "a"):
        raise OSError(errno.EIO, "Input/output error")
    assert caught.value.filename == str(tmp_path / "log.jsonl")


@pytest.mark.parametrize("kind", ["folder", "link", "link to nothing", "link to itself"])
def test_what_stands_in_place_of_a_lock_is_named(kind, tmp_path):
    lock, target = tmp_path / "run" / NAME, tmp_path / "target"
    lock.parent.mkdir()
    target.write_text("x")
    if kind == "folder":
        lock.mkdir()
    else:
        lock.symlink_to({"link": target, "link to nothing": tmp_path / "nothing", "link to itself": lock}[kind])
    for use in (RunLock(lock.parent).check, RunLock(lock.parent).take):
        with pytest.raises(ConfigError, match=rf"run/{NAME} is a {kind.partition(' ')[0]}; a run locks a plain file"):
            use()
    assert target.read_text() == "x"


def test_a_folder_that_is_a_link_to_itself_is_named(tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"output_dir .*run is a link that leads to itself"):
        RunLock(tmp_path / "run")
