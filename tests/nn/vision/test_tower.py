"""Positions of trees with images: those of each trajectory alone, equal where a token is shared, or refused."""

import numpy as np
import pytest
import torch

import treewise as tw
from tests.image_capability import HISTORIES, image_model, random_pixels, trajectory
from tests.image_models import IMAGE_TOKEN
from tests.needs import IMAGES, require
from treewise.nn.vision import opened, tree_positions


@pytest.fixture
def qwen():
    require(IMAGES)
    model = image_model("qwen2_vl")
    processor, num_rows = random_pixels(model)
    return model, processor, [trajectory(each, num_rows) for each in HISTORIES]


def test_positions_are_those_of_the_model_for_each_trajectory_alone(qwen):
    model, processor, items = qwen
    forest = tw.Forest.from_trajectories(items)
    ours = tree_positions(model.model, IMAGE_TOKEN, forest, lambda image: processor([opened(image)]))
    for path, item in zip(forest.paths, items, strict=True):
        ids = torch.from_numpy(item.token_ids.astype(np.int64))[None]
        grids = [processor([opened(each)])["image_grid_thw"] for each in item.images]
        seen = {"image_grid_thw": torch.cat(grids)} if grids else {}
        theirs, _ = model.model.get_rope_index(ids, mm_token_type_ids=(ids == IMAGE_TOKEN).int(), **seen)
        assert np.array_equal(ours[:, path], theirs[:, 0].numpy())
    assert (ours[:, forest.paths[0]] != np.arange(len(items[0]))).any()  # an image is shorter than its tokens


def test_positions_that_depend_on_what_comes_later_are_refused(qwen, monkeypatch):
    model, processor, items = qwen
    own = type(model.model).get_rope_index

    def from_the_end(self, input_ids, mm_token_type_ids, image_grid_thw=None):
        positions, deltas = own(self, input_ids, mm_token_type_ids, image_grid_thw)
        return positions + input_ids.shape[1], deltas

    monkeypatch.setattr(type(model.model), "get_rope_index", from_the_end)
    with pytest.raises(
        tw.errors.UnsupportedModelError, match=r"gives token 0 another position than in a trajectory that"
    ):
        tw.TreeEngine(model, processor=processor, check=False).step(items)
