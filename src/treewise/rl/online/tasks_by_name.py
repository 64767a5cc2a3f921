"""Tasks by the names that configurations give them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treewise.errors import ConfigError, DataError
from treewise.rl.tasks import EnvironmentTask, ReasoningGymTask, RowsTask, SumTask
from treewise.rl.tasks.protocol import SingleTurnTask, Task, TurnTask
from treewise.rl.tasks.single_turn import loaded_function

_GYM = "reasoning_gym:"
FORMS = (
    "reasoning_gym:NAME, sum, rows.jsonl (with reward_functions), module:name or file.py:name (a task, a function that "
    "makes one, or an environment class)"
)


def task_named(
    name: str, settings: Mapping[str, Any] | None = None, reward_functions: Sequence[str] = (), seed: int = 0
) -> Task:
    """The task of a configuration.

    Parameters:
        name: one of `FORMS`.
        settings: of the task: difficulty of a reasoning_gym task, arguments of a function or environment.
        reward_functions: `module:function`, of rows.
        seed: other seeds make other items, where items are made.

    Raises:
        ConfigError: an unknown form, or settings that the task does not take.
        DataError: rows that cannot be read.
    """
    given = dict(settings or {})
    try:
        if name.startswith(_GYM):
            own = {key: given.pop(key) for key in ("instruction", "solved_examples") if key in given}
            return ReasoningGymTask(name.removeprefix(_GYM), given, seed=seed, **own)
        if name == "sum":
            return SumTask(seed=seed, **given)
        if name.endswith((".jsonl", ".json")):
            return RowsTask(_rows(Path(name)), list(reward_functions), name=Path(name).stem, **given)
        if ":" not in name:
            raise ConfigError(f"tasks={name!r} is not a task; give {FORMS}.")
        return _made(name, loaded_function(name), given)
    except TypeError as error:
        raise ConfigError(f"tasks={name!r} with {given}: {error}") from None


def _made(name: str, found: Any, settings: dict[str, Any]) -> Task:
    is_environment = isinstance(found, type) and hasattr(found, "reset") and hasattr(found, "get_reward")
    if is_environment:
        own = {key: settings.pop(key) for key in list(settings) if key in EnvironmentTask.__slots__}
        return EnvironmentTask(lambda: found(**settings), **{"name": name, **own})
    made = found(**settings)
    if not isinstance(made, SingleTurnTask | TurnTask):
        raise ConfigError(f"tasks={name!r} makes a {type(made).__name__}, which is not a task; see docs/online-rl.md.")
    return made


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"tasks: {path}: no such file.")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not valid JSON ({error}).") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: a row must be an object, not {type(row).__name__}.")
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: no rows.")
    return rows
