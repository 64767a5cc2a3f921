"""Annotations of settings as checks: limits, choices, and what an error says to do."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt

from tests.damage import damages
from treewise.base.given_settings import check_setting_types
from treewise.base.own_files import read_own, sealed, unsealed
from treewise.errors import ConfigError, DataError, beyond_limits, check_fields


@dataclass
class Settings:
    count: Annotated[int, Ge(1), "leave it out for no limit"] | None = None
    share: Annotated[float, Ge(0), Le(1)] = 0.5
    rate: Annotated[float, Gt(0), Lt(math.inf)] = 1.0
    mode: Literal["stop", "skip"] = "stop"
    text: str = "any"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 0}, r"^count=0 must be at least 1; leave it out for no limit\.$"),
        ({"count": "8"}, "count='8' must be at least 1"),
        ({"share": 1.5}, r"^share=1\.5 must be 0 or positive and at most 1\.$"),
        ({"rate": 0.0}, r"^rate=0 must be positive and finite\.$"),
        ({"rate": math.nan}, "rate=nan must be positive and finite"),
        ({"mode": "stops"}, r"mode='stops' is unknown; choose one of stop, skip\. Did you mean 'stop'\?"),
    ],
)
def test_a_value_beyond_its_annotation_is_an_error(given: dict[str, Any], message: str) -> None:
    check_fields(Settings())
    check_fields(Settings(count=1, share=1, rate=1e300, mode="skip"))
    with pytest.raises(ConfigError, match=message):
        check_fields(Settings(**given))


def test_limits_in_words() -> None:
    limits = (Ge(0), Lt(2**32), "advice")
    assert beyond_limits(-1, limits) == "0 or positive and below 4,294,967,296"
    assert beyond_limits(7, limits) is None
    assert beyond_limits(7, ()) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cout": 1}, "unknown setting 'cout' of a test. Did you mean 'count'"),
        ({"count": True}, "a test: count=True must be an integer or none"),
        ({"rate": "1"}, "a test: rate='1' must be a number"),
    ],
)
def test_settings_of_another_type_are_errors(given: dict[str, Any], message: str) -> None:
    known = {"count": int | None, "rate": float}
    check_setting_types("a test", {"count": None, "rate": 1}, known)
    with pytest.raises(ConfigError, match=message):
        check_setting_types("a test", given, known)


VALUES = {"a": [1, 0.1, None, True], "b": {"c": "d\n\u20ac"}, "nan": -math.inf}


@pytest.mark.parametrize("indent", [None, 1])
def test_what_was_sealed_comes_back_or_an_error_names_the_file(indent, tmp_path):
    path = tmp_path / "own.json"
    path.write_text(sealed(VALUES, indent))
    read = partial(unsealed, indent=indent)
    assert read_own(path, read, "write it again") == VALUES
    for _ in damages(path):
        with pytest.raises(DataError, match=r"own\.json: (damaged|cannot be read) \(.*\); write it again\.$"):
            read_own(path, read, "write it again", DataError)


def test_what_reads_a_file_may_raise_anything(tmp_path):
    path = tmp_path / "own.json"
    with pytest.raises(ConfigError, match=r"own\.json: cannot be read \(No such file or directory\); write it again\."):
        read_own(path, unsealed, "write it again")
    path.write_text("{}")
    assert read_own(path, partial(unsealed, may_lack=True), "write it again") == {}
    with pytest.raises(ConfigError, match=r"own\.json: damaged \(KeyError: 'a'\); write it again\."):
        read_own(path, lambda _: {}["a"], "write it again")
