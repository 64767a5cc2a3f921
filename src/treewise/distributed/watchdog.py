"""When one process of a run fails, the others give its reason and end within seconds.

What others do: torchrun ends the workers of its own host when one of them fails, by SIGTERM, which a run answers by
finishing its step, and by SIGKILL after 30 s. gloo raises an error when a connection closes, NCCL when it notices it,
or at the timeout of collectives (`ddp_timeout`). None of them gives the reason on other hosts, ends a process that
computes while another has failed, or finds the process that all wait for.

So a thread of every process reads the store of the process group five times a second. A process that fails writes its
reason there; every other rank then has 2 s to end by an error of its own and is otherwise terminated with exit code 3.
After an error of a collective operation each process is asked where it is; one that is stopped or gone does not answer.
Where the process that holds the store is itself stopped, nothing that asks it comes back, neither this thread nor a
group that is being made; then a second thread ends this process at the timeout. A command is watched from the moment
that its processes have found one another (`over_command`), so while it loads data and model, too.
"""

import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any

from accelerate import PartialState
from torch import accelerator, distributed
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from treewise.distributed import groups, ranks
from treewise.errors import StoppedError, TreewiseError

GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 1.5
_RUNS = itertools.count()  # the same number on every rank: a second run of a process group has keys of its own


class _Watch:
    """The watch of this process over the others: of a command, from its process group on; else of a trainer's run."""

    def __init__(self) -> None:
        self._command: ExitStack | None = None  # that this process runs
        self._is_on = False

    @contextmanager
    def over_command(self) -> Iterator[None]:
        """Around a command: the watch begins with its process group (`start_group`, `begin`) and ends with the command.

        Raises:
            LostRankError: another process is gone, or did not answer within `ddp_timeout`.
        """
        with ExitStack() as self._command:
            try:
                yield
            finally:
                self._command = None

    def begin(self, timeout_seconds: float) -> None:
        """Watches the rest of the command, once the process group is there; without a command the trainer watches."""
        if self._command is not None:
            self._command.enter_context(self.watching(timeout_seconds))

    @contextmanager
    def watching(self, timeout_seconds: float) -> Iterator[None]:
        """Watches the other processes and explains errors of collective operations, unless this process does already.

        Raises:
            LostRankError: as `Watchdog.explaining`.
        """
        if self._is_on or ranks.count() == 1:
            yield
            return
        with Watchdog(timeout_seconds) as watch, watch.explaining():
            self._is_on = True
            try:
                yield
            finally:
                self._is_on = False


_WATCH = _Watch()
over_command, begin, watching = _WATCH.over_command, _WATCH.begin, _WATCH.watching


def join(args: Any) -> None:
    """Before transformers chooses the device of a run of several processes: joins those on CPUs, which it does, too,
    but ignores `ddp_timeout`. args: `TrainingArguments`; without a GPU they are set to the CPU, or each process would
    train alone, on all trees, into the same folder.
    """
    if not accelerator.is_available():
        args.use_cpu = True
    if args.use_cpu and args.ddp_backend in (None, "gloo") and not distributed.is_initialized():
        start_group(args.ddp_timeout)


def join_as_launched(timeout_seconds: float = 1800.0) -> None:
    """What a function that needs the other processes does before there are settings of a run: joins them, if this
    process is one of several and has not joined yet. timeout_seconds: the default of `ddp_timeout`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ or distributed.is_initialized():
        return
    if accelerator.is_available():
        PartialState(timeout=timedelta(seconds=timeout_seconds))
    else:
        start_group(timeout_seconds)


def start_group(timeout_seconds: float) -> None:
    """Joins the processes of a run on CPUs over gloo, as torchrun's and accelerate's variables name them.

    A process that torchrun has started again finds what the last attempt left in the store of torchrun's agent, and
    would connect to addresses that are gone. So each attempt has keys of its own. Agents of several machines count
    attempts differently: the one whose process failed counts it alone. There rank 0 has to have the store, which is
    then new in each attempt (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, as `treewise launch` sets it).

    Raises:
        LostRankError: not all processes came within the time.
    """
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    others = [f"rank {each}" for each in range(count) if each != rank]
    # Without a store its holder is missing: torchrun's agent or rank 0, which itself has none until all others came.
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    holder = "torchrun" if by_agent else "rank 0" if rank else " or ".join(others)
    waited = (
        f"rank {rank} waited {timeout_seconds:g} s (ddp_timeout) for {{}} to start: stopped, or its machine is gone."
    )
    timeout, store = timedelta(seconds=timeout_seconds), None
    with groups.ended_after(timeout_seconds + GRACE_SECONDS, waited.format(holder)):
        try:
            found, own, size = next(rendezvous("env://", timeout=timeout))
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if by_agent else "0"
            store = PrefixStore(f"treewise/attempt/{attempt}", found)
            store.set(f"rank {own}", "")
            distributed.init_process_group("gloo", store=store, rank=own, world_size=size, timeout=timeout)
        except RuntimeError as error:
            if not _is_of_collective(error):
                raise
            missing = holder
            with suppress(RuntimeError):  # the store ended with its holder
                absent = [each for each in others if store is not None and not store.check([each])]
                missing = holder if store is None else " and ".join(absent) or " or ".join(others)
            gone = f"rank {rank} lost the connection to {missing} while they started: its process was gone (killed?)."
            raise groups.lost(waited.format(missing) if _is_timeout(error) else gone) from error


class Watchdog:
    """Watches the other processes while entered; does nothing in a run of one process.

    timeout_seconds: `ddp_timeout`, after which a store that does not answer ends this process.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds, self._silent_polls = timeout_seconds, 0
        self._is_over = threading.Event()
        self._own_failure: str | None = None
        self._failure: str | None = None  # of another process
        self._is_asking = self._has_asked = False
        self._locations: dict[int, str] = {}  # rank -> the line that it is at
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if ranks.count() > 1:
            group: Any = distributed.group.WORLD
            with groups.ended_after(self._timeout_seconds + GRACE_SECONDS, self._unanswered()), self.explaining():
                store = group.get_group_store().clone()  # with a connection of its own
            own_store = PrefixStore(f"treewise/watchdog/{next(_RUNS)}", store)
            target, arguments = self._watch, (own_store,)
            self._thread = threading.Thread(target=target, args=arguments, name="treewise-watchdog", daemon=True)
            self._thread.start()
            threading.Thread(target=self._watch_store, name="treewise-store-watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # A signal stops all ranks at the same step; that is not a failure.
        if error is not None and not isinstance(error, StoppedError):
            self._own_failure = f"rank {ranks.own()} failed: {type(error).__name__}: {error}"
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(GRACE_SECONDS)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Turns errors of collective operations into errors that name what happened and what to do.

        Raises:
            LostRankError: another process is gone, or did not answer within the timeout.
        """
        try:
            yield
        except RuntimeError as error:
            if ranks.count() == 1 or isinstance(error, TreewiseError) or not _is_of_collective(error):
                raise
            silent, located = self._roll_call()
            if not _is_timeout(error):
                gone = [f"rank {rank} failed: its process was gone (killed?)" for rank in silent]
                reason = self._failure or "; ".join(gone) or "its error is printed there"
                raise groups.lost(f"rank {ranks.own()} lost the connection to another process: {reason}.") from error
            lines = [f"Rank {rank} does not answer: it is stopped or stuck, or its machine is gone." for rank in silent]
            raise groups.lost(
                f"rank {ranks.own()} waited {self._timeout_seconds:g} s (ddp_timeout) for another process. "
                f"{self._failure or ' '.join(lines + located)}",
                " Raise ddp_timeout if a step or a save may take that long.",
            ) from error

    def _roll_call(self) -> tuple[list[int], list[str]]:
        """Asks the other processes where they are: ranks that do not answer, and a sentence for each that does."""
        self._is_asking = True
        until = time.monotonic() + _ANSWER_SECONDS
        while self._failure is None and len(self._locations) < ranks.count() - 1 and time.monotonic() < until:
            time.sleep(0.05)
        if not self._has_asked and ranks.own() != 0:
            return [0], []  # the store, through which all are asked, is there, and did not answer either
        silent = sorted(set(range(ranks.count())) - set(self._locations) - {ranks.own()})
        return silent, [f"Rank {rank} is at {line}." for rank, line in sorted(self._locations.items())]

    # -- the thread; it alone uses the store, whose answers may never come ------------------------------------------

    def _watch(self, store: Store) -> None:
        with suppress(RuntimeError):  # the process that holds the store is gone, which ends collectives, too
            while not self._is_over.wait(_POLL_SECONDS):
                self._exchange(store)
                self._silent_polls = 0
            if self._own_failure is not None and store.add("failures", 1) == 1:
                store.set("failure", self._own_failure)
                time.sleep(2 * _POLL_SECONDS)  # the store may end with this process: the others read it first

    def _watch_store(self) -> None:
        """Counts polls and not seconds: a process that was itself stopped for a while asks first, then judges."""
        while not self._is_over.wait(_POLL_SECONDS) and self._thread is not None and self._thread.is_alive():
            self._silent_polls += 1
            if self._silent_polls * _POLL_SECONDS > self._timeout_seconds + GRACE_SECONDS:
                groups.end_now(groups.lost(self._unanswered()))

    def _unanswered(self) -> str:
        """Of the process that holds the store."""
        waited = f"had no answer from rank 0 for {self._timeout_seconds:g} s (ddp_timeout)"
        return f"rank {ranks.own()} {waited}: it is stopped, or its machine is gone."

    def _exchange(self, store: Store) -> None:
        if store.check(["failure"]):
            self._failure = store.get("failure").decode()
            if not self._is_over.wait(GRACE_SECONDS):  # else this process is leaving by itself
                groups.end_now(f"{self._failure}; rank {ranks.own()} ends, too")
        if self._is_asking:
            store.set("question", "")
            others = set(range(ranks.count())) - {ranks.own()}
            self._locations = {rank: store.get(str(rank)).decode() for rank in others if store.check([str(rank)])}
            self._has_asked = True
        if store.check(["question"]):
            store.set(str(ranks.own()), "the same wait" if self._is_asking else _current_line())


def _is_of_collective(error: RuntimeError) -> bool:
    """Whether NCCL or gloo raised it; errors of gloo have no type of their own, but name its source files."""
    return isinstance(error, distributed.DistError) or "gloo" in str(error).lower()


def _is_timeout(error: RuntimeError) -> bool:
    text = str(error).lower()
    is_refused = "connection refused" in text  # gloo times out at once where the process at an address is gone
    return ("timed out" in text or "timeout" in text) and not is_refused


def _current_line() -> str:
    """The line that the main thread is at: the innermost one of treewise, else of any module."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost: FrameType | None = frame
    while frame is not None and f"{os.sep}treewise{os.sep}" not in frame.f_code.co_filename:
        frame = frame.f_back
    frame = frame or innermost
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})" if frame else "its end"
