"""Runs one recipe of a client by that client's Python: `python -m tests.clients.recipes axolotl sft 4`."""

import importlib
import sys


def main(module: str, recipe: str, steps: str) -> None:
    client = importlib.import_module(f"tests.clients.recipes.{module}")
    if (named := getattr(client, recipe, None)) is not None:
        named(int(steps))
    else:
        client.run(recipe, int(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
