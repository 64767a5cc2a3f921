"""The calls of an agent on the page: a tree of each episode, and what forks cost."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.analysis.test_online_log import write_online_run
from treewise.errors import DataError
from treewise.report import read_run
from treewise.report.analysis.agent_calls import MAX_CALLS, MAX_DEPTH, MAX_EPISODES, agent_report
from treewise.report.html.page import render_page


def call(start: int | None, fork: str | None = None, again: int = 0, **more: Any) -> dict[str, Any]:
    found = {"from": start, "model": "policy", "is_trained": True, "new_tokens": 5, "again_tokens": again, "fork": fork}
    return {**found, "tokens": [3], "rewards": [None], "text": "asked", "replies": ["said"], **more}


def episode(*calls: dict[str, Any], reward: float | None = 1.0, task: str = "t/1") -> dict[str, Any]:
    return {
        "task": task,
        "reward": reward,
        "kind": None,
        "failure": None if reward is not None else "late",
        "calls": calls,
    }


def numbers(chain: Any) -> list[Any]:
    return [[each.number, *map(numbers, each.branches)] for each in chain]


def test_calls_are_chains_with_branches() -> None:
    """Two go on from the first, one of which has another branch below it; one begins anew."""
    line = episode(call(None), call(0), call(0, "result cut", 7), call(1), call(1), call(None, "new conversation"))
    (found,) = agent_report(1, [line], 3.0, 2.0, 1.5).episodes
    assert [numbers(chain) for chain in found.chains] == [[[0, [[2]]], [1, [[4]]], [3]], [[5]]]
    assert found.num_calls == 6


def test_what_forks_cost_is_added_up_by_reason() -> None:
    lines = [
        episode(call(None), call(0, "result cut", 7), call(0, "turn edited", 20)),
        episode(call(None, "new conversation"), call(0, "result cut", 1), call(0, "same messages again")),
    ]
    report = agent_report(3, lines, 3.0, 2.0, 1.5)
    assert report.forks == (("turn edited", 1, 20), ("result cut", 2, 8))
    assert (report.num_episodes, report.num_calls) == (2, 6)


def test_those_that_forked_most_are_shown_within_bounds() -> None:
    plain = [episode(call(None), task=f"plain {number}") for number in range(MAX_EPISODES)]
    forked = episode(call(None), call(0, "result cut", 1), task="forked")
    long = episode(*(call(None) for _ in range(MAX_CALLS + 1)), task="long")
    report = agent_report(1, [*plain, long, forked], 1.0, 1.0, 1.0)
    assert report.episodes[0].task == "forked"
    assert len(report.episodes) == MAX_EPISODES - 1
    assert all(each.task != "long" for each in report.episodes)


def test_branches_of_branches_are_bounded() -> None:
    count = 3 * MAX_DEPTH
    calls = [call(None), *(each for n in range(count) for each in (call(2 * n), call(2 * n, "result cut")))]
    (found,) = agent_report(1, [episode(*calls)], 1.0, 1.0, 1.0).episodes

    def depth(chain: Any) -> int:
        return 1 + max((depth(branch) for each in chain for branch in each.branches), default=0)

    def size(chain: Any) -> int:
        return sum(1 + sum(map(size, each.branches)) for each in chain)

    assert depth(found.chains[0]) == MAX_DEPTH + 1
    assert size(found.chains[0]) == len(calls)


def write_calls(folder: Path, *lines: Any) -> Path:
    (folder / "calls").mkdir(exist_ok=True)
    text = "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines)
    (folder / "calls" / "iteration-00002.jsonl").write_text(text)
    return folder


def test_the_page_shows_them_with_text_and_sharing(tmp_path: Path) -> None:
    folder = write_online_run(tmp_path / "run")
    judge = call(1, text="judge <this>", is_trained=False, model="other")
    failed = episode(call(None), reward=None)
    write_calls(folder, episode(call(None, rewards=[0.25]), call(0, "result cut", 7), judge), failed)
    run = read_run(folder)
    assert run.online is not None
    agent = run.online.agent
    assert agent is not None
    # Of the rows of the second iteration: 5 + 4 + 4 and 3 + 3 tokens, of which 5 + 1 + 2 and 3 + 1 are different.
    assert (agent.share_ratio, agent.leaf_ratio) == (pytest.approx(19 / 12), pytest.approx(19 / 12))
    page = " ".join(render_page(None, run, "1.0").split())
    assert "Iteration 2: 2 episodes, 4 calls" in page
    assert "One row per call has 1.58 × the tokens of the trees, turns merged 1.58 ×." in page
    assert '<td>result cut</td><td class="num">1</td> <td class="num">7</td>' in page
    assert "<pre>judge &lt;this&gt;</pre>" in page
    assert "5 → 3 tokens, reward 0.25</summary>" in page
    assert "call 3, other: 5 → 3 tokens, not trained" in page
    assert "t/1: 1 call, late" in page
    assert json.loads(json.dumps(run.to_dict()))["online"]["agent"]["forks"] == [["result cut", 1, 7]]


@pytest.mark.parametrize("line", ["{", '{"calls": 3}', json.dumps(episode(call(4)))])
def test_calls_that_are_none_are_named(line: str, tmp_path: Path) -> None:
    folder = write_calls(write_online_run(tmp_path / "run"), episode(call(None)), line)
    with pytest.raises(DataError, match=r"iteration-00002\.jsonl.*line 2.*calls of an agent"):
        read_run(folder)
