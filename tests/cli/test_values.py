"""Values are what their key declares, or an error that names both."""

import pytest

from treewise.cli.keys import schema
from treewise.cli.values import coerce


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
