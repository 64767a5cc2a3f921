"""Results of `treewise bench` against earlier ones of the same machine, by ratio; exit code 1 where some are worse.

    python benchmarks/compare.py NEW.json BASELINE [--min_share 0.9]

Seconds differ from machine to machine and from day to day; ratios of contestants that took turns do so far less. So
treewise's speed is held against a baseline's beside the other contestants' speed, in the cases that both have.
"""

import argparse
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from treewise.bench.results import case_of, is_ours, load

# Speed may fall to this fraction of the baseline's, and a gradient error may grow by this factor.
MIN_SPEED = 0.9
MAX_ERROR_FACTOR = 3.0
SMALLEST_ERROR = 1e-6  # errors below are rounding, whatever their ratio


def check(new: dict[str, Any], baseline: dict[str, Any], min_speed: float = MIN_SPEED) -> tuple[list[str], int]:
    """Regressions against a baseline, a line each, and how many of treewise's contestants were compared.

    Compared are the cases (model, workload, dtype) that both records have. Each of treewise's contestants must reach
    `min_speed` of the baseline's speed, after both runs are put on one scale: by how much faster or slower the other
    contestants were, in the geometric mean. Speeds are those of the fastest step, which other jobs on the machine
    disturb least. The gradient error may grow threefold; what ran must run again.
    """
    before = {case_of(row): row for row in baseline["rows"]}
    worse: list[str] = []
    count = 0
    for row in new["rows"]:
        old, what = before.get(case_of(row), {}), f"{row.get('model')}, {row.get('workload')}"
        if "contestants" not in old:
            continue
        if "contestants" not in row:
            worse.append(f"{what}: skipped now: {row.get('skipped')}")
            continue
        was, now = (
            {name: each["seconds"]["min"] for name, each in side["contestants"].items() if "seconds" in each}
            for side in (old, row)
        )
        others = [name for name in was if name in now and not is_ours(name)]
        for name in filter(is_ours, was):
            if name not in now:
                worse.append(f"{what}: {name} did not run")
            elif others:
                count += 1
                speed = was[name] / now[name] * geometric_mean([now[each] / was[each] for each in others])
                if speed < min_speed:
                    beside = ", ".join(others)
                    worse.append(f"{what}: {name} has {speed:.2f} of the baseline's speed beside {beside}")
        for name in filter(is_ours, old["contestants"]):
            error, after = (side["contestants"].get(name, {}).get("gradient_error") for side in (old, row))
            if error is None or after is None or after <= MAX_ERROR_FACTOR * max(error, SMALLEST_ERROR):
                continue
            worse.append(f"{what}: gradient error of {name} is {after:.1e}, the baseline's is {error:.1e}")
    return worse, count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("new", type=Path, help="what `treewise bench --json` wrote")
    parser.add_argument("baseline", type=Path, help="earlier results: a file, or a folder of bench-<hardware>.json")
    parser.add_argument("--min_share", type=float, default=MIN_SPEED, help="of the baseline's speed")
    args = parser.parse_args()
    worse, count = check(load(args.new), load(args.baseline), args.min_share)
    print(*(f"WORSE {line}" for line in worse), sep="\n", end="\n" if worse else "")
    print(f"{count} contestants compared with {args.baseline}, {len(worse)} worse")
    return 1 if worse or not count else 0


if __name__ == "__main__":
    raise SystemExit(main())
