"""Trainers of TRL over tiny data, built twice: once as they are, once with the line."""

import random
from typing import Any

import pytest

from tests.integrations.trl.helpers import model_for_trl, settings, tiny_tokenizer, words


@pytest.fixture(autouse=True, scope="session")
def _quiet_datasets():
    import datasets

    datasets.disable_progress_bars()


def dataset(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset  # here, as the tests of this folder are skipped without it

    return Dataset.from_list(rows)


@pytest.fixture
def conversations() -> Any:
    """Four questions, three conversations each, that share a system prompt and the question."""
    rng = random.Random(0)
    system, rows = words(rng, 5, 8), []
    for _ in range(4):
        user = words(rng, 3, 6)
        for _ in range(3):
            first = {"role": "assistant", "content": words(rng, 2, 4)}
            rows.append(
                [
                    {"role": "system", "content": system},
                    {"role": "user", "content": user},
                    first,
                    {"role": "user", "content": words(rng, 1, 3)},
                    {"role": "assistant", "content": words(rng, 2, 7)},
                ]
            )
    return dataset([{"messages": messages} for messages in rows])


@pytest.fixture
def pairs() -> Any:
    rng = random.Random(1)
    return dataset(
        [
            {"prompt": words(rng, 6, 12), "chosen": f" {words(rng, 2, 6)}", "rejected": f" {words(rng, 2, 6)}"}
            for _ in range(8)
        ]
    )


@pytest.fixture
def unpaired() -> Any:
    """Two answers to each question, one of them wanted."""
    rng, rows = random.Random(2), []
    for _ in range(6):
        prompt = words(rng, 6, 12)
        rows += [{"prompt": prompt, "completion": f" {words(rng, 2, 6)}", "label": label} for label in (True, False)]
    return dataset(rows)


@pytest.fixture
def prompts() -> Any:
    rng = random.Random(3)
    return dataset([{"prompt": words(rng, 6, 12)} for _ in range(8)])


@pytest.fixture
def build(tmp_path: Any):
    """`build(SFTTrainer, SFTConfig, data, beta=0.1, ...)` makes a function that builds the same trainer each time.

    model: a path, or what makes one; a tiny model where not given. more: makes further arguments
    of the trainer.
    """

    def prepare(trainer: Any, config: Any, data: Any, *, model=None, peft=None, more=None, **changes):
        def make() -> Any:
            extra = more() if more else {}
            if peft is not None:
                extra["peft_config"] = peft()
            return trainer(
                model=model if isinstance(model, str) else (model or model_for_trl)(),
                args=config(**settings(tmp_path, **changes)),
                train_dataset=data,
                processing_class=tiny_tokenizer(),
                **extra,
            )

        return make

    return prepare
