"""Contestants on screenshots: the same gradients, and seconds of the tower beside them."""

import pytest
import torch

from treewise.bench import Settings, make, measure_workload, random_model
from treewise.bench.contestants import twin
from treewise.bench.images import image_format


@pytest.mark.exhaustive
def test_all_contestants_agree_on_screenshots() -> None:
    model = random_model("qwen2.5-vl-tiny", torch.float32, torch.device("cpu"))
    workload = make("screenshots", "tiny", 64, images=image_format(model))
    row = measure_workload(twin(model), workload, Settings(repetitions=1))
    errors = {name: each["gradient_error"] for name, each in row["contestants"].items()}
    assert {"flat", "merged", "tree"} < set(errors)
    assert max(errors.values()) < 2e-6
    assert (row["images"], row["flat_images"]) == (9, 30)
    assert row["tower_share"] == pytest.approx(
        row["tower_seconds"]["median"] / row["contestants"]["tree"]["seconds"]["median"]
    )


def test_other_models_have_no_format_of_images() -> None:
    assert image_format(random_model("qwen3-tiny", torch.float32, torch.device("cpu"))) is None
