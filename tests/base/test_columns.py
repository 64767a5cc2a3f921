"""Tables on terminals of all widths."""

import io

import pytest
from rich.console import Console

from treewise.base.columns import Columns


@pytest.mark.parametrize("columns", [100, 60, 40])
def test_every_cell_is_whole_and_stands_once(columns: int) -> None:
    names = ["part", "first seconds", "nothing", "second seconds", "third seconds", "last seconds"]
    rows = [["projections", "1.25", "", "2.25", "3.25", "4.25"], ["left out", "no time"]]
    console = Console(width=columns, file=io.StringIO())
    console.print(Columns("a title", names, rows))
    out = console.file.getvalue()
    assert max(map(len, out.splitlines())) <= columns
    assert out.count("part ") == out.count("projections") >= (1 if columns == 100 else 2)
    for name in (*names[1:2], *names[3:], *rows[0][3:], "1.25", "no time", "left out", "a title"):
        assert out.count(name) == 1, name
    assert "nothing" not in out


def test_what_does_not_fit_at_all_is_folded() -> None:
    console = Console(width=16, file=io.StringIO())
    console.print(Columns("", ["part", "seconds"], [["projections", "123456.25"]]))
    assert "…" not in console.file.getvalue()
