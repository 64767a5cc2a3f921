"""How far a load is: records and bytes read so far, in a terminal or a notebook. A log file gets no bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], object]]:
    """Gives `advance(num_bytes, num_records)`. The total of compressed files is not known beforehand."""
    console = Console(stderr=True)
    is_shown = console.is_terminal or console.is_jupyter
    console.quiet = not is_shown  # rich before 14.3 ends a bar that is off with an empty line
    columns = [SpinnerColumn(), TextColumn("reading {task.completed} records, {task.fields[megabytes]:.1f} MB")]
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not is_shown) as bar:
        task = bar.add_task("records", total=None, megabytes=0.0)

        def advance(num_bytes: int, num_records: int) -> None:
            megabytes = bar.tasks[0].fields["megabytes"] + num_bytes / 1e6
            bar.update(task, advance=num_records, megabytes=megabytes)

        yield advance
