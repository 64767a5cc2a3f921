"""The entry point: reads a command, runs it, and turns errors into messages and exit codes.

Exit codes: 0, 1 where a verification failed, 2 for an error that treewise explains, 3 where another process of the run
failed, 128 plus the number of the signal that ended it (130 for SIGINT; a training run is saved first).
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

from treewise.base import features
from treewise.base.progress import ERASE
from treewise.cli.gave_up import EXPLAINED, give_up, has_given_up
from treewise.cli.output import enduring_output, is_first_rank
from treewise.cli.parser import make_parser, module_of, parse
from treewise.cli.waiting import telling
from treewise.errors import ConfigError, LostRankError, StoppedError, TreewiseError, VerificationError

INTERRUPTED = 130
SECONDS_TO_END = 10.0  # that a command has after SIGINT
_PARENT = os.getppid()  # before anything is loaded, which takes seconds
_UNTOLD = ("serve", "completion")  # which says itself what it loads, then waits for clients; which a shell reads


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    if has_given_up():  # torchrun starts again what it cannot tell from a death
        return EXPLAINED
    words = list(sys.argv[1:] if argv is None else argv)
    if os.environ.get("COLUMNS") == "0":  # of a terminal that does not say its width; rich would print nothing
        del os.environ["COLUMNS"]
    name = next((word for word in words if not word.startswith("-")), None)

    def command() -> int:
        if name is None or words[0] != name:
            parser = make_parser()
            parser.parse_args(words)  # --help, --version, or an unknown flag
            parser.print_help()
            return 2
        args = parse(name, words)
        if not hasattr(args, "overrides"):
            return int(module_of(name).run(args))
        with enduring_output(), _watched():  # it trains, and goes on without a reader of its output
            return int(module_of(name).run(args))

    code = explained(name, command, is_told=name not in (None, *_UNTOLD), shows_errors=_wants_traceback(words))
    if code == EXPLAINED:
        with suppress(OSError):  # as where the disk is full, which was the error
            give_up()
    return code


def explained(
    name: str | None, work: Callable[[], int], *, is_told: bool = True, shows_errors: bool | None = None
) -> int:
    """The exit code of a command's work; its errors are printed as messages, as are those of examples.

    is_told: whether slow work is printed on stderr. shows_errors: whether errors of treewise are raised; None: where
    the environment asks for that.
    """
    raises = _wants_traceback(()) if shows_errors is None else shows_errors
    try:
        with ending_at_once(str(name)), telling(str(name)) if is_told else nullcontext():
            return work()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone, as after `| head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the process ends
        return 0
    except StoppedError as error:
        if is_first_rank():
            print(_safe(error), file=sys.stderr)
        return error.exit_code
    except TreewiseError as error:
        if raises:
            raise
        print(f"error: {_safe(error)}", file=sys.stderr)
        if isinstance(error, LostRankError):
            return error.exit_code
        return 1 if isinstance(error, VerificationError) else EXPLAINED
    except OSError as error:  # a disk that is full, a folder that may not be written
        if raises:
            raise
        print(_safe(f"error: {error.filename or name}: {error.strerror or error}"), file=sys.stderr)
        return EXPLAINED


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Around the imports of an example, which take seconds: it says so, and ends by a signal as a command does."""
    try:
        with ending_at_once(name), telling(name):
            yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


@contextmanager
def ending_at_once(name: str) -> Iterator[None]:
    """Inside, SIGTERM ends the process with a line, whatever it imports or computes, and SIGINT does where a library
    swallowed the `KeyboardInterrupt`. A training run, which is saved first, takes both over (`trainer.signals`).
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    process, is_over = os.getpid(), threading.Event()

    def end(number: int, line: str) -> None:
        with suppress(Exception):  # a print may be what was interrupted
            sys.stdout.flush()
        if is_first_rank():
            with suppress(OSError):
                os.write(2, f"{ERASE if os.isatty(2) else ''}{line}\n".encode())
        os._exit(128 + number)

    def terminate(number: int, _frame: object) -> None:
        if os.getpid() == process:
            end(number, f"treewise {name}: ended by SIGTERM")
        signal.signal(number, signal.SIG_DFL)  # of a fork, whose end is its parent's business
        os.kill(os.getpid(), number)

    def interrupt(number: int, frame: FrameType | None) -> None:
        def wait() -> None:
            if not is_over.wait(SECONDS_TO_END):
                end(number, "interrupted")

        if os.getpid() == process:
            threading.Thread(target=wait, daemon=True).start()
        signal.default_int_handler(number, frame)

    own: dict[int, Any] = {signal.SIGTERM: terminate}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        own[signal.SIGINT] = interrupt
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    try:
        yield
    finally:
        is_over.set()
        for number, handler in before.items():
            if signal.getsignal(number) is own[number]:
                signal.signal(number, handler)


@contextmanager
def _watched() -> Iterator[None]:
    """Around a command of several processes; torch is imported only for those."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        if not os.environ.get(name, "0").isdigit():
            raise ConfigError(f"{name} is {os.environ[name]!r}, not a number; torchrun and accelerate set it.")
    with ExitStack() as others:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # which torchrun sets
            others.enter_context(features.launcher.WATCH.watching(_PARENT))
        if os.environ.get("WORLD_SIZE", "1") != "1":
            from treewise.distributed.watchdog import over_command

            others.enter_context(over_command())
        yield


def _safe(message: object) -> str:
    """A message without control characters but line ends: those of records and arguments must not reach a terminal."""
    from treewise.data.io.field_checks import printable

    return "\n".join(map(printable, str(message).split("\n")))


def _wants_traceback(words: Sequence[str]) -> bool:
    return "--debug" in words or os.environ.get("TREEWISE_DEBUG", "") not in ("", "0")


if __name__ == "__main__":
    sys.exit(main())
