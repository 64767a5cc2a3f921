"""`treewise completion bash|zsh|tcsh`: a script that completes commands, flags and keys."""

import argparse
import importlib.util
from typing import Any

from treewise.cli import parser as parsers
from treewise.errors import ConfigError, pip_install

SHELLS = ("bash", "zsh", "tcsh")
_FILES = {"data", "eval_data", "model", "tokenizer", "gguf_file", "chat_template", "reference"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("shell", choices=SHELLS)
    parser.epilog = (
        'bash: eval "$(treewise completion bash)" in ~/.bashrc; zsh: treewise completion zsh > a folder of $fpath, as '
        "_treewise."
    )


def run(args: argparse.Namespace) -> int:
    """Prints the script; returns the exit code."""
    if importlib.util.find_spec("shtab") is None:
        raise ConfigError(f"completion needs the shtab package: {pip_install('shtab')}")
    import shtab

    print(shtab.complete(complete_parser(), args.shell))
    return 0


def complete_parser() -> argparse.ArgumentParser:
    """The parser of all commands, in which keys of configurations are flags."""
    import shtab

    from treewise.cli.aliases import ALIASES
    from treewise.cli.commands import rl
    from treewise.cli.keys import TRAIN, rl_aliases, schema

    parser, by_name = parsers.make_parsers(*parsers.COMMANDS)
    keys = {"train": [*schema(TRAIN), *ALIASES], "rl": [*schema(rl.all_keys()), *ALIASES, *rl_aliases()]}
    for name, command in by_name.items():
        command.formatter_class = argparse.HelpFormatter  # without the list of keys
        command.usage = command.epilog = None
        if name in keys:
            config: Any = command.add_argument("config", nargs="?")  # shtab reads an attribute of it, `complete`
            config.complete = shtab.FILE
        for key in dict.fromkeys(keys.get(name, ())):
            if "." in key:
                continue
            try:
                flag: Any = command.add_argument(f"--{key}")
            except argparse.ArgumentError:
                continue  # the command has this flag already
            if key in _FILES:
                flag.complete = shtab.FILE
            elif key == "output_dir":
                flag.complete = shtab.DIRECTORY
    return parser
