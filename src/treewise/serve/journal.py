"""What a server promised: sessions, models, requests and answers, in one SQLite file that survives a kill.

A request is written before it is acknowledged, and its answer before a client sees it; a request that comes again
(its id follows from session and sequence number) is the same row. After a restart a model goes on from its newest
snapshot by running the requests since then again, in the groups in which they ran before, so its weights are the same
bits. SQLite's write-ahead log keeps what was committed when the process is killed.

Every session has an owner, the digest of the API key that made it, and all that its id begins is that owner's: models,
samplers, requests, checkpoints. Every row has a checksum, which a start compares; SQLite compares those of its log, and
what it leaves out there is kept and reported (`write_ahead_log.py`).

Where the disk has no room, a write changes nothing and is a `DiskError`; within `waiting_for_room` it is tried again.
"""

import hashlib
import json
import logging
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from treewise.base.own_files import disk_error, is_no_room
from treewise.errors import ConfigError, DiskError
from treewise.serve.write_ahead_log import OPEN, keep_what_is_lost

T = TypeVar("T")
Room = Callable[[DiskError], object]  # waits for room, or raises what it was given
logger = logging.getLogger("treewise")
_VERSION = 2  # of the schema
_SUMMED = {  # the columns that each table's checksums are of
    "facts": "kind, id, owner, number, content, created",
    "requests": "id, owner, seq, kind, body, batch, answer, media, created, answered, begun",
}
_SCHEMA = """
CREATE TABLE facts (kind TEXT, id TEXT, owner TEXT, number INTEGER, content TEXT, created REAL,
    checksum INTEGER, PRIMARY KEY (kind, id));
CREATE TABLE requests (id TEXT PRIMARY KEY, owner TEXT, seq INTEGER, kind TEXT, body BLOB, batch INTEGER,
    answer BLOB, media TEXT, created REAL, answered REAL, begun INTEGER DEFAULT 0, checksum INTEGER);
CREATE INDEX by_owner ON requests (owner, seq);
""" + "".join(
    f"""CREATE TRIGGER {table}_{when[:6]} AFTER {when} ON {table} BEGIN
    UPDATE {table} SET checksum = checksum_of({columns}) WHERE rowid = NEW.rowid; END;"""
    for table, columns in _SUMMED.items()
    for when in ("INSERT", f"UPDATE OF {columns}")
)
KEEP_ANSWERS_SECONDS = 3600.0
ROOM_BYTES = 1 << 16  # that have to have room before a disk is no longer full
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE)
_DISK = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)  # codes
# Media of answers that are errors: of what ran, of what never did, and of a step whose gradients were lost, which drops
# them again when it runs again.
ERRORS = FAILED, REFUSED, LOST = "failed", "refused", "lost"
GAP = "gap"  # kind of a row that stands for several numbers, which never came: from that in its id to its own


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """A request that is to run. batch: the group in which it ran before the server was restarted. is_answered: the
    client has its answer; it runs again for what it changed. is_done: it changed nothing, or a checkpoint alone, and is
    passed over. begun: how often it began before, without an answer."""

    id: str
    owner: str
    seq: int
    kind: str
    batch: int | None = None
    is_answered: bool = False
    is_done: bool = False
    begun: int = 0


class StoredRequest(NamedTuple):
    """A request: what was asked, and the media and content of its answer, None while there is none."""

    kind: str
    media: str | None
    answer: bytes | None


class RequestJournal:
    """Opens or makes the file; any thread may call.

    Raises:
        ConfigError: it cannot be read, is of another version, or a row is not what was written. DiskError: there is no
            room for what SQLite writes when it opens it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock, self._own = path, threading.RLock(), threading.local()
        try:
            with ExitStack() as stack:
                lost = keep_what_is_lost(path)
                self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
                stack.callback(self._db.close)
                self._check(path)
                if lost:
                    logger.warning("%s", lost)
                self._mark(OPEN)  # and empties the log, so that what is damaged is not found again
                stack.pop_all()
        except (sqlite3.Error, OSError, UnicodeError) as error:
            if is_no_room(error) or getattr(error, "sqlite_errorcode", 0) in _NO_ROOM:
                raise disk_error(path, error, 0) from None
            raise ConfigError(f"{path}: the journal cannot be read ({error}). {_INSTEAD}") from None

    def _check(self, path: Path) -> None:
        self._db.create_function("checksum_of", -1, _checksum, deterministic=True)
        self._db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;")
        if not self._all("SELECT name FROM sqlite_master"):
            self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={_VERSION}; COMMIT;")
        if self._all("PRAGMA user_version") != [(_VERSION,)]:
            raise ConfigError(f"{path}: the journal is of another version of treewise. {_INSTEAD}")
        wrong = [str(row[0]) for row in self._all("PRAGMA integrity_check(3)") if row[0] != "ok"]
        for table, columns in _SUMMED.items():
            query = f"SELECT id FROM {table} WHERE checksum IS NOT checksum_of({columns}) LIMIT 3"
            wrong += [f"{table}: {name!r} is not what was written" for (name,) in self._all(query)]
        if wrong:
            raise ConfigError(f"{path}: the journal is damaged: {'; '.join(wrong)}. {_INSTEAD}")

    def _mark(self, application_id: int) -> None:
        """Writes into the database itself whether a log belongs to it, unless there is no room."""
        with suppress(sqlite3.OperationalError):
            self._db.execute(f"PRAGMA application_id={application_id}")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Gives the file back, and with it all that its log has."""
        with self._lock:
            self._mark(0)
            self._db.close()

    def _all(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    # -- writing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def waiting_for_room(self, room: Room) -> Iterator[None]:
        """Within it, what this thread writes is tried again after each call of `room`, which may raise."""
        self._own.room = room
        try:
            yield
        finally:
            del self._own.room

    def _write(self, query: str, *values: Any) -> None:
        """Raises `DiskError`."""
        size = sum(len(value) for value in values if isinstance(value, str | bytes))
        self._tried(lambda: self._all(query, *values), size)

    def _tried(self, write: Callable[[], T], num_bytes: int = 0) -> T:
        while True:
            try:
                return write()
            except sqlite3.OperationalError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _DISK:
                    raise
                found, room = disk_error(self._path, error, num_bytes), getattr(self._own, "room", None)
                if room is None:
                    raise found from error
            room(found)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, self._db:
            self._db.execute("BEGIN")
            yield

    # -- facts of sessions, models, samplers, checkpoints -------------------------------------------------------------

    def put(self, kind: str, name: str, owner: str, content: Any) -> None:
        """Writes what is known of something, in place of what was."""
        row = (kind, name, owner, -1, json.dumps(content), time.time())
        self._write("INSERT OR REPLACE INTO facts VALUES (?, ?, ?, ?, ?, ?, 0)", *row)

    def get(self, kind: str, name: str) -> Any:
        """The content; None where there is none of this name."""
        found = self._all("SELECT content FROM facts WHERE kind = ? AND id = ?", kind, name)
        return json.loads(found[0][0]) if found else None

    def remove(self, kind: str, name: str) -> None:
        """Forgets what is written of this kind under this name."""
        self._write("DELETE FROM facts WHERE kind = ? AND id = ?", kind, name)

    def try_room(self) -> None:
        """Writes something of the size of a small request, and forgets it. Raises `DiskError`."""
        self.put("room", "", "", "x" * ROOM_BYTES)
        self.remove("room", "")

    def names(self, kind: str, owner: str | None = None) -> list[str]:
        """Names of a kind, the newest first; of one owner."""
        query = "SELECT id FROM facts WHERE kind = ? AND (? IS NULL OR owner = ?) ORDER BY created DESC, rowid DESC"
        return [row[0] for row in self._all(query, kind, owner, owner)]

    # -- owners -------------------------------------------------------------------------------------------------------

    def key_of(self, name: str) -> str | None:
        """The digest of the key that owns what has this name: a session, or what its id begins. None: unknown."""
        query = "SELECT owner FROM facts WHERE kind = 'session' AND id = ?"
        return next((row[0] for row in self._all(query, name.partition(":")[0])), None)

    def names_of(self, kind: str, key: str) -> list[str]:
        """Names of a kind that belong to a key's sessions, the newest first."""
        query = (
            "SELECT id FROM facts WHERE kind = ? AND owner IN (SELECT id FROM facts WHERE kind = 'session' AND "
            "owner = ?) ORDER BY created DESC, rowid DESC"
        )
        return [row[0] for row in self._all(query, kind, key)]

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(self, work: QueuedRequest, body: bytes) -> None:
        """Writes a request, once."""
        self._write(
            "INSERT OR IGNORE INTO requests (id, owner, seq, kind, body, created) VALUES (?, ?, ?, ?, ?, ?)",
            *(work.id, work.owner, work.seq, work.kind, body, time.time()),
        )

    def refuse(self, work: QueuedRequest, content: bytes) -> None:
        """Writes a request that is not to run together with its answer; one that is there stays as it is."""
        now = time.time()
        self._write(
            "INSERT OR IGNORE INTO requests (id, owner, seq, kind, body, answer, media, created, answered) "
            "VALUES (?, ?, ?, ?, x'', ?, ?, ?, ?)",
            *(work.id, work.owner, work.seq, work.kind, content, REFUSED, now, now),
        )

    def find(self, name: str) -> StoredRequest | None:
        """A request; None where there is none of this id."""
        found = self._all("SELECT kind, media, answer FROM requests WHERE id = ?", name)
        return StoredRequest(*found[0]) if found else None

    def is_lost(self, name: str) -> bool:
        """Whether a request was answered with `LOST`."""
        return self._all("SELECT media FROM requests WHERE id = ?", name) == [(LOST,)]

    def body(self, name: str) -> bytes:
        """Of a request that has not run."""
        return bytes(self._all("SELECT body FROM requests WHERE id = ?", name)[0][0])

    def answer(self, name: str, media: str, content: bytes) -> None:
        """Writes an answer, once."""
        self._write(_ANSWER, content, media, time.time(), name)

    def begin(self, works: Sequence[QueuedRequest]) -> None:
        """Marks requests as one group, and counts that those without an answer begin in this process: one that ends the
        process does so again at each start."""
        query = (
            "UPDATE requests SET batch = IFNULL(batch, ?), "
            "begun = CASE WHEN answer IS NULL THEN MAX(begun, ?) ELSE begun END WHERE id = ?"
        )

        def write() -> None:  # it may come again after it was committed, where SQLite's checkpoint had no room
            with self._transaction():
                self._db.executemany(query, [(works[0].seq, work.begun + 1, work.id) for work in works])

        self._tried(write)

    def works(self, owner: str | None = None) -> list[QueuedRequest]:
        """Every request (of one owner) that has no answer, or whose effect is in no snapshot yet, as they arrived."""
        rows = self._all(
            "SELECT r.id, r.owner, r.seq, r.kind, r.batch, r.answer IS NOT NULL, r.answer IS NOT NULL AND "
            "(r.media = ? OR r.kind != 'optim_step' AND (r.kind != 'forward_backward' OR r.media = ?)), r.begun "
            "FROM requests r LEFT JOIN facts f ON f.kind = 'model' AND f.id = r.owner "
            "WHERE (r.answer IS NULL OR r.seq > f.number) AND (? IS NULL OR r.owner = ?) ORDER BY r.created",
            *(REFUSED, FAILED, owner, owner),
        )
        return [QueuedRequest(*row[:5], *map(bool, row[5:7]), *row[7:]) for row in rows]

    def snapshot(self, model: str, seq: int, answer: tuple[str, str, bytes] | None = None) -> None:
        """The effects of a model's requests up to `seq` are on the disk. answer: of request `seq`, where it is one that
        must not run again."""

        def write() -> None:
            with self._transaction():
                if answer is not None:
                    name, media, content = answer
                    self._all(_ANSWER, content, media, time.time(), name)
                self._all("UPDATE facts SET number = ? WHERE kind = 'model' AND id = ?", seq, model)
                query = "UPDATE requests SET body = NULL WHERE owner = ? AND seq <= ? AND answer IS NOT NULL"
                self._all(query, model, seq)

        self._tried(write)

    def last_seq(self, model: str) -> int:
        """The highest number that a model's requests have here; -1: none."""
        (found,) = self._all("SELECT MAX(seq) FROM requests WHERE owner = ?", model)
        return max(-1 if found[0] is None else int(found[0]), self.snapshot_seq(model))

    def forget(self) -> None:
        """Removes old answers, of samples and of what a snapshot holds; clients fetch theirs within seconds. And
        empties the log, of which one wrong bit loses all that follows it."""
        old = time.time() - KEEP_ANSWERS_SECONDS
        self._write("DELETE FROM requests WHERE (body IS NULL OR kind = 'sample') AND answered < ?", old)
        self._write("PRAGMA wal_checkpoint(TRUNCATE)")

    def snapshot_seq(self, model: str) -> int:
        """Up to which request the newest snapshot goes; -1: none was made."""
        found = self._all("SELECT number FROM facts WHERE kind = 'model' AND id = ?", model)
        return int(found[0][0]) if found else -1


_ANSWER = "UPDATE requests SET answer = ?, media = ?, answered = ? WHERE id = ? AND answer IS NULL"
_INSTEAD = (
    "Put back a copy that is whole, or move it and its -wal file away to begin anew: checkpoints stay in runs/, as "
    "folders of PEFT, but belong to no run then."
)


def digest_of(key: str) -> str:
    """What stands for an API key in the journal."""
    return hashlib.sha256(b"treewise serve " + key.encode()).hexdigest()


def _checksum(*values: Any) -> int:
    """Of a row's values, with their types and lengths."""
    total = 0
    for value in values:
        content = value if isinstance(value, bytes) else repr(value).encode()
        total = zlib.crc32(content, zlib.crc32(b"%d %d " % (isinstance(value, bytes), len(content)), total))
    return total
