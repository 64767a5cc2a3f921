"""What a curriculum by angles does before the first iteration: angles of the items, and the self-check of some."""

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError
from treewise.experimental.gain.self_check import CheckReport as CheckReport
from treewise.experimental.gain.self_check import check_angles
from treewise.experimental.gain.signals import angles_of as angles_of  # for the loop, too
from treewise.objectives import Objective
from treewise.rl.curriculum import Curriculum, TaskSampler
from treewise.rl.online.collector import Group
from treewise.rl.online.journal import journals
from treewise.rl.online.records import write_check
from treewise.tree.trajectory import Trajectory

logger = logging.getLogger("treewise")


def begin_angles(items: TaskSampler, prompts: Sequence[Sequence[int]], engine: TreeEngine) -> None:
    """Gives the sampler of items the angles of all prompts."""
    found = angles_of(engine, prompts)
    items.begin(found.total.tolist(), found.num_shared)


def items_to_check(items: TaskSampler, count: int, stream: int) -> list[int]:
    """Which items are checked, by the seed of the run. stream: names the random stream."""
    rng = np.random.default_rng([items.seed, stream])
    chosen = np.arange(count) if items.size is None else rng.permutation(items.size)[:count]
    found: list[int] = chosen.tolist()
    return found


def checked(
    groups: Sequence[Group],
    items: TaskSampler,
    engine: TreeEngine,
    objective: Objective,
    credited: Callable[[list[Trajectory]], list[Trajectory]],
) -> CheckReport:
    """The angles of groups' prompts against the norms of their gradients. Raises as `check_angles`."""
    return check_angles(
        [group.rows for group in groups],
        [group.prompt_ids for group in groups],
        engine,
        objective,
        credited,
        num_tokens=sum(group.num_sampled for group in groups),
        num_shared=items.memory.get("num_shared"),
    )


def told(report: CheckReport, curriculum: Curriculum, folder: Path | None) -> None:
    """Writes the report into the run's folder, and prints it. folder: None where another process does.

    Raises:
        ConfigError: angles are useless here, and the curriculum is not forced.
    """
    if folder is not None:
        write_check(folder, curriculum.name, report.to_dict())
        sys.stdout.write(f"{report.text()}\n")
    reason = report.refusal()
    if reason is None:
        return
    if not curriculum.settings.force:
        for path in journals(folder) if folder is not None else ():  # nothing to resume
            path.unlink()
        raise ConfigError(f"{reason} Choose another, or force it: curriculum_settings.force=true.")
    logger.warning("%s", reason)
