"""Logits that are computed when they are read: every way of reading gives the tensor, and losses read scored rows."""

import numpy as np
import pytest
import torch
from torch.nn import functional

import treewise as tw
from tests.integrations.decoder.test_seam import ROWS, alone, model_of, padded, through
from treewise.integrations.decoder.lazy_logits import LazyLogits
from treewise.testing.oracle import gradient_error


def lazy():
    torch.manual_seed(0)
    tree = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    head = torch.nn.Linear(3, 7, bias=False, dtype=torch.float64)
    places = np.array([[0, 1, 2], [0, 1, 4]])
    return LazyLogits(tree, places, head), head(tree[torch.tensor(places)])


READINGS = [
    lambda logits: logits[:, -1],
    lambda logits: logits[..., :2].sum(),
    lambda logits: logits * 2 + 1,
    lambda logits: 3 - logits / 2,
    lambda logits: torch.tanh(logits / 5) * 5,
    lambda logits: logits.float().log_softmax(-1),
    lambda logits: functional.log_softmax(logits, dim=-1),
    lambda logits: torch.cat([logits, logits], dim=1),
    lambda logits: torch.stack([logits, logits * 2]),
    lambda logits: logits.view(-1, logits.shape[-1]).gather(1, torch.zeros(6, 1, dtype=torch.long)),
    lambda logits: logits.to(torch.float32),
    lambda logits: (-logits).exp(),
    lambda logits: logits.argmax(-1),
    lambda logits: logits @ torch.ones(7, 2, dtype=torch.float64),
    lambda logits: torch.stack([each.sum() for each in logits]),
    lambda logits: logits > 0,
    lambda logits: logits == logits.max(),
    lambda logits: torch.where(logits > 0, logits, 0.0),
    lambda logits: logits.detach(),
    lambda logits: logits.clone().div_(2),
    lambda logits: logits.mean(dim=(0, 1)),
    lambda logits: torch.as_tensor(np.asarray(logits.detach())),
]


@pytest.mark.parametrize("read", READINGS)
def test_reading(read):
    found, expected = lazy()
    assert (found.shape, found.dtype, found.device, found.dim(), len(found), found.numel()) == (
        *(expected.shape, expected.dtype, expected.device),
        *(expected.dim(), len(expected), expected.numel()),
    )
    value = read(found)
    value = value.tensor() if isinstance(value, LazyLogits) else value
    torch.testing.assert_close(value, read(expected))
    assert value.requires_grad == read(expected).requires_grad


def test_in_place():
    found, expected = lazy()
    found /= 2
    torch.testing.assert_close(found, expected / 2)
    found, expected = lazy()
    found[0] = 0
    assert not found[0].any()


def test_each_row_of_the_tree_is_projected_once_and_only_where_it_is_read():
    sizes = []
    head = torch.nn.Linear(3, 7)
    head.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    logits = LazyLogits(torch.randn(5, 3, requires_grad=True), np.array([[0, 1, 2], [0, 1, 4]]), head)
    logits.of_cells(np.array([1, 4]))
    logits.tensor()
    logits.tensor()
    assert sizes == [0, 1, 4]


# -- in a model -------------------------------------------------------------------------------------------------------


@pytest.fixture
def projected(monkeypatch):
    """Numbers of rows that a model's head projects from now on."""

    def of(model):
        rows, own = [], functional.linear

        def linear(inputs, weight, bias=None):
            if weight is model.lm_head.weight:
                rows.append(inputs.numel() // inputs.shape[-1])
            return own(inputs, weight, bias)

        monkeypatch.setattr(functional, "linear", linear)
        return rows

    return of


def test_a_loss_projects_scored_rows_of_the_tree_alone(projected):
    model = model_of()
    tw.share_prefixes(model)
    through(model, padded())  # the probe
    rows = projected(model)
    through(model, padded())
    scored = {tuple(row[:end]) for row in ROWS for end in range(4, len(row))}
    assert rows == [0, len(scored)]


def test_once_logits_are_read_beside_the_loss_they_are_computed_once(projected):
    model = model_of()
    tw.share_prefixes(model)
    for _ in range(2):
        _, _, out = through(model, padded())
        out.logits.argmax(-1)
    rows = projected(model)
    _, _, out = through(model, padded())
    out.logits.argmax(-1)
    tree = tw.Forest.from_trajectories([tw.Trajectory(row) for row in ROWS]).num_tokens
    assert rows == [0, tree + 1]  # and one row of padding


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere2"])
def test_caps_and_scales_of_logits_stay_row_by_row_of_the_tree(family):
    model = model_of(family)
    expected = alone(model)
    tw.share_prefixes(model)
    found = through(model, padded())
    assert isinstance(found[2].logits, LazyLogits)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert gradient_error(found[1], expected[1]) < 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"num_items_in_batch": torch.tensor(40)},
        {"num_items_in_batch": 40},
        {"shift_labels": functional.pad(padded()["labels"], (0, 1), value=-100)[:, 1:].contiguous()},
    ],
)
def test_arguments_of_the_loss(changes):
    model = model_of()
    expected = through(model, padded() | changes)
    tw.share_prefixes(model)
    found = through(model, padded() | changes)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert gradient_error(found[1], expected[1]) < 1e-6


def test_a_loss_function_of_ones_own_gets_logits():
    model = model_of()
    model.loss_function = lambda logits, labels, **_: logits[labels >= 0].square().mean()
    expected = through(model, padded())
    sharing = tw.share_prefixes(model)
    found = through(model, padded())
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert gradient_error(found[1], expected[1]) < 1e-6
    own = model.loss_function
    sharing.remove()
    assert model.loss_function is not own


def test_no_label_at_all():
    model = model_of()
    inputs = padded()
    inputs["labels"][:] = -100
    tw.share_prefixes(model)
    assert torch.isnan(model(**inputs).loss)
    assert model(**inputs, num_items_in_batch=torch.tensor(3)).loss.item() == 0
