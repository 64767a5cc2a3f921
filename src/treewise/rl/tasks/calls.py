"""Functions and classes of the user's: found by name, and called so that none can end or hang the run.

`module:name` or `file.py:name`; each file is loaded once, as a module under a name of its own, so that what it defines
can be sent to worker processes, which load it again. Calls run in threads, or in processes that are killed; those of
different environments at the same time (`run_together`, `Beside`).

What a function raises, SystemExit included, comes back as a `FailedCall` with the file and line of the user's code. A
thread cannot be ended, so one that takes too long is left behind and goes on using the processor; a worker process is
killed. Between processes, arguments and results are pickled by the standard library; nothing else is.
"""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import multiprocessing
import queue
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import treewise
from treewise.base.paths import path_of
from treewise.data.io.field_checks import printable
from treewise.errors import ConfigError, pip_install

FailureKind = Literal["raised", "not_a_number", "timeout", "missing"]
START_SECONDS = 120.0  # that a worker may take to start and to import the user's files
_LIBRARIES = tuple(
    str(Path(path).resolve()) for path in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
)
_OWN = str(Path(treewise.__file__).resolve().parent)
_FILES: dict[str, ModuleType] = {}  # by resolved path


def found_by_name(name: str, what: str) -> object:
    """What a module or a file defines. what: names it in errors, as `reward function`.

    Raises:
        ConfigError: no such module, file or name, or the module cannot be loaded: with the file and line of the error.
    """
    location, _, attribute = name.rpartition(":")
    if not location or not attribute:
        raise ConfigError(f"{what} {name!r} must be written module:name or file.py:name.")
    is_file = location.endswith(".py")
    if is_file and not path_of(location).is_file():
        raise ConfigError(f"{what} {name!r}: {location} is not a file.")
    try:
        module = _module_of_file(str(path_of(location).resolve())) if is_file else _module(location)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        if error.name is None or not f"{location}.".startswith(f"{error.name}."):  # one that the user's module imports
            raise ConfigError(f"{what} {name!r} cannot be loaded: {described(error)}") from None
        raise ConfigError(
            f"{what} {name!r}: there is no {error.name}.py in this folder, nor a module of that name installed."
        ) from None
    except BaseException as error:  # a module of the user's may raise anything, SystemExit included
        raise ConfigError(f"{what} {name!r} cannot be loaded: {described(error)}") from None
    if not hasattr(module, attribute):
        raise ConfigError(f"{what} {name!r}: {location} has no {attribute!r}.")
    return getattr(module, attribute)


def _load_files(paths: Sequence[str]) -> None:
    """Imports the user's files where a worker process begins, so that what is sent to it can be unpickled."""
    for path in paths:
        _module_of_file(path)


def _module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # `python -m` has it, the installed command does not
    return importlib.import_module(name)


def _module_of_file(path: str) -> ModuleType:
    if path in _FILES:
        return _FILES[path]
    name = f"{Path(path).stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None  # of any .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling finds what it defines by this name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _FILES[path] = module
    return module


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A function of the user's that raised, took too long, or gave no number. message: begins with file and line."""

    kind: FailureKind
    message: str
    cause: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A call. owner: the user's function in it, whose place is named where no frame of a traceback is the user's."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    owner: Any = None


class Calls:
    """Calls with a time limit.

    Parameters:
        timeout_seconds: of one call; None waits for ever.
        workers: processes that calls run in; 0: threads of this process.
        at_once: calls of environments that are under way at a time, in threads; workers are their own limit.

    Raises:
        ConfigError: workers without the package `pebble`.
    """

    def __init__(self, timeout_seconds: float | None = 30.0, workers: int = 0, at_once: int = 64) -> None:
        self.timeout_seconds, self.workers, self.at_once = timeout_seconds, workers, workers or at_once
        self._pool: Any = None
        self._lock = threading.Lock()
        self._first: Any = None  # a process that starts as the workers do, until it has shown whether they can
        if workers:
            _pebble()

    def run(self, function: Callable[..., Any], *args: object, owner: object = None) -> Any:
        """What a function returns, or a `FailedCall`."""
        return self.run_all([Job(function, args, owner)])[0]

    def run_all(self, jobs: Sequence[Job], total_seconds: float | None = None) -> list[Any]:
        """What each job returns, or a `FailedCall`, in their order; workers compute several at a time.

        total_seconds: for all of them; a job that begins after it fails as one that takes too long.
        """
        end = None if total_seconds is None else time.monotonic() + total_seconds
        if self.workers:
            futures = [self._scheduled(job) for job in jobs]
            if reason := self._reason_not_to_start():
                self.close()
                return [FailedCall("raised", reason)] * len(jobs)
            return [self._result(job, future, end) for job, future in zip(jobs, futures, strict=True)]
        return [self._in_thread(job, end) for job in jobs]

    def run_together(self, jobs: Sequence[Job]) -> list[Any]:
        """The same for calls of different environments, several at a time also in threads."""
        if self.workers or len(jobs) < 2 or self.at_once < 2:
            return self.run_all(jobs)
        results: list[Any] = [None] * len(jobs)
        with Beside(self.at_once) as threads:
            for index, job in enumerate(jobs):
                threads.start(index, functools.partial(self._in_thread, job, None))
            for _ in jobs:
                index, result = threads.take()
                results[index] = result
        return results

    def close(self) -> None:
        """Ends the workers."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _in_thread(self, job: Job, end: float | None) -> object:
        results: list[object] = []
        thread = threading.Thread(target=lambda: results.append(guarded(job)), daemon=True, name="treewise-reward")
        limit = _least(self.timeout_seconds, end)
        if limit is not None and limit <= 0:
            return self._too_late(job)
        thread.start()
        thread.join(limit)
        return results[0] if results else self._too_late(job)

    def _scheduled(self, job: Job) -> Future[object] | FailedCall:
        with self._lock:
            if self._pool is None:
                context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
                self._pool = _pebble().ProcessPool(
                    max_workers=self.workers, initializer=_load_files, initargs=(list(_FILES),), context=context
                )
                self._first = context.Process(target=_load_files, args=(list(_FILES),), daemon=True)
                self._first.start()
        try:
            scheduled: Future[object] = self._pool.schedule(
                _guarded_in_worker, args=(job,), timeout=self.timeout_seconds
            )
            return scheduled
        except RuntimeError as error:  # pebble's word for a pool whose workers do not start
            self.close()
            return FailedCall("raised", f"the worker processes do not start: {printable(error)}")

    def _reason_not_to_start(self) -> str | None:
        """Why workers cannot start; pebble would start them again and again. They start while this one does."""
        with self._lock:
            if self._first is None:
                return None
            self._first.join(START_SECONDS)
            code, self._first = self._first.exitcode, None
        what = f"ended with exit code {code}" if code is not None else f"took more than {START_SECONDS:.0f} seconds"
        guard = "; a script that asks for workers needs `if __name__ == '__main__':` around what it runs"
        return None if code == 0 else f"the worker processes do not start: one {what}{guard if code == 1 else ''}"

    def _result(self, job: Job, future: Future[object] | FailedCall, end: float | None) -> object:
        if isinstance(future, FailedCall):
            return future
        limit = _least(self.timeout_seconds, end)
        try:
            return future.result(None if limit is None else max(limit, 0.0) + START_SECONDS)
        except (TimeoutError, FutureTimeoutError):
            future.cancel()
            return self._too_late(job)
        except Exception as error:  # the worker died (ProcessExpired), or a value cannot be sent to it
            code = getattr(error, "exitcode", None)
            what = f"{type(error).__name__}: {error}" if code is None else f"it ended its process, exit code {code}"
            hint = "" if code is not None else " (what goes to worker processes must be picklable; see reward_workers)"
            return FailedCall("raised", f"{place_of(job.owner)}{printable(what)}{hint}")

    def _too_late(self, job: Job) -> FailedCall:
        return FailedCall(
            "timeout", f"{place_of(job.owner)}no answer within {self.timeout_seconds} seconds (reward_timeout)"
        )


class Beside:
    """Work in threads beside the main one, at most so much at once, taken back in the order in which it ends. The
    threads are daemons, so work that never ends holds up no exit.
    """

    def __init__(self, at_once: int) -> None:
        self.at_once, self.num_under_way = at_once, 0
        self._num_threads = 0
        self._todo: queue.SimpleQueue[tuple[Any, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, Any, BaseException | None, bool]] = queue.SimpleQueue()

    def start(self, key: Any, work: Callable[[], Any]) -> None:
        """Begins some work, or queues it. key: names it."""
        self.num_under_way += 1
        self._todo.put((key, work))
        if self._num_threads < min(self.at_once, self.num_under_way):
            self._num_threads += 1
            threading.Thread(target=self._run, daemon=True, name="treewise-beside").start()

    def hand_in(self, key: Any, result: Any) -> None:
        """What others did, from whatever thread, to be taken as the rest."""
        self._done.put((key, result, None, False))

    def take(self, timeout: float | None = None) -> tuple[Any, Any]:
        """The key and the result of what ends next; raises what the work raised.

        Raises:
            queue.Empty: nothing ended within so many seconds.
        """
        key, result, error, is_own = self._done.get(timeout=timeout)
        self.num_under_way -= is_own
        if error is not None:
            raise error
        return key, result

    def __enter__(self) -> "Beside":
        return self

    def __exit__(self, *_: object) -> None:
        for _thread in range(self._num_threads):
            self._todo.put(None)

    def _run(self) -> None:
        while (task := self._todo.get()) is not None:
            key, work = task
            try:
                self._done.put((key, work(), None, True))
            except BaseException as error:  # raised again where it is taken
                self._done.put((key, None, error, True))


def guarded(job: Job) -> object:
    """What a job returns; what it raises as a `FailedCall`."""
    try:
        return job.function(*job.args)
    except BaseException as error:  # a user's function may raise anything, SystemExit included
        return FailedCall("raised", described(error, job.owner), error)


def _guarded_in_worker(job: Job) -> object:
    outcome = guarded(job)
    return replace(outcome, cause=None) if isinstance(outcome, FailedCall) else outcome


def described(error: BaseException, owner: object = None) -> str:
    """`rewards.py:12: ValueError: ...`: the deepest line of the user's code, else where `owner` is defined."""
    if isinstance(error, SyntaxError) and error.filename:
        return printable(f"{_short(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}")
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    outside = [frame for frame in frames if not _is_below(frame[0], (_OWN,)) and not frame[0].startswith("<")]
    users = [frame for frame in outside if not _is_below(frame[0], _LIBRARIES)]
    found = users or outside
    place = f"{_short(found[-1][0])}:{found[-1][1]}: " if found else place_of(owner)
    try:
        text = str(error)
    except Exception:  # of a class of the user's
        text = "its text cannot be made"
    return printable(f"{place}{type(error).__name__}: {text}" if text else f"{place}{type(error).__name__}")[:2000]


def place_of(function: object) -> str:
    """`rewards.py:3: ` where a function begins; empty where that is not known, as of a builtin one."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is None and not inspect.isclass(function):
        code = getattr(vars(type(function)).get("__call__"), "__code__", None)
    if code is None and inspect.isclass(function):
        code = getattr(getattr(function, "__init__", None), "__code__", None)
    if code is None or code.co_filename.startswith("<"):
        return ""
    return f"{_short(code.co_filename)}:{code.co_firstlineno}: "


def _short(filename: str) -> str:
    path = Path(filename)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _is_below(filename: str, folders: tuple[str, ...]) -> bool:
    path = Path(filename).resolve()
    return any(path.is_relative_to(folder) for folder in folders)


def _least(timeout: float | None, end: float | None) -> float | None:
    left = None if end is None else end - time.monotonic()
    limits = [seconds for seconds in (timeout, left) if seconds is not None]
    return min(limits, default=None)


def _pebble() -> ModuleType:
    try:
        import pebble
    except ImportError:
        raise ConfigError(f"reward_workers needs the package pebble: {pip_install('pebble')}.") from None
    return pebble
