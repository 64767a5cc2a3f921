"""Values of any type survive JSON."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treewise.trainer.checkpoint.json_values import from_plain, to_plain

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just("__is__"),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.just("__is__"), inner)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_values_survive_json_with_their_types(value):
    found = from_plain(json.loads(json.dumps(to_plain(value))))
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.int64])
def test_tensors_and_arrays_survive_json(dtype):
    for value in (torch.arange(6).reshape(2, 3).to(dtype), torch.tensor(1).to(dtype), torch.empty(0, 2, dtype=dtype)):
        found = from_plain(json.loads(json.dumps(to_plain({"a": value}))))["a"]
        assert found.dtype == dtype
        assert torch.equal(found, value)
    array = np.arange(4, dtype=np.uint32)
    assert np.array_equal(from_plain(json.loads(json.dumps(to_plain(array)))), array)
