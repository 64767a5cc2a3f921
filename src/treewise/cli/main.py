"""The dispatcher: one module per command, imported only when it is asked for.

Exit codes: 0, 1 where a verification failed, 2 for an error that treewise explains, 3 where another process of the run
failed, 130 and 143 when SIGINT or SIGTERM ended it (a training run is saved first).
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

import treewise
from treewise.errors import ConfigError, LostRankError, StoppedError, TreewiseError, VerificationError, did_you_mean

COMMANDS = {
    "train": "fine-tune a model on trees of trajectories",
    "rl": "the model update of RL, on rollouts of any engine",
    "import": "rollouts of other training stacks, and recorded agent logs, to rows",
    "inspect": "what the data holds, and what training on trees can gain on it",
    "plan": "how trees are cut into micro-batches",
    "verify": "flat against tree on your own model and rows",
    "bench": "treewise against flat training and tree rows, measured on this machine",
    "doctor": "what this machine has, which attention will run, and a check that it is right",
    "grow": "a larger model from a smaller one, to train on",
    "models": "which families of models are supported, and why others are not",
}
MODULES = {"import": "import_"}  # where a command's name cannot be a module's
INTERRUPTED = 130
MAX_MESSAGE = 400  # characters of an argument's error


class _Parser(argparse.ArgumentParser):
    """Reports an invalid flag as every other error is reported: in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.removeprefix("argument ").split())
        if len(message) > MAX_MESSAGE:  # a flag's value is shown in full by argparse
            message = f"{message[:MAX_MESSAGE]}..."
        raise ConfigError(f"{message}. See {self.prog} --help.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in words if not word.startswith("-")), None)
    try:
        parser = _parser(name)
        if name is None or words[0] != name:
            parser.parse_args(words)  # --help, --version, or an unknown flag
            parser.print_help()
            return 2
        args = _parse(parser, name, words)
        return int(_module(name).run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone, as after `| head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives until the process ends
        return 0
    except StoppedError as error:
        from treewise.cli.training_run import is_first_rank

        if is_first_rank():
            print(error, file=sys.stderr)
        return error.exit_code
    except TreewiseError as error:
        if _wants_traceback(words):
            raise
        print(f"error: {error}", file=sys.stderr)
        if isinstance(error, LostRankError):
            return error.exit_code
        return 1 if isinstance(error, VerificationError) else 2
    except OSError as error:  # a disk that is full, a folder that may not be written
        if _wants_traceback(words):
            raise
        print(f"error: {error.filename or name}: {error.strerror or error}", file=sys.stderr)
        return 2


def _parser(name: str | None) -> argparse.ArgumentParser:
    """The parser of one command; of all, with their names alone, where none is given."""
    parser = _Parser(
        prog="treewise",
        description="Trains language models on trees of tokens: every shared prefix is computed once.",
        epilog="TREEWISE_DEBUG=1 or --debug shows the traceback of an error.",
    )
    parser.add_argument("--version", action="version", version=f"treewise {treewise.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for each, summary in COMMANDS.items():
        command = commands.add_parser(each, help=summary, description=summary[0].upper() + summary[1:] + ".")
        command.allow_abbrev = False  # `--lear 1` would be a guess
        if each == name:
            _module(each).add_arguments(command)
            command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _parse(parser: argparse.ArgumentParser, name: str, words: list[str]) -> argparse.Namespace:
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, f"Commands: {', '.join(COMMANDS)}.")
        raise ConfigError(f"unknown command {name!r}.{hint}")
    args, rest = parser.parse_known_args(words)
    if hasattr(args, "overrides"):  # a command with a configuration takes its keys as flags
        args.overrides = rest
    elif rest:
        flags = re.findall(r"--\w[\w-]*", _module_help(name))
        hint = did_you_mean(rest[0].split("=")[0], flags, f"See treewise {name} --help.")
        raise ConfigError(f"unknown argument {rest[0]!r}.{hint}")
    return args


def _module(name: str) -> ModuleType:
    return import_module(f"treewise.cli.commands.{MODULES.get(name, name)}")


def _module_help(name: str) -> str:
    """The flags of a command, as its help lists them."""
    parser = _Parser()
    _module(name).add_arguments(parser)
    return parser.format_help()


def _wants_traceback(words: Sequence[str]) -> bool:
    return "--debug" in words or os.environ.get("TREEWISE_DEBUG", "") not in ("", "0")


if __name__ == "__main__":
    sys.exit(main())
