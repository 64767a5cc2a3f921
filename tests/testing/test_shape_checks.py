"""Shapes that a function states are checked in tests: each letter is one size."""

import jaxtyping
import pytest
import torch

from treewise.errors import ConfigError
from treewise.nn.attention.cascade import attend
from treewise.nn.attention.gateway import Gateway, extend
from treewise.nn.recurrent.rows import gather
from treewise.objectives.policy_gradient import weighted_logprob
from treewise.testing.shape_checks import install


def test_sizes_that_differ() -> None:
    weighted_logprob(torch.ones(3), torch.ones(3), torch.ones(3))
    with pytest.raises(jaxtyping.TypeCheckError):
        weighted_logprob(torch.ones(3), torch.ones(2), torch.ones(3))


def test_axes_that_are_missing() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        extend(torch.ones(2, 3, 4), torch.ones(2, 3, 4), (), "layer")


def test_keys_and_values_of_other_lengths() -> None:
    query = torch.ones(1, 2, 3, 8)
    with pytest.raises(jaxtyping.TypeCheckError):
        attend(query, torch.ones(1, 2, 4, 8), query, None, None)  # type: ignore[arg-type]


def test_an_index_of_floats() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        gather(torch.ones(3, 2), torch.ones(2))


def test_methods_and_functions_without_shapes_are_as_they_were() -> None:
    assert Gateway.add_state_gradients.__annotations__["grad"] is torch.Tensor
    assert not hasattr(Gateway.add_state_gradients, "__wrapped__")  # tests/stated_shapes.py
    assert hasattr(extend, "__wrapped__")


def test_a_package_that_is_imported_already() -> None:
    with pytest.raises(ConfigError, match=r"treewise\.nn is already imported"):
        install("treewise.nn")
