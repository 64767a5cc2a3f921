"""`treewise completion bash|zsh|tcsh`: a script that completes commands, flags and keys."""

import argparse
import importlib.util

from treewise.cli import parser as parsers
from treewise.errors import ConfigError

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
        raise ConfigError("completion needs the shtab package: pip install 'treewise[completion]'")
    import shtab

    print(shtab.complete(complete_parser(), args.shell))
    return 0


def complete_parser() -> argparse.ArgumentParser:
    """The parser of all commands, in which keys of configurations are flags."""
    import shtab

    from treewise.cli.aliases import ALIASES
    from treewise.cli.commands import rl
    from treewise.cli.config import schema

    parser = parsers.make_parser(*parsers.COMMANDS)
    keys = {"train": [*schema(), *ALIASES], "rl": [*schema(rl.KEYS), *ALIASES, *rl.aliases()]}
    (commands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001
    for name, command in commands.choices.items():
        command.formatter_class = argparse.HelpFormatter  # without the list of keys
        command.usage = command.epilog = None
        have = set(command._option_string_actions)  # noqa: SLF001
        if name in keys:
            command.add_argument("config", nargs="?").complete = shtab.FILE
        for key in dict.fromkeys(keys.get(name, ())):
            if f"--{key}" in have or "." in key:
                continue
            flag = command.add_argument(f"--{key}")
            if key in _FILES:
                flag.complete = shtab.FILE
            elif key == "output_dir":
                flag.complete = shtab.DIRECTORY
    return parser
