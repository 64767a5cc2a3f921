from pathlib import Path

import pytest

from treewise.base.paths import path_of
from treewise.data import load_trees
from treewise.errors import DataError


def test_a_home_that_is_not_there_is_left_as_it_is(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert path_of("~/data.jsonl") == Path("/somewhere/data.jsonl")
    assert path_of("~no-such-user/data.jsonl") == Path("~no-such-user/data.jsonl")


def test_data_in_a_home_that_is_not_there_are_not_found():
    with pytest.raises(DataError, match=r"~no-such-user/data\.jsonl"):
        load_trees("~no-such-user/data.jsonl")
