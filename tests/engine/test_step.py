"""What the order and the reads of a walk decide: gaps between rows that are read, passes beside other ranks."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from treewise import Forest, Trajectory, TreeEngine, plan
from treewise.distributed.lockstep import forward_passes, training_passes
from treewise.distributed.lockstep.guest import DONE
from treewise.distributed.lockstep.turns import Passes
from treewise.engine.step import StepLoss
from treewise.errors import ConfigError
from treewise.nn.guest import MicroBatchOutput
from treewise.objectives import SFT
from treewise.planning.plans import Plan, lay_out
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of


@pytest.mark.parametrize("attention", ["cascade", "reference"])
def test_a_micro_batch_skips_the_branches_beside_it(attention: str) -> None:
    """Two branches are open in one micro-batch; what is below the second reads the trunk and the second alone."""
    rng = np.random.default_rng(0)
    items = [
        Trajectory([3, 4, 5, 6, branch, 7, leaf, *rng.integers(3, 64, 3)]) for branch in (10, 20) for leaf in (30, 40)
    ]
    forest = Forest.from_trajectories(items)
    made = plan(forest, 8, hold="never")
    assert [[rows.tolist() for _, rows in lay_out(made, each).gateway] for each in range(3)] == [
        [],
        [[0, 1, 2, 3, 4, 5]],
        [[0, 1, 2, 3, 6, 7]],
    ]
    model = tiny_model("gpt_neox", torch.float64)
    loss, logprobs, expected = flat_sft(model, items)
    engine = TreeEngine(model, 8, attention, hold="never", check=False)
    model.zero_grad()
    assert engine.step(forest).loss == pytest.approx(loss, rel=1e-10)
    assert gradient_error(gradients_of(model), expected) < 1e-10
    with torch.no_grad():
        for found, each in zip(engine.logprobs(forest), logprobs, strict=True):
            torch.testing.assert_close(found, each.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("hold", ["never", "always"])
def test_a_walk_trains_again_after_a_visit_and_after_an_error(hold: str) -> None:
    rng = np.random.default_rng(2)
    items = [Trajectory([3, 4, 5, 6, *rng.integers(7, 64, 5)]) for _ in range(4)]
    model = tiny_model("gpt_neox", torch.float64)
    loss, _, expected = flat_sft(model, items)
    engine = TreeEngine(model, 8, hold=hold, check=False)
    walk = engine.new_walk(plan(forest := Forest.from_trajectories(items), 8, hold=hold))
    outputs: list[MicroBatchOutput] = []

    def fails_late(output: MicroBatchOutput) -> torch.Tensor | None:
        outputs.append(output)
        if len(outputs) == 3:
            raise KeyError
        return StepLoss(forest, SFT(), None).of_micro_batch(output)

    of_trees = StepLoss(forest, SFT(), None)
    walk.visit(of_trees.of_micro_batch)
    with pytest.raises(KeyError):
        walk.train(fails_late)
    model.zero_grad()
    walk.train(StepLoss(forest, SFT(), None).of_micro_batch)
    assert of_trees.output(walk).loss == pytest.approx(loss, rel=1e-10)
    assert gradient_error(gradients_of(model), expected) < 1e-10


@pytest.mark.parametrize("hold", ["never", "always"])
@pytest.mark.parametrize("passes", [training_passes, forward_passes], ids=["training", "values"])
def test_all_ranks_run_the_same_passes(passes: Callable[[Plan], Passes], hold: str) -> None:
    """Layers of shards gather their weights in every forward and backward, so each of them needs its counterpart."""
    rng = np.random.default_rng(1)
    forests = [
        Forest.from_trajectories([Trajectory([3, 4, 5, 6, 7, 8, *rng.integers(9, 64, 9)]) for _ in range(number)])
        for number in (3, 7)
    ]
    budget = 24 if hold == "always" else 10
    texts = [*(passes(plan(each, budget, hold=hold)).text for each in forests), DONE]
    found = []
    for rank in range(3):  # the last of them has no work
        model, events, answers = tiny_model("llama"), [], iter([texts, [DONE] * 3, [DONE] * 3])
        layer = model.model.layers[0]
        layer.register_forward_hook(lambda *_, to=events: to.append("graph" if torch.is_grad_enabled() else "forward"))
        layer.register_full_backward_hook(lambda *_, to=events: to.append("backward"))
        engine = TreeEngine(model, budget, hold=hold, check=False)
        engine.enable_lockstep(lambda _, answers=answers: next(answers))
        if rank < 2 and passes is training_passes:
            engine.step(forests[rank])
        elif rank < 2:
            with torch.no_grad():
                engine.logprobs(forests[rank])
        engine.drain()
        found.append(events)
    assert found[0] == found[1] == found[2]
    assert found[0].count("graph") == found[0].count("backward")
    assert len(found[0]) > len(plan(forests[0], budget, hold=hold).micro_batches)


def test_a_rank_without_work_needs_no_gradient_where_the_head_alone_is_trained() -> None:
    model = tiny_model("llama").requires_grad_(False)
    model.lm_head.requires_grad_(True)
    made = plan(Forest.from_trajectories([Trajectory(range(3, 40))]), 8)
    answers = iter([[DONE, training_passes(made).text], [DONE] * 2])
    engine = TreeEngine(model, 8, check=False)
    engine.enable_lockstep(lambda _: next(answers))
    engine.drain()
    assert not gradients_of(model)


class MeanOfSome(SFT):
    def token_losses(self, values, streams):
        return super().token_losses(values, streams).mean()


def test_a_loss_of_a_whole_micro_batch_is_no_loss_of_terms() -> None:
    with pytest.raises(ConfigError, match=r"MeanOfSome.token_losses must return one loss for each term, found .* \[\]"):
        TreeEngine(tiny_model()).step(Trajectory([3, 4, 5]), MeanOfSome())


class Told:
    """Listens to what walks tell."""

    def __init__(self) -> None:
        self.reached: dict[str, list[tuple[int, int | None]]] = {}

    def begins(self, what: str, total: int | None, *, is_part: bool) -> None: ...
    def ends(self) -> None: ...
    def reaches(self, what: str, done: int, total: int | None, unit: str) -> None:
        self.reached.setdefault(what, []).append((done, total))


@pytest.mark.parametrize("hold", ["never", "always"])
@pytest.mark.parametrize("budget", [4, 9, None])
def test_walks_tell_how_many_tokens_are_done_after_each_micro_batch(
    budget: int | None, hold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [Trajectory([3, 4, 5, 6, branch, 7, leaf, 9]) for branch in (10, 20) for leaf in (30, 40)]
    forest, told = Forest.from_trajectories(items), Told()
    engine = TreeEngine(tiny_model("llama"), budget, hold=hold, check=False)
    for reader in ("base.progress", "engine.step"):
        monkeypatch.setattr(f"treewise.{reader}.listeners", [told])
    engine.step(forest)
    with torch.no_grad():
        engine.logprobs(forest)
    schedule = plan(forest, budget, hold=hold).schedule
    assert set(told.reached) == {"forward and backward", "forward"}
    for reached in told.reached.values():
        done = [each for each, _ in reached]
        assert (done[0], done[-1]) == (0, forest.num_tokens)
        assert done == sorted(done)
        assert len(done) == 1 + len(schedule)
        assert {total for _, total in reached} == {forest.num_tokens}
    if budget is not None:  # without gradients each micro-batch runs once, when it first comes
        made, seen = plan(forest, budget, hold=hold), set[int]()
        for step, (done, _) in zip(made.schedule, told.reached["forward"][1:], strict=True):
            seen.add(step.micro_batch)
            assert done == sum(made.micro_batches[each].num_tokens for each in seen)


def test_a_loss_of_the_caller_leaves_its_backward_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward is a third of the work."""
    forest, told = Forest.from_trajectories([Trajectory(range(3, 12))]), Told()
    engine = TreeEngine(tiny_model("llama"), None, check=False)
    for reader in ("base.progress", "engine.step"):
        monkeypatch.setattr(f"treewise.{reader}.listeners", [told])
    engine.step(forest, lambda logprobs: -torch.cat(logprobs).sum())
    assert told.reached == {"forward and backward": [(0, 9), (3, 9)]}
