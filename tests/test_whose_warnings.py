"""Warnings of treewise and of calls that it makes are errors; what plugins and packages of others warn of is not."""

import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A package of another project: a function that warns of itself, one that names its caller, one that calls the first.
OTHERS = """
import warnings

def old():
    warnings.warn("old", DeprecationWarning)

def names_its_caller():
    warnings.warn("old", FutureWarning, stacklevel=2)

def uses_old():
    old()
    names_its_caller()

class Leak:
    def __del__(self):
        raise ValueError("in a destructor of others")

def ends_a_thread():
    raise ValueError("in a thread of others")
"""
CONFTEST = """
from tests.whose_warnings import name_callers, pardon_collections

name_callers()
pardon_collections()
"""
# What pytest-benchmark does under pytest-xdist, and inductor on Python 3.12.
PLUGIN = """
import warnings

def pytest_configure():
    warnings.warn("of a plugin")

def pytest_runtest_call():
    warnings.warn("`torch.jit.script_method` is deprecated", DeprecationWarning)
"""


@pytest.fixture
def others():
    module = types.ModuleType("others")
    exec(compile(OTHERS, "/others/others.py", "exec"), vars(module))
    return module


def test_what_a_test_or_treewise_calls_is_an_error(others) -> None:
    with pytest.raises(DeprecationWarning, match="old"):
        others.old()
    with pytest.raises(FutureWarning, match="old"):
        others.names_its_caller()
    treewise_module = types.ModuleType("treewise.anything")
    exec("def call(function):\n    function()", vars(treewise_module))
    with pytest.raises(DeprecationWarning, match="old"):
        treewise_module.call(others.old)


def test_what_packages_of_others_do_among_themselves_is_not(others) -> None:
    with pytest.warns() as seen:
        others.uses_old()
    assert [str(each.message) for each in seen] == ["old", "old"]
    others.uses_old()
    others.Leak()
    thread = threading.Thread(target=others.ends_a_thread)
    thread.start()
    thread.join()


def run_pytest(folder: Path, test: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Of a test in a project with our settings of pytest and our conftest."""
    path = folder / "tests" / "test_one.py"
    path.parent.mkdir()
    path.write_text(test)
    (path.parent / "conftest.py").write_text(CONFTEST)
    (path.parent / "whose_warnings.py").write_text((ROOT / "tests" / "whose_warnings.py").read_text())
    (folder / "noisy.py").write_text(PLUGIN)
    (folder / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    command = [sys.executable, "-m", "pytest", "-p", "noisy", "-p", "no:cacheprovider", *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_plugin_that_warns_ends_no_run(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "def test_one(): pass", "-n", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.slow
def test_errors_in_threads_and_destructors_of_ours_fail_a_test(tmp_path: Path) -> None:
    test = """
import threading

class Leak:
    def __del__(self):
        raise ValueError("here")

def fail():
    raise ValueError("here")

def test_destructor():
    Leak()

def test_thread():
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()

def test_file(tmp_path):
    open(tmp_path / "leaked", "w")
"""
    done = run_pytest(tmp_path, test)
    assert "3 failed" in done.stdout, done.stdout


@pytest.mark.slow
def test_what_the_collector_finds_unclosed_fails_no_test_of_ours(tmp_path: Path) -> None:
    """It names the code that ran at that moment, where what came before and afterwards is found as ever."""
    test = """
import gc
import warnings

class Holds:
    pass

def test_cycle(tmp_path):
    found = Holds()
    found.file, found.itself = open(tmp_path / "leaked", "w"), found
    del found
    gc.collect()

def test_afterwards(tmp_path):
    gc.collect()
    open(tmp_path / "leaked", "w")
"""
    done = run_pytest(tmp_path, test)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
