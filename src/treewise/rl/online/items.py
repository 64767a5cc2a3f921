"""The training items of a task as the pool that a curriculum draws from."""

from functools import partial

from treewise.errors import ConfigError
from treewise.rl.curriculum import Pool
from treewise.rl.online.settings import OnlineSettings
from treewise.rl.tasks.protocol import Task


def pool_of(task: Task, settings: OnlineSettings) -> Pool:
    """The items that a run practises.

    Raises:
        ConfigError: fewer items than trees.
    """
    sizes = [size for size in (task.num_items("train"), settings.num_items) if size is not None]
    total = min(sizes, default=None)
    if total is not None and total < settings.trees_per_iteration:
        raise ConfigError(
            f"{task.name} has {total} training items, fewer than trees_per_iteration="
            f"{settings.trees_per_iteration}; the trees of an iteration are of different items."
        )
    return Pool(total, partial(book_key, task))


def book_key(task: Task, index: int) -> str:
    """How the book calls a training item."""
    return f"{task.name}/{index}"
