"""The calls in merged rows, against those that an agent made."""

import numpy as np

from tests.rl.agents.helpers import CALL, Speaker, episodes_on, say
from treewise.nn.flops import FlopModel, LayerReach
from treewise.report.analysis.calls import calls_of
from treewise.report.analysis.facts import tree_facts
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

FLOPS = FlopModel(5.0, 10.0, 100.0, 200.0, ((LayerReach(), 2.0),), 1, 1, 1, 1)


def test_an_agent_s_rows_hold_its_calls() -> None:
    """Two turns that go on, a retry of the second, and a call that begins anew; equal answers are two draws."""
    speaker = Speaker([CALL, "It is 3.", "It is 3.", "Hello."])
    with episodes_on(speaker) as episodes:
        episode = episodes.open("a")
        start = [{"role": "user", "content": "1+2?"}]
        turn, _ = say(episode, start)
        result = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "3"}
        for _ in range(2):
            say(episode, [*start, turn, result])
        say(episode, [{"role": "user", "content": "Hi"}])
        rows, _ = episode.rows()
    assert len(rows) < len(speaker.seen) == 4
    items = [
        Trajectory(row["token_ids"], row["loss_weights"], draws=np.array(row["draws"]), group="a", rollout=0)
        for row in rows
    ]
    forest = Forest.from_trajectories(items)
    facts = tree_facts("a", forest, FLOPS)
    assert facts.num_calls == 4
    assert facts.holds_merged_turns
    each = [Trajectory([*prefix, *ids], [0] * len(prefix) + [1] * len(ids)) for prefix, ids, _ in speaker.seen]
    alone = Forest.from_trajectories(each)
    assert facts.num_call_tokens == alone.num_flat_tokens > forest.num_flat_tokens
    assert facts.call_flops == FLOPS.flat(alone)


def test_rows_of_one_call_are_as_they_are() -> None:
    items = [Trajectory(range(3, 12), [0, 0, 1, 1, 1, 1, 1, 0, 0]), Trajectory(range(3, 9))]
    forest = Forest.from_trajectories(items)
    facts = tree_facts("t", forest, FLOPS)
    assert not facts.holds_merged_turns
    assert (facts.num_calls, facts.num_call_tokens) == (2, forest.num_flat_tokens)
    assert facts.call_flops == FLOPS.flat(forest)


def test_what_an_answer_does_not_train_parts_no_call() -> None:
    """Where draws are known; a gap between two draws does."""
    weights, draws = [0, 0, 1, 0, 1, 0, 0, 1, 1], [-1, -1, 5, 5, 5, -1, -1, 6, 6]
    item = Trajectory(range(3, 12), weights, draws=np.array(draws))
    found = calls_of(Forest.from_trajectories([item]))
    assert sorted(found.ends.tolist()) == [4, 8]
    assert found.num_trained == 4


def test_an_answer_that_rows_of_a_rollout_share_was_asked_for_once() -> None:
    """A rollout of two rows that both train the first turn; of two rollouts it is two."""

    def rows(rollouts: tuple[int, int]) -> Forest:
        return Forest.from_trajectories(
            Trajectory([3, 4, 5, 6, 7 + number, 8], [0, 0, 1, 0, 0, 1], group="g", rollout=rollout)
            for number, rollout in enumerate(rollouts)
        )

    for rollouts, lengths in (((0, 0), [3, 6, 6]), ((0, 1), [3, 3, 6, 6])):
        forest = rows(rollouts)
        assert sorted((forest.depth[calls_of(forest).ends] + 1).tolist()) == lengths
