"""The same curve, sooner: SFT and RL by TRL and by treewise, from the same weights; results, a figure and a page.

    make proof                                    # seed 0, all trainers; about 40 minutes of two idle cores
    python benchmarks/proof.py --seed 1           # another seed, beside what the result holds
    python benchmarks/proof.py --seed 2 --parts rl turns    # these take one thread: two seeds may run side by side
    python benchmarks/proof.py --seed 0 --parts sft --trainers treewise "tree rows" --steps 4

Each trainer is a process of its own (proof_sft.py, proof_rl.py), one after the other. Its clock runs from the first
step to the last, host work included, evaluation not. The page is build/proof/proof.html.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import proof_rl
import proof_sft
from common import RESULTS, ROOT, hardware, save

import treewise
from treewise.report.html.charts import Chart, line_chart
from treewise.report.html.page import Section, write_charts

FOLDER = ROOT / "build" / "proof"
PARTS = {"sft": proof_sft.TRAINERS, "rl": proof_rl.TRAINERS, "turns": proof_rl.TRAINERS}
TIMED = ("sampling", "scoring", "update")  # of a step of RL
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--trainers", nargs="+", help="of these parts; all of them by default")
    parser.add_argument("--steps", type=int, help="of each run; fewer, to try it")
    parser.add_argument("--page", action="store_true", help="only the page, from the result that is there")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for part in () if args.page else args.parts:
        for trainer in args.trainers or PARTS[part]:
            row = run(part, trainer, args)
            others = [each for each in saved_rows() if key(each) != key(row)]  # of seeds that run beside this one, too
            save("proof", sorted([*others, row], key=order))  # after every run, lest an interruption lose it
    rows = saved_rows()
    path = FOLDER / "proof.html"
    sections = [SECTIONS[part](own) for part, own in by_part(rows)]
    write_charts(path, "The same curve, sooner", sections, treewise.__version__)
    for section in sections:
        for line in section.table:
            print("  ".join(f"{cell:<52}" if at == 0 else f"{cell:>12}" for at, cell in enumerate(line)))
    print("the page:", path)


def run(part: str, trainer: str, args: argparse.Namespace) -> Row:
    """One trainer in a process of its own."""
    name = "proof_sft.py" if part == "sft" else "proof_rl.py"
    script, output = [sys.executable, str(Path(__file__).with_name(name))], FOLDER / f"row-{part}-{args.seed}.json"
    given = ["--seed", str(args.seed)]
    if part != "sft":
        start = FOLDER / f"start-{part}-{args.seed}.pt"
        given += ["--part", part, "--start", str(start)]
        if not start.is_file():
            subprocess.run([*script, "start", *given], check=True)
    steps = [] if args.steps is None else ["--steps", str(args.steps)]
    subprocess.run([*script, trainer, *given, *steps, "--output", str(output)], check=True)
    row: Row = json.loads(output.read_text())
    return row


def saved_rows() -> list[Row]:
    """The runs of the result on this hardware."""
    path = RESULTS / f"proof-{hardware()}.json"
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def key(row: Row) -> tuple[str, int, str]:
    return row["part"], row["seed"], row["trainer"]


def order(row: Row) -> tuple[int, int, int]:
    names = list(PARTS[row["part"]])
    return list(PARTS).index(row["part"]), row["seed"], names.index(row["trainer"])


def by_part(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    found = [(part, sorted((row for row in rows if row["part"] == part), key=order)) for part in PARTS]
    return [(part, own) for part, own in found if own]


# -- what came of it ---------------------------------------------------------------------------------------------------


def charts(rows: list[Row], title: str, unit: str) -> tuple[Chart, ...]:
    """The curves of the first seed over steps and over minutes."""
    first = [row for row in rows if row["seed"] == rows[0]["seed"]]
    over_steps, over_minutes = [], []
    for row in first:
        steps, seconds, values = zip(*row["curve"], strict=True)
        over_steps.append((row["label"], steps, values))
        over_minutes.append((row["label"], [each / 60 for each in seconds], values))
    return (
        line_chart(over_steps, f"{title} over steps", "optimizer step", unit),
        line_chart(over_minutes, f"{title} over minutes", "minutes", unit),
    )


def seconds_of(rows: list[Row], trainer: str) -> dict[int, float]:
    return {row["seed"]: row["seconds"] for row in rows if row["trainer"] == trainer}


def speed_up(rows: list[Row], trainer: str) -> str:
    """Seconds of a trainer over those of treewise on the same seed, median over seeds."""
    own, best = seconds_of(rows, trainer), seconds_of(rows, "treewise")
    ratios = [own[seed] / best[seed] for seed in own if seed in best]
    return f"{median(ratios):.2f} x" if ratios else ""


def distance(rows: list[Row], trainer: str) -> float | None:
    """The largest distance of a held-out loss from treewise's at the same step, over seeds."""
    curves = {(row["seed"], row["trainer"]): row["curve"] for row in rows}
    pairs = [(curves[seed, name], curves.get((seed, "treewise"))) for seed, name in curves if name == trainer]
    found = [abs(a - b) for own, other in pairs if other for (_, _, a), (_, _, b) in zip(own, other, strict=True)]
    return max(found, default=None)


def sft(rows: list[Row]) -> Section:
    """Held-out loss of fine-tuning."""
    head = ("trainer", "minutes", "slower than treewise", "held-out loss", "distance", "peak, MiB", "seeds")
    lines = []
    for trainer, label in proof_sft.TRAINERS.items():
        own = [row for row in rows if row["trainer"] == trainer]
        if own:
            far = distance(rows, trainer)
            before, after = own[0]["curve"][0][2], median(row["curve"][-1][2] for row in own)
            lines.append(
                (
                    label,
                    f"{median(row['seconds'] for row in own) / 60:.1f}",
                    speed_up(rows, trainer),
                    f"{before:.3f} to {after:.3f}",
                    "" if far is None else f"{far:.0e}",
                    f"{max(row['peak_mib'] for row in own):,}",
                    str(len(own)),
                )
            )
    first = rows[0]
    text = (
        f"SmolLM2-135M, {first['steps']} optimizer steps of {proof_sft.ROWS} calls of one agent, "
        f"{first['flat_tokens']:,} flat tokens, {first['tree_tokens']:,} on trees: the same rows, order, optimizer and "
        "rate. The distance is the largest between two held-out losses after the same step. Evaluation is not timed."
    )
    return Section("Fine-tuning on agents' calls", text, charts(rows, "Held-out loss", "nats a token"), (head, *lines))


def rl(rows: list[Row]) -> Section:
    """Held-out reward of RL, and where its seconds go."""
    head = (
        "trainer",
        "minutes",
        "slower than treewise",
        "held-out reward",
        *(f"{each}, s" for each in TIMED),
        "seeds",
    )
    lines = []
    for trainer, label in proof_rl.TRAINERS.items():
        own = [row for row in rows if row["trainer"] == trainer]
        if own:
            parts = [[row["seconds_of_a_step"].get(name, {}).get("median") for row in own] for name in TIMED]
            means = [sum(row["curve"][at][2] for row in own) / len(own) for at in (0, -1)]
            lines.append(
                (
                    label,
                    f"{median(row['seconds'] for row in own) / 60:.1f}",
                    speed_up(rows, trainer),
                    f"{means[0]:.3f} to {means[1]:.3f}",
                    *("" if None in part else f"{median(part):.2f}" for part in parts),
                    str(len(own)),
                )
            )
    first = rows[0]
    task = "words spelled backward" + (", a letter a turn" if first["part"] == "turns" else "")
    text = (
        f"GRPO on {task}, {first['prompts']} prompts of about 500 tokens and {first['samples']} "
        "samples of each a step; seconds are medians of a step. Each run draws its own samples."
    )
    title = "Online RL, several turns" if first["part"] == "turns" else "Online RL"
    return Section(title, text, charts(rows, "Held-out reward", "mean reward"), (head, *lines))


SECTIONS: dict[str, Callable[[list[Row]], Section]] = {"sft": sft, "rl": rl, "turns": rl}


if __name__ == "__main__":
    main()
