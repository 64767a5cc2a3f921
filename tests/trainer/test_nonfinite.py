"""A loss or gradient that is not finite never reaches the optimizer, and its trees are kept."""

import json

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from tests.image_models import IMAGE_TOKEN, png, tiny_processor
from treewise.data import load_trees
from treewise.errors import NonFiniteError
from treewise.trainer.nonfinite import write_rows
from treewise.trainer.step import NonFiniteGuard
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory


class PoisonGradient(TrainerCallback):
    """Makes the gradient of given steps infinite, as an overflow in some layer would."""

    def __init__(self, *steps):
        self.steps = steps

    def on_train_begin(self, args, state, control, model, **kwargs):
        def poison(gradient):
            return gradient * float("inf") if state.global_step + 1 in self.steps else gradient

        model.model.norm.weight.register_hook(poison)


def test_only_updates_that_are_skipped_in_a_row_end_a_run(tmp_path):
    guard = NonFiniteGuard("skip", 1, 0.0, tmp_path / "nonfinite.jsonl")
    for step, is_finite in enumerate((False, True, False), start=1):
        assert guard.check_step(step, 1.0, [], is_finite=is_finite) == is_finite
    with pytest.raises(NonFiniteError, match="Skipped in a row before: 1 step"):
        guard.check_step(4, 1.0, [], is_finite=False)


class Snapshots(TrainerCallback):
    def __init__(self):
        self.taken = []

    def on_step_end(self, args, state, control, model, optimizer, **kwargs):
        moments = [value.clone() for entry in optimizer.state.values() for value in entry.values()]
        self.taken.append([each.detach().clone() for each in model.parameters()] + moments)


def test_a_skipped_step_leaves_parameters_and_optimizer_as_they_were(make_trainer, trees, caplog):
    snapshots = Snapshots()
    trainer = make_trainer(trees, max_steps=3, nonfinite="skip", callbacks=[PoisonGradient(2), snapshots])
    trainer.train()
    first, second, third = snapshots.taken
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))
    assert not all(torch.equal(left, right) for left, right in zip(second, third, strict=True))
    assert "the gradient of step 2 is not finite; it was not applied. Its trees: rows.jsonl:" in caplog.text


def test_too_many_skipped_steps_in_a_row_stop_the_run(make_trainer, trees):
    poison = PoisonGradient(2, 3, 4)
    trainer = make_trainer(trees, max_steps=6, nonfinite="skip", max_skipped_steps=2, callbacks=[poison])
    with pytest.raises(NonFiniteError, match=r"step 4 is not finite.*Skipped in a row before: 2 steps"):
        trainer.train()


def test_trees_of_a_faulty_step_are_written_as_rows_that_load_again(make_trainer, trees, tmp_path):
    trainer = make_trainer(trees, max_steps=3, callbacks=[PoisonGradient(1)], per_device_train_batch_size=7)
    with pytest.raises(NonFiniteError, match=r"nonfinite\.jsonl"):
        trainer.train()
    found = load_trees(str(tmp_path / "run" / "nonfinite.jsonl"), None)
    wanted = sorted(tuple(item.token_ids.tolist()) for tree in trees for item in tree)
    assert sorted(tuple(each.token_ids.tolist()) for tree in found for each in tree.trajectories) == wanted


def test_the_trajectory_whose_own_loss_is_not_finite_is_named(make_trainer, trees):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            model.model.embed_tokens.weight.data[2] = float("nan")  # no other tree has token 2
            self.norm = model.model.norm.weight.clone()

    odd, breaks = Trajectory(np.array([50, 2, 51, 52]), source="odd.jsonl:1"), Break()
    trainer = make_trainer([*trees, [odd]], per_device_train_batch_size=8, max_steps=2, callbacks=[breaks])
    with pytest.raises(NonFiniteError, match=r"step 2 .* Not finite by themselves: odd\.jsonl:1\."):
        trainer.train()
    assert torch.equal(breaks.norm, trainer.model.model.norm.weight)


def test_a_spike_of_the_gradient_is_logged_with_its_trees(make_trainer, trees, caplog):
    class Amplify(TrainerCallback):
        def on_train_begin(self, args, state, control, model, **kwargs):
            model.model.norm.weight.register_hook(lambda grad: grad * (1e4 if state.global_step + 1 == 12 else 1))

    make_trainer(trees, max_steps=13, callbacks=[Amplify()], learning_rate=1e-5).train()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "treewise"]
    assert line.startswith("step 12: gradient norm")
    assert "rows.jsonl:" in line


def test_rows_hold_every_stream_and_label_and_load_again(tmp_path):
    item = Trajectory(
        [1, 2, 3],
        advantages=0.5,
        teacher_ids=[[1, 4], [2, 4], [3, 4]],
        teacher_logprobs=[[0, float("-inf")], [-1, -2], [-1, -3]],
        group="g",
        rollout="r",
        reward=1.5,
        rollout_weight=2.0,
        source="rows.jsonl:1",
    )
    write_rows(tmp_path / "a.jsonl", [Forest.from_trajectories([item])], {"step": 3})
    row = json.loads((tmp_path / "a.jsonl").read_text())
    for name, values in {"token_ids": item.token_ids, **item.streams}.items():
        assert np.array_equal(np.array(row[name], dtype=values.dtype), values)
    labels = {"group": "g", "rollout": "r", "reward": 1.5, "rollout_weight": 2.0, "source": "rows.jsonl:1", "step": 3}
    assert labels.items() <= row.items()
    (again,) = load_trees(str(tmp_path / "a.jsonl"), None)[0].trajectories
    assert again.streams.keys() == item.streams.keys()
    assert all(np.array_equal(values, item.streams[name]) for name, values in again.streams.items())


def test_written_rows_hold_their_images(tmp_path):
    path = tmp_path / "shot.png"
    path.write_bytes(png(1))
    items = [
        Trajectory([5, *[IMAGE_TOKEN] * 4, 6], images=[ImageSpan(source, 1, 5)], source=f"rows:{index}")
        for index, source in enumerate((path, png(2)))
    ]
    write_rows(tmp_path / "a.jsonl", [Forest.from_trajectories(items)], {"step": 3})
    found = load_trees(str(tmp_path / "a.jsonl"), tiny_processor("llava"))
    assert [image.digest for tree in found for item in tree.trajectories for image in item.images] == [
        item.images[0].digest for item in items
    ]
