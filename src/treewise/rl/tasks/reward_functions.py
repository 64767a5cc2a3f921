"""Reward functions, called as TRL's `GRPOTrainer` calls them (TRL 1.16, `_calculate_rewards`).

A function gets a batch by keyword: `prompts`, `completions`, `completion_ids`, every column of the rows as a list,
`trainer_state`, `log_extra` and `log_metric`. Prompts and completions are texts where the prompt of the row is a text,
and messages where it is messages. It returns one number per completion, or None for "not applicable"; a reward is the
weighted sum of the functions that apply. Coroutine functions run side by side.
"""

import asyncio
import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treewise.data.io.field_checks import shown
from treewise.data.render.messages import Message
from treewise.errors import ConfigError, num, pip_install
from treewise.rl.tasks.calls import FailedCall, Job, found_by_name, place_of
from treewise.rl.tasks.protocol import RewardRequest
from treewise.tree.checks import MAX_FLOAT

RewardFunction = Callable[..., Any]
Value = float | None | FailedCall
NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # of rows; TRL leaves them out
TAKEN = ("prompts", "completions")  # names that a column cannot have


@dataclass(slots=True)
class Logged:
    """What functions log of a batch. columns: by `log_extra`, one value per rollout. metrics: by `log_metric`."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def log_extra(self, column: str, values: list[Any]) -> None:
        """Takes a column of values, one for each rollout, as TRL's trainer does."""
        self.columns.setdefault(str(column), []).extend(values)

    def log_metric(self, name: str, value: float) -> None:
        """Takes a value of a metric, as TRL's trainer does."""
        self.metrics.setdefault(str(name), []).append(float(value))

    def add(self, other: "Logged") -> None:
        """Takes in what another function logged."""
        self.columns |= other.columns
        for name, values in other.metrics.items():
            self.metrics.setdefault(name, []).extend(values)


@dataclass(frozen=True, slots=True)
class RewardFunctions:
    """The functions of a task, the first `num_plain` of which are no coroutine functions, and the weight of each."""

    functions: tuple[RewardFunction, ...]
    weights: tuple[float, ...]
    num_plain: int

    @classmethod
    def of(cls, given: Sequence[str | RewardFunction], weights: Sequence[float] | None, name: str) -> "RewardFunctions":
        """Callables, or `module:function`; name: of the task, for errors.

        Raises:
            ConfigError: no function, one that cannot be loaded or called, or other weights than functions.
        """
        if not given:
            raise ConfigError(f"task {name} has no reward function; give reward_functions: [module:function].")
        if weights is not None and len(weights) != len(given):
            raise ConfigError(f"task {name}: {len(weights)} reward_weights for {num(len(given), 'reward function')}.")
        if weights is not None and not all(
            isinstance(weight, int | float) and math.isfinite(weight) for weight in weights
        ):
            raise ConfigError(f"task {name}: reward_weights are {shown(list(weights))}; they must be finite numbers.")
        weighted = zip(map(loaded_function, given), weights or [1.0] * len(given), strict=True)
        functions, of_each = zip(*sorted(weighted, key=lambda pair: is_async(pair[0])), strict=True)
        return cls(functions, of_each, num_plain=len(functions) - sum(map(is_async, functions)))

    def jobs(self, requests: Sequence[RewardRequest], trainer_state: object = None) -> list[Job]:
        """The calls for a batch: one for each plain function, and one for all coroutine functions together."""
        batch = reward_arguments(requests) | {"trainer_state": trainer_state}
        plain, coroutines = self.functions[: self.num_plain], self.functions[self.num_plain :]
        jobs = [Job(_called, (function, batch), function) for function in plain]
        return jobs + ([Job(_called_together, (coroutines, batch), coroutines[0])] if coroutines else [])

    def rewards(self, requests: Sequence[RewardRequest]) -> list[float | None]:
        """The reward of each rollout, by calls here and now; None where a function failed or none answered."""
        rewards, _ = self.combined([job.function(*job.args) for job in self.jobs(requests)])
        return [reward if isinstance(reward, float) else None for reward in rewards]

    def combined(self, results: Sequence[Any]) -> tuple[list[float | FailedCall], Logged]:
        """The reward of each rollout, from what the jobs returned."""
        flat = [answer for result in results for answer in (result if isinstance(result, list) else [result])]
        logged = Logged()
        for function, (values, own) in zip(self.functions, flat, strict=True):
            logged.add(own)
            known = [value for value in values if isinstance(value, float)]
            if known:
                logged.log_metric(f"rewards/{name_of(function)}/mean", sum(known) / len(known))
        names = " and ".join(f"{place_of(function)}{name_of(function)}" for function in self.functions)
        rewards: list[float | FailedCall] = []
        for values in zip(*(values for values, _ in flat), strict=True):
            wrong = next((value for value in values if isinstance(value, FailedCall)), None)
            terms = [weight * v for v, weight in zip(values, self.weights, strict=True) if isinstance(v, float)]
            if wrong is not None:
                rewards.append(wrong)
            elif terms:
                rewards.append(number(sum(terms), f"the weighted sum of {names} is"))
            else:
                rewards.append(number(None, f"{names} returned"))
        return rewards, logged


def reward_arguments(requests: Sequence[RewardRequest]) -> dict[str, Any]:
    """What TRL's trainer passes of a batch: prompts, completions, ids, and the columns of the rows as lists. A
    completion is a text for a prompt that is a text, else its message in a list.
    """
    columns = [key for key in requests[0].item.extra if key not in NOT_COLUMNS]
    prompts: list[Any] = []
    completions: list[Any] = []
    for request in requests:
        prompt = request.item.prompt
        message = request.message or {"role": "assistant", "content": request.text}
        prompts.append(prompt if isinstance(prompt, str) else [dict(part) for part in prompt])
        completions.append(request.text if isinstance(prompt, str) else [dict(message)])
    return {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [list(request.token_ids) for request in requests],
        **{key: [request.item.extra.get(key) for request in requests] for key in columns},
    }


def loaded_function(function: str | RewardFunction) -> RewardFunction:
    """A callable, from `module:function`, `file.py:function` or itself.

    Raises:
        ConfigError: there is no such module or function, it cannot be loaded, or it is not callable.
    """
    target = found_by_name(function, "reward function") if isinstance(function, str) else function
    if not callable(target) or inspect.isclass(target):
        raise ConfigError(
            f"reward function {shown(function)} is of type {type(target).__name__}; give a function, or an object that "
            "can be called."
        )
    return target


def is_async(function: Any) -> bool:
    """Whether a call gives a coroutine: of functions, `functools.partial` and objects with an async `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)


def name_of(function: object) -> str:
    """A function's name as TRL shows it."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def number(value: object, where: str) -> float | FailedCall:
    """A reward as a float that float32 holds, or why it is none. where: `close returned`, for messages."""
    if value is None:
        return FailedCall("missing", f"{where} None (not applicable)")
    reward = None
    if not isinstance(value, str | bytes):
        with contextlib.suppress(Exception):  # what is no number raises of many kinds
            reward = float(value)  # type: ignore[arg-type]
    if reward is None:
        return FailedCall("not_a_number", f"{where} {shown(value)}, of type {type(value).__name__}")
    if not abs(reward) <= MAX_FLOAT:  # in float32 TRL holds rewards, too
        beyond = ", beyond float32 (3.4e38)" if math.isfinite(reward) else ""
        return FailedCall("not_a_number", f"{where} {reward}{beyond}")
    return reward


def _called(function: RewardFunction, batch: Mapping[str, Any]) -> tuple[list[Value], Logged]:
    logged, size = Logged(), len(batch["prompts"])
    result = function(**{**batch, "log_extra": logged.log_extra, "log_metric": logged.log_metric})
    return _values(function, result, size), logged


def _called_together(functions: Sequence[RewardFunction], batch: Mapping[str, Any]) -> list[tuple[list[Value], Logged]]:
    async def one(function: RewardFunction) -> tuple[list[Value], Logged]:
        logged, size = Logged(), len(batch["prompts"])
        result = await function(**{**batch, "log_extra": logged.log_extra, "log_metric": logged.log_metric})
        return _values(function, result, size), logged

    async def every() -> list[tuple[list[Value], Logged]]:
        return await asyncio.gather(*(one(function) for function in functions))

    return asyncio.run(every())


def _values(function: RewardFunction, result: Any, size: int) -> list[Value]:
    where = f"{place_of(function)}{name_of(function)} returned"
    if result is None or isinstance(result, str | bytes | Mapping | int | float):
        raise ValueError(
            f"{name_of(function)} returned {shown(result)}, of type {type(result).__name__}, in place of a list of "
            f"{size} rewards"
        )
    values = list(result)
    if len(values) != size:
        raise ValueError(f"{name_of(function)} returned {num(len(values), 'reward')} for {num(size, 'completion')}")
    return [None if value is None else number(value, where) for value in values]


def math_reward(completions: Sequence[Any], answer: Sequence[str], **_columns: object) -> list[float]:
    """A reward function of TRL's form: 1 where `math-verify` finds the completion equal to the column `answer`.

    Raises:
        ConfigError: `math-verify` is not installed.
        ValueError: an answer of the data that cannot be read as mathematics.
    """
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ConfigError(f"math_reward needs math-verify: {pip_install('math-verify')}.") from None
    rewards = []
    for completion, expected in zip(completions, answer, strict=True):
        # math-verify's own limits use signals, which threads cannot have; `Calls` has its own.
        gold = parse(str(expected), parsing_timeout=None)
        if not gold:
            raise ValueError(f"the answer {expected!r} cannot be read as mathematics")
        parsed = parse(completion_text(completion), parsing_timeout=None)
        rewards.append(float(verify(gold, parsed, timeout_seconds=None)))
    return rewards


def completion_text(completion: str | Sequence[Message]) -> str:
    """The text of a completion, a text or chat messages."""
    return completion if isinstance(completion, str) else "".join(str(m.get("content") or "") for m in completion)
