"""Parts of micro-batches: balanced, complete, and with the keys that their tokens see, and no others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treewise.distributed.context import context_part, part_bounds
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.testing.strategies import forests


def keys_seen(layout, rows):
    """For each query, the keys that it sees, each by its name in `rows`."""
    queries = np.arange(layout.num_tokens)[:, None]
    seen = (layout.lo[None] <= queries) & (queries < layout.hi[None])
    return [{rows[key] for key in np.flatnonzero(each)} for each in seen]


@pytest.mark.parametrize("num_parts", [1, 2, 3, 20])
@given(forests(), st.sampled_from([None, 3, 9]))
def test_every_token_is_in_one_part_and_sees_what_it_saw(num_parts, forest, max_tokens):
    made = plan(forest, max_tokens)
    for index in range(made.num_micro_batches):
        layout = lay_out(made, index)
        gateway = [("above", above, row) for above, rows in layout.gateway for row in rows]
        names = gateway + [("own", row) for row in range(layout.num_tokens)]
        whole, depth = keys_seen(layout, names), dict(zip(names, layout.key_depth, strict=True))
        bounds = part_bounds(1.0 + layout.depth, num_parts)
        found = []
        for number in range(num_parts):
            part = context_part(layout, bounds, number)
            above = [("above", batch, row) for batch, rows in part.layout.gateway for row in rows]
            own = bounds[number] + np.arange(part.layout.num_tokens) if part.num_own else [0]
            rows = above + [("own", row) for row in (*part.rows, *own)]
            assert len(rows) == len(set(rows)) == len(part.layout.lo)
            assert [depth[row] for row in rows] == part.layout.key_depth.tolist()
            for name in ("depth", "token_ids", "positions"):
                assert np.array_equal(getattr(part.layout, name), getattr(layout, name)[own])
            seen = keys_seen(part.layout, rows)
            found += seen[: part.num_own]
            assert set().union(*seen) == set(rows), "keys that no token sees"
        assert found == whole


@pytest.mark.parametrize(("cost", "num_parts", "bounds"), [
    ([1, 1, 1, 1, 1, 1], 3, [0, 2, 4, 6]),
    ([1, 2, 3, 4, 5, 6, 7, 8], 2, [0, 6, 8]),
    ([9, 1, 1], 3, [0, 1, 2, 3]),
    ([1, 1, 9], 3, [0, 1, 2, 3]),
    ([1, 1], 4, [0, 1, 2, 2, 2]),
])  # fmt: skip
def test_parts_cost_the_same(cost, num_parts, bounds):
    assert part_bounds(np.array(cost, dtype=float), num_parts).tolist() == bounds
