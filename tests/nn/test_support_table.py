"""Every family of transformers is as the capability table says: supported and equal to flat training, or refused."""

import re
from functools import cache

import pytest
import transformers

from tests.capability import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    REFUSED,
    SUPPORTED,
    TOLERANCE,
    UNTRIED,
    as_markdown,
    examine,
    image_families,
)
from tests.damage import damages
from treewise import TreeEngine
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn.model import REFUSED_FAMILIES
from treewise.nn.support_table import Capability, CapabilityTable
from treewise.testing.families import causal_families, tiny_model

TABLE = CapabilityTable.load()
FAMILIES = [*causal_families(), *image_families()]
# Vision-language models share their decoders with the causal families; these stand for the others in every run.
VISION = {"aya_vision", "glm4v_moe", "internvl", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm"}
# The forwards of two more take seconds on the tiny model.
SLOW = {"blt", "kimi_linear", *image_families()} - VISION
is_same_release = transformers.__version__ == TABLE.transformers


def without_numbers(reason: str) -> str:
    return re.sub(r"\d[\d.e-]*", "", reason)


@cache
def representatives() -> set[str]:
    """Every ninth of the first families of each combination of layers, and two that see: `make test` tries these."""
    first: dict[tuple[str, ...], str] = {}
    for row in TABLE.rows:
        if row.family not in SLOW:
            first.setdefault((row.status, *row.layers), row.family)
    return {*list(first.values())[::9], "internvl", "qwen3_vl"}


def marks_of(family: str) -> list[pytest.MarkDecorator]:
    return [] if family in representatives() else [pytest.mark.exhaustive]


@pytest.mark.parametrize("family", [pytest.param(each, marks=marks_of(each)) for each in FAMILIES])
@pytest.mark.filterwarnings("default")  # of building models: transformers' own
def test_family_is_as_the_table_says(family: str) -> None:
    found = examine(family)
    assert found.status in (SUPPORTED, REFUSED, UNTRIED), found
    if not is_same_release:
        return  # the table belongs to another release; that nothing is wrong has been seen
    stored = TABLE.find(family)
    assert stored is not None, "run `make models`"
    if found.status == UNTRIED and "No module named" in found.reason:
        pytest.skip(found.reason)  # the model itself needs what this environment lacks
    assert (found.status, found.layers) == (stored.status, stored.layers)
    assert without_numbers(found.reason) == without_numbers(stored.reason)
    if "No module named" not in found.image_reason:
        assert (found.image_error is None) == (stored.image_error is None), found.image_reason


@pytest.mark.skipif(not is_same_release, reason="the table belongs to another release of transformers")
def test_the_table_holds_every_family_of_this_release() -> None:
    assert {row.family for row in TABLE.rows} == set(FAMILIES)


def test_images_are_refused_for_a_reason_and_supported_at_the_tolerance() -> None:
    for row in TABLE.of_status(SUPPORTED):
        if row.family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            assert (row.image_error is None) == bool(row.image_reason), row.family
            assert row.image_error is None or row.image_error < TOLERANCE
    named = {"gemma3", "idefics3", "internvl", "llava", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm"}
    assert named <= set(TABLE.with_images())
    assert len(TABLE.with_images()) >= 40


def test_at_least_60_causal_families_are_supported() -> None:
    causal = set(causal_families())
    assert sum(row.family in causal for row in TABLE.of_status(SUPPORTED)) >= 60


def test_a_refusal_names_a_reason() -> None:
    assert all(len(row.reason) > 20 for row in TABLE.rows if row.status != SUPPORTED)


def test_refusals_are_sentences_not_exceptions_of_others() -> None:
    raw = re.compile(r"\w+Error\b|fails on a tree|cannot be built|forms of pixels")
    rows = {row.family: row for row in TABLE.rows}
    seeing = [each for each in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if is_same_release or each in rows]
    for family in (*seeing, *(each.family for each in TABLE.of_status(REFUSED))):
        assert not raw.search(rows[family].reason + rows[family].image_reason), rows[family]


@pytest.mark.parametrize("family", sorted(REFUSED_FAMILIES))
def test_a_family_that_looks_like_others_is_refused_before_computing(family: str) -> None:
    row = TABLE.find(family)
    assert row is not None
    assert (row.status, row.reason) == (REFUSED, f"{row.model} {REFUSED_FAMILIES[family]}.")
    if family in ("blt", "instructblipvideo"):  # seconds to build
        return
    with pytest.raises(UnsupportedModelError, match=re.escape(row.reason)):
        TreeEngine(tiny_model(family))


def test_a_damaged_table_is_named(tmp_path) -> None:
    TABLE.save(path := tmp_path / "table.json")
    for _ in damages(path, num_flips=60):
        with pytest.raises(ConfigError, match=r"table\.json: (damaged|cannot be read) \(.*\); write it again"):
            CapabilityTable.load(path)
    assert CapabilityTable.load(path) == TABLE


def test_a_table_survives_its_file(tmp_path) -> None:
    path = tmp_path / "table.json"
    TABLE.save(path)
    assert CapabilityTable.load(path) == TABLE


def test_the_page_escapes_columns() -> None:
    page = as_markdown(CapabilityTable("1.0", (Capability("a", REFUSED, "A", "x | y"),)))
    assert "| `a` | x \\| y |" in page
