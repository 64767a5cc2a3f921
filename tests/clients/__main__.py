"""Clients of the Tinker API as their users run them, against a server with trees and against one without: `make
clients`, or `python -m tests.clients axolotl art`. Each client has an environment of its own without treewise,
resolved and installed by uv with the client's own pins, one at a time (1 to 3 GB).

A recipe runs twice on the same data and draws (`--seed` of the servers): with `--share all`, and with `--share none`,
which computes each row alone. Losses and changes of weights have to be the same.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests import environments
from tests.clients.material import NAME, model, tokenizer, write
from tests.clients.table import CLIENTS, Client
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
from tests.serve.servers import KEY, Address, running

RESULTS = ROOT / "benchmarks" / "results" / "clients.json"
PAGE = ROOT / "docs" / "clients.md"
MARK = "<!-- table: python -m tests.clients --table -->"
SHOWN = ("tinker", "torch", "transformers")
SHARES = ("all", "none")
# Numbers are float64 in the servers, but log-probs of 10 are rounded to 1e-6 on the wire, and clients make ratios of
# them, or advantages of 0.1.
MOST = {"losses": 1e-6, "weights": 1e-4}


@dataclass
class Trained:
    """One run that a client trained. curve: of each step what the server's page shows (loss, flat, tree and computed
    tokens, seconds). update: what its adapters add to each weight."""

    curve: list[list[float]]
    update: dict[str, torch.Tensor]


def main() -> int:
    """Returns 1 where a client differed or failed."""
    return environments.command(
        "clients",
        __doc__,
        list(CLIENTS),
        lambda: write_table(PAGE, MARK, table()),
        lambda name, given: run_client(name, given.folder, given.recipes, given.model),
        model={"default": "tiny", "help": "what is trained: tiny, smollm2-demo, or a folder"},
    )


def run_client(name: str, folder: Path, part: str, trained: str) -> bool:
    """Runs a client's recipes, says what each was, and keeps it."""
    client, place = CLIENTS[name], folder.resolve() / name
    say(f"== {name}: {', '.join(client.asked)}")
    try:
        python = environment(place, client)
    except NotToBeHadError as error:
        say(f"   not run: {error}")
        return False
    versions = installed(python, (*client.shown, *SHOWN))
    say(f"   {', '.join(f'{each} {version}' for each, version in versions.items())}")
    is_right = True
    for recipe, steps in client.recipes.items():
        if part not in recipe:
            continue
        try:
            runs = [trained_by(client, recipe, python, place / recipe / share, share, trained) for share in SHARES]
            found = compared(*runs, steps)
        except RecipeError as error:
            say(f"   {recipe}: failed\n{error}")
            found = {"outcome": "failed"}
        say(f"   {recipe}: " + ", ".join(f"{key} {_shown(value)}" for key, value in found.items()))
        is_right &= found["outcome"] in ("equal", "sampled")
        if trained == "tiny":
            save_recipe(RESULTS, CLIENTS, name, versions, recipe, found)
    return is_right


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def environment(place: Path, client: Client) -> Path:
    """The Python of an environment with a client. Raises `NotToBeHadError`: no such Python, or no such release."""
    made_of, resolve = repr((client.asked, client.instead)), pins_resolved(client.asked, client.instead)
    return environments.environment(place / "environment", client.python, made_of, resolve, with_treewise=False)


# -- recipes ----------------------------------------------------------------------------------------------------------


def trained_by(
    client: Client, recipe: str, python: Path, folder: Path, share: str, trained: str
) -> tuple[list[Trained], int]:
    """What a recipe trained on a server of its own, and how many tokens it sampled.

    Raises:
        RecipeError: it did not end well.
    """
    shutil.rmtree(folder, ignore_errors=True)
    served, settings = model(trained), {"name": NAME, "max_tokens": "auto", "share": share, "seed": 1}
    write(folder, served)
    with running(folder / "served", served, tokenizer(), **settings) as address:
        call(python, address, folder, client.module, recipe, str(client.recipes[recipe]))
        status = address.ask("/api/v1/status")[1]
    # The newest stand first.
    return [
        Trained(curve, _update(folder / "served", name)) for name, curve in reversed(status["curves"].items())
    ], status["sampled_tokens"]


def call(python: Path, address: Address, folder: Path, *arguments: str) -> None:
    """Runs a recipe by a client's Python."""
    own = {"TINKER_BASE_URL": address.url, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"}
    run_recipe([str(python), "-m", "tests.clients.recipes", *arguments], folder, own, log=folder / "text")


def _update(served: Path, name: str) -> dict[str, torch.Tensor]:
    """The product of each adapter's two matrices, from the snapshot that a server leaves at its end."""
    saved = list((served / "runs" / name.replace(":", ".") / "snapshots").glob("*/adapter_model.safetensors"))
    if not saved:
        return {}
    state = {key: each.double() for key, each in load_file(max(saved, key=lambda path: path.stat().st_mtime)).items()}
    return {key: each @ state[key.replace("lora_B", "lora_A")] for key, each in state.items() if "lora_B" in key}


def compared(shared: tuple[list[Trained], int], alone: tuple[list[Trained], int], steps: int) -> dict[str, Any]:
    """Runs with trees against the same ones with each row alone. `losses` is the largest difference of a step's loss
    per token, since terms of either sign may all but cancel.

    Raises:
        RecipeError: other steps were made than asked for, or nothing was shared.
    """
    (runs, num_sampled), (flat_runs, num_flat_sampled) = shared, alone
    if num_sampled != num_flat_sampled:
        raise RecipeError(f"{num_sampled} tokens were sampled, and {num_flat_sampled} without sharing")
    counts = [[len(run.curve) for run in each] for each in (runs, flat_runs)]
    if counts[0] != counts[1] or sum(counts[0]) != steps:
        raise RecipeError(f"{counts[0]} steps were made, {counts[1]} without sharing, {steps} asked for")
    if not steps:
        return {"outcome": "sampled", "sampled tokens": num_sampled}
    pairs = [
        (one, other)
        for run, flat in zip(runs, flat_runs, strict=True)
        for one, other in zip(run.curve, flat.curve, strict=True)
    ]
    num_flat, num_tree = (sum(one[column] for one, _ in pairs) for column in (2, 3))
    if any(other[2] != other[3] for _, other in pairs) or num_flat != sum(other[2] for _, other in pairs):
        raise RecipeError("rows were not computed alone, or not the same ones")
    if num_tree >= num_flat:
        raise RecipeError("nothing was shared")
    found = {
        "share ratio": num_flat / num_tree,
        "losses": max(abs(one[1] - other[1]) / other[2] for one, other in pairs),
        "weights": max(update_error(run.update, flat.update) for run, flat in zip(runs, flat_runs, strict=True)),
        "steps": steps,
    }
    is_equal = all(found[each] <= most for each, most in MOST.items())
    return {"outcome": "equal" if is_equal else "DIFFERENT", **found}


def table() -> str:
    """The results as lines of Markdown."""
    lines = ["| client | with | recipe | steps | share ratio | losses | weights |", "|---" * 7 + "|"]
    for name, found in json.loads(RESULTS.read_text()).items():
        label, used = name, ", ".join(f"{each} {version}" for each, version in found["versions"].items())
        for recipe, each in found["recipes"].items():
            errors = ["" if each.get(key) is None else f"{each[key]:.0e}" for key in ("losses", "weights")]
            ratio = f"{each['share ratio']:.2f}" if "share ratio" in each else each["outcome"]
            lines.append("| " + " | ".join([label, used, recipe, str(each.get("steps", "")), ratio, *errors]) + " |")
            label = used = ""
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
