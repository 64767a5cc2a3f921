"""The bundled screenshots: they load, and branch where a try was taken up again and where a screenshot was dropped."""

import json
from pathlib import Path

from tests.data.images.test_placing import PARTS
from tests.image_models import tiny_processor
from treewise.data import load_trees

FOLDER = Path(__file__).parents[2] / "examples" / "data" / "screenshots"


def test_the_bundled_screenshots_are_trees_of_tries() -> None:
    processor = tiny_processor("llava")
    processor.chat_template = PARTS
    trees = load_trees(FOLDER / "tries.jsonl", processor)
    forests = [tree.forest() for tree in trees]
    assert [forest.num_trajectories for forest in forests] == [13, 11, 10]
    calls = [item for forest in forests for item in forest.trajectories]
    assert max(len(item.images) for item in calls) == 3
    seen = {image.digest for item in calls for image in item.images}
    assert len(seen) == len(list(FOLDER.glob("*.png"))) == 22
    assert sum(len(item.images) for item in calls) > 3 * len(seen)
    assert all(forest.share_ratio > 1.5 for forest in forests)
    assert {item.reward for item in calls} == {0.0, 1.0}


def test_every_screenshot_is_small_and_used() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 300_000
    text = (FOLDER / "tries.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    assert len(records) == 11
    assert all(path.name in text for path in FOLDER.glob("*.png"))
