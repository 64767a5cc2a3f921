"""Does an agent as it is learn what the same agent learns that was rewritten as an environment, and in the same time?

Runs of examples/agent_demo.py, from the same weights on the same tasks: the agent of the OpenAI Agents SDK through the
endpoint, and the environment, side by side, a thread each, so that both share whatever else the machine does. CPU
seconds are those of all processes, agents included.

    python benchmarks/bench_agents.py [--seeds 0 1 2] [--python .venv-agents/bin/python]     # `make agents` makes it

Runs that the result holds are not repeated.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import RESULTS, hardware, save

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples" / "agent_demo.py"
KINDS = ("agent", "environment")


def saved_runs() -> list[dict[str, Any]]:
    path = RESULTS / f"agents-{hardware()}.json"
    return [row for row in json.loads(path.read_text())["rows"] if "seed" in row] if path.is_file() else []


def side_by_side(seed: int, start: Path, folder: Path, python: str) -> list[dict[str, Any]]:
    """A run of each kind."""
    running = []
    for kind in KINDS:
        output = folder / f"{kind}-{seed}"
        shutil.rmtree(output, ignore_errors=True)
        words = [sys.executable, str(DEMO), "--kind", kind, "--seed", str(seed), "--start", str(start)]
        words += ["--python", python, "--output", str(output), "--record", str(folder / f"{kind}-{seed}.json")]
        with (folder / f"{kind}-{seed}.log").open("w") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            running.append((output, subprocess.Popen(words, stdout=log, stderr=log, env=environment)))
    for output, process in running:
        if process.wait():
            raise RuntimeError(f"{output}.log: the run ended with {process.returncode}")
        shutil.rmtree(output)  # checkpoints of 2 GB
    return [json.loads((folder / f"{kind}-{seed}.json").read_text()) for kind in KINDS]


def compared(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each seed that both have: what the agent took, over what the environment took, and the success of both."""
    rows = []
    for seed in sorted({run["seed"] for run in runs}):
        agent, environment = (next(r for r in runs if (r["seed"], r["kind"]) == (seed, kind)) for kind in KINDS)
        rows.append(
            {
                "pair": seed,
                "cpu_ratio": agent["cpu_seconds"] / environment["cpu_seconds"],
                "seconds_ratio": sum(agent["seconds_iteration"]) / sum(environment["seconds_iteration"]),
                **{each["kind"]: list(each["held_out_success"].values()) for each in (agent, environment)},
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--python", default=str(ROOT / ".venv-agents" / "bin" / "python"), help="with openai-agents")
    parser.add_argument("--folder", type=Path, default=Path("build/agents"), help="for the runs while they last")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    runs = saved_runs()
    start = args.folder / "warm-up"
    if not start.is_dir():
        words = [sys.executable, str(DEMO), "--python", args.python, "--output", str(args.folder), "--warm_up_alone"]
        subprocess.run(words, check=True)
    for seed in args.seeds:
        if all(run["seed"] != seed for run in runs):
            runs += side_by_side(seed, start, args.folder, args.python)
            print(compared(runs)[-1], flush=True)
            save("agents", [*compared(runs), *runs])  # lest an interruption lose it
    print("written to", save("agents", [*compared(runs), *runs]))


if __name__ == "__main__":
    main()
