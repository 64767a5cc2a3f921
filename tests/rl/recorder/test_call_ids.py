"""Ids of calls: of what was seen and sampled alone."""

import numpy as np

from treewise.rl.recorder.call_ids import SIZE, call_ids


def test_ids_are_of_the_tokens_and_of_what_tells_equal_ones_apart() -> None:
    found = [
        *call_ids([1, 2, 3], 2),
        *call_ids([1, 2], 1),
        *call_ids([1, 2, 3], 2, (0, 1)),
        *call_ids([1, 2, 3], 2, (1, 0)),
    ]
    assert len(set(found)) == len(found)
    assert all(len(name) == SIZE and name.isalnum() for name in found)
    assert call_ids(np.array([1, 2, 3], dtype=np.int64), 3)[:2] == found[:2]
