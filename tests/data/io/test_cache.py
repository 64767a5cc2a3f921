"""What the cache holds is what reading gives: a change of what records are read as raises the number in its key."""

import hashlib
import json

import pytest

from tests.data.io.test_other_forms import SAME
from treewise.data import RenderOptions, load_trees
from treewise.data.io import cache

# Raise `cache.READING` where this hash changes, and write the new one down.
READING, FINGERPRINTS = 1, "ddae2b5ea4b159fcac61ff1dce6a2c8c433982848c87a1429a71fd0327c1a63f"


def test_a_change_of_what_is_read_raises_the_number_of_reading(fixtures, tokenizer, qwen3_template):
    found = []
    for name in ("gsm8k", "nemo", "tau2_grok", "tau_airline", "tokens", "whowhen"):
        for template in ("chatml", qwen3_template):
            options = RenderOptions(chat_template=template, on_hidden="warn")
            found.append(load_trees(fixtures / f"{name}.jsonl.gz", tokenizer, options=options).fingerprint)
    for theirs, ours in SAME.values():
        for record in (theirs, ours):
            found.append(load_trees([record], tokenizer, options={"chat_template": "chatml"}).fingerprint)
    assert (cache.READING, hashlib.sha256("".join(found).encode()).hexdigest()) == (READING, FINGERPRINTS)


@pytest.mark.parametrize("change", ["READING", "__version__", "settings", "content", "name"])
def test_the_key_follows_the_version_the_settings_and_the_files(change, tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"token_ids": [1, 2]}))
    before = cache.cache_key(["a"], [rows])
    assert cache.cache_key(["a"], [rows]) == before
    if change == "READING":
        monkeypatch.setattr(cache, change, cache.READING + 1)
    elif change == "__version__":
        monkeypatch.setattr(cache.treewise, change, "9.9.9")
    elif change == "content":
        rows.write_text(json.dumps({"token_ids": [1, 3]}))
    elif change == "name":
        rows = rows.rename(tmp_path / "others.jsonl")
    assert cache.cache_key(["b" if change == "settings" else "a"], [rows]) != before
