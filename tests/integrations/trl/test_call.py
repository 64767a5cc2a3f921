"""Vision models in TRL's trainers, with and without the line: same losses, metrics and steps."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image as PIL
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.trainer.utils import add_fused_lm_head

from tests.data.images.test_placing import PARTS
from tests.image_models import FAMILIES, IMAGE_TOKEN, png, seeing_model, tiny_processor
from tests.integrations.trl.helpers import assert_same_training, settings
from treewise import share_prefixes
from treewise.data.images import decoded
from treewise.integrations.batches.batch_forest import NotShareable
from treewise.integrations.batches.batch_images import images_of_call
from treewise.testing import gradient_error, gradients_of

# PEFT and TRL still use names that transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

ORDERED = {"shuffle_dataset": False, "train_sampling_strategy": "sequential"}


def processor():
    made = tiny_processor("llava")
    made.chat_template = PARTS
    return made


def model():
    return seeing_model("llava")


def screens() -> Dataset:
    """Two tasks with two screenshots, three answers each."""
    rows = []
    for task in range(2):
        for answer in range(3):
            talk = [
                ("user", f"w{task} w4"),
                ("assistant", "w5 w6"),
                ("user", f"w{answer + 7}"),
                ("assistant", "w8 w9 w10"),
            ]
            messages = [{"role": role, "content": text} for role, text in talk]
            rows.append({"messages": messages, "images": [PIL.open(io.BytesIO(png(seed))) for seed in (task, 9)]})
    return Dataset.from_list(rows)


@pytest.mark.representatives("12")
@pytest.mark.parametrize("max_tokens", [None, 12])
def test_sft_on_screenshots(tmp_path, max_tokens):
    def make():
        args = SFTConfig(**settings(tmp_path, per_device_train_batch_size=6, max_length=None, max_steps=2, **ORDERED))
        return SFTTrainer(model=model(), args=args, train_dataset=screens(), processing_class=processor())

    counts = assert_same_training(make, max_tokens=max_tokens).sharings[0].counts
    assert counts.share_ratio > 1.8
    assert counts.num_left == 0


def test_grpo_on_screenshots(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": f"w{seed} w4"}], "image": PIL.open(io.BytesIO(png(seed)))}
        for seed in range(3)
    ]
    data = Dataset.from_list(rows)

    def make():
        args = GRPOConfig(
            **settings(tmp_path, per_device_train_batch_size=6, max_steps=2),
            num_generations=3, max_completion_length=6, beta=0.0, num_iterations=2, shuffle_dataset=False,
        )  # fmt: skip
        reward = lambda completions, **_: [float(len(each[0]["content"])) for each in completions]  # noqa: E731
        return GRPOTrainer(
            model=model(), args=args, train_dataset=data, processing_class=processor(), reward_funcs=reward
        )

    assert assert_same_training(make).sharings[0].counts.num_calls > 0


def batch_of_grids(images):
    """Three rows of two screenshots each, padded on the right, as Qwen's processor makes them."""
    rows, pixels, grids = [], [], []
    for seeds, tail in (((1, 2), [7, 8]), ((1, 2), [9]), ((1, 3), [7])):
        ids = [5, 6]
        for seed in seeds:
            made = images(images=[decoded(png(seed, 40, 40), "test")], return_tensors="pt")
            pixels.append(made["pixel_values"])
            grids.append(made["image_grid_thw"])
            ids += [IMAGE_TOKEN] * (int(made["image_grid_thw"].prod()) // 4) + [10 + seed]
        rows.append([*ids, *tail])
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": torch.cat(pixels),
        "image_grid_thw": torch.cat(grids),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
        "labels": torch.where((mask == 1) & (ids != IMAGE_TOKEN), ids, -100),
    }


@pytest.mark.representatives("12")
@pytest.mark.parametrize("max_tokens", [None, 12])
def test_positions_and_images_of_qwen(max_tokens):
    batch, found = batch_of_grids(FAMILIES["qwen2_5_vl"].images()), []
    for shared in (False, True):
        seeing = seeing_model("qwen2_5_vl", torch.float64)
        add_fused_lm_head(seeing)
        sharing = share_prefixes(seeing, max_tokens) if shared else None
        output = seeing(**batch, fused_lm_head=True)
        output.loss.backward()
        found.append((output.log_probs.detach(), gradients_of(seeing)))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
    assert gradient_error(found[1][1], found[0][1]) < 1e-6
    assert (sharing.counts.num_calls, sharing.counts.num_left) == (1, 0)
    assert sharing.counts.share_ratio > 1.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pixel_values": torch.zeros(1, 2, 3, 16, 16)}, "do not tell which image is which"),
        ({"pixel_values": torch.zeros(3, 3, 16, 16)}, "do not tell which image is which"),
        ({"image_sizes": torch.tensor([[16, 16], [8, 16]])}, "images of several sizes"),
        (
            {"image_grid_thw": torch.tensor([[1, 4, 4]]), "pixel_values": torch.zeros(16, 8)},
            "with 4 placeholders stand",
        ),
        ({"model_type": "idefics"}, "images of 'idefics' are not supported"),
    ],
)
def test_batches_that_are_left_to_the_model(changes, message):
    kind = changes.pop("model_type", "llava")
    config = SimpleNamespace(model_type=kind, vision_config=SimpleNamespace(spatial_merge_size=2))
    arguments = {"pixel_values": torch.zeros(2, 3, 16, 16), **changes}
    with pytest.raises(NotShareable, match=message):
        images_of_call(arguments, np.array([[5, *[IMAGE_TOKEN] * 4, 6, *[IMAGE_TOKEN] * 4]]), config, IMAGE_TOKEN)
