"""Tasks by the names that configurations give them."""

import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treewise.data.io.field_checks import printable, shown
from treewise.data.io.files import SUFFIXES, PartialTailError, find_files, parsed_object, stem
from treewise.data.sources import read_records
from treewise.errors import ConfigError, DataError, TreewiseError
from treewise.rl import tasks
from treewise.rl.tasks.calls import described, found_by_name
from treewise.rl.tasks.protocol import SingleTurnTask, Task, TurnTask

_GYM = "reasoning_gym:"
_OF_OTHERS = {
    "textarena": "textarena_games:textarena_task",
    "verifiers": "verifiers_env.tasks:verifiers_task",
    "openenv": "openenv_server:openenv_task",
}
FORMS = (
    "reasoning_gym:NAME, verifiers:NAME, textarena:GAME, openenv:URL, sum, a file of rows (.jsonl, .json, .parquet, "
    "with reward_functions), module:name or file.py:name (a task, a function that makes one, or an environment class)"
)


def task_named(
    name: str,
    settings: Mapping[str, Any] | None = None,
    reward_functions: Sequence[str] = (),
    seed: int = 0,
    reward_weights: Sequence[float] | None = None,
    *,
    is_for_agent: bool = False,
) -> Task:
    """The task of a configuration.

    Parameters:
        name: one of `FORMS`.
        settings: of the task: difficulty of a reasoning_gym task, arguments of a function or environment.
        reward_functions, reward_weights: `module:function` and what each counts, of rows.
        seed: other seeds make other items, where items are made.
        is_for_agent: rows are tasks of an agent, whatever their columns.

    Raises:
        ConfigError: an unknown form, or settings that the task does not take.
        DataError: rows that cannot be read.
    """
    given = dict(settings or {})
    is_rows = name.endswith(SUFFIXES) or Path(name).is_dir()
    if is_for_agent and not is_rows:
        raise ConfigError(f"tasks={shown(name)}: with an agent give a file of rows ({', '.join(SUFFIXES)}).")
    if not is_rows and ":" not in name and name != "sum":
        raise ConfigError(f"tasks={shown(name)} is not a task; give {FORMS}.")
    if not is_rows and (reward_functions or reward_weights):
        raise ConfigError(f"tasks={name!r} rewards itself; reward_functions and reward_weights are of files of rows.")
    try:
        if name.startswith(_GYM):
            words = {key: given.pop(key) for key in ("instruction", "solved_examples") if key in given}
            return tasks.ReasoningGymTask(name.removeprefix(_GYM), given, seed=seed, **words)
        package, _, rest = name.partition(":")
        if package in _OF_OTHERS and rest:
            module, _, function = _OF_OTHERS[package].partition(":")
            make = getattr(importlib.import_module(f"treewise.rl.tasks.of_others.{module}"), function)
            task: Task = make(rest, **given)
            return task
        if name == "sum":
            return tasks.SumTask(seed=seed, **given)
        if is_rows:
            rows, locations, own = _rows(name)
            if is_for_agent:
                from treewise.rl.tasks.agent_task import AgentTask

                return AgentTask(rows, reward_functions, reward_weights, name=own, **given)
            return tasks.RowsTask(rows, list(reward_functions), reward_weights, name=own, locations=locations, **given)
        return _made(name, found_by_name(name, "task"), given)
    except TypeError as error:
        raise ConfigError(f"tasks={name!r} with {given}: {error}") from None


def _made(name: str, found: Any, settings: dict[str, Any]) -> Task:
    is_environment = isinstance(found, type) and hasattr(found, "reset") and hasattr(found, "get_reward")
    if is_environment:
        own = {key: settings.pop(key) for key in list(settings) if key in tasks.EnvironmentTask.__slots__}
        return tasks.EnvironmentTask(functools.partial(found, **settings), **{"name": name, **own})
    if not callable(found):
        raise ConfigError(f"tasks={name!r} is of type {type(found).__name__}; give {FORMS}.")
    try:
        made = found(**settings)
    except (TreewiseError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a function of the user's may raise anything, SystemExit included
        raise ConfigError(f"tasks={name!r} with {settings}: {described(error, found)}") from error
    if not isinstance(made, SingleTurnTask | TurnTask):
        raise ConfigError(
            f"tasks={name!r} makes something of type {type(made).__name__}, which is not a task: an environment has "
            "reset and get_reward, a task num_items, item and rewards (docs/online-rl.md, Which tasks are there)."
        )
    return made


def _rows(name: str) -> tuple[list[dict[str, Any]], list[str], str]:
    """The rows of a file or a folder, where each stands, and what they are called."""
    files = find_files([name])
    records = [record for file in files for record in read_records(file)]
    try:
        rows = [{key: _plain(value) for key, value in parsed_object(record).items()} for record in records]
    except PartialTailError:
        raise DataError(f"{records[-1].location}: the last line is cut off; write it again or remove it.") from None
    if not rows:
        raise DataError(f"{printable(name)}: no rows.")
    locations = [record.location for record in records]
    return rows, locations, printable(stem(files[0])) if len(files) == 1 else printable(Path(name).name)


def _plain(value: object) -> object:
    """A value of a column as TRL's trainers get it: lists, not arrays."""
    return value.tolist() if isinstance(value, np.ndarray) else value
