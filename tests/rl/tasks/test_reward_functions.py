"""Reward functions get what TRL's GRPOTrainer passes, and their sums are TRL's."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest

from tests.rl.online.helpers import TOKENIZER, tiny_policy
from treewise.data.render.template import CHATML
from treewise.errors import ConfigError
from treewise.rl.online.rollout import OneTurn, start
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.tasks import Calls, RewardFailure, RewardRequest, RewardRunner, RowsTask
from treewise.rl.tasks.reward_functions import is_async, loaded_function, math_reward

TEXTS = [{"prompt": f"n{i}", "answer": i, "tags": ["a", str(i)], "note": None} for i in range(8)]
MESSAGES = [{"answer": i, "prompt": [{"role": "user", "content": f"n{i}"}]} for i in range(8)]


def requests_of(task: RowsTask, *texts: str) -> list[RewardRequest]:
    return [RewardRequest(task.item("train", i), text, (1, 2)) for i, text in enumerate(texts)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("rows", [TEXTS, MESSAGES], ids=["texts", "messages"])
def test_arguments_are_those_of_trls_trainer(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    recorded: list[dict[str, Any]] = []

    def record(**given: Any) -> list[float]:
        recorded.append(given)
        return [1.0] * len(given["prompts"])

    args = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=6,
        max_steps=1,
        **{"use_cpu": True, "report_to": "none", "save_strategy": "no", "bf16": False, "disable_tqdm": True},
    )
    dataset = datasets.Dataset.from_list(rows)
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = CHATML
    trainer = trl.GRPOTrainer(
        tiny_policy(), reward_funcs=record, train_dataset=dataset, processing_class=tokenizer, args=args
    )
    trainer.train()
    theirs = recorded[0]
    task = RowsTask(rows, [record], held_out=0.0)
    runner = RewardRunner(trainer_state=trainer.state)
    requests = []
    for answer, ids in zip(theirs["answer"], theirs["completion_ids"], strict=True):
        turn = start(task, [task.item("train", answer)], ChatTokens(tokenizer), Calls())[0]
        assert isinstance(turn, OneTurn)
        turn.extend(ids)
        requests.append(turn.request())
    runner.rewards(task, requests)
    ours = recorded[-1]
    assert len(recorded) == 2
    assert list(ours) == list(theirs)
    for name in theirs:
        if name in ("log_extra", "log_metric"):
            ours[name]("name", [1.0] * 4 if name == "log_extra" else 1.0)
        elif name == "trainer_state":
            assert type(ours[name]) is type(theirs[name])
        else:
            assert ours[name] == theirs[name], name
            assert type(ours[name][0]) is type(theirs[name][0])


@pytest.mark.parametrize(
    ("name", "make", "columns", "text", "expected"),
    [
        ("think_format_reward", False, {}, "<think>\na\n</think>\nb", [1.0, 0.0]),
        ("accuracy_reward", False, {"solution": "$3$"}, "so \\boxed{3}", [1.0, 0.0]),
        ("reasoning_accuracy_reward", False, {"solution": "$3$"}, "</think> \\boxed{3}", [1.0, 0.0]),
        ("get_cosine_scaled_reward", {"max_len": 4}, {"solution": "$3$"}, "\\boxed{3}", [0.75, -0.75]),
        ("get_repetition_penalty_reward", {"ngram_size": 1}, {}, "a", [0.0, 0.0]),
        ("get_soft_overlong_punishment", {"max_completion_len": 2, "soft_punish_cache": 1}, {}, "a", [-1.0, -1.0]),
    ],
)
def test_functions_of_trl(name: str, make: Any, columns: dict[str, str], text: str, expected: list[float]) -> None:
    rewards = pytest.importorskip("trl.rewards")
    pytest.importorskip("math_verify")
    function = getattr(rewards, name)(**make) if make else getattr(rewards, name)
    rows = [{"prompt": [{"role": "user", "content": "1 + 2?"}], **columns}] * 2
    task = RowsTask(rows, [function], held_out=0.0)
    outcomes, logged = RewardRunner().rewards(task, requests_of(task, text, "no"))
    assert outcomes == pytest.approx(expected)
    if name == "reasoning_accuracy_reward":
        assert logged.columns["solution"] == ["$3$", "$3$"]


def test_sums_are_weighted_over_the_functions_that_apply(tmp_path: Path) -> None:
    async def even(answer: list[int], **_: Any) -> list[float | None]:
        return [1.0 if each % 2 == 0 else None for each in answer]

    def first(answer: list[int], log_extra: Any, log_metric: Any, **_: Any) -> list[float | None]:
        log_extra("seen", answer)
        log_metric("count", len(answer))
        return [0.5 if each == 0 else None for each in answer]

    class Async:
        async def __call__(self, **_: Any) -> list[float]:
            return []

    assert is_async(functools.partial(even)) and is_async(Async()) and not is_async(first)  # noqa: PT018
    task = RowsTask(TEXTS, [even, first], [10.0, 1.0], held_out=0.0)
    runner = RewardRunner(extras=tmp_path / "log.jsonl")
    outcomes, logged = runner.rewards(task, requests_of(task, "", "", ""))
    assert outcomes[0] == 10.5
    assert outcomes[2] == 10.0
    assert isinstance(outcomes[1], RewardFailure)
    assert outcomes[1].kind == "missing"
    assert logged.metrics == {"count": [3.0], "rewards/even/mean": [1.0], "rewards/first/mean": [0.5]}
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3


def test_columns_that_a_row_lacks_are_none() -> None:
    seen: dict[str, Any] = {}
    rows = [{"prompt": "a", "one": 1}, {"prompt": "b", "two": 2}]
    task = RowsTask(rows, [lambda **given: seen.update(given) or [1.0, 1.0]], held_out=0.0)
    RewardRunner().rewards(task, requests_of(task, "", ""))
    assert (seen["one"], seen["two"]) == ([1, None], [None, 2])


def test_columns_of_reserved_names_and_functions_that_change_their_arguments() -> None:
    def clears(prompts: list[str], completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("seen", list(completions))
        prompts.clear()
        completions.clear()
        return []

    row = {"prompt": "a", "log_extra": 1, "trainer_state": 2, "completion": 3, "completion_ids": 4, "self": 5}
    task = RowsTask([row, row], [clears], held_out=0.0)
    outcomes, _ = RewardRunner().rewards(task, requests_of(task, "", ""))
    assert ["clears returned 0 rewards for 2 completions" in str(each) for each in outcomes] == [True] * 2


def test_parts_of_text_are_written_by_templates_that_read_text() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "n1"}]}]
    task = RowsTask([{"prompt": parts}, {"prompt": [{"role": "user", "content": "n1"}]}], [len], held_out=0.0)
    chat = ChatTokens(TOKENIZER, "chatml")
    first, second = start(task, [task.item("train", index) for index in range(2)], chat, Calls())
    assert first.token_ids == second.token_ids
    assert isinstance(first, OneTurn)
    assert first.item.prompt == tuple(parts)  # reward functions get what the row holds


def test_functions_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded_function("treewise.rl.tasks:math_reward") is math_reward
    (tmp_path / "mine.py").write_text("def ones(prompts, **_):\n    return [1.0] * len(prompts)\nvalue = 3\n")
    assert loaded_function(f"{tmp_path}/mine.py:ones")(prompts=["a"]) == [1.0]
    assert loaded_function(f"{tmp_path}/mine.py:ones") is loaded_function(f"{tmp_path}/mine.py:ones")
    monkeypatch.setattr("sys.path", [])
    monkeypatch.chdir(tmp_path)
    assert loaded_function("mine:ones")(prompts=["a"]) == [1.0]
    names = ("nothing", "no_such_module:f", "treewise.rl.tasks:f", "other.py:f", "mine.py:value", ":f", "mine.py:")
    for name in names:
        with pytest.raises(ConfigError, match="reward function"):
            loaded_function(name)
    with pytest.raises(ConfigError, match=r"there is no no_such_module\.py in this folder, nor a module"):
        loaded_function("no_such_module:f")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys\nsys.exit('bye')\n", r"bad.py:2: SystemExit: bye"),
        ("x = 1\ndef f(:\n", r"bad.py:2: SyntaxError"),
        ("raise ValueError('\x1b[31mred')\n", r"bad.py:1: ValueError: \\x1b\[31mred"),
        ("import no_such_package\n", r"bad.py:1: ModuleNotFoundError"),
        ("def f(): ...\nx = '\0'\n", "source code string cannot contain null bytes"),
    ],
)
def test_files_that_cannot_be_loaded(source: str, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(ConfigError, match=f"'bad.py:f' cannot be loaded: .*{message}"):
        loaded_function("bad.py:f")


def test_math_answers() -> None:
    pytest.importorskip("math_verify")
    completions = [[{"role": "assistant", "content": text}] for text in (r"$\frac{1}{2}$", "The answer is 0.5", "3")]
    assert math_reward(completions, ["0.5"] * 3) == [1.0, 1.0, 0.0]
    with pytest.raises(ValueError, match="cannot be read"):
        math_reward(completions[:1], ["?"])
