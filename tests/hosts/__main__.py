"""Trainers of others with treewise's one line and without, each as its users run it, on a CPU: `make hosts`, or
`python -m tests.hosts axolotl trl-0.24`. Each host has an environment of its own, resolved and installed by uv with the
host's own pins, one at a time (2 to 7 GB).

A recipe runs three times on the same rows and draws: flat, flat with the model's hidden units in another order, and
with the line. Every logged number and the change of all weights have to be those of the flat run, to FACTOR times what
the order of the units changes: the same sums, rounded otherwise.
"""

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import environments
from tests.environments import (
    ROOT,
    NotToBeHadError,
    RecipeError,
    installed,
    pins_resolved,
    run_recipe,
    save_recipe,
    say,
    update_error,
    write_table,
)
from tests.hosts.material import ADAPTER, reordered, weights
from tests.hosts.recipes.runs import RUNS
from tests.hosts.table import HOSTS, Host

RESULTS = ROOT / "benchmarks" / "results" / "hosts.json"
PAGE = ROOT / "docs" / "hosts.md"
MARK = "<!-- table: python -m tests.hosts --table -->"
FACTOR = 10
TIE = 1e-6
SHOWN = ("treewise", "torch", "transformers", "accelerate", "peft", "trl")
# In the names of logged numbers that are times, or what a machine does.
TIMES = ("time", "per_sec", "flos", "memory", "speed")


@dataclass
class Run:
    """What one run of a recipe left. updates: what each weight changed by. text: what it printed."""

    logs: list[dict[str, float]]
    updates: dict[str, Any]
    seconds: float
    text: str = field(repr=False)


def main() -> int:
    """Returns 1 where a host differed or failed."""
    return environments.command(
        "hosts",
        __doc__,
        list(HOSTS),
        lambda: write_table(PAGE, MARK, table()),
        lambda name, given: run_host(name, given.folder, given.recipes),
    )


def run_host(name: str, folder: Path, part: str) -> bool:
    """Runs a host's recipes, says what each was, and keeps it."""
    host, place = HOSTS[name], folder.resolve() / name
    say(f"== {name}: {', '.join(host.asked) or 'the environment of the tests'}")
    try:
        python = environment(place, host)
    except NotToBeHadError as error:
        say(f"   not run: {error}")
        return False
    output, made = place / "runs", place / "material"
    shutil.rmtree(output, ignore_errors=True)
    made.mkdir(parents=True, exist_ok=True)
    versions = installed(python, (*SHOWN, *host.shown))
    say(f"   {', '.join(f'{each} {version}' for each, version in versions.items())}")
    recipes = [recipe for recipe in host.recipes if part in recipe]
    try:
        run_recipe([str(python), "-c", f"from tests.hosts.material import *; write(Path({str(made)!r}))"], ROOT)
        run_recipe([str(python), "-m", "tests.hosts.recipes.runs", host.module, str(made), str(output), *recipes], ROOT)
    except RecipeError as error:
        say(f"   failed\n{error}")
        return False
    found = {}
    for recipe in recipes:
        try:
            found[recipe] = compared(host, made, output / recipe, recipe)
        except RecipeError as error:
            say(f"   {recipe}: failed\n{error}")
            found[recipe] = {"outcome": "failed"}
        say(f"   {recipe}: " + ", ".join(f"{key} {_shown(value)}" for key, value in found[recipe].items()))
        save_recipe(RESULTS, HOSTS, name, versions, recipe, found[recipe])
    return all(each["outcome"] in ("equal", "refused") for each in found.values())


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def environment(place: Path, host: Host) -> Path:
    """The Python of an environment with a host and treewise as it is now.

    Raises:
        NotToBeHadError: no such Python, or no such release.
    """
    if not host.asked:
        return ROOT / ".venv" / "bin" / "python"
    project = ROOT / "pyproject.toml"
    resolve = pins_resolved(host.asked, host.instead, "--extra", "lora", "--extra", "datasets", project)
    made_of = repr((host, project.read_text()))
    return environments.environment(place / "environment", host.python, made_of, resolve)


# -- recipes ----------------------------------------------------------------------------------------------------------


def compared(host: Host, made: Path, output: Path, recipe: str) -> dict[str, Any]:
    """The line against flat training, by what rounding does.

    Raises:
        RecipeError: a run failed, or shared nothing.
    """
    if recipe.startswith("refused"):
        return {"outcome": "refused", "by": refusal(output / "tree")}
    flat, other, tree = (
        read(output / name, made / model, is_reordered=model == "reordered") for name, (model, _) in RUNS.items()
    )
    if recipe in host.over_padding:
        for entry in (*flat.logs, *other.logs, *tree.logs):
            for name in ("logits/chosen", "logits/rejected"):
                entry.pop(name, None)
    ratios = re.findall(r"share ratio ([\d.]+); (\d+) batch", tree.text)
    if not ratios:
        raise RecipeError(f"nothing was shared\n{tree.text[-3000:]}")
    found = {
        "share ratio": float(ratios[0][0]),
        "left": sum(int(left) for _, left in ratios),
        "logs": log_error(tree, flat),
        "logs by rounding": log_error(other, flat),
        "weights": update_error(tree.updates, flat.updates),
        "weights by rounding": update_error(other.updates, flat.updates),
        "seconds flat": flat.seconds,
        "seconds": tree.seconds,
    }
    is_equal = all(found[each] <= FACTOR * found[f"{each} by rounding"] for each in ("logs", "weights"))
    return {"outcome": "equal" if is_equal else "DIFFERENT", **found}


def read(folder: Path, model: Path, *, is_reordered: bool) -> Run:
    """What a run left in its last checkpoint."""
    text = (folder / "text").read_text()
    saved = sorted((folder / "output").rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    if not saved or not (folder / "ended").is_file():
        raise RecipeError(f"{folder} did not end well\n{text[-5000:]}")
    history = json.loads(saved[-1].read_text())["log_history"]
    logs = [{name: float(value) for name, value in entry.items() if _is_compared(name, value)} for entry in history]
    after = weights(saved[-1].parent)
    before = weights(model / ADAPTER if (saved[-1].parent / "adapter_config.json").is_file() else model)
    if is_reordered:
        before, after = reordered(before, back=True), reordered(after, back=True)
    updates = {name: each - before[name] for name, each in after.items()}
    return Run(logs, updates, float(re.findall(r"train_runtime\W: '?([\d.]+)", text)[-1]), text)


def _is_compared(name: str, value: Any) -> bool:
    return isinstance(value, int | float) and not any(part in name for part in TIMES)


def refusal(folder: Path) -> str:
    """The error of ours that ended a run."""
    named = re.findall(r"treewise\.errors\.(\w+: .*)", (folder / "text").read_text())
    if (folder / "ended").is_file() or not named:
        raise RecipeError(f"{folder} was not refused\n{(folder / 'text').read_text()[-5000:]}")
    return str(named[-1])


def log_error(found: Run, expected: Run) -> float:
    """The largest difference of a logged number, relative where it is larger than 1.

    Shares of pairs whose margin is all but 0, as before the first step, are ties that rounding decides.
    """
    if [entry.keys() for entry in found.logs] != [entry.keys() for entry in expected.logs]:
        raise RecipeError(f"other things were logged: {found.logs} for {expected.logs}")
    pairs = (
        (found_entry[name], value)
        for found_entry, entry in zip(found.logs, expected.logs, strict=True)
        for name, value in entry.items()
        if not (name == "rewards/accuracies" and abs(entry["rewards/margins"]) < TIE)
    )
    return max(abs(one - two) / max(1.0, abs(two)) for one, two in pairs)


def table() -> str:
    """The results as lines of Markdown."""
    lines = ["| host | with | recipe | share ratio | logs | rounding | weights | rounding |", "|---" * 8 + "|"]
    for name, found in json.loads(RESULTS.read_text()).items():
        versions = {each: version for each, version in found["versions"].items() if each != "treewise"}
        label, used = name, ", ".join(f"{each} {version}" for each, version in versions.items())
        for recipe, each in found["recipes"].items():
            figures = (each.get(key) for key in ("logs", "logs by rounding", "weights", "weights by rounding"))
            cells = [
                each.get("share ratio", each["outcome"]),
                *("" if one is None else f"{one:.0e}" for one in figures),
            ]
            lines.append("| " + " | ".join([label, used, recipe.replace("_", " "), *map(str, cells)]) + " |")
            label = used = ""
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
