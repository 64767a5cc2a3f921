"""Logs of SQLite with a bit flipped in them: what SQLite then leaves out is counted, and kept."""

import logging
import random
import shutil
import sqlite3

import pytest

from treewise.serve.journal import RequestJournal
from treewise.serve.write_ahead_log import lost_transactions

HEADER, FRAME = 32, 24 + 4096
NUM_EARLY, NUM_ROWS = 150, 30


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """What a killed server leaves: a log of an earlier and of the last time, and a transaction that was not ended."""
    folder = tmp_path_factory.mktemp("killed")
    journal = RequestJournal(folder / "journal.sqlite")
    for number in range(NUM_EARLY):
        journal.put("model", f"early-{number}", "s", {})
    journal._all("PRAGMA wal_checkpoint(RESTART)")
    for number in range(NUM_ROWS):
        journal.put("model", f"late-{number}", "s", {})
    journal._db.execute("PRAGMA cache_size = 1")
    journal._db.execute("BEGIN")
    for number in range(40):  # more than the cache holds, so a part of it is in the log
        journal.put("model", f"never-{number}", "s", "x" * 4000)
    for path in folder.glob("journal*"):
        shutil.copy(path, folder / f"copy-{path.name}")
    journal._db.execute("ROLLBACK")
    journal.close()
    return folder


def copied(killed, folder):
    folder.mkdir(parents=True)
    for name in ("journal.sqlite", "journal.sqlite-wal"):
        shutil.copy(killed / f"copy-{name}", folder / name)
    return folder / "journal.sqlite", folder / "journal.sqlite-wal"


def last_frames(log):
    """Of each frame that ends a transaction of the log's last time: its number."""
    content = log.read_bytes()
    salts = content[16:24]
    starts = range(HEADER, len(content) - FRAME + 1, FRAME)
    mine = [start for start in starts if content[start + 8 : start + 16] == salts]
    return [(start - HEADER) // FRAME for start in mine if content[start + 4 : start + 8] != bytes(4)], len(mine)


def test_a_log_that_is_whole_loses_nothing(killed, tmp_path, caplog):
    """Also with frames of a transaction that a kill ended, and with those of earlier times, whatever they are."""
    database, log = copied(killed, tmp_path / "a")
    ends, num_mine = last_frames(log)
    assert len(ends) == NUM_ROWS
    assert max(ends) + 1 < num_mine < (log.stat().st_size - HEADER) // FRAME
    content = bytearray(log.read_bytes())
    content[HEADER + num_mine * FRAME + 30] ^= 4
    log.write_bytes(content)
    assert lost_transactions(log, 4096) is None
    journal = RequestJournal(database)
    assert len(journal.names("model")) == NUM_EARLY + NUM_ROWS
    journal.close()
    assert not caplog.records
    assert not list(tmp_path.glob("a/*damaged*"))


def test_each_flipped_bit_is_found_counted_and_kept(killed, tmp_path, caplog):
    """In the header, in a frame's header and in its page: what is lost is what SQLite does not read."""
    _, source = copied(killed, tmp_path / "source")
    ends, _ = last_frames(source)
    draw, limit = random.Random(0), HEADER + (ends[-1] + 1) * FRAME
    places = [0, 3, 9, 14, 17, 25, 31, *(HEADER + each for each in range(24)), HEADER + ends[-1] * FRAME + 9]
    for number, place in enumerate([*places, *(draw.randrange(limit) for _ in range(60))]):
        database, log = copied(killed, tmp_path / str(number))
        content = bytearray(log.read_bytes())
        content[place] ^= 1 << draw.randrange(8)
        log.write_bytes(content)
        lost, before = lost_transactions(log, 4096), database.read_bytes()
        wanted = -1 if place < HEADER else (place - HEADER) // FRAME
        assert lost is not None, place
        assert lost.frame == wanted
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            journal = RequestJournal(database)
        late = [name for name in journal.names("model") if name.startswith("late")]
        journal.close()
        is_exact = not 4 <= (place - HEADER) % FRAME < 8  # the bytes that say whether a frame ends a transaction
        assert abs(lost.num_transactions - (NUM_ROWS - len(late))) <= (not is_exact)
        assert sum(end >= wanted for end in ends) == NUM_ROWS - len(late)
        (line,) = [record.getMessage() for record in caplog.records]
        assert f"the {lost.num_transactions} writes from there on are lost" in line
        assert (tmp_path / str(number) / "journal.sqlite.damaged-1-wal").read_bytes() == content
        assert (tmp_path / str(number) / "journal.sqlite.damaged-1").read_bytes() == before


def test_damage_is_reported_once(killed, tmp_path, caplog):
    """A second start finds what the first one read, killed or not."""
    database, log = copied(killed, tmp_path / "a")
    content = bytearray(log.read_bytes())
    content[HEADER + 5 * FRAME + 100] ^= 1
    log.write_bytes(content)
    first = RequestJournal(database)
    names = first.names("model")
    first.put("model", "new", "s", {})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first.close()
    caplog.clear()
    second = RequestJournal(tmp_path / "b" / "journal.sqlite")
    assert set(second.names("model")) == {*names, "new"}
    second.close()
    assert not caplog.records


@pytest.mark.parametrize("content", [b"", b"short", bytes(40)])
def test_a_log_without_frames_loses_nothing(content, tmp_path):
    (tmp_path / "wal").write_bytes(content)
    assert lost_transactions(tmp_path / "wal", 4096) is None
    assert lost_transactions(tmp_path / "none", 4096) is None


@pytest.mark.parametrize("page_size", [512, 65536])
def test_pages_of_other_sizes(page_size, tmp_path):
    database = sqlite3.connect(tmp_path / "db", isolation_level=None)
    database.executescript(
        f"PRAGMA page_size={page_size}; PRAGMA journal_mode=WAL; CREATE TABLE t (a); INSERT INTO t VALUES (1);"
    )
    log = tmp_path / "copy"
    shutil.copy(tmp_path / "db-wal", log)
    database.close()
    assert lost_transactions(log, page_size) is None
    content = bytearray(log.read_bytes())
    content[HEADER + 24 + page_size - 1] ^= 1
    log.write_bytes(content)
    assert lost_transactions(log, page_size).frame == 0


@pytest.mark.parametrize("size", [None, 0, 1])
def test_a_log_without_its_database_is_kept(killed, tmp_path, caplog, size):
    """SQLite removes it, as it does with one of an empty database."""
    database, log = copied(killed, tmp_path / "a")
    content = log.read_bytes()
    database.unlink()
    if size is not None:
        database.write_bytes(bytes(size))
    journal = RequestJournal(database)
    assert journal.names("model") == []
    journal.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"{database}: missing or empty, so the {NUM_ROWS} writes in its log are lost" in line
    assert (tmp_path / "a" / "journal.sqlite.damaged-1-wal").read_bytes() == content


# -- logs that end too early ------------------------------------------------------------------------------------------


def all_of(killed, folder):
    """As `copied`, with the index of the log, which a killed server leaves, too."""
    database, log = copied(killed, folder)
    shutil.copy(killed / "copy-journal.sqlite-shm", folder / "journal.sqlite-shm")
    return database, log


def test_a_log_that_is_cut_off_is_found_and_kept(killed, tmp_path, caplog):
    """At a frame, where it looks whole, within one, in its header, and to nothing."""
    _, source = copied(killed, tmp_path / "source")
    ends, _ = last_frames(source)
    frames = [0, 1, ends[3], ends[3] + 1, ends[-1] - 1, ends[-1]]
    sizes = {0, 20, *(HEADER + frame * FRAME + more for frame in frames for more in (0, 11, 24))}
    for size in sorted(sizes):
        folder = tmp_path / str(size)
        database, log = all_of(killed, folder)
        log.write_bytes(log.read_bytes()[:size])
        content, before = log.read_bytes(), database.read_bytes()
        caplog.clear()
        journal = RequestJournal(database)
        late = [name for name in journal.names("model") if name.startswith("late")]
        journal.close()
        num_frames = max(0, size - HEADER) // FRAME
        assert len(late) == sum(end < num_frames for end in ends) < NUM_ROWS
        (line,) = [record.getMessage() for record in caplog.records]
        assert f"cut off behind {num_frames} of {ends[-1] + 1} frames, so the writes from there on are lost" in line
        assert (folder / "journal.sqlite.damaged-1-wal").read_bytes() == content
        assert (folder / "journal.sqlite.damaged-1").read_bytes() == before


def test_a_log_without_what_lies_behind_its_last_commit_loses_nothing(killed, tmp_path, caplog):
    database, log = all_of(killed, tmp_path / "a")
    ends, _ = last_frames(log)
    log.write_bytes(log.read_bytes()[: HEADER + (ends[-1] + 1) * FRAME])
    journal = RequestJournal(database)
    assert len(journal.names("model")) == NUM_EARLY + NUM_ROWS
    journal.close()
    assert not caplog.records


@pytest.mark.parametrize("has_index", [True, False])
def test_a_log_that_is_missing_is_found_and_the_database_kept(has_index, killed, tmp_path, caplog):
    """As where somebody copies the database of a server that was killed, and no more of it."""
    database, log = all_of(killed, tmp_path / "a")
    log.unlink()
    if not has_index:
        database.with_name("journal.sqlite-shm").unlink()
    before = database.read_bytes()
    journal = RequestJournal(database)
    assert not [name for name in journal.names("model") if name.startswith("late")]
    journal.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "journal.sqlite-wal: missing, so the last writes are lost; what was before is read. It was copied to" in line
    assert (tmp_path / "a" / "journal.sqlite.damaged-1").read_bytes() == before
    assert not (tmp_path / "a" / "journal.sqlite.damaged-1-wal").exists()
    RequestJournal(database).close()  # it was closed, so it needs no log any more
    assert len(caplog.records) == 1


@pytest.mark.parametrize("leaves", ["all", "an empty log", "no log"])
def test_a_log_that_is_empty_loses_nothing(leaves, tmp_path, caplog):
    """A server that had just emptied its log, and was killed."""
    journal = RequestJournal(tmp_path / "journal.sqlite")
    journal.put("model", "a", "s", {})
    journal.forget()
    (tmp_path / "b").mkdir()
    for path in tmp_path.glob("journal*"):
        shutil.copy(path, tmp_path / "b" / path.name)
    journal.close()
    if leaves != "all":
        (tmp_path / "b" / "journal.sqlite-wal").write_bytes(b"")
    if leaves == "no log":
        (tmp_path / "b" / "journal.sqlite-wal").unlink()
    again = RequestJournal(tmp_path / "b" / "journal.sqlite")
    assert again.names("model") == ["a"]
    again.close()
    assert not caplog.records
