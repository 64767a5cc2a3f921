"""Notebooks of `examples` from their scripts: `python tests/examples/notebook.py` writes them again."""

import json
import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = ("walkthrough", "t4")


def as_notebook(script: str) -> str:
    """The cells of a script with `# %%` markers as a Jupyter notebook (format 4.5), without outputs."""
    cells = []
    for kind, body in re.findall(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", script, re.DOTALL | re.MULTILINE):
        text = re.sub(r"^# ?", "", body, flags=re.MULTILINE) if kind else body
        cell = {
            "cell_type": "markdown" if kind else "code",
            "id": f"cell-{len(cells)}",
            "metadata": {},
            "source": text.strip("\n").splitlines(keepends=True),
        }
        cells.append(cell if kind else {**cell, "execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name in NOTEBOOKS:
        script = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        (EXAMPLES / f"{name}.ipynb").write_text(as_notebook(script), encoding="utf-8")
