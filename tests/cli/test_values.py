"""Values are what their key declares, or an error that names both."""

from typing import Literal

import pytest

from treewise.cli.keys import schema
from treewise.cli.values import coerce, read_file, read_mapping
from treewise.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "annotation", "expected"),
    [
        ("1e-5", float, 1e-5),
        ("1_000", int, 1000),
        ("1e3", int, 1000),
        (8.0, int, 8),
        (3, float, 3),
        ("none", int | None, None),
        ("none", str | list[str] | None, "none"),
        ("off", bool, False),
        (False, schema()["eval_strategy"], "no"),
        ("a, b", list[str], ["a", "b"]),
        ("[a, b]", list[str] | str, ["a", "b"]),
        ('{"a": 1}', dict | str | None, {"a": 1}),
        ("8", str, "8"),
    ],
)
def test_values_become_their_type(given, annotation, expected):
    found = coerce("eval_strategy" if given is False else "key", given, annotation)
    assert found == expected
    assert type(found) is type(expected)


# -- what YAML 1.1 reads as something else than it says ---------------------------------------------------------------


def read(text, annotation, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"key: {text}\n")
    [(value, location)] = read_file(path, ()).values()
    assert location == f"{path}:1"
    return coerce("key", value, annotation)


@pytest.mark.parametrize(
    ("text", "annotation", "expected"),
    [
        ("no", bool, False),
        ("On", bool, True),
        ("true", bool, True),
        ("off", Literal["off", "auto"], "off"),
        ("yes", bool | str, True),
        ("1:30", str, "1:30"),
        ("010", str | None, "010"),
        ("2026-11-28", str, "2026-11-28"),
        ("2026-11-28 12:00:00", str, "2026-11-28 12:00:00"),
        ("1_000", int, 1000),
        ("0x10", int, 16),
        ("0", int, 0),
        ("0.5", float, 0.5),
        ("-7", int, -7),
        ("1e-5", float, 1e-5),
        ("~", int | None, None),
        ('"no"', str, "no"),
        ("[1, 2]", list[int], [1, 2]),
    ],
)
def test_words_of_a_file_are_what_they_say(text, annotation, expected, tmp_path):
    found = read(text, annotation, tmp_path)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("text", "annotation", "words"),
    [
        ("1:30", int, "key must be an integer, found '1:30', which YAML 1.1 reads as 90; write the number in digits"),
        ("1:30.5", float, "key must be a number, found '1:30.5', which YAML 1.1 reads as 90.5; write the number"),
        ("010", int, "key must be an integer, found '010', which YAML 1.1 reads as 8; write the number in digits"),
        ("-0_10", int | None, "found '-0_10', which YAML 1.1 reads as -8"),
        ("no", int, r"key must be an integer, found False \(true or false\)"),
        ("off", str, r"key must be text, found False \(true or false\). Quote it if it is meant as text"),
        ("08", int, r"key must be an integer, found '08' \(text\)"),
        ("2026-11-28", int, r"key must be an integer, found '2026-11-28' \(text\)"),
        ("true", str, r"key must be text, found True \(true or false\). Quote it"),
    ],
)
def test_what_looks_like_something_else_is_refused(text, annotation, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        read(text, annotation, tmp_path)


@pytest.mark.parametrize("text", ["010", "-007", "00.5", "0_1"])
def test_a_flag_with_leading_zeros_is_no_number(text):
    with pytest.raises(ConfigError, match=rf"key must be a.* found '{text}' \(text\)"):
        coerce("key", text, float if "." in text else int)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{enable_thinking: no}", "--x.enable_thinking is 'no', which YAML 1.1 reads as false; write true or false"),
        ("{a: {b: [1, 1:30]}}", r"--x.a.b\[1\] is '1:30', which YAML 1.1 reads as 90"),
        ("{a: 010}", "--x.a is '010', which YAML 1.1 reads as 8"),
    ],
)
def test_parts_without_a_type_are_refused_where_they_look_like_something_else(text, words):
    with pytest.raises(ConfigError, match=words):
        read_mapping("--x", text)
    assert read_mapping("--x", "{a: false, b: 'no', c: 8, d: 2026-11-28}") == {
        **{"a": False, "b": "no", "c": 8},
        "d": "2026-11-28",
    }
