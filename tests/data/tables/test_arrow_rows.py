"""Values of Arrow columns by their type: plain ones, marked JSON, and types that have no meaning in a record."""

import json

import pyarrow as pa
import pytest

from treewise.data import load_trees
from treewise.data.tables.arrow_rows import FEATURES, arrow_records
from treewise.data.tables.stored_json import StoredJson
from treewise.errors import DataError


def rows(table, features=None):
    return [record.payload for record in arrow_records(table.to_batches(), "table", features)]


def with_features(table, features):
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def test_json_is_marked_by_its_arrow_type_at_every_depth():
    contents = pa.array(['"Hi"']).cast(pa.json_())
    messages = pa.StructArray.from_arrays([pa.array(["user"]), contents], ["role", "content"])
    table = pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, 1, 1]), messages)})
    assert rows(table) == [
        {"messages": [{"role": "user", "content": StoredJson('"Hi"', "content")}]},
        {"messages": []},
    ]


@pytest.mark.parametrize("list_of", [[{"_type": "Json"}], {"feature": {"_type": "Json"}, "_type": "List"}])
def test_json_is_marked_by_the_features_beside_plain_text(list_of):
    """As a pyarrow without the type reads it, and other writers of Parquet keep it."""
    table = pa.table({"prompt": ['"Hi"'], "messages": [['{"role": "user"}']]})
    found = rows(with_features(table, {"prompt": {"_type": "Json"}, "messages": list_of}))
    assert found == [{"prompt": StoredJson('"Hi"', "prompt"), "messages": [StoredJson('{"role": "user"}', "messages")]}]


def test_maps_are_objects_and_uuids_text():
    raw = pa.array([b"0123456789abcdef"], pa.binary(16))
    table = pa.table(
        {
            "arguments": pa.array([[("city", "Paris")]], pa.map_(pa.string(), pa.string())),
            "group": pa.ExtensionArray.from_storage(pa.uuid(), raw),
        }
    )
    assert rows(table) == [{"arguments": {"city": "Paris"}, "group": "30313233-3435-3637-3839-616263646566"}]


def test_every_feature_of_datasets_is_read_or_an_error_by_name():
    from datasets.features import features

    files = set(features._FEATURE_TYPES) - set(FEATURES)
    assert files <= {"Audio", "Video", "Pdf", "Nifti", "Mesh", "BioSequence", "BioStructure"}
    for name in files:
        with pytest.raises(DataError, match=rf"table: column speech is of the type {name} of datasets.*remove_columns"):
            rows(pa.table({"speech": ["a"]}), {"speech": {"_type": name}})


def test_a_feature_without_meaning_is_found_within_lists_and_structs():
    table = pa.table({"messages": [[{"content": {"audio": {"bytes": b"a", "path": "a"}}}]]})
    features = {"messages": {"feature": {"content": {"audio": {"_type": "Audio"}}}, "_type": "List"}}
    with pytest.raises(DataError, match=r"column messages\[\]\.content\.audio is of the type Audio"):
        load_trees(with_features(table, features))


def test_an_unknown_arrow_type_is_an_error_by_name():
    tensor = pa.FixedShapeTensorArray.from_storage(
        pa.fixed_shape_tensor(pa.int64(), (2,)), pa.array([[1, 2]], pa.list_(pa.int64(), 2))
    )
    with pytest.raises(DataError, match=r"column token_ids is of the Arrow type arrow.fixed_shape_tensor"):
        rows(pa.table({"token_ids": tensor}))


def test_damaged_features_are_an_error():
    table = pa.table({"prompt": ["a"]}).replace_schema_metadata({"huggingface": "{"})
    with pytest.raises(DataError, match="features that datasets wrote into its metadata are damaged"):
        rows(table)
