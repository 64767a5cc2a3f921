"""Runs on trees of images: a step as flat training does it, resumed, killed, on two processes, and sharded."""

import os
import signal

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.image_models import FAMILIES, seeing_model
from tests.nn.vision.test_forest_images import HISTORIES, flat_gradients, trajectories
from tests.trainer.helpers import in_child, losses
from treewise.nn.wrapped import unwrap_model
from treewise.testing import gradient_error
from treewise.trainer import TreeTrainer, TreeTrainingArguments
from treewise.trainer.checkpoint import store
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

FAMILY = "qwen2_5_vl"  # positions of its own, windows in its tower
SETTINGS = {
    "max_steps": 3, "learning_rate": 1e-2, "max_grad_norm": 0.5, "seed": 3, "report_to": "none", "use_cpu": True,
    "disable_tqdm": True, "save_strategy": "no", "max_tokens": 12, "per_device_train_batch_size": 2,
}  # fmt: skip
SAVED = {"save_strategy": "steps", "save_steps": 2}
# Trees of a run: of three images, of one that is not shared, and without any.
TREES = (HISTORIES[:3], HISTORIES[4:6], HISTORIES[6:], [[(20, 4), (21, 3)], [(20, 4), (22, 5)]])


@pytest.fixture(scope="module")
def trees(tmp_path_factory):
    """Trees whose images are files."""
    folder, model, images = tmp_path_factory.mktemp("shots"), seeing_model(FAMILY), FAMILIES[FAMILY].images()

    def on_disk(image):
        path = folder / f"{image.digest[:8]}.png"
        path.write_bytes(image.read())
        return ImageSpan(path, image.start, image.end)

    return [
        [Trajectory(item.token_ids, images=tuple(map(on_disk, item.images))) for item in trajectories(model, images, h)]
        for h in TREES
    ]


def trainer_of(trees, folder, trained="", **settings):
    """trained: what names of the parameters that are trained contain."""
    args = TreeTrainingArguments(output_dir=str(folder), **{**SETTINGS, **settings})
    model, images = seeing_model(FAMILY), FAMILIES[FAMILY].images()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    return TreeTrainer(model, args, train_dataset=trees, processing_class=images)


def weights_of(trainer):
    return {
        name: (each.data.full_tensor() if isinstance(each.data, DTensor) else each.data).clone()
        for name, each in unwrap_model(trainer.model).named_parameters()
    }


def assert_same_bits(found, expected):
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.representatives("12")
@pytest.mark.parametrize("max_tokens", [None, 12])
def test_a_step_is_that_of_flat_training(trees, tmp_path, max_tokens):
    model, rate = seeing_model(FAMILY), 0.1
    loss, _, gradients = flat_gradients(model, FAMILIES[FAMILY].images(), [item for tree in trees for item in tree])
    settings = {"optim": "sgd", "learning_rate": rate, "max_steps": 1, "max_grad_norm": 0, "max_tokens": max_tokens}
    trainer = trainer_of(trees, tmp_path, per_device_train_batch_size=len(trees), **settings)
    trainer.train()
    assert losses(trainer) == pytest.approx([loss], rel=1e-5)
    after = weights_of(trainer)
    found = {name: (each.data.double() - after[name].double()) / rate for name, each in model.named_parameters()}
    found = {name: each for name, each in found.items() if name in gradients}
    assert gradient_error(found, gradients) < 1e-5


@pytest.mark.exhaustive
def test_a_resumed_run_and_a_killed_one_end_like_an_undisturbed_one(trees, tmp_path):
    whole = trainer_of(trees, tmp_path / "whole", **SAVED)
    whole.train()
    again = trainer_of(trees, tmp_path / "whole", **SAVED)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same_bits(weights_of(again), weights_of(whole))

    def killed():
        trainer = trainer_of(trees, tmp_path / "killed", **SAVED)
        trainer.model.model.visual.register_forward_hook(lambda *_: _kill_in_step(trainer, 3))
        trainer.train()

    _, status = os.waitpid(in_child(killed, 60), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert [store.step_of(each) for each in store.checkpoints(tmp_path / "killed")] == [2]
    after = trainer_of(trees, tmp_path / "killed", **SAVED)
    after.train(resume_from_checkpoint=True)
    assert_same_bits(weights_of(after), weights_of(whole))


def _kill_in_step(trainer, step):
    if trainer.state.global_step + 1 == step:
        os.kill(os.getpid(), signal.SIGKILL)
