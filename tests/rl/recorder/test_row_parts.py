"""Rows of environments and of agents, put together from what was written and what was sampled."""

import numpy as np
import pytest

from treewise.errors import DataError
from treewise.rl.recorder.row_parts import RowPart, held_tokens, row_streams, written_part


def sampled(ids: list[int], draw: int, **streams: np.ndarray) -> RowPart:
    ones = np.ones(len(ids))
    return RowPart(np.array(ids), ones, -ones, np.full(len(ids), draw), **streams)


def test_what_was_written_has_no_draw_no_weight_and_no_version() -> None:
    parts = [
        written_part(np.array([1, 2])),
        sampled([3, 4], 0, policy_versions=np.array([5, 5])),
        written_part(np.array([6])),
        sampled([7], 1),
    ]
    row = row_streams(parts)
    assert {name: np.asarray(value).tolist() for name, value in row.items()} == {
        "token_ids": [1, 2, 3, 4, 6, 7],
        "loss_weights": [0, 0, 1, 1, 0, 1],
        "sampler_logprobs": [0, 0, -1, -1, 0, -1],
        "draws": [-1, -1, 0, 0, -1, 1],
        "policy_versions": [-1, -1, 5, 5, -1, -1],
    }
    assert "policy_versions" not in row_streams(parts[-2:])


def test_experts_are_those_of_the_forward_that_was_given_a_token_first() -> None:
    def routes(*experts: int) -> np.ndarray:
        return np.array(experts, dtype=np.int16)[:, None, None]

    parts = [
        written_part(np.array([1, 2])),
        sampled([3, 4], 0, routed_experts=routes(10, 11, 12)),  # the last token was the input of no forward
        written_part(np.array([5])),
        sampled([6, 7], 1, routed_experts=routes(20, 21, 22, 23, 24, 25, 26, 27)),  # of a longer turn that was cut
    ]
    found = row_streams(parts)["routed_experts"]
    assert found[:, 0, 0].tolist() == [10, 11, 12, 23, 24, 25, 26]
    assert row_streams(parts[:3])["routed_experts"][:, 0, 0].tolist() == [10, 11, 12, -1, -1]
    with pytest.raises(DataError, match=r"\[1, 1\] and \[2, 1\]"):
        row_streams([*parts, sampled([8], 2, routed_experts=np.zeros((8, 2, 1), dtype=np.int16))])


def test_a_token_of_a_draw_is_held_and_trained_by_any_row() -> None:
    rows = [([-1, 0, 0, -1, 1], [0, 1, 1, 0, 0]), ([-1, 0, 0, 0, 2, 2], [0, 0, 0, 1, 1, 0])]
    found = held_tokens({0: 4, 1: 1, 2: 2, 3: 1}, [(np.array(draws), np.array(weights)) for draws, weights in rows])
    assert {draw: (each.held.tolist(), each.trained.tolist()) for draw, each in found.items()} == {
        0: ([True, True, True, False], [True, True, True, False]),
        1: ([True], [False]),
        2: ([True, True], [True, False]),
        3: ([False], [False]),
    }
