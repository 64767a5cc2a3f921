"""Tasks of one turn: items are functions of split and index, and rewards are those of the source."""

from typing import Any

import pytest

from treewise.errors import ConfigError, DataError
from treewise.rl.tasks import ReasoningGymTask, RewardRequest, RowsTask, SingleTurnTask, SumTask
from treewise.rl.tasks.single_turn import ITEMS_PER_SEED, extracted_answer

ROWS = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(10)]


def exact(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float | None]:
    assert all(isinstance(prompt, str) for prompt in prompts)
    assert len(columns["completion_ids"]) == len(prompts)
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def never(prompts: list[Any], **_columns: Any) -> list[float | None]:
    return [None] * len(prompts)


def test_sums_are_split_and_rewarded() -> None:
    task = SumTask(num_terms=2, seed=1)
    assert isinstance(task, SingleTurnTask)
    questions = {s: {str(task.item(s, i).prompt) for i in range(200)} for s in ("train", "held_out")}
    assert not questions["train"] & questions["held_out"]
    item = task.item("train", 5)
    assert item == task.item("train", 5)
    answer = item.extra["answer"]
    texts = [answer, f"It is {answer}.", f"{answer} or 999", "none"]
    assert task.rewards([RewardRequest(item, text) for text in texts]) == [1, 1, 0, 0]
    with pytest.raises(ConfigError, match="max_number 3"):
        SumTask(max_number=3)


def test_rows_are_split_and_rewarded_by_functions_of_trls_form() -> None:
    task = RowsTask(ROWS, [exact, never], reward_weights=[2.0, 1.0], held_out=0.2)
    assert (task.num_items("train"), task.num_items("held_out")) == (8, 2)
    assert task.item("held_out", 0).key == "rows/row 8"
    assert task.item("train", 9) == task.item("train", 1)
    requests = [RewardRequest(task.item("train", i), text) for i, text in ((0, "1"), (1, "7"))]
    assert task.rewards(requests) == [2.0, 0.0]
    assert RowsTask(ROWS, [never]).rewards(requests) == [None, None]


def test_rows_that_cannot_be_practised() -> None:
    with pytest.raises(DataError, match="row 0 has no prompt; its columns are 'question'"):
        RowsTask([{"question": "?"}], [exact])
    for prompt, message in (
        (5, "a text or a list of messages, found 5"),
        (None, "found None"),
        ("", "the prompt is empty"),
        ([], "prompt is empty"),
        ([5], r"prompt\[0\] must be an object"),
        ([{"role": "robot", "content": "a"}], "has role 'robot'"),
        ([{"role": "user", "content": 5}], "content must be text"),
        ([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], "holds an image"),
    ):
        with pytest.raises(DataError, match=f"here:2.*{message}"):
            RowsTask([ROWS[0], {"prompt": prompt}], [exact], locations=["here:1", "here:2"])
    with pytest.raises(DataError, match="no column can have this name"):
        RowsTask([{"prompt": "a", "completions": 1}], [exact])
    with pytest.raises(ConfigError, match="no reward function"):
        RowsTask(ROWS, [])
    with pytest.raises(ConfigError, match="1 reward_weights for 2 reward functions"):
        RowsTask(ROWS, [exact, never], reward_weights=[1.0])
    with pytest.raises(DataError, match="no held_out rows"):
        RowsTask(ROWS, [exact], held_out=0.0).item("held_out", 0)
    requests = [RewardRequest(RowsTask(ROWS, [exact]).item("train", 0), "")]
    with pytest.raises(ValueError, match="returned 0 rewards for 1"):
        RowsTask(ROWS, [lambda **_: []]).rewards(requests)


def test_answers_stand_in_tags_or_in_the_last_line() -> None:
    assert extracted_answer("so <answer>1</answer> no, <answer> 4 </answer> yes") == "4"
    assert extracted_answer("a\n5\n\n") == "5"
    assert extracted_answer(" \n") is None


def test_reasoning_gym_items_and_verifier() -> None:
    pytest.importorskip("reasoning_gym")
    task = ReasoningGymTask("chain_sum", {"max_terms": 3, "max_digits": 2})
    assert isinstance(task, SingleTurnTask)
    item = task.item("train", 7)
    assert item == ReasoningGymTask("chain_sum", {"max_terms": 3, "max_digits": 2}).item("train", 7)
    assert item != task.item("held_out", 7)
    assert item != ReasoningGymTask("chain_sum", {"max_terms": 3, "max_digits": 2}, seed=1).item("train", 7)
    right = RewardRequest(item, f"<answer>{item.extra['answer']}</answer>")
    assert task.rewards([right, RewardRequest(item, "<answer>zero</answer>")])[0] == 1.0
    assert task.rewards([right, RewardRequest(item, "<answer>zero</answer>")])[1] < 1.0


def test_solved_examples_stand_before_the_question() -> None:
    pytest.importorskip("reasoning_gym")
    task = ReasoningGymTask("chain_sum", {"max_terms": 3}, instruction="", solved_examples=2)
    first, second = task.item("train", 0).prompt, task.item("held_out", 0).prompt
    assert [each["role"] for each in first] == ["user", "assistant"] * 2 + ["user"]
    assert first[:4] == second[:4]
    assert first[4] == ReasoningGymTask("chain_sum", {"max_terms": 3}, instruction="").item("train", 0).prompt[0]
    entry = task.item("train", 0).extra["entry"]
    assert entry["question"] == first[4]["content"]
    with pytest.raises(ConfigError, match="solved_examples"):
        ReasoningGymTask("chain_sum", solved_examples=-1)


def test_reasoning_gym_blocks_do_not_repeat_items() -> None:
    pytest.importorskip("reasoning_gym")
    task = ReasoningGymTask("chain_sum", {"min_terms": 5, "max_terms": 6, "min_digits": 4, "max_digits": 4})
    around = [task.item("train", i).prompt[0]["content"] for i in (0, 1, 2, *range(ITEMS_PER_SEED, ITEMS_PER_SEED + 3))]
    assert len(set(around)) == 6


def test_reasoning_gym_settings_that_cannot_be() -> None:
    pytest.importorskip("reasoning_gym")
    for name, settings in (("no_such_task", {}), ("chain_sum", {"max_term": 3}), ("chain_sum", {"seed": 3})):
        with pytest.raises(ConfigError, match="reasoning_gym:"):
            ReasoningGymTask(name, settings)
