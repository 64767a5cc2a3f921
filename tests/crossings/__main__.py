"""Draws crossings until the time is over: `python -m tests.crossings --minutes 10 --seed 1`."""

import argparse
import sys

import torch

from tests.crossings import online_loop, training
from tests.crossings.drawing import run


def main() -> int:
    """Returns 1 where a draw was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.crossings", description=__doc__)
    parser.add_argument("--minutes", type=float, help="stop after so many minutes")
    parser.add_argument("--draws", type=int, help="stop after so many draws (2,000 meet all pairs)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="leave out so many draws at the beginning")
    parser.add_argument("--of", choices=("training", "online", "both"), default="both", help="both: half the time each")
    parser.add_argument("--settings", nargs="*", default=[], metavar="NAME=VALUE,...", help="draw among these values")
    given = parser.parse_args()
    torch.set_num_threads(1)
    spaces = {"training": training(given.seed), "online": online_loop()}
    spaces = spaces if given.of == "both" else {given.of: spaces[given.of]}
    for wanted in given.settings:
        spaces = {name: space.among(*wanted.split("=")) for name, space in spaces.items()}
    minutes, num_wrong = None if given.minutes is None else given.minutes / len(spaces), 0
    for name, space in spaces.items():
        report = run(space, given.seed, num_draws=given.draws, minutes=minutes, skip=given.skip)
        sys.stdout.write(f"{name}: {report}\n")
        num_wrong += report.counts["wrong"]
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
