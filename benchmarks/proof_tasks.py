"""The tasks of proof_rl.py: spelling a word backward behind solved examples, at once or a letter a turn.

A prompt holds some 500 characters, which are tokens here. In turns the policy gives a letter and gets + where it is
right, else -; the reward is the share of right letters. At once it is 1 for all letters right.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from bench_branching import texts_of_words, words
from tiny_policy import END, Parts

from treewise.rl.samplers import SampleRequest, TransformersSampler
from treewise.rl.tasks import EnvironmentTask, TaskItem
from treewise.rl.tasks.protocol import RewardRequest, Split

HELD_OUT = 96
Ids = list[int]
# One sample behind each list of tokens, with its end where it has one.
Sample = Callable[[list[Ids]], list[Ids]]


class Task(Protocol):
    """What proof_rl.py needs of a task.

    examples: of a prompt. tokens: generated for a sample, about. max_new_tokens: of a sample at most.
    """

    name: str
    examples: int
    tokens: int
    max_new_tokens: int

    def first_texts(self, rng: np.random.Generator) -> list[Parts]:
        """What is imitated first: no examples."""

    def texts(self, rng: np.random.Generator, examples: int) -> list[Parts]:
        """What is imitated then: every answer of a prompt, and that behind it."""

    def success(self, model: Any, tokenizer: Any, examples: int, count: int = HELD_OUT) -> float:
        """Mean reward of one sample at temperature 1 of each held-out question."""

    def for_trl(self, count: int, tokenizer: Any) -> dict[str, Any]:
        """What TRL's trainer is given: a dataset of so many prompts, a reward function, and how it samples."""

    def for_treewise(self, count: int) -> Any:
        """The task of `treewise rl`."""


def answered(word: str) -> str:
    """A solved example."""
    return f"w{word}={word[::-1]},"


def drawn(rng: np.random.Generator, count: int, split: Split = "train") -> list[str]:
    """So many words."""
    return [words(split)[int(number)] for number in rng.integers(0, len(words(split)), count)]


def samples_of(model: Any, tokenizer: Any, max_new_tokens: int) -> Sample:
    """treewise's sampler, whoever trains."""
    sampler, stop = TransformersSampler(model, max_rows=32), (tokenizer.eos_token_id,)

    def sample(prompts: list[Ids]) -> list[Ids]:
        requests = [
            SampleRequest(tuple(ids), max_new_tokens=max_new_tokens, seed=number, stop_ids=stop)
            for number, ids in enumerate(prompts)
        ]
        return [one.token_ids.tolist() for (one,) in sampler.sample(requests)]

    return sample


class AtOnce:
    """Words of 5 to 7 letters, spelled backward behind solved ones; the reward is 1 for all letters right."""

    name, examples, tokens, max_new_tokens = "backward", 34, 7, 9

    def first_texts(self, rng: np.random.Generator) -> list[Parts]:
        return texts_of_words(rng)

    def texts(self, rng: np.random.Generator, examples: int) -> list[Parts]:
        rows: list[Parts] = []
        for _ in range(272 // examples):
            *shown, last = drawn(rng, examples + 1)
            pairs = [part for word in shown for part in ((f"w{word}=", False), (f"{word[::-1]},", True))]
            rows.append([*pairs, (f"w{last}=", False), (last[::-1] + END, True)])
        return rows

    def prompt(self, split: Split, index: int, examples: int) -> tuple[str, str]:
        """A prompt, and its answer."""
        rng = np.random.default_rng([index, split == "held_out"])
        (word,) = drawn(rng, 1, split)
        return "".join(map(answered, drawn(rng, examples))) + f"w{word}=", word[::-1]

    def success(self, model: Any, tokenizer: Any, examples: int, count: int = HELD_OUT) -> float:
        prompts, answers = zip(*(self.prompt("held_out", index, examples) for index in range(count)), strict=True)
        found = samples_of(model, tokenizer, self.max_new_tokens)([encoded(tokenizer, each) for each in prompts])
        given = [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]
        return sum(text == answer for text, answer in zip(given, answers, strict=True)) / count

    def for_trl(self, count: int, tokenizer: Any) -> dict[str, Any]:
        def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
            return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

        pairs = [self.prompt("train", index, self.examples) for index in range(count)]
        return {"rows": [{"prompt": prompt, "answer": answer} for prompt, answer in pairs], "reward_funcs": reward}

    def for_treewise(self, count: int) -> Any:
        return self

    # What treewise's `Task` is:

    def num_items(self, split: Split) -> int | None:
        return None

    def item(self, split: Split, index: int) -> TaskItem:
        prompt, answer = self.prompt(split, index, self.examples)
        return TaskItem(f"{self.name}/{split}/{index}", ({"role": "user", "content": prompt},), {"answer": answer})

    def rewards(self, requests: list[RewardRequest]) -> list[float]:
        return [float(request.text == request.item.extra["answer"]) for request in requests]


class Letters:
    """An environment: a word is spelled backward, a letter each turn."""

    def reset(self, word: str) -> None:
        """Starts with a word."""
        self.letters, self.at, self.right = word[::-1], 0, 0

    @property
    def done(self) -> bool:
        """Whether all letters were given."""
        return self.at == len(self.letters)

    def put(self, letter: str) -> str:
        """Gives the next letter.

        Args:
            letter: The letter.
        """
        is_right = letter == self.letters[self.at]
        self.at, self.right = self.at + 1, self.right + is_right
        return "+" if is_right else "-"

    def get_reward(self) -> float:
        """The share of right letters."""
        return self.right / len(self.letters)

    def fork(self) -> "Letters":
        """A copy."""
        return copy.copy(self)


@dataclass
class Episode:
    """A word that is played. prompt: its tokens. ids: all tokens behind it; sampled: 1 for the policy's own."""

    prompt: Ids
    environment: Letters
    ids: Ids = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int], *, is_sampled: bool) -> None:
        """Tokens of a turn, or of its answer."""
        self.ids += ids
        self.sampled += [int(is_sampled)] * len(ids)


class InTurns:
    """The same a letter a turn; the answer to each letter is + or -."""

    name, examples, tokens, max_new_tokens = "letters", 19, 12, 24

    def first_texts(self, rng: np.random.Generator) -> list[Parts]:
        return [self.played(word) for word in drawn(rng, 24)]

    def texts(self, rng: np.random.Generator, examples: int) -> list[Parts]:
        rows: list[Parts] = []
        for _ in range(152 // examples):
            rows.append([part for word in drawn(rng, examples + 1) for part in self.played(word)])
        return rows

    def played(self, word: str) -> list[tuple[str, bool]]:
        """A word with all letters right."""
        return [(f"w{word}=", False), *((part, part != "+") for letter in word[::-1] for part in (letter + END, "+"))]

    def prompt(self, split: Split, index: int, examples: int) -> tuple[str, str]:
        """A prompt, and its word."""
        rng = np.random.default_rng([index, split == "held_out", 1])
        (word,) = drawn(rng, 1, split)
        shown = "".join(text for each in drawn(rng, examples) for text, _ in self.played(each))
        return f"{shown}w{word}=", word

    def play(self, questions: Sequence[tuple[str, str]], tokenizer: Any, sample: Sample) -> list[Episode]:
        """An episode of each prompt and its word, all turn by turn."""
        episodes = []
        for prompt, word in questions:
            episodes.append(Episode(encoded(tokenizer, prompt), Letters()))
            episodes[-1].environment.reset(word)
        while under_way := [each for each in episodes if not each.environment.done]:
            turns = sample([each.prompt + each.ids for each in under_way])
            for each, ids in zip(under_way, turns, strict=True):
                each.add(ids, is_sampled=True)
                told = each.environment.put(tokenizer.decode(ids, skip_special_tokens=True))
                if not each.environment.done:
                    each.add(encoded(tokenizer, told), is_sampled=False)
        return episodes

    def success(self, model: Any, tokenizer: Any, examples: int, count: int = HELD_OUT) -> float:
        questions = [self.prompt("held_out", index, examples) for index in range(count)]
        played = self.play(questions, tokenizer, samples_of(model, tokenizer, 3))
        return float(np.mean([each.environment.get_reward() for each in played]))

    def for_trl(self, count: int, tokenizer: Any) -> dict[str, Any]:
        questions = [self.prompt("train", index, self.examples) for index in range(count)]
        word_of = dict(questions)

        def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
            """As TRL's loop of tools: every turn is generated behind all that stands before it."""

            def sample(contexts: list[Ids]) -> list[Ids]:
                batch = tokenizer.pad({"input_ids": contexts}, padding_side="left", return_tensors="pt")
                with torch.no_grad():
                    found = trainer.model.generate(**batch, max_new_tokens=3, do_sample=True, top_k=0, temperature=1.0)
                rows = found[:, batch["input_ids"].shape[1] :].tolist()
                return [row[: row.index(end) + 1] if (end := tokenizer.eos_token_id) in row else row for row in rows]

            played = self.play([(each, word_of[each]) for each in prompts], tokenizer, sample)
            return {
                "prompt_ids": [each.prompt for each in played],
                "completion_ids": [each.ids for each in played],
                "env_mask": [each.sampled for each in played],
                "logprobs": None,
                "share_right": [each.environment.get_reward() for each in played],
            }

        def reward(share_right: list[float], **_: Any) -> list[float]:
            return share_right

        rows = [{"prompt": prompt} for prompt, _ in questions]
        return {"rows": rows, "reward_funcs": reward, "rollout_func": rollout}

    def for_treewise(self, count: int) -> Any:
        pairs = [self.prompt("train", index, self.examples) for index in range(count)]
        rows = [{"prompt": prompt, "word": word} for prompt, word in pairs]
        return EnvironmentTask(Letters, self.name, rows, max_turns=8, text_tool="put", held_out=0.0)


def encoded(tokenizer: Any, text: str) -> Ids:
    """The tokens of a text."""
    ids: Ids = tokenizer.encode(text, add_special_tokens=False)
    return ids


TASKS: dict[str, Task] = {"rl": AtOnce(), "turns": InTurns()}
