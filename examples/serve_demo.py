"""`make serve-demo`: a server, a recipe of tinker-cookbook as its client, the curve, and what sharing is worth.

The recipe is `rl_loop`, unchanged: groups of samples of one prompt, rewarded for a number in a box. Its data set and
tokenizer are files of the names that it asks the Hub for: 250 questions that name the number. SmolLM2 answers, under
the name of the model for which the cookbook has a chat format. A second server with `--share none` then gets the same
recipe for fewer steps; both count the seconds of forward and backward and the tokens of the rows.
"""

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

from treewise.nn.load_model import load_tokenizer

MODEL, NAME = "smollm2-demo", "Qwen/Qwen3-8B"
STEPS, STEPS_ALONE = int(os.environ.get("SERVE_DEMO_STEPS", "8")), 3
RECIPE = "tinker_cookbook.recipes.rl_loop"
FLAGS = {"loss_fn": "importance_sampling", "batch_size": 4, "group_size": 8, "max_tokens": 24, "learning_rate": 3e-4}


def write_files(folder: Path) -> None:
    """The data set and the tokenizer that the recipe looks up by name."""
    data = folder / "openai" / "gsm8k"
    data.mkdir(parents=True)
    rows = [{"question": f"Which number is {n}?", "answer": f"It is {n}.\n#### {n}"} for n in range(1, 251)]
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (data / "README.md").write_text("---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n")
    load_tokenizer(MODEL).save_pretrained(folder / NAME)


@contextmanager
def server(folder: Path, port: int, *flags: str) -> Iterator[str]:
    """A server in a process of its own; its address."""
    command = [sys.executable, "-m", "treewise.cli.main", "serve", "--model", MODEL, "--name", NAME]
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
    """Runs the recipe; the mean reward of each step, and the median seconds of forward and backward for a token of the
    rows (of all steps but the first, which checks the model).
    """
    own = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    flags = {"model_name": NAME, **FLAGS, "save_every": 0, "max_steps": steps, "log_path": log}
    command = [sys.executable, "-m", RECIPE, *(f"{name}={value}" for name, value in flags.items())]
    subprocess.run(command, cwd=folder, env={**os.environ, **own}, check=True, capture_output=True)
    metrics = [json.loads(line) for line in (folder / log / "metrics.jsonl").read_text().splitlines()]
    (curve,) = asked(url, "status")["curves"].values()
    for _, loss, flat, tree, computed, seconds in curve:
        print(f"  loss {loss:+.3f}, {flat:.0f} flat tokens, {tree:.0f} tree, {computed:.0f} computed, {seconds:.1f} s")
    return [each["reward/total"] for each in metrics], median(each[5] / each[2] for each in curve[1:] or curve)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        with server(folder / "shared", 8101) as url:
            print(f"{RECIPE} against {url}, {STEPS} steps")
            rewards, shared = learn(folder, url, STEPS, "log-shared")
        for step, reward in enumerate(rewards):
            print(f"step {step}: mean reward {reward:.2f} {'#' * round(40 * reward)}")
        with server(folder / "alone", 8102, "--share", "none") as url:
            print(f"the same with --share none, {STEPS_ALONE} steps")
            _, alone = learn(folder, url, STEPS_ALONE, "log-alone")
    print(f"forward and backward of a token of the rows: {alone / shared:.1f} times as long without sharing")


if __name__ == "__main__":
    main()
