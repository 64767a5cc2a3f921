"""`make quick`: the tests that a change touches, those nearest by imports first, for as long as there is time.

A file is as far from a change as imports lead to it: a test of a changed module, or one that imports it, is at 1.
Imports within functions count; so do features, public names, and modules that are named in a string. Files that are no
Python (templates, pages, settings) lead to those that name them. What is changed: files that differ from `--since`.

    python -m pytest -p tests.nearest --nearest 60 [--since main]
"""

import re
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOUSES = {"treewise": ROOT / "src", "tests": ROOT}
MAX_FILES = 60  # collecting one takes a third of a second
BY_NAME = ("treewise", "treewise.base.features")  # what these import is asked for by name
READ_ALL = {".py": "tests/test_house.py", ".md": "tests/documents/test_*.py"}  # tests that read every file

MODULE = re.compile(r"\b(?:treewise|tests)\.[a-z_.0-9]*[a-z_0-9]")
FROM = re.compile(r"^ *from ((?:treewise|tests)[\w.]*) import (\([^)]*\)|[^\n(]*)", re.MULTILINE)
FEATURE = re.compile(r"\bfeatures\.(\w+)")
PUBLIC = re.compile(r"\b(?:treewise|tw)\.(\w+)")
TYPES_ALONE = re.compile(r"^if TYPE_CHECKING.*\n(?:    .*\n|\n)*", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nearest", type=float, metavar="SECONDS", help="tests of what changed, until this time is over")
    parser.addoption(
        "--since", help="the commit that is compared with; default: the last, or if nothing changed the one before"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("nearest") is not None:
        config.pluginmanager.register(Nearest(config.getoption("nearest"), config.getoption("since")), "nearest")


class Nearest:
    """Collects, orders, and leaves out once the time is over. distances: of files of tests."""

    def __init__(self, seconds: float, since: str | None) -> None:
        self._ends = time.monotonic() + seconds
        self._seconds, self._left = seconds, 0
        self.changed = changed_files(since)
        found = distances(self.changed)
        self.distances = {path: found[path] for path in sorted(found, key=lambda path: (found[path], path))[:MAX_FILES]}
        self._others = len(found) - len(self.distances)

    def pytest_report_header(self) -> str:
        others = f", {self._others} others further away" if self._others else ""
        return f"nearest: {len(self.changed)} changed files, {len(self.distances)} files of tests{others}"

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        is_left = collection_path.suffix == ".py" and collection_path not in self.distances
        return is_left or None  # None: others decide

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self.distances[item.path])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        is_late = time.monotonic() > self._ends
        self._left += is_late
        return is_late or None  # True: this test is done

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left:
            terminalreporter.write_line(
                f"{self._left} tests were left to `make test` after {self._seconds:.0f} seconds"
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:  # of a change that no test reads
            session.exitstatus = pytest.ExitCode.OK


def changed_files(since: str | None) -> list[Path]:
    """Files that differ from a commit, new ones too; without one from the last, or where none does the one before."""

    def listed(*command: str) -> list[Path]:
        lines = subprocess.run(("git", *command), cwd=ROOT, check=True, capture_output=True, text=True).stdout
        return [ROOT / line for line in lines.splitlines()]

    new = listed("ls-files", "--others", "--exclude-standard")
    found = listed("diff", "--name-only", since or "HEAD") + new
    return found or ([] if since else listed("diff", "--name-only", "HEAD~1"))


def distances(changed: list[Path]) -> dict[Path, int]:
    """Of files of tests that imports lead to, from changed files; a changed one is at 0."""
    paths = all_modules()
    modules = {path: name for name, path in paths.items()}
    found = {modules[path]: 0 for path in changed if path in modules}
    importers = _importers()
    for path in changed:
        readers = [*ROOT.glob(READ_ALL.get(path.suffix, "none")), *([] if path in modules else _readers(path))]
        found = {modules[each]: 1 for each in readers} | found
    reached = sorted(found, key=found.__getitem__)
    for module in reached:  # grows
        for importer in importers.get(module, ()):
            if importer not in found:
                found[importer] = found[module] + 1
                reached.append(importer)
    return {paths[name]: distance for name, distance in found.items() if paths[name].name.startswith("test_")}


@cache
def _importers() -> dict[str, list[str]]:
    """Modules that ask for one."""
    found: dict[str, list[str]] = {}
    for module in all_modules():
        for imported in imports_of(module):
            found.setdefault(imported, []).append(module)
    names = {path: module for module, path in all_modules().items()}
    for module, path in all_modules().items():
        if module not in found and "src" in path.parts:  # loaded by a name that is put together
            found[module] = [names[each] for each in _readers(path) if each in names]
    return found


def _readers(changed: Path) -> list[Path]:
    """Files of Python that name a file; of one in a package also the tests of the folder that it is in."""
    named = [path for path in all_modules().values() if changed.name in _text(path) and path != changed]
    if not changed.is_relative_to(ROOT / "src" / "treewise"):
        return named
    folders = (ROOT / "tests" / path for path in changed.relative_to(ROOT / "src" / "treewise").parents)
    return named + next(tests for tests in (sorted(folder.glob("test_*.py")) for folder in folders) if tests)


@cache
def all_modules() -> dict[str, Path]:
    """Files by the name of their module."""
    found = {}
    for house, folder in HOUSES.items():
        for path in sorted((folder / house).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module: str) -> set[str]:
    """Modules of ours that this one asks for; a test asks for the module that it mirrors."""
    modules = all_modules()
    if module in BY_NAME:
        return set()
    found = set(_named_in(TYPES_ALONE.sub("", _text(modules[module]))))
    if module.startswith("tests."):
        package, _, name = module.rpartition(".")
        found.add(f"treewise{package.removeprefix('tests')}.{name.removeprefix('test_')}")
    return (found & modules.keys()) - {module}


def _named_in(text: str) -> Iterator[str]:
    """Modules that a file names, also by features and public names of theirs."""
    features, public = _asked_by_name()
    yield from MODULE.findall(text)
    yield from (features.get(name, "") for name in FEATURE.findall(text))
    yield from (public.get(name, "") for name in PUBLIC.findall(text))
    for start, names in FROM.findall(text):
        for name in re.findall(r"\w+", names):
            yield f"{start}.{name}"
            yield public.get(name, "") if start == "treewise" else ""


@cache
def _asked_by_name() -> tuple[dict[str, str], dict[str, str]]:
    """Modules of features and of public names."""
    from treewise.base.features import FEATURES

    stub = _text(ROOT / "src" / "treewise" / "__init__.pyi")
    public = {name: start for start, names in FROM.findall(stub) for name in re.findall(r"\w+", names)}
    return {name: module for name, (module, _) in FEATURES.items()}, public


@cache
def _text(path: Path) -> str:
    return path.read_text()
