"""DESIGN.md names the layers that import-linter holds, in their order; README.md counts families."""

import re
import tomllib
from pathlib import Path

from treewise.nn.support_table import SUPPORTED, CapabilityTable

ROOT = Path(__file__).parents[2]


def modules_in(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def test_the_layers_are_those_of_the_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    text = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    lines = re.findall(r"^    (\S.*)$", text.split("\n## Layers\n")[1].split("\n## ")[0], re.MULTILINE)
    shown = [modules_in(re.split(r"\s{2,}", line)[0]) for line in lines]
    assert shown == [modules_in(layer) for layer in contract]


def test_files_that_are_named_exist() -> None:
    text = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    files = [
        f"/{path.relative_to(ROOT).as_posix()}" for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.*")
    ]
    named = set(re.findall(r"`([\w/]+\.(?:py|json))`", text))
    assert len(named) > 8
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]


def test_the_readme_counts_families_as_the_table_does() -> None:
    table = CapabilityTable.load()
    claim = f"{table.counts()[SUPPORTED]} of {len(table.rows)} families of transformers {table.transformers[:4]}"
    assert claim in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_guide_names_every_module_of_the_package() -> None:
    tree = (ROOT / "AGENTS.md").read_text(encoding="utf-8").split("src/treewise/\n")[1].split("```")[0]
    package = ROOT / "src" / "treewise"
    folders = {path.name for path in package.iterdir() if (path / "__init__.py").is_file()}
    assert {name for name in folders if f"{name}/" not in tree} == set()


def test_the_contributors_guide_lists_every_make_target() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert targets is not None
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert not [target for target in targets[1].split() if target != "help" and f"`make {target}`" not in page]
