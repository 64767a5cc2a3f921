"""Tasks by name: what is missing is said before anything is loaded."""

import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from treewise.errors import ConfigError
from treewise.rl.online.tasks_by_name import task_named


def test_a_missing_client_of_openenv_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was found at the first `reset`, and blamed on the environment."""
    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(ConfigError, match=r"^openenv:http://localhost:1 needs openenv.*: pip install 'openenv"):
        task_named("openenv:http://localhost:1")


def test_prompts_in_a_json_column_are_what_they_were(tmp_path) -> None:
    """`datasets` writes such a column where prompts are texts and lists of messages."""
    prompts = ['"Sort b a"', '[{"role":"user","content":"Sort 2 1"}]', "42"]
    table = pa.table({"prompt": pa.array(prompts).cast(pa.json_()), "answer": [{"a": 1, "b": None}] * 3})
    pq.write_table(table, tmp_path / "rows.parquet")
    task = task_named(str(tmp_path / "rows.parquet"), {"held_out": 0.0}, ["math:sqrt"])
    items = [task.item("train", index) for index in range(3)]
    assert [item.prompt for item in items] == ["Sort b a", ({"role": "user", "content": "Sort 2 1"},), "42"]
    assert items[0].extra == {"answer": {"a": 1, "b": None}}
