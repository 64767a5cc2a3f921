"""The entry point: reads a command, runs it, and turns errors into messages and exit codes.

Exit codes: 0, 1 where a verification failed, 2 for an error that treewise explains, 3 where another process of the run
failed, 128 plus the number of the signal that ended it (130 for SIGINT; a training run is saved first).
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from treewise.base.features import feature
from treewise.cli.output import enduring_output, is_first_rank
from treewise.cli.parser import make_parser, module_of, parse
from treewise.cli.waiting import telling
from treewise.errors import ConfigError, LostRankError, StoppedError, TreewiseError, VerificationError

INTERRUPTED = 130
_PARENT = os.getppid()  # before anything is loaded, which takes seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if os.environ.get("COLUMNS") == "0":  # of a terminal that does not say its width; rich would print nothing
        del os.environ["COLUMNS"]
    name = next((word for word in words if not word.startswith("-")), None)
    try:
        if name is None or words[0] != name:
            parser = make_parser()
            parser.parse_args(words)  # --help, --version, or an unknown flag
            parser.print_help()
            return 2
        args = parse(name, words)
        trains = hasattr(args, "overrides")  # and goes on without a reader of its output
        with ExitStack() as around:
            if trains:
                around.enter_context(enduring_output())
            if name not in ("serve", "completion"):  # which waits for clients; which a shell reads
                around.enter_context(telling(name))
            if trains:
                around.enter_context(_watched())
            return int(module_of(name).run(args))
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
        if _wants_traceback(words):
            raise
        print(f"error: {_safe(error)}", file=sys.stderr)
        if isinstance(error, LostRankError):
            return error.exit_code
        return 1 if isinstance(error, VerificationError) else 2
    except OSError as error:  # a disk that is full, a folder that may not be written
        if _wants_traceback(words):
            raise
        print(_safe(f"error: {error.filename or name}: {error.strerror or error}"), file=sys.stderr)
        return 2


@contextmanager
def _watched() -> Iterator[None]:
    """Around a command of several processes; torch is imported only for those."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        if not os.environ.get(name, "0").isdigit():
            raise ConfigError(f"{name} is {os.environ[name]!r}, not a number; torchrun and accelerate set it.")
    with ExitStack() as others:
        if "TORCHELASTIC_RUN_ID" in os.environ:  # which torchrun sets
            others.enter_context(feature("launcher").WATCH.watching(_PARENT))
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
