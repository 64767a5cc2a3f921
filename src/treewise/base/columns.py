"""Tables of a terminal, for `rich` to print: with all of their columns, however narrow it is."""

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


class Columns:
    """A table whose columns are whole, without those that hold nothing: where the terminal has no room for all, several
    tables with the first column."""

    def __init__(self, title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.title, self.names = title, names
        self.rows = [[*row, *[""] * (len(names) - len(row))] for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, style="italic")
        unlimited = options.update(max_width=sys.maxsize)
        shown: list[int] = []
        for column in [each for each in range(1, len(self.names)) if any(row[each] for row in self.rows)]:
            wider = self._table([*shown, column])
            if shown and Measurement.get(console, unlimited, wider).maximum > options.max_width:
                yield self._table(shown)
                shown = []
            shown.append(column)
        yield self._table(shown)

    def _table(self, columns: Sequence[int]) -> Table:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(self.names[0], overflow="fold")
        for column in columns:
            table.add_column(self.names[column], justify="right", overflow="fold")
        for name, *cells in self.rows:
            own = [cells[column - 1] for column in columns]
            if any(own):
                table.add_row(name, *own)
        return table
