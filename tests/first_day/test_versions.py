"""The sets of versions: what the page shows is what was run, and the lowest are those that pyproject.toml names."""

import json
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.first_day.__main__ import PAGE, RESULTS, ROOT, SETS, table

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lowest(name: str) -> Version:
    """The lower bound of a package, among the dependencies and extras."""
    listed = [
        *PROJECT["dependencies"],
        *(each for extra in PROJECT["optional-dependencies"].values() for each in extra),
    ]
    (bounds,) = {str(each.specifier) for each in map(Requirement, listed) if each.name == name}
    (bound,) = (part.removeprefix(">=") for part in bounds.split(",") if part.startswith(">="))
    return Version(bound)


def test_the_page_shows_what_was_run() -> None:
    results = json.loads(RESULTS.read_text())
    assert {"lowest", "lowest-but-torch", "lowest-plain"} <= results.keys() <= SETS.keys()
    assert not [name for name, found in results.items() if "failed" in found["outcome"] or "error" in found["outcome"]]
    assert table() in PAGE.read_text(), "python -m tests.first_day --table"


@pytest.mark.parametrize(
    ("name", "of"),
    [
        *((each, "lowest") for each in ("torch", "transformers", "peft", "trl", "numpy", "tinker")),
        *((each, "lowest-plain") for each in ("accelerate", "datasets", "pyarrow")),
    ],
)
def test_what_is_admitted_was_run(name: str, of: str) -> None:
    bound, found = lowest(name), Version(json.loads(RESULTS.read_text())[of][name])
    assert found.release[: len(bound.release)] == bound.release, f"run make versions SETS={of}"
