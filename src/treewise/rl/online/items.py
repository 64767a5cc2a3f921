"""Which items an iteration practises: a function of the task, the settings, the seed and the book."""

import numpy as np

from treewise.errors import ConfigError
from treewise.rl.online.settings import OnlineSettings
from treewise.rl.success_book import SuccessBook
from treewise.rl.tasks.protocol import Task

_CHOICE = 1  # names the random stream of this file


def chosen_items(task: Task, settings: OnlineSettings, book: SuccessBook, seed: int, iteration: int) -> list[int]:
    """Indices of training items, `trees_per_iteration` different ones.

    Raises:
        ConfigError: fewer items than trees, or a choice by learnability among items without end.
    """
    count, total = settings.trees_per_iteration, _num_items(task, settings)
    if total is None:
        return list(range(iteration * count, (iteration + 1) * count))
    if settings.task_choice == "learnability":
        names = {book_key(task, index): index for index in range(total)}
        rng = np.random.default_rng([seed, iteration, _CHOICE])
        return [names[name] for name in book.choose(list(names), count, rng)]
    chosen: list[int] = []
    at = iteration * count
    while len(chosen) < count:  # a pass may end within an iteration; an item that comes again at once is passed over
        order = np.random.default_rng([seed, at // total, _CHOICE]).permutation(total)
        index = int(order[at % total])
        if index not in chosen:
            chosen.append(index)
        at += 1
    return chosen


def book_key(task: Task, index: int) -> str:
    """How the book calls a training item."""
    return f"{task.name}/{index}"


def _num_items(task: Task, settings: OnlineSettings) -> int | None:
    of_task = task.num_items("train")
    sizes = [size for size in (of_task, settings.num_items) if size is not None]
    total = min(sizes, default=None)
    if total is None and settings.task_choice == "learnability":
        raise ConfigError(f"task_choice='learnability' needs num_items: {task.name} makes new items without end.")
    if total is not None and total < settings.trees_per_iteration:
        raise ConfigError(
            f"{task.name} has {total} training items, fewer than trees_per_iteration="
            f"{settings.trees_per_iteration}; the trees of an iteration are of different items."
        )
    return total
