"""What holds around a whole training run: the lock of its folder, signals, the watch over other processes.

One run per folder: a file that names its process, locked until that process ends. The lock is the operating system's
(`flock`), so it ends with a killed run; the content of the file is for people. A forked child (a worker of a loader)
would share the lock and outlive a killed run by seconds, so forked children close the descriptor at once. Without flock
support, a holder on this host is checked by its pid; a holder on another host is assumed alive.
"""

import errno
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from treewise.base import features
from treewise.distributed import ranks
from treewise.errors import ConfigError, StoppedError
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.checkpoint import store
from treewise.trainer.signals import StopSignals

logger = logging.getLogger("treewise")


@contextmanager
def entered_run(args: TreeTrainingArguments, signals: StopSignals, *folders: str) -> Iterator[None]:
    """Locks the run's folder, removes unfinished checkpoints of a killed run, handles signals, watches the other ranks.

    folders: those that the run writes within its own.

    Raises:
        ConfigError: another run holds the folder, it cannot be written, or a link would lead out of it.
        LostRankError: another process of the run is gone, or does not answer.
    """

    def enter_folder() -> None:
        stack.enter_context(RunLock(args.output_dir))
        store.check_places(args.output_dir)
        for path in (Path(args.output_dir, name) for name in folders):
            if path.is_symlink():
                raise ConfigError(f"{path} is a link, and a run writes into folders of its own; remove it.")
            if path.exists() and not path.is_dir():
                raise ConfigError(f"{path} is a file, and a run writes a folder of this name; move it away.")
        for line in store.recover(args.output_dir):
            logger.warning("%s", line)

    with ExitStack() as stack:
        if ranks.count() > 1:
            stack.enter_context(features.watchdog.watching(args.ddp_timeout))
        ranks.on_first_rank(enter_folder)
        stack.enter_context(signals)
        yield


def stopped_error(signals: StopSignals, what: str) -> StoppedError:
    """The error that ends a run after a signal. what: where the run stopped, and what of it is saved."""
    number = signals.received or signal.SIGINT
    error = StoppedError(f"{signal.Signals(number).name}: {what}")
    error.exit_code = 128 + number
    return error


# -- the lock of a run's folder ----------------------------------------------------------------------------------------


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".treewise.lock"


class RunLock:
    """Keeps other runs out of a folder while it is held. One process may hold it several times over.

    Parameters:
        setting: the one that names the folder, for errors.
    """

    _held: dict[Path, tuple[int, int]] = {}  # noqa: RUF012 - of all locks: folder -> (open file, times taken)

    def __init__(self, folder: str | Path, setting: str = "output_dir") -> None:
        self._setting = setting
        try:
            self.folder = Path(folder).resolve()
        except (OSError, RuntimeError):
            raise ConfigError(f"{setting} {folder} is a link that leads to itself; remove it.") from None
        self._is_new = False

    def __enter__(self) -> "RunLock":
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Raises `ConfigError` while another process holds the folder; takes and writes nothing."""
        if self.folder in self._held:
            return
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # said by what takes or uses it
            try:
                descriptor = os.open(self.folder / NAME, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            except OSError as error:
                self._refuse(error)
                raise
            try:
                self._lock(descriptor)
            finally:
                os.close(descriptor)

    def take(self) -> None:
        """Raises `ConfigError`, naming the process, while another one holds the folder."""
        if self.folder in self._held:
            descriptor, times = self._held[self.folder]
            self._held[self.folder] = descriptor, times + 1
            return
        try:
            self._is_new = not self.folder.exists()
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = self._open()
        except OSError as error:
            self._refuse(error)
            raise ConfigError(f"{self._setting} {self.folder} cannot be written ({error.strerror}).") from error
        self._held[self.folder] = descriptor, 1

    def _refuse(self, error: OSError) -> None:
        """Raises `ConfigError` where something else than a file stands in the lock's place."""
        kind = {errno.ELOOP: "a link", errno.EISDIR: "a folder"}.get(error.errno or 0)
        if kind is not None and (self.folder / NAME).is_symlink() == (kind == "a link"):
            raise ConfigError(f"{self.folder / NAME} is {kind}; a run locks a plain file of this name. Remove it.")

    def release(self) -> None:
        """Releases the folder after as many calls as `take` had; no effect in a forked process."""
        if self.folder not in self._held:
            return
        descriptor, times = self._held.pop(self.folder)
        if times > 1:
            self._held[self.folder] = descriptor, times - 1
            return
        with suppress(OSError):
            (self.folder / NAME).unlink()  # while locked, so that the file is still this lock's
        os.close(descriptor)
        if self._is_new:
            with suppress(OSError):
                self.folder.rmdir()  # only if nothing was written into it

    @classmethod
    def _forget(cls) -> None:
        """In a forked process: closes the descriptors that it shares with its parent, whose locks stay."""
        for descriptor, _ in cls._held.values():
            with suppress(OSError):
                os.close(descriptor)
        cls._held.clear()

    def _open(self) -> int:
        path = self.folder / NAME
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
            try:
                self._lock(descriptor)
                with suppress(FileNotFoundError):  # the last holder removed it after it was opened
                    if os.path.samestat(os.fstat(descriptor), path.stat()):
                        now = time.strftime("%Y-%m-%d %H:%M:%S")
                        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
                        os.ftruncate(descriptor, 0)
                        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
                        return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        holder: dict[str, Any] = {}
        with suppress(OSError, ValueError, RecursionError):
            read = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
            holder = read if isinstance(read, dict) else {}
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                raise ConfigError(self._in_use(holder)) from None
            except OSError:
                pass  # a file system without locks
        pid = holder.get("pid")
        is_there = isinstance(pid, int) and psutil.pid_exists(pid)
        if holder and (holder.get("host") != socket.gethostname() or is_there):
            raise ConfigError(
                f"{self._in_use(holder)} If that run is gone, remove {self.folder / NAME}: this file "
                "system has no locks."
            )

    def _in_use(self, holder: dict[str, Any]) -> str:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')} (since {holder.get('since', '?')})"
        return f"{self._setting} {self.folder} is in use by {who}; wait for it, stop it, or choose another folder."


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RunLock._forget)
