"""What the report reads of an online run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.damage import NUM_CUTS, NUM_FLIPS, OTHERS, damages
from tests.report.analysis.test_run_log import write_run
from treewise.base.own_files import sealed
from treewise.errors import DataError
from treewise.report import read_run
from treewise.report.analysis.online_log import reward_tree
from treewise.report.html.charts import PROMPT, drawing
from treewise.report.html.page import render_page
from treewise.tree.trajectory import Trajectory

HISTORY = [
    {"iteration": 0.0, "eval_reward": 0.2, "eval_pass@1": 0.1, "step": 0},
    {"iteration": 1.0, "reward": 0.3, "success": 0.25, "sampled_tokens": 100.0, "share_ratio": 2.0, "step": 1}
    | {"branch_depth": 3.0, "entropy": 1.5, "logprob_gap": 1.0},
    {"iteration": 2.0, "reward": 0.5, "success": 0.5, "sampled_tokens": 60.0, "share_ratio": 2.5, "step": 2}
    | {"branch_depth": 4.0, "entropy": 1.2, "logprob_gap": 1.0, "eval_reward": 0.6, "eval_pass@1": 0.5},
]
# A fork after two tokens, of which the first way forks again: rewards 1, 0 and 0.
FORKED = [([1, 2, 3, 4, 5], 1.0), ([1, 2, 3, 6], 0.0), ([1, 2, 7, 8], 0.0)]
ALWAYS = [([1, 9, 9], 1.0), ([1, 9, 8], 1.0)]


def row(ids: list[int], reward: float, group: str) -> dict[str, Any]:
    texts = {"prompt_text": f"{group}?", "completion_text": " ".join(map(str, ids[1:]))}
    return {"token_ids": ids, "loss_weights": [0.0, *[1.0] * (len(ids) - 1)], "reward": reward, "group": group, **texts}


def write_online_run(folder: Path, name: str = "t/1") -> Path:
    write_run(folder, HISTORY)
    for name_of in ("rollouts", "curriculum"):
        (folder / name_of).mkdir()
    # Items, predictions, what came, trials: of those that the first iteration tried, one has no reward at first.
    for iteration, draws in (
        (1, [(1, 0.5, 0.5, 8), (2, 0.5, None, 0)]),
        (2, [(1, 0.2, 0.5, 6), (1, 0.28, 0.0, 2), (2, 0.5, 1.0, 4), (3, 0.9, 1.0, 5)]),
    ):
        named = [dict(zip(("index", "predicted", "observed", "trials"), each, strict=True)) for each in draws]
        (folder / "curriculum" / f"iteration-{iteration:05d}.json").write_text(json.dumps({"draws": named}))
    (folder / "curriculum" / "check.json").write_text("{}")
    for iteration in (1, 2):
        rows = [row(*each, name) for each in FORKED] + [row(*each, "t/2") for each in ALWAYS]
        path = folder / "rollouts" / f"iteration-{iteration:05d}.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return folder


def test_rewards_are_shown_over_generated_tokens(tmp_path: Path) -> None:
    online = read_run(write_online_run(tmp_path / "run")).online
    assert online is not None
    series = {each.label: each for each in online.over_tokens}
    assert series["reward, training"].tokens == (100, 160)
    assert series["reward, held out"].tokens == (0, 160)
    assert series["reward, held out"].values == (0.2, 0.6)
    assert series["pass@1, held out"].values == (0.1, 0.5)
    assert (online.predicted, online.observed, online.trials) == (pytest.approx((0.22,)), (0.375,), (8.0,))


def test_trees_and_held_out_samples_have_their_text(tmp_path: Path) -> None:
    folder = write_online_run(tmp_path / "run")
    (folder / "evaluations").mkdir()
    for iteration, rewards in ((0, (0.0, None)), (1, (0.5, 0.5)), (2, (1.0, 0.0))):
        samples = [
            {"key": key, "prompt": f"{key}?", "completion": f"answer {iteration}", "reward": reward}
            for key, reward in zip("ab", rewards, strict=True)
        ]
        path = folder / "evaluations" / f"iteration-{iteration:05d}.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in samples))
    online = read_run(folder).online
    assert online is not None
    assert online.trees[1].prompt == "t/1?"
    assert online.trees[1].rollouts == (("2 3 4 5", 1.0), ("2 3 6", 0.0), ("2 7 8", 0.0))
    assert [(each.key, each.iterations, each.completions, each.rewards) for each in online.held_out] == [
        ("a", (0, 2), ("answer 0", "answer 2"), (0.0, 1.0)),
        ("b", (0, 2), ("answer 0", "answer 2"), (None, 0.0)),
    ]
    page = render_page(None, read_run(folder), "0")
    assert "2 3 4 5" in page
    assert "answer 2" in page


def test_rows_without_text_are_drawn_without_it(tmp_path: Path) -> None:
    folder = write_online_run(tmp_path / "run")
    for path in (folder / "rollouts").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        bare = [{key: row[key] for key in ("token_ids", "loss_weights", "reward", "group")} for row in rows]
        path.write_text("".join(json.dumps(each) + "\n" for each in bare))
    online = read_run(folder).online
    assert online is not None
    assert len(online.trees) == 4
    assert not any(tree.prompt or tree.rollouts for tree in online.trees)


def test_values_of_a_tree_are_means_over_draws(tmp_path: Path) -> None:
    online = read_run(write_online_run(tmp_path / "run")).online
    assert online is not None
    assert [(each.iteration, each.which, each.group) for each in online.trees] == [
        (1, "best", "t/2"),
        (1, "worst", "t/1"),
        (2, "best", "t/2"),
        (2, "worst", "t/1"),
    ]
    tree = online.trees[1]
    shape = {(piece.start, piece.end): (piece.value, piece.is_leaf) for piece in tree.pieces}
    assert shape == {
        (0, 2): (pytest.approx(1 / 3), False),
        (2, 3): (0.5, False),
        (3, 5): (1.0, True),
        (3, 4): (0.0, True),
        (2, 4): (0.0, True),
    }
    assert tree.mean_reward == pytest.approx(1 / 3)
    assert tree.prompt_tokens == 1


def test_a_tree_is_drawn_to_the_scale_of_its_tokens() -> None:
    rows = [Trajectory(ids, [0.0, *[1.0] * (len(ids) - 1)], reward=reward) for ids, reward in FORKED]
    drawn = drawing(reward_tree(rows, 1, "best", "t"))
    texts = sorted(mark.text for mark in drawn.marks if mark.is_leaf)
    assert texts == ["0", "0", "1"]
    ends = {mark.text: mark.x for mark in drawn.marks}
    per_token = (ends["1"] - 10 - PROMPT) / 4
    assert ends["0.333"] == pytest.approx(10 + PROMPT + per_token, abs=0.1)
    assert len(drawn.paths) == 5


def test_a_rollout_that_ends_where_another_goes_on_is_a_way_of_its_own() -> None:
    rows = [Trajectory([1, 2, 3], reward=0.0), Trajectory([1, 2, 3, 4], reward=1.0), Trajectory([1, 2, 3], reward=0.5)]
    tree = reward_tree(rows, 1, "best", "t")
    assert [(piece.value, piece.is_leaf) for piece in tree.pieces] == [(0.5, False), (1.0, True)]


@pytest.mark.parametrize(
    "name", ["rollouts/iteration-00002.jsonl", "curriculum/iteration-00002.json", "evaluations/iteration-00002.jsonl"]
)
def test_damaged_files_of_an_online_run_are_named(name: str, tmp_path: Path) -> None:
    folder = write_online_run(tmp_path / "run")
    (folder / "evaluations").mkdir()
    for number in (0, 2):
        sample = {"key": "t/1", "prompt": "2+2?", "completion": str(number), "reward": number / 4}
        (folder / "evaluations" / f"iteration-{number:05d}.jsonl").write_text(json.dumps(sample) + "\n")
    draws = folder / "curriculum" / "iteration-00002.json"
    draws.write_text(sealed(json.loads(draws.read_text())) + "\n")
    whole = read_run(folder)
    expected = re.escape(f"{folder / name}: ") + "(damaged|cannot be read) .*: move it away, and the page is made"
    num_right = 0
    for _ in damages(folder / name):
        try:
            found = read_run(folder)
        except DataError as error:
            num_right += re.match(expected, str(error)) is not None
        else:  # rows and samples have no checksum
            num_right += found == whole or not name.startswith("curriculum")
    assert num_right == NUM_FLIPS + NUM_CUTS + len(OTHERS) + 1
    assert read_run(folder) == whole


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rollouts/iteration-00002.jsonl", r": damaged .line 1: KeyError: .loss_weights..; rows of rollouts: move it"),
        ("curriculum/iteration-00002.json", r": damaged .KeyError: .draws..; draws of an iteration: move it"),
    ],
)
def test_rows_and_draws_that_are_none_are_named(name: str, said: str, tmp_path: Path) -> None:
    folder = write_online_run(tmp_path / "run")
    (folder / name).write_text('{"token_ids": [1]}\n')
    with pytest.raises(DataError, match=f"{name}{said}"):
        read_run(folder)
