"""Names, keywords and flags that pages use exist, also in blocks that are not run."""

import argparse
import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import treewise
from treewise.cli import online_run
from treewise.cli import parser as command_line
from treewise.cli.aliases import ALIASES
from treewise.cli.commands import rl
from treewise.cli.keys import TRAIN, rl_aliases, schema

ROOT = Path(__file__).parents[2]
REPORTS = (ROOT / "benchmarks" / "reports").glob("*.md")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *REPORTS, ROOT / "examples" / "README.md"])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def code_of(page: Path) -> Iterator[ast.AST]:
    """Every node of every Python block."""
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        lines = block.splitlines()
        if ">>> " in block:
            lines = [line[4:] for line in lines if line.startswith((">>> ", "... "))]
        yield from ast.walk(ast.parse("\n".join(lines)))


def found(node: ast.AST) -> object | None:
    """What an expression such as `tw.advantages.per_turn` names; None where it does not begin with the package."""
    if isinstance(node, ast.Name):
        return treewise if node.id in ("tw", "treewise") else None
    if isinstance(node, ast.Attribute):
        owner = found(node.value)
        if owner is None:
            return None
        if inspect.ismodule(owner) and not hasattr(owner, node.attr):
            return importlib.import_module(f"{owner.__name__}.{node.attr}")
        return getattr(owner, node.attr)
    return None


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_names_and_keywords_exist(page: Path) -> None:
    for node in code_of(page):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("treewise"):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, each.name) for each in node.names), ast.unparse(node)
        if isinstance(node, ast.Attribute):
            found(node)
        if isinstance(node, ast.Call) and callable(called := found(node.func)):
            names = {each.arg: None for each in node.keywords if each.arg}
            positional = [None for each in node.args if not isinstance(each, ast.Starred | ast.Constant)]
            inspect.signature(called).bind_partial(*positional, **names)


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of every `treewise` command in blocks of a console, or of no language."""
    text = page.read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for line in re.findall(r"^(?:\$ )?treewise (\w[^|\n]*)", block, re.MULTILINE):
            if language in ("", "console"):
                yield shlex.split(line.replace("[", "").replace("]", ""), comments=True)


def flags_of(command: str) -> set[str]:
    """Flags of a command; of those with a configuration, its keys."""
    parser = command_line.make_parser(command)
    (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    flags = {flag.lstrip("-") for action in commands.choices[command]._actions for flag in action.option_strings}
    if command == "train":
        flags |= set(schema(TRAIN))
    if command == "rl":
        flags |= set(schema(rl.KEYS | online_run.keys())) | set(rl_aliases())
    return flags | {alias for alias, key in ALIASES.items() if key in flags}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_flags_exist(page: Path) -> None:
    for command, *words in commands_of(page):
        assert command in command_line.COMMANDS, f"treewise {command}"
        flags = {word[2:].split("=")[0].split(".")[0] for word in words if word.startswith("--")}
        unknown = flags - flags_of(command) - {"key"}  # `--key value` stands for any
        assert not unknown, f"treewise {command}: {unknown}"


# In running text: `treewise.nn.flops`, `src/treewise/x.py`, `treewise plan`, `make bench`.
DOTTED = re.compile(r"`(?:tw|treewise)((?:\.(?!json|lock)[A-Za-z_]\w*)+)(?=[`(])")
PATH = re.compile(r"`((?:src|tests|benchmarks|examples|docs)/[\w./-]+)`")
SCRIPT = re.compile(r"python ((?:benchmarks|examples|docs)/[\w./]+\.py)")
COMMAND = re.compile(r"`treewise ([a-z]\w*)")
RUN_AS = re.compile(r"-m (treewise[\w.]*) ")
TARGET = re.compile(r"`make ([a-z][\w-]*)")


@pytest.mark.parametrize("page", [each for each in PAGES if each.name not in ("LOG.md", "CHANGELOG.md")], ids=str)
def test_modules_paths_and_commands_of_running_text_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for dotted in DOTTED.findall(text):
        assert pkgutil.resolve_name(f"treewise{dotted}") is not None  # imports modules on the way
    for path in PATH.findall(text) + SCRIPT.findall(text):
        assert path.startswith(("tests/a/", "src/treewise/a/")) or (ROOT / path).exists(), path  # a and b stand for any
    for module in set(RUN_AS.findall(text)):
        is_package = importlib.util.find_spec(module).submodule_search_locations is not None  # type: ignore[union-attr]
        assert not is_package or importlib.util.find_spec(f"{module}.__main__") is not None, module
    assert set(COMMAND.findall(text)) <= {*command_line.COMMANDS, "import"}
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(TARGET.findall(text)) <= set(targets)


def test_pages_are_short_enough_to_be_read() -> None:
    made = {"keys.md", "model-table.md"}  # by scripts
    long = {page.name: len(page.read_text(encoding="utf-8").splitlines()) for page in (ROOT / "docs").glob("*.md")}
    assert {name: lines for name, lines in long.items() if lines > 200 and name not in made} == {}
