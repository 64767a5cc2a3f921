"""One run per folder: a file that says who has it, held by a lock that ends with its process.

The lock is the operating system's (`flock`), so a killed run leaves none behind; the file is for people. A process that
is forked while it is held (a loader's worker) would share it, and outlive a killed run by seconds: it gives it up at
once. Where a file system has no such locks, a holder on this machine is alive if its process is; one on another
machine is believed.
"""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from treewise.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".treewise.lock"


class RunLock:
    """Keeps other runs out of a folder while it is held. One process may hold it several times over."""

    _held: dict[Path, tuple[int, int]] = {}  # noqa: RUF012 - of all locks: folder -> open file, how often held

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        self._is_new = False

    def __enter__(self) -> "RunLock":
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

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
            raise ConfigError(f"output_dir {self.folder} cannot be written ({error.strerror}).") from error
        self._held[self.folder] = descriptor, 1

    def release(self) -> None:
        """Gives the folder back after the last `take`; in a forked process there is nothing to give back."""
        if self.folder not in self._held:
            return
        descriptor, times = self._held.pop(self.folder)
        if times > 1:
            self._held[self.folder] = descriptor, times - 1
            return
        with suppress(OSError):
            (self.folder / NAME).unlink()  # while locked, so that nobody else's is removed
        os.close(descriptor)
        if self._is_new:
            with suppress(OSError):
                self.folder.rmdir()  # only if nothing was written into it

    @classmethod
    def _forget(cls) -> None:
        """In a forked process: closes what it shares with its parent, whose locks stay."""
        for descriptor, _ in cls._held.values():
            with suppress(OSError):
                os.close(descriptor)
        cls._held.clear()

    def _open(self) -> int:
        path = self.folder / NAME
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._lock(descriptor)
                if _is_same(descriptor, path):  # else its last holder removed it in this very moment
                    _write(descriptor)
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        holder = _read(descriptor)
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                raise ConfigError(self._refusal(holder)) from None
            except OSError:
                pass  # a file system without locks
        if holder and (holder.get("host") != socket.gethostname() or _is_alive(holder.get("pid"))):
            raise ConfigError(
                f"{self._refusal(holder)} If that run is gone, remove {self.folder / NAME}: this file system has no "
                "locks that would tell."
            )

    def _refusal(self, holder: dict[str, Any]) -> str:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')} (since {holder.get('since', '?')})"
        return f"output_dir {self.folder} is in use by {who}; wait for it, stop it, or choose another folder."


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RunLock._forget)


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _write(descriptor: int) -> None:
    who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(who).encode(), 0)


def _read(descriptor: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def _is_alive(pid: Any) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
