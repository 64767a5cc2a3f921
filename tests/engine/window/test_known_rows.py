"""The rows of a window: longest known prefixes, and memory that grows."""

import torch
from hypothesis import given

from treewise.engine.window.known_rows import GrowingRows, KnownRows
from treewise.testing.strategies import token_lists
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory


@given(token_lists(max_sequences=8))
def test_a_token_is_known_exactly_if_its_path_was_there_before(sequences):
    known, number_of = KnownRows(), {}
    for sequence in sequences:
        forest = Forest.from_trajectories([Trajectory(sequence)])
        numbers = known.number(forest)
        for index, position in enumerate(forest.paths[0]):
            path = tuple(sequence[: index + 1])
            assert numbers[position] == number_of.get(path, -1)
            number_of.setdefault(path, len(number_of))
            numbers[position] = number_of[path]
        known.add(forest, numbers)
    union = Forest.from_trajectories(known.trajectories())
    assert union.num_tokens == len(number_of)
    numbers = known.numbers_on(union)
    for row, path in zip(known.trajectories(), union.paths, strict=True):
        for index, position in enumerate(path):
            assert numbers[position] == number_of[tuple(row.token_ids[: index + 1].tolist())]


def test_memory_grows_and_keeps_what_is_there():
    rows = GrowingRows()
    parts = [torch.randn(size, 3) for size in (2, 1, 5, 9)]
    for part in parts:
        rows.append(part)
    assert torch.equal(rows.rows, torch.cat(parts))
    assert rows.capacity >= rows.num_rows == 17
