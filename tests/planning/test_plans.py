"""Layouts and edges: each micro-batch's intervals against the ancestor matrix, every edge once."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.plain_trees import is_above
from treewise.engine.edge_scorer import edges_of
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.testing.strategies import forests_and_budgets

HOLDS = ("auto", "never", "always")


def key_positions(made, layout):
    """Tree positions of the keys: gateway rows first, then own tokens."""
    rows = [made.micro_batches[above].positions()[read] for above, read in layout.gateway]
    return np.concatenate([*rows, layout.positions])


def check_layouts(made):
    forest, seen = made.forest, is_above(made.forest.parent)
    edges = []
    for number, batch in enumerate(made.micro_batches):
        layout = lay_out(made, number)
        own, keys = layout.positions, key_positions(made, layout)
        assert own.tolist() == batch.positions().tolist()
        assert len(keys) == len(layout.lo) == len(layout.hi) == layout.num_tokens + len(layout.gateway_rows)
        assert layout.lo.dtype == layout.hi.dtype == np.int32
        np.testing.assert_array_equal(layout.token_ids, forest.token_ids[own])
        np.testing.assert_array_equal(layout.depth, forest.depth[own])
        np.testing.assert_array_equal(layout.key_depth, forest.depth[keys])
        query = np.arange(len(own))[:, None]
        np.testing.assert_array_equal((layout.lo <= query) & (query < layout.hi), seen[own][:, keys])
        # The keys are all ancestors, each once, and nothing that no token sees.
        assert sorted(keys.tolist()) == np.flatnonzero(seen[own].any(axis=0)).tolist()
        source, target = edges_of(forest, own, np.ones(forest.num_tokens, dtype=bool))
        assert (np.diff(source) >= 0).all()
        edges += zip(own[source].tolist(), target.tolist(), strict=True)
    child = np.flatnonzero(forest.parent >= 0)
    assert sorted(edges) == sorted(zip(forest.parent[child].tolist(), child.tolist(), strict=True))


@given(forests_and_budgets(), st.sampled_from(HOLDS))
def test_intervals_are_the_ancestor_matrix_and_edges_appear_once(forest_and_budget, hold):
    forest, budget = forest_and_budget
    check_layouts(plan(forest, budget, hold=hold))


@given(forests_and_budgets(), st.data())
def test_only_needed_targets_get_edges(forest_and_budget, data):
    forest, budget = forest_and_budget
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    is_needed = rng.random(forest.num_tokens) < 0.5
    made = plan(forest, budget)
    targets = [edges_of(forest, batch.positions(), is_needed)[1] for batch in made.micro_batches]
    expected = np.flatnonzero(is_needed & (forest.parent >= 0))
    assert sorted(np.concatenate(targets).tolist()) == expected.tolist()
