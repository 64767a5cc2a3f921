"""`make serve-demo`: a server, a recipe of tinker-cookbook as its client, the curve, and what sharing is worth.

The recipe is `sl_loop`, unchanged. Its data set and tokenizer are files of the names that it asks the Hub for: the
bundled answers of a search in one crossword, and SmolLM2's tokenizer under the name of a model for which the cookbook
has a chat format. A second server with `--share none` then gets the same recipe for fewer steps; both count the seconds
of forward and backward.
"""

import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from treewise.models.load_model import load_tokenizer

MODEL, NAME = "smollm2-demo", "Qwen/Qwen3-8B"
STEPS, STEPS_ALONE = 6, 3
RECIPE, DATA = "tinker_cookbook.recipes.sl_loop", "HuggingFaceH4/no_robots"
FLAGS = {"model_name": NAME, "batch_size": 16, "learning_rate": 1e-3, "lora_rank": 16, "save_every": 0}
SEARCHES, GROUP = Path(__file__).parent / "data" / "searches.jsonl.gz", "crosswords-6"


def write_files(folder: Path) -> None:
    """The data set and the tokenizer that the recipe looks up by name."""
    with gzip.open(SEARCHES, "rt") as file:
        records = [json.loads(line) for line in file]
    rows = [{"messages": each["messages"]} for each in records if each["group"] == GROUP]
    (folder / DATA).mkdir(parents=True)
    (folder / DATA / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    load_tokenizer(MODEL).save_pretrained(folder / NAME)


@contextmanager
def server(folder: Path, port: int, *flags: str) -> Iterator[str]:
    """A server in a process of its own; its address."""
    command = [sys.executable, "-m", "treewise", "serve", "--model", MODEL, "--name", NAME]
    process = subprocess.Popen([*command, "--folder", str(folder), "--port", str(port), *flags])
    url = f"http://127.0.0.1:{port}"
    try:
        while not is_up(url):
            if process.poll() is not None:
                raise SystemExit("the server ended; what it said stands above")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def asked(url: str, path: str) -> Any:
    request = urllib.request.Request(f"{url}/api/v1/{path}", headers={"X-API-Key": "tml-local"})
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def is_up(url: str) -> bool:
    try:
        return asked(url, "healthz")["status"] == "ok"
    except OSError:
        return False


def learn(folder: Path, url: str, steps: int, log: str) -> tuple[list[float], float]:
    """Runs the recipe; the mean loss of each step, and the median seconds of forward and backward of all steps but the
    first, which checks the model.
    """
    own = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    flags = {**FLAGS, "max_steps": steps, "log_path": log}
    command = [sys.executable, "-m", RECIPE, *(f"{name}={value}" for name, value in flags.items())]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **own}, stdout=subprocess.DEVNULL, stderr=sys.stderr)
    if done.returncode:
        raise SystemExit(f"{RECIPE} ended with {done.returncode}; what it said stands above")
    metrics = [json.loads(line) for line in (folder / log / "metrics.jsonl").read_text().splitlines()]
    (curve,) = asked(url, "status")["curves"].values()
    _, _, flat, tree, computed, _ = curve[-1]
    print(f"the last step: {flat:.0f} flat tokens, {tree:.0f} tree tokens, {computed:.0f} computed", flush=True)
    return [each["train_mean_nll"] for each in metrics if "train_mean_nll" in each], median(
        seconds for *_, seconds in curve[1:] or curve
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        with server(folder / "shared", 8101) as url:
            print(f"{RECIPE} against {url}, {STEPS} steps", flush=True)
            losses, shared = learn(folder, url, STEPS, "log-shared")
        for step, loss in enumerate(losses):
            print(f"step {step}: loss {loss:.2f} {'#' * round(40 * loss / losses[0])}", flush=True)
        with server(folder / "alone", 8102, "--share", "none") as url:
            print(f"the same with --share none, {STEPS_ALONE} steps", flush=True)
            _, alone = learn(folder, url, STEPS_ALONE, "log-alone")
    print(
        f"forward and backward take {shared:.2f} s, {alone:.2f} s without sharing: {alone / shared:.1f} times as long"
    )


if __name__ == "__main__":
    main()
