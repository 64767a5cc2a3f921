"""Tasks of one turn: reasoning_gym, rows of a data set, and a sum of our own that needs nothing."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from treewise.data.io.field_checks import shown
from treewise.data.io.files import refuse_half_pairs
from treewise.data.render.messages import IMAGES, Message, clean_conversation
from treewise.errors import ConfigError, DataError, pip_install
from treewise.rl.tasks.protocol import RewardRequest, Split, TaskItem, check_held_out, row_of_split, rows_of_split
from treewise.rl.tasks.reward_functions import NOT_COLUMNS, TAKEN, RewardFunction, RewardFunctions

# Seeds of reasoning_gym: held-out items come from their own half of the numbers, so no setting can make them meet.
HELD_OUT_SEED = 1 << 30
ITEMS_PER_SEED = 1 << 10
FIRST_EXAMPLE = 1 << 19  # index of the first training item that is shown solved; runs practise those before it
ANSWER_HINT = "Give the final answer between <answer> and </answer>."


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
        messages = [message for example in examples for message in (self._question(example), _answer(example))]
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
    """Rows with a `prompt`, rewarded by functions of TRL's form; see `treewise.rl.tasks.reward_functions`.

    Parameters:
        rows: each with `prompt`, chat messages or a text; a text is continued as it stands, as in TRL. Other columns go
            to the reward functions as lists, with None where a row lacks one.
        reward_functions: callables or `module:function`. A reward is their weighted sum; None counts as no answer of
            that function, and a rollout that no function rewards has none.
        reward_weights: of the functions, 1 by default.
        held_out: the share of rows, taken from the end, that is never practised.
        locations: of the rows, for errors, as `rows.jsonl:3`.

    Raises:
        ConfigError: a reward function that cannot be loaded, weights or a share that cannot be.
        DataError: a row without a prompt that a model can continue.
    """

    rows: Sequence[Mapping[str, Any]]
    reward_functions: Sequence[str | RewardFunction]
    reward_weights: Sequence[float] | None = None
    held_out: float = 0.1
    name: str = "rows"
    locations: Sequence[str] | None = None
    functions: RewardFunctions = field(init=False, repr=False)
    _columns: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_held_out(self.name, self.held_out)
        self.functions = RewardFunctions.of(self.reward_functions, self.reward_weights, self.name)
        for index, row in enumerate(self.rows):
            _check_row(row, self.locations[index] if self.locations else f"{self.name}: row {index}")
        self._columns = tuple(dict.fromkeys(key for row in self.rows for key in row if key not in NOT_COLUMNS))

    def num_items(self, split: Split) -> int:
        """Rows of a split."""
        return len(rows_of_split(len(self.rows), self.held_out, split))

    def item(self, split: Split, index: int) -> TaskItem:
        """See `SingleTurnTask`; an index beyond the rows begins again."""
        number = row_of_split(self.name, len(self.rows), self.held_out, split, index)
        row = self.rows[number]
        prompt = row["prompt"] if isinstance(row["prompt"], str) else tuple(row["prompt"])
        return TaskItem(f"{self.name}/row {number}", prompt, {key: row.get(key) for key in self._columns})

    def rewards(self, requests: Sequence[RewardRequest]) -> list[float | None]:
        """Weighted sums, without what guards a run; `RewardRunner` calls the functions themselves."""
        return self.functions.rewards(requests)


def _check_row(row: Mapping[str, Any], location: str) -> None:
    if "prompt" not in row:
        raise DataError(f"{location} has no prompt; its columns are {', '.join(map(shown, row)) or 'none'}.")
    taken = [key for key in TAKEN if key in row]
    if taken:
        raise DataError(f"{location}: reward functions get {taken[0]} of the run, so no column can have this name.")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{location}: the prompt is empty; a model needs a token to continue.")
        refuse_half_pairs(prompt, f"{location}: prompt")
        return
    if not isinstance(prompt, list | tuple):
        raise DataError(f"{location}: the prompt must be a text or a list of messages, found {shown(prompt)}.")
    talk = clean_conversation(list(prompt), location, "prompt")
    if any(IMAGES in message for message in talk.messages):
        raise DataError(f"{location}: the prompt holds an image; rollouts are sampled from text alone.")


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
