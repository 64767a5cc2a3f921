"""The parsers of all commands: one module per command, imported only when it is asked for."""

import argparse
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

import treewise
from treewise.cli.aliases import as_text, resolve_flags
from treewise.errors import ConfigError, did_you_mean

COMMANDS = {
    "train": "fine-tune a model on trees of trajectories",
    "rl": "reinforcement learning, on rollouts of any engine or of its own",
    "launch": "one job of Slurm, Kubernetes or this machine: trainers, vLLM servers, logs",
    "serve": "the Tinker API on trees: recipes of tinker-cookbook on this machine",
    "record": "an endpoint for any agent: what its calls sample becomes rows",
    "import": "rollouts of other training stacks, and recorded agent logs, to rows",
    "inspect": "what the data holds, and what training on trees can gain on it",
    "plan": "how trees are cut into micro-batches",
    "verify": "flat against tree on your own model and rows",
    "bench": "treewise against flat training and tree rows, measured on this machine",
    "profile": "where the time of a training step goes, tree beside flat",
    "doctor": "what this machine has, which attention will run, and a check that it is right",
    "grow": "a larger model from a smaller one, to train on",
    "models": "which families of models are supported, and why others are not",
    "schema": "the JSON schema of a configuration, for editors",
    "completion": "completion of commands and keys, for a shell",
}
# Where a command's module is, if not in `commands` by its name.
MODULES = {"import": "treewise.cli.commands.import_", "grow": "treewise.experimental.grow.command"}
MAX_MESSAGE = 400  # characters of an argument's error


class Parser(argparse.ArgumentParser):
    """Reports an invalid flag as every other error is reported: in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        message = " ".join(message.removeprefix("argument ").split())
        if len(message) > MAX_MESSAGE:  # a flag's value is shown in full by argparse
            message = f"{message[:MAX_MESSAGE]}..."
        raise ConfigError(f"{message}. See {self.prog} --help.")


def make_parser(*names: str) -> argparse.ArgumentParser:
    """The parser of all commands, with the arguments of those named."""
    return make_parsers(*names)[0]


def make_parsers(*names: str) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of all commands, with the arguments of those named, and the parser of each command by its name."""
    parser = Parser(
        prog="treewise",
        description="Trains language models on trees of tokens: every shared prefix is computed once.",
        epilog="TREEWISE_DEBUG=1 or --debug shows the traceback of an error.",
    )
    parser.add_argument("--version", action="version", version=f"treewise {treewise.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    by_name: dict[str, argparse.ArgumentParser] = {}
    for each, summary in COMMANDS.items():
        command = commands.add_parser(each, help=summary, description=summary[0].upper() + summary[1:] + ".")
        by_name[each] = command
        command.allow_abbrev = False  # `--lear 1` would be a guess
        if each in names:
            module_of(each).add_arguments(command)
            command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser, by_name


def parse(name: str, words: Sequence[str]) -> argparse.Namespace:
    """The arguments of one command. Aliases of its flags are resolved, and printed on stderr.

    Raises:
        ConfigError: an unknown command or flag, or an invalid value.
    """
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, f"Commands: {', '.join(COMMANDS)}.")
        raise ConfigError(f"unknown command {name!r}.{hint}")
    usage = Parser()
    module_of(name).add_arguments(usage)
    usage.usage = None
    flags = [*re.findall(r"--\w[\w-]*", usage.format_usage()), "--help", "--debug"]
    resolved, renamed = resolve_flags(words, flags)
    args, rest = make_parser(name).parse_known_args(resolved)
    if hasattr(args, "overrides"):  # a command with a configuration takes its keys as flags
        args.overrides = rest
    elif rest:
        hint = did_you_mean(rest[0].split("=")[0], flags, f"See treewise {name} --help.")
        raise ConfigError(f"unknown argument {rest[0]!r}.{hint}")
    if renamed:
        print(as_text(renamed), file=sys.stderr)
    return args


def module_of(name: str) -> ModuleType:
    """The module of a command."""
    return import_module(MODULES.get(name, f"treewise.cli.commands.{name}"))
