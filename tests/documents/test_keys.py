"""What the reference pages take from the code is what the code has; recipes hold keys that are there."""

import re
from pathlib import Path

import pytest

from treewise.cli.commands import rl
from treewise.cli.config import read_config
from treewise.cli.keys import key_names, schema

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[Path, str]:
    monkeypatch.syspath_prepend(str(DOCS))
    import reference

    return reference.pages()


def test_reference_pages_are_what_their_code_makes(made: dict[Path, str]) -> None:
    """`python docs/reference.py` writes them."""
    assert {path.name: text for path, text in made.items()} == {path.name: path.read_text() for path in made}


def test_every_key_of_ours_is_on_the_page(made: dict[Path, str]) -> None:
    shown = set(re.findall(r"^\| `(\w+)` \|", made[DOCS / "keys.md"], re.MULTILINE))
    theirs = set(schema()) - set(key_names()) | set(rl.KEYS)
    assert len(shown) > 150
    assert theirs <= shown


def test_recipes_for_gpus_hold_keys_that_are_there(tmp_path: Path) -> None:
    pages = [(DOCS / name).read_text(encoding="utf-8") for name in ("gpu.md", "lora.md")]
    recipes = [recipe for page in pages for recipe in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    assert len(recipes) == 5
    for recipe in recipes:
        (tmp_path / "run.yaml").write_text(recipe, encoding="utf-8")
        found = read_config(str(tmp_path / "run.yaml"))
        assert found.data
        assert found.training["max_tokens"] >= 8192
