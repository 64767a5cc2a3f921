"""A bar for sampling, on terminals alone."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def token_progress(what: str, num_tokens: int, *, hidden: bool) -> Iterator[Callable[[int], None] | None]:
    """Shows how much of a budget of tokens is sampled; yields what to call with each batch's number of tokens."""
    if hidden or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f} tokens"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"sampling, {what}", total=num_tokens)
        yield lambda count: progress.advance(bar, count)
