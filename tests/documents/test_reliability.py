"""The table of faults names tests that exist, and leaves no case out."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests" / "cases.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists():
    known = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) > 40
    assert named <= known, named - known


def test_the_page_holds_every_case():
    cases = set()
    for first, last in re.findall(r"^\| (\d+)(?:-(\d+))? ", PAGE, re.M):
        cases |= set(range(int(first), int(last or first) + 1))
    assert cases == set(range(1, 45))
