"""The tables of configuration keys name every key, with the default that it has."""

import dataclasses
import re
from pathlib import Path

import pytest
from transformers import TrainingArguments

from treewise import TreeTrainingArguments
from treewise.cli.commands import rl
from treewise.cli.config import read_config
from treewise.cli.keys import rl_aliases, schema
from treewise.data import RenderOptions

DOCS = Path(__file__).parents[2] / "docs"


def table_of(page: str, heading: str) -> dict[str, str]:
    """Keys of the first table below a heading, each with the text of its default; none where keys share a default."""
    text = (DOCS / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    found: dict[str, str] = {}
    for line in re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()[2:]:  # type: ignore[index]
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        keys = re.findall(r"`(\w+)`", cells[0])
        defaults = [each.strip("` ") for each in cells[2].split(",")] if len(cells) > 2 else []
        found |= dict(zip(keys, defaults if len(defaults) == len(keys) else [""] * len(keys), strict=True))
    return found


def ours() -> dict[str, object]:
    """What TreeTrainingArguments adds to transformers, with defaults."""
    theirs = {each.name for each in dataclasses.fields(TrainingArguments)}
    return {each.name: each.default for each in dataclasses.fields(TreeTrainingArguments) if each.name not in theirs}


def test_every_key_of_a_training_run_is_in_the_table() -> None:
    shown = set(table_of("training.md", "Keys of the configuration"))
    rendering = {each.name for each in dataclasses.fields(RenderOptions)}
    own = set(schema()) - {each.name for each in dataclasses.fields(TrainingArguments)}
    assert shown == own | set(ours()) | rendering | {"output_dir"}


@pytest.mark.parametrize(("key", "default"), ours().items())
def test_defaults_of_a_training_run(key: str, default: object) -> None:
    shown = table_of("training.md", "Keys of the configuration")[key]
    said = "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
    assert shown in (said, said.removesuffix(".0"))


def test_every_key_of_rl_is_named_on_its_page() -> None:
    page = (DOCS / "rl.md").read_text(encoding="utf-8")
    assert not [key for key in (*rl.KEYS, *rl_aliases()) if f"`{key}`" not in page]


def test_recipes_for_gpus_hold_keys_that_are_there(tmp_path: Path) -> None:
    recipes = re.findall(r"```yaml\n(.*?)```", (DOCS / "gpu.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(recipes) == 4
    for recipe in recipes:
        (tmp_path / "run.yaml").write_text(recipe, encoding="utf-8")
        found = read_config(str(tmp_path / "run.yaml"))
        assert found.data
        assert found.training["max_tokens"] >= 8192
