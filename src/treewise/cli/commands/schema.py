"""`treewise schema [train|rl]`: the JSON schema of a configuration, with which editors complete and check it."""

import argparse
import json

from treewise.cli.json_schema import json_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "of",
        nargs="?",
        default="train",
        choices=("train", "rl"),
        help="the command that the configuration is for (train)",
    )
    parser.epilog = (
        "Save it, and name it in the first line of a configuration: # yaml-language-server: $schema=train.schema.json"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the schema; returns the exit code."""
    print(as_text(args.of))
    return 0


def as_text(of: str) -> str:
    """The schema of `treewise train` or `treewise rl`, as text."""
    from treewise.cli.commands import rl, train

    if of == "train":
        return json.dumps(json_schema("treewise train", train.KEYS), indent=1)
    return json.dumps(json_schema("treewise rl", rl.all_keys(), rl.aliases()), indent=1)
