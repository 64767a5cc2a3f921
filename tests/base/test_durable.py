"""Files that are whole or not there: what is on the disk when a write fails, a process is killed, a machine stops."""

import os
import stat
import subprocess
import sys

import pytest

from treewise.base import durable
from treewise.base.durable import append, moved_into_place, write_atomically
from treewise.errors import ConfigError, DiskError

KILLED = """
import os, signal, sys
from pathlib import Path
from treewise.base import durable
path = Path(sys.argv[1])
if sys.argv[2] == "moved":
    with durable.moved_into_place(path) as part:
        part.write_text("new")
        os.kill(os.getpid(), signal.SIGKILL)
durable.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
durable.write_atomically(path, "new")
"""


def _write(how: str, path, content: str) -> None:
    if how == "moved":
        with moved_into_place(path) as part:
            part.write_text(content)
    else:
        write_atomically(path, content)


@pytest.mark.parametrize("how", ["moved", "atomically"])
def test_a_killed_process_leaves_the_old_file_and_the_next_one_writes(how, tmp_path):
    path = tmp_path / "file.json"
    path.write_text("old")
    assert subprocess.run([sys.executable, "-c", KILLED, str(path), how], check=False).returncode == -9
    assert path.read_text() == "old"
    _write(how, path, "newer")
    assert path.read_text() == "newer"


@pytest.mark.parametrize("how", ["moved", "atomically"])
def test_the_content_is_on_the_disk_before_the_name_is(how, tmp_path, monkeypatch):
    """And the name before anybody goes on: what a machine that stops between two of these leaves is old or new."""
    done = []
    fsync, replace = os.fsync, os.replace

    def synced(number: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file")
        fsync(number)

    monkeypatch.setattr(durable.os, "fsync", synced)
    monkeypatch.setattr(durable.os, "replace", lambda *paths: (done.append("name"), replace(*paths)))
    _write(how, tmp_path / "file.json", "content")
    assert done == ["file", "name", "folder"]


def test_what_can_be_made_again_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(durable.os, "fsync", lambda _: pytest.fail("flushed"))
    with moved_into_place(tmp_path / "cache" / "a", is_durable=False) as part:
        part.write_text("content")
    assert (tmp_path / "cache" / "a").read_text() == "content"


def test_a_write_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(UnicodeEncodeError), moved_into_place(tmp_path / "a") as part:
        part.write_text("half and \ud800", encoding="utf-8")
    assert list(tmp_path.iterdir()) == []


def test_a_secret_is_its_owner_s_from_the_beginning(tmp_path):
    with moved_into_place(tmp_path / "secret", permissions=0o600) as part:
        assert stat.S_IMODE(part.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_a_link_in_the_place_of_what_is_written_aside_is_an_error(tmp_path):
    (tmp_path / "other").write_text("of somebody")
    (tmp_path / ".file.tmp").symlink_to(tmp_path / "other")
    with pytest.raises(ConfigError, match="is a link"):
        write_atomically(tmp_path / "file", "content")
    assert (tmp_path / "other").read_text() == "of somebody"


def test_an_append_is_whole_or_taken_back(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    append(path, b"one\n")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(durable.os, "fsync", full)
        with pytest.raises(DiskError, match="rows cannot be written"):
            append(path, b"two\n")
    assert path.read_bytes() == b"one\n"
