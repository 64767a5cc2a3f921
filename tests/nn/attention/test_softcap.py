"""Tiles of capped attention equal the dense formula, forward and backward, for any tile size."""

import pytest
import torch

from treewise.nn.attention import softcap
from treewise.nn.attention.mask import LayerRule
from treewise.nn.attention.softcap import Attended, Visibility

SCALING, CAP = 0.4, 0.9
RULE = LayerRule(SCALING, softcap=CAP)


def dense(query, key, value, is_causal, mask):
    num_groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(num_groups, 1), value.repeat_interleave(num_groups, 1)
    scores = CAP * torch.tanh(query @ key.transpose(-1, -2) * SCALING / CAP)
    if mask is not None:
        scores = scores + mask
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, -1) @ value, torch.logsumexp(scores, -1)


@pytest.mark.parametrize("tile", [(256, 1024), (4, 3), (1, 1)])
@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_tiles_equal_the_formula(monkeypatch, tile, kind):
    monkeypatch.setattr(softcap, "TILE_ROWS", tile[0])
    monkeypatch.setattr(softcap, "TILE_KEYS", tile[1])
    num_keys = 11 if kind == "causal" else 14
    shapes = ((4, 11, 6), (2, num_keys, 6), (2, num_keys, 5))
    query, key, value = (torch.randn(1, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    mask = None
    if kind == "masked":  # whole tiles are hidden, also the first ones of a row
        mask = torch.zeros(1, 1, 11, num_keys, dtype=torch.float64)
        mask[..., 5:, :9] = -torch.inf
        mask[..., :3, 2:] = -torch.inf
    expected, expected_lse = dense(query, key, value, kind == "causal", mask)
    visible = Visibility(kind == "causal", mask)
    with torch.no_grad():
        out, lse = softcap.softcap_attention(query, key, value, visible, RULE)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    with torch.no_grad():
        part = Attended(query, key, value, out, lse)
        found = softcap.softcap_attention_backward(grad, part, visible, RULE)
    for one, leaf in zip(found, (query, key, value), strict=True):
        torch.testing.assert_close(one, leaf.grad)
