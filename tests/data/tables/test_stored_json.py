"""Text of a JSON column and the value of a record that it stands for."""

import pickle

import pytest

from treewise.data.tables.stored_json import StoredJson
from treewise.errors import DataError

VALUES = {
    "text": ("content", '"Hi"', "Hi"),
    "parts": ("content", '[{"type":"text","text":"Hi"}]', [{"type": "text", "text": "Hi"}]),
    "a text that reads as a number": ("content", " 5 ", " 5 "),
    "a text that reads as null": ("completion", "null", "null"),
    "a text that reads as a list": ("prompt", "[1, 2]", "[1, 2]"),
    "messages": ("prompt", '[{"role":"user","content":"7"}]', [{"role": "user", "content": "7"}]),
    "one message": ("completion", '{"role":"assistant"}', {"role": "assistant"}),
    "an object": ("completion", '{"sum": 4}', '{"sum": 4}'),
    "a number": ("reward", "0.5", 0.5),
    "arguments": ("arguments", '{"city":"New  York"}', {"city": "New  York"}),
    "arguments as text": ("arguments", '{"city": "Paris"}', '{"city": "Paris"}'),
    "a null within": ("properties", '{"a":null}', {"a": None}),
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name):
    field, text, value = VALUES[name]
    assert pickle.loads(pickle.dumps(StoredJson(text, field))).value("row 1") == value
    assert StoredJson.of_stream(text, field).value("row 1") == value


def test_what_was_read_already_stays():
    assert StoredJson.of_stream("plain", "content").value("row 1") == "plain"
    assert StoredJson.of_stream({"a": None}, "arguments").value("row 1") == {"a": None}


BAD = {
    "cut": (StoredJson('"cut', "content"), "content, a column of type Json, holds text that is not valid JSON"),
    "half a pair": (StoredJson('"\\ud83d"', "content"), "UnicodeEncodeError"),
    "deep": (StoredJson("[" * 100_000, "content"), "RecursionError|Expecting|nested"),
    "read before": (StoredJson(42, "content", is_read=True), "content is 42: a column of type Json"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_lost_or_damaged_is_an_error(name):
    value, words = BAD[name]
    with pytest.raises(DataError, match=f"^row 1: .*({words})"):
        value.value("row 1")
