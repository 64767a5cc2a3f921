"""Runs of a host's recipes: `python -m tests.hosts.recipes.runs trl MATERIAL OUTPUT sft dpo`, by that host's Python.

Each run is a child of this process, which has imported the host once. It writes what it prints into `text` of its
folder. A recipe whose name begins with `refused` runs once, with the line.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

# name: (folder of the model, whether with the line)
RUNS = {"flat": ("model", False), "other": ("reordered", False), "tree": ("model", True)}


def main(module: str, material: str, output: str, *kinds: str) -> None:
    host = importlib.import_module(f"tests.hosts.recipes.{module}")
    for kind in kinds:
        for name, (model, line) in RUNS.items():
            if name == "tree" or not kind.startswith("refused"):
                folder = Path(output) / kind / name
                folder.mkdir(parents=True)
                one_run(getattr(host, kind), folder, Path(material), Path(material) / model, line)


def one_run(recipe: Any, folder: Path, material: Path, model: Path, line: bool) -> None:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    text = os.open(folder / "text", os.O_WRONLY | os.O_CREAT)
    os.dup2(text, 1)
    os.dup2(text, 2)
    try:
        recipe(material, model, folder / "output", line=line)
        (folder / "ended").touch()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
