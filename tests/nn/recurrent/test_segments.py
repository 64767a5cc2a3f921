"""Row segments and their schedule against walking up the tree token by token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treewise.nn.recurrent.segments import (
    CALL_TOKENS,
    GATEWAY,
    NOTHING,
    RowSegments,
    make_schedule,
    row_segments,
    rows_before,
    rows_up_to_end,
)
from treewise.planning.planner import plan
from treewise.planning.plans import Plan, lay_out
from treewise.testing.strategies import forests_and_budgets

HOLDS = st.sampled_from(["auto", "never", "always"])


def each_micro_batch(run: Plan) -> list[tuple[int, np.ndarray, RowSegments]]:
    found = []
    for number in range(run.num_micro_batches):
        layout = lay_out(run, number)
        found.append((number, layout.positions, row_segments(run, number, layout)))
    return found


@given(forests_and_budgets(), HOLDS)
def test_segments_partition_the_rows_and_follow_parents(given, hold) -> None:
    forest, budget = given
    run = plan(forest, budget, hold=hold)
    for number, positions, segments in each_micro_batch(run):
        assert segments.start[0] == 0
        assert segments.end[-1] == len(positions)
        assert np.array_equal(segments.start[1:], segments.end[:-1])
        layout = lay_out(run, number)
        for index in range(segments.num_segments):
            rows = positions[segments.start[index] : segments.end[index]]
            assert np.array_equal(forest.parent[rows[1:]], rows[:-1])
            above = forest.parent[rows[0]]
            if segments.parent[index] >= 0:
                assert positions[segments.end[segments.parent[index]] - 1] == above
            elif segments.gateway[index] >= 0:
                other = layout.gateway_batches[segments.gateway[index]]
                assert run.micro_batches[other].positions()[segments.gateway_row[index]] == above
            else:
                assert above == -1


@given(forests_and_budgets(), HOLDS)
def test_cuts_are_the_rows_that_other_micro_batches_continue(given, hold) -> None:
    forest, budget = given
    run = plan(forest, budget, hold=hold)
    for _, positions, segments in each_micro_batch(run):
        elsewhere = np.setdiff1d(np.arange(forest.num_tokens), positions)
        assert np.array_equal(positions[segments.cut_rows], np.intersect1d(forest.parent[elsewhere], positions))


@given(forests_and_budgets(), st.integers(1, 6))
def test_tails_are_the_path_above(given, count) -> None:
    """Decoded through the cuts of the micro-batches above, a tail is what walking up gives."""
    forest, budget = given
    run = plan(forest, budget)
    kept: dict[int, dict[int, np.ndarray]] = {}  # micro-batch -> cut row -> tail as tree positions
    for number, positions, segments in each_micro_batch(run):
        batches = lay_out(run, number).gateway_batches
        before = rows_before(segments, count)

        def decode(codes, positions=positions, segments=segments, batches=batches):
            found = []
            for code in codes.tolist():
                if code <= -2:
                    segment, place = divmod(-2 - code, count)
                    tail = kept[int(batches[segments.gateway[segment]])][int(segments.gateway_row[segment])]
                    found.append(tail[place])
                else:
                    found.append(positions[code] if code >= 0 else -1)
            return found

        for index in range(segments.num_segments):
            assert decode(before[index]) == path_above(forest, positions[segments.start[index]], count)
        ends = rows_up_to_end(segments, before, segments.cuts)
        kept[number] = {}
        for row, codes in zip(segments.cut_rows.tolist(), ends, strict=True):
            kept[number][row] = np.array(decode(codes))
            assert kept[number][row].tolist() == [*path_above(forest, positions[row], count)[1:], positions[row]]


def path_above(forest, token: int, count: int) -> list[int]:
    found: list[int] = []
    at = forest.parent[token]
    while at >= 0 and len(found) < count:
        found.insert(0, int(at))
        at = forest.parent[at]
    return [-1] * (count - len(found)) + found


@given(forests_and_budgets(), HOLDS)
def test_schedule_scans_each_row_once_after_its_parent(given, hold) -> None:
    forest, budget = given
    run = plan(forest, budget, hold=hold)
    for _, positions, segments in each_micro_batch(run):
        schedule = make_schedule(segments)
        done: dict[int, tuple[int, int]] = {}
        for number, group in enumerate(schedule.batches):
            assert sum(len(source.index) for source in group.sources) == len(group.segments)
            origin = [(source.batch, int(index)) for source in group.sources for index in source.index]
            for segment, (source, index) in zip(group.segments.tolist(), origin, strict=True):
                above = int(segments.parent[segment])
                if above >= 0:
                    assert done[above] == (source, index)
                    assert schedule.batches[source].wants_states
                elif segments.gateway[segment] >= 0:
                    assert source == GATEWAY
                    assert schedule.entering[index] == segment
                else:
                    assert source == NOTHING
            done.update({segment: (number, index) for index, segment in enumerate(group.segments.tolist())})
        assert sorted(done) == list(range(segments.num_segments))
        assert np.array_equal(schedule.order[schedule.position], np.arange(len(positions)))
        assert np.sum(schedule.order >= 0) == len(positions)
        assert [done[int(cut)] for cut in segments.cuts] == list(schedule.cuts)
        assert all(schedule.batches[group].wants_states for group, _ in schedule.cuts)


def laid_out(parent: list[int], length: np.ndarray) -> RowSegments:
    """Segments one after the other, none of them cut."""
    none, start = np.full(len(parent), -1), np.cumsum(length) - length
    return RowSegments(start, start + length, np.array(parent), none, none, np.zeros(0, dtype=int))


def test_a_chain_of_turns_takes_one_call_per_turn_and_one_for_all_sides() -> None:
    """A trunk of 100 turns with a side branch after each but the last; the trunk goes on first."""
    parent = [*range(-1, 99), *range(98, -1, -1)]
    schedule = make_schedule(laid_out(parent, np.repeat([200, 60], [100, 99])))
    assert len(schedule.batches) <= 101
    assert len(schedule.order) == sum(schedule.sizes) <= 1.1 * (100 * 200 + 99 * 60)


def test_a_wide_fan_takes_few_calls_and_little_padding() -> None:
    length = np.append(500, np.random.default_rng(0).integers(1, 2000, 1000))
    schedule = make_schedule(laid_out([-1, *[0] * 1000], length))
    assert len(schedule.batches) <= 13
    assert len(schedule.order) <= 1.6 * length.sum()
    assert not any(group.wants_states for group in schedule.batches[1:])


def test_short_segments_of_different_length_share_a_call() -> None:
    length = np.array([40, 1, 2, 3, 4, 5, 6, 7, 8])
    schedule = make_schedule(laid_out([-1, *[0] * 8], length))
    assert [len(group.segments) for group in schedule.batches] == [1, 8]
    assert len(schedule.order) < length.sum() + CALL_TOKENS
