"""All modules and parameters of a model, once each, in torch's own order."""

import pytest
from torch import nn

from treewise.nn.decoder import all_modules, all_parameters
from treewise.testing import tiny_model


def shared() -> nn.Module:
    """A module that stands at two places, one inside of the other's neighbour, parameters that are tied, and gaps."""
    first, inner = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    model = nn.Sequential(nn.Sequential(first, inner), inner, nn.Sequential(nn.Linear(2, 2), first))
    model[2][0].weight = first.weight
    model.gone = None
    model.register_module("none", None)
    return model


@pytest.mark.parametrize("make", [shared, nn.Identity, lambda: tiny_model("qwen3", tie_word_embeddings=True)])
def test_modules_and_parameters_are_those_of_torch(make):
    model = make()
    assert all(one is other for one, other in zip(all_modules(model), model.modules(), strict=True))
    found = all_parameters(all_modules(model))
    assert all(one is other for one, other in zip(found, model.parameters(), strict=True))
