"""The key of the cache: every part of the code that a rendered record depends on."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import treewise
from treewise.data import RenderOptions, cache
from treewise.data.sources import Source

TOKENIZER = SimpleNamespace(
    get_vocab=lambda: {"a": 0}, added_tokens_decoder={}, chat_template=None, special_tokens_map={}
)


@pytest.mark.parametrize("changed", ["data/render/template.py", "data/io/rows.py", "data/load.py", "tree/checks.py"])
def test_the_key_follows_the_code_that_reads_and_renders(changed, tmp_path, monkeypatch):
    package = Path(treewise.__file__).parent
    for room in ("data", "tree"):
        shutil.copytree(package / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "data" / "cache.py"))

    def key():
        return cache.cache_key([Source.of_file(rows)], RenderOptions(), TOKENIZER, allow_partial_tail=False)

    before = key()
    assert before == key()
    with (tmp_path / changed).open("a") as file:
        file.write("# changed\n")
    assert key() != before
