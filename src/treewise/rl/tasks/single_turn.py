"""Tasks of one turn: reasoning_gym, rows of a data set, and a sum of our own that needs nothing."""

import importlib.util
import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from treewise.errors import ConfigError, DataError, pip_install
from treewise.rl.tasks.protocol import Message, RewardRequest, Split, TaskItem

# Seeds of reasoning_gym: held-out items come from their own half of the numbers, so no setting can make them meet.
HELD_OUT_SEED = 1 << 30
ITEMS_PER_SEED = 1 << 10
FIRST_EXAMPLE = 1 << 19  # index of the first training item that is shown solved; runs practise those before it
ANSWER_HINT = "Give the final answer between <answer> and </answer>."

RewardFunction = Callable[..., Sequence[float | None]]


@dataclass(slots=True)
class ReasoningGymTask:
    """A procedural task of the `reasoning-gym` package with its verifier. Needs the extra `rl`.

    Parameters:
        task: the name in the package, as `chain_sum`.
        settings: of its difficulty, as `{"max_terms": 3}`.
        seed: other seeds, other items, of both splits.
        instruction: follows every question; the answer is what stands in `<answer>` tags, else the last line.
        solved_examples: so many questions with their answers, the same for all items, stand before each question as
            turns of a chat; with them small models know the form of an answer.
    """

    task: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    instruction: str = ANSWER_HINT
    solved_examples: int = 0
    name: str = ""
    _datasets: dict[int, Any] = field(default_factory=dict, repr=False)
    _scorer: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.name = self.name or f"reasoning_gym:{self.task}"
        if "seed" in self.settings or "size" in self.settings:
            raise ConfigError(f"{self.name}: seed and size are not settings of difficulty; give seed= beside them.")
        if not 0 <= self.seed < 1 << 10:
            raise ConfigError(f"{self.name}: seed is {self.seed}; it must be in 0..1023.")
        if self.solved_examples < 0:
            raise ConfigError(f"{self.name}: solved_examples is {self.solved_examples}; it must not be negative.")
        self._scorer = self._block("train", 0)  # unknown names and settings are errors now

    def num_items(self, split: Split) -> int | None:
        """None: items are made as they are asked for."""
        del split
        return None

    def item(self, split: Split, index: int) -> TaskItem:
        """See `SingleTurnTask`."""
        entry = self._entry(split, index)
        examples = [self._entry("train", FIRST_EXAMPLE + number) for number in range(self.solved_examples)]
        messages = [each for example in examples for each in (self._question(example), _answer(example))]
        extra = {"entry": entry, "answer": entry["answer"]}
        return TaskItem(f"{self.name}/{split}/{index}", (*messages, self._question(entry)), extra)

    def rewards(self, requests: Sequence[RewardRequest]) -> list[float]:
        """The package's own verifier."""
        score = self._scorer.score_answer
        return [float(score(extracted_answer(r.text), r.item.extra["entry"])) for r in requests]

    def _question(self, entry: Mapping[str, Any]) -> Message:
        text = f"{entry['question']}\n{self.instruction}" if self.instruction else entry["question"]
        return {"role": "user", "content": text}

    def _entry(self, split: Split, index: int) -> Any:
        return self._block(split, index // ITEMS_PER_SEED)[index % ITEMS_PER_SEED]

    def _block(self, split: Split, number: int) -> Any:
        """Items of one seed of the package; a seed belongs to one split."""
        # The package seeds item i of a data set with seed + i, so blocks must lie as far apart as they are long.
        seed = (HELD_OUT_SEED if split == "held_out" else 0) + (self.seed << 20) + number * ITEMS_PER_SEED
        if seed not in self._datasets:
            try:
                import reasoning_gym
            except ImportError:
                raise ConfigError(f"{self.name} needs reasoning-gym: {pip_install('reasoning-gym')}.") from None
            try:
                dataset = reasoning_gym.create_dataset(self.task, seed=seed, size=ITEMS_PER_SEED, **dict(self.settings))
            except (ValueError, TypeError, AssertionError) as error:
                raise ConfigError(f"{self.name} with {dict(self.settings)}: {error}") from None
            self._datasets = dict(list(self._datasets.items())[-3:]) | {seed: dataset}
        return self._datasets[seed]


def _answer(entry: Mapping[str, Any]) -> Message:
    return {"role": "assistant", "content": str(entry["answer"])}


def extracted_answer(text: str) -> str | None:
    """What stands in the last `<answer>` tags, else the last line that is not empty; None where there is none."""
    _, opening, rest = text.rpartition("<answer>")
    if opening:
        return rest.partition("</answer>")[0].strip() or None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


@dataclass(slots=True)
class RowsTask:
    """Rows with a `prompt`, rewarded by functions of TRL's form, `reward(prompts, completions, **columns)`.

    Parameters:
        rows: each with `prompt`, a text or chat messages; other columns go to the reward functions as lists.
        reward_functions: callables or `module:function`. A reward is their weighted sum; None counts as no answer of
            that function, and a rollout that no function rewards has none.
        weights: of the functions, 1 by default.
        held_out: the share of rows, taken from the end, that is never practised.
    """

    rows: Sequence[Mapping[str, Any]]
    reward_functions: Sequence[str | RewardFunction]
    weights: Sequence[float] | None = None
    held_out: float = 0.1
    name: str = "rows"
    _functions: list[RewardFunction] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if not self.reward_functions:
            raise ConfigError(f"task {self.name} has no reward function; give module:function.")
        if self.weights is not None and len(self.weights) != len(self.reward_functions):
            raise ConfigError(
                f"task {self.name}: {len(self.weights)} weights for {len(self.reward_functions)} reward functions."
            )
        if not 0.0 <= self.held_out < 1.0:
            raise ConfigError(f"task {self.name}: held_out is {self.held_out}; it must be in [0, 1).")
        self._functions = [loaded_function(each) for each in self.reward_functions]
        for index, row in enumerate(self.rows):
            if "prompt" not in row:
                raise DataError(f"{self.name}: row {index} has no prompt; its columns are {', '.join(row)}.")

    def num_items(self, split: Split) -> int:
        """Rows of a split."""
        num = round(len(self.rows) * self.held_out)
        return num if split == "held_out" else len(self.rows) - num

    def item(self, split: Split, index: int) -> TaskItem:
        """See `SingleTurnTask`; an index beyond the rows begins again."""
        size = self.num_items(split)
        if not size:
            raise DataError(f"{self.name}: no {split} rows of {len(self.rows)} with held_out={self.held_out}.")
        number = index % size + (self.num_items("train") if split == "held_out" else 0)
        row = self.rows[number]
        prompt = row["prompt"]
        messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
        extra = {key: value for key, value in row.items() if key != "prompt"}
        return TaskItem(f"{self.name}/row {number}", messages, extra)

    def rewards(self, requests: Sequence[RewardRequest]) -> list[float | None]:
        """Weighted sums. Completions are given as TRL gives them: a text for a text prompt is wrapped as messages."""
        prompts = [list(request.item.prompt) for request in requests]
        completions = [[{"role": "assistant", "content": request.text}] for request in requests]
        columns = {key: [r.item.extra.get(key) for r in requests] for r in requests for key in r.item.extra}
        ids = [list(request.token_ids) for request in requests]
        totals: list[float | None] = [None] * len(requests)
        for function, weight in zip(self._functions, self.weights or [1.0] * len(self._functions), strict=True):
            values = function(prompts=prompts, completions=completions, completion_ids=ids, **columns)
            if len(values) != len(requests):
                raise ValueError(f"{_name(function)} returned {len(values)} rewards for {len(requests)} completions")
            for index, value in enumerate(values):
                if value is not None:
                    totals[index] = (totals[index] or 0.0) + weight * float(value)
        return totals


def math_reward(completions: Sequence[Any], answer: Sequence[str], **_columns: Any) -> list[float]:
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
        # math-verify's own limits use signals, which threads cannot have; RewardRunner has its own.
        gold = parse(str(expected), parsing_timeout=None)
        if not gold:
            raise ValueError(f"the answer {expected!r} cannot be read as mathematics")
        parsed = parse(completion_text(completion), parsing_timeout=None)
        rewards.append(float(verify(gold, parsed, timeout_seconds=None)))
    return rewards


def completion_text(completion: Any) -> str:
    """The text of a completion, a text or chat messages."""
    return completion if isinstance(completion, str) else "".join(str(m.get("content") or "") for m in completion)


@dataclass(slots=True)
class SumTask:
    """Sums of small numbers. Needs nothing beyond Python; for tests, examples and benchmarks.

    The reward is 1 for the right number as the last one of the completion, else 0.
    """

    num_terms: int = 2
    max_number: int = 9
    seed: int = 0
    name: str = "sum"

    def __post_init__(self) -> None:
        if self.num_terms < 2 or self.max_number < 9:
            raise ConfigError(
                f"{self.name}: num_terms is {self.num_terms} (at least 2) and max_number {self.max_number} "
                "(at least 9); with fewer questions none are left for evaluation."
            )

    def num_items(self, split: Split) -> int | None:
        """None: items never end. A fifth of all questions is held out, by a hash of their numbers."""
        del split
        return None

    def item(self, split: Split, index: int) -> TaskItem:
        """See `SingleTurnTask`."""
        draw = np.random.default_rng([self.seed, index, split == "held_out"])
        while True:
            numbers = [int(n) for n in draw.integers(0, self.max_number + 1, self.num_terms)]
            question = " + ".join(map(str, numbers)) + " ="
            if (zlib.crc32(question.encode()) % 5 == 0) == (split == "held_out"):
                break
        return TaskItem(
            f"{self.name}/{split}/{index}", ({"role": "user", "content": question},), {"answer": str(sum(numbers))}
        )

    def rewards(self, requests: Sequence[RewardRequest]) -> list[float]:
        """1 for the right sum."""
        rewards = []
        for request in requests:
            words = "".join(c if c.isdigit() else " " for c in request.text).split()
            rewards.append(float(bool(words) and words[-1] == request.item.extra["answer"]))
        return rewards


def loaded_function(function: str | RewardFunction) -> RewardFunction:
    """A callable, from `module:function`, `file.py:function` or itself.

    Raises:
        ConfigError: there is no such module or function.
    """
    if callable(function):
        return function
    location, _, name = function.rpartition(":")
    if not location or not name:
        raise ConfigError(f"reward function {function!r} must be written module:function.")
    try:
        target = getattr(_module(location), name)
    except ImportError as error:
        raise ConfigError(f"reward function {function!r}: {error}") from error
    except AttributeError:
        raise ConfigError(f"reward function {function!r}: {location} has no {name!r}.") from None
    if not callable(target) or inspect.iscoroutinefunction(target):
        raise ConfigError(f"reward function {function!r} must be a plain function.")
    return target


def _module(location: str) -> Any:
    if not location.endswith(".py"):
        return importlib.import_module(location)
    path = Path(location).expanduser()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"{path} is not a file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
