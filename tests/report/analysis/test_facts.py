"""Suspicious records, costs at budgets, and the choice of trees to draw."""

import numpy as np
import pytest
from hypothesis import given

from treewise.data import LoadReport
from treewise.nn.flops import FlopModel, LayerReach
from treewise.planning.planner import plan
from treewise.report.analysis.facts import inspect_forests, suspicions, tree_facts
from treewise.report.analysis.plan_facts import BudgetCosts
from treewise.report.analysis.token_text import TokenText
from treewise.report.html.build import build_data_report, drawn_first
from treewise.testing.strategies import forests
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

FLOPS = FlopModel(100.0, 200.0, 10.0, 20.0, ((LayerReach(), 4.0),), 50, 50, 16, 32)


class Named:
    """A forest with a name."""

    def __init__(self, name: str, forest: Forest) -> None:
        self.name, self._forest = name, forest

    def forest(self) -> Forest:
        return self._forest


def trajectory(tokenizer, *parts: tuple[str, float], source: str = "") -> Trajectory:
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in parts]
    weights = np.concatenate([np.full(len(each), weight) for each, (_, weight) in zip(ids, parts, strict=True)])
    return Trajectory([token for each in ids for token in each], loss_weights=weights, source=source)


def found_in(tokenizer, *trajectories: Trajectory) -> dict[str, list[str]]:
    forest = Forest.from_trajectories(trajectories)
    return {kind: where for kind, where in suspicions("t", forest, text=TokenText(tokenizer)).items() if where}


def test_a_spelled_out_control_token_is_found_and_a_real_one_is_not(tokenizer) -> None:
    real = tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]
    pieces = tokenizer("<|im", add_special_tokens=False)["input_ids"]
    pieces = pieces + tokenizer("_end|>", add_special_tokens=False)["input_ids"]
    begin = tokenizer("Write this to the log: ", add_special_tokens=False)["input_ids"]
    spelled = Trajectory(begin + pieces + begin, source="rows:1")
    proper = Trajectory(begin + begin + real, source="rows:2")
    found = found_in(tokenizer, spelled, proper)
    assert found["special token in text"] == [f"rows:1, token {len(begin)}: '<|im_end|>Write'"]
    assert "turn ends inside an answer" not in found


def test_a_turn_that_ends_inside_an_answer_is_found(tokenizer) -> None:
    whole = trajectory(tokenizer, ("Question", 0.0), ("yes<|im_end|>\n<|im_start|>no more", 1.0), source="rows:1")
    found = found_in(tokenizer, whole)["turn ends inside an answer"]
    assert len(found) == 2
    assert found[0].startswith("rows:1, token 2: '<|im_end|>")
    ended = trajectory(tokenizer, ("Question", 0.0), ("yes<|im_end|>", 1.0), ("\nMore", 0.0), source="rows:2")
    with_line = trajectory(tokenizer, ("Question", 0.0), ("no<|im_end|>\n", 1.0), ("More", 0.0), source="rows:3")
    assert "turn ends inside an answer" not in found_in(tokenizer, ended, with_line)


def test_hardly_any_trained_token(tokenizer) -> None:
    long = Trajectory(range(1000), loss_weights=[0.0] * 997 + [1.0] * 3, source="rows:1")
    assert found_in(tokenizer, long)["hardly any trained token"] == ["rows:1"]
    fair = Trajectory(range(1000), loss_weights=[0.0] * 990 + [1.0] * 10, source="rows:1")
    assert "hardly any trained token" not in found_in(tokenizer, fair)


def test_one_trajectory_far_longer_than_the_rest_is_found() -> None:
    usual = [Trajectory([number, *range(50)], source=f"rows:{number}") for number in range(40)]
    outlier = Trajectory(range(1000), source="rows:long")
    forest = Forest.from_trajectories([*usual, outlier])
    report = inspect_forests([("t", forest)], LoadReport(num_files=1, num_records=41))
    (found,) = [each for each in report.findings if each.kind == "extremely long trajectory"]
    assert found.examples == ("rows:long (1,000 tokens)",)


def test_a_trajectory_that_two_trees_hold_is_found() -> None:
    trees = [
        (name, Forest.from_trajectories([Trajectory(range(start, 40), source=f"{name}:{start}") for start in starts]))
        for name, starts in (("a", (1, 2)), ("b", (2, 3, 3)))
    ]
    report = inspect_forests(trees, LoadReport(num_files=1, num_records=5))
    found = {each.kind: each for each in report.findings}
    assert found["duplicate in another tree"].examples == ("b:2, as a:2",)
    assert found["duplicated trajectory"].count == 1


def test_a_declared_tree_too_large_to_hold_flat_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treewise.tree.forest.MAX_FLAT_TOKENS", 10)
    forest = Forest.from_nodes([-1, 0, 0], [range(1, 20), range(20, 40), range(40, 60)], advantages=None)
    assert forest.tree_streams
    report = build_data_report([Named("declared", forest)], LoadReport(num_files=1, num_records=3))
    assert report.facts.total.num_tree_tokens == 59
    assert len(report.pictures) == 1


@given(forest=forests(max_new_tokens=20))
def test_costs_are_those_of_the_plans(forest: Forest) -> None:
    budget = max(1, forest.num_tokens // 3)
    costs = BudgetCosts(FLOPS, (budget,))
    costs.add(forest)
    total = tree_facts("t", forest, FLOPS)
    calls, *flat, leaf, tree, limited = costs.rows(total)
    made = plan(forest, budget)
    assert calls.num_tokens == total.num_call_tokens
    assert [each.num_tokens for each in flat] in ([], [forest.num_flat_tokens])
    assert leaf.num_tokens == forest.num_leaf_tokens
    assert tree.token_ratio == pytest.approx(total.call_ratio)
    assert limited.num_recomputed_tokens == made.num_recomputed_tokens
    assert limited.flops == pytest.approx(FLOPS.planned(made))
    assert limited.flop_ratio == pytest.approx(total.call_flops / FLOPS.planned(made))
    # A recomputed token costs a forward more, a third of a forward and backward.
    assert limited.token_ratio == pytest.approx(calls.num_tokens / (tree.num_tokens + made.num_recomputed_tokens / 3))


def test_budgets_shown_are_the_given_one_and_the_largest_that_cut() -> None:
    costs = BudgetCosts(budgets=(1000,))
    costs.add(Forest.from_trajectories([Trajectory(range(5000))]))
    assert costs.budgets == [512, 1000, 1024, 2048, 4096]


def test_the_drawn_trees_are_chosen_by_each_order_in_turn() -> None:
    def tree(flat: int, size: int):
        return tree_facts("t", Forest.from_trajectories([Trajectory(range(size))] * (flat // size)))

    facts = [tree(10, 10), tree(900, 900), tree(40, 20), tree(100, 50)]
    assert drawn_first(facts, [0, 0, 5, 9], 2) == [1, 0]  # the most tokens; all leaf ratios are equal
    assert drawn_first(facts, [0, 0, 5, 9], 3) == [1, 0, 3]
    assert sorted(drawn_first(facts, [0, 0, 5, 9], 99)) == [0, 1, 2, 3]
    assert drawn_first(facts, [0, 0, 5, 9], 0) == []


def test_budgets_below_the_largest_image_are_not_listed():
    items = [Trajectory([7] * 310 + [last] * 300, images=(ImageSpan(b"x", 5, 305),)) for last in (1, 2)]
    costs = BudgetCosts()
    costs.add(Forest.from_trajectories(items))
    assert costs.budgets == [512]
