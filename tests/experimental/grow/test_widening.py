"""Widening row by row: the same as at once, sums over copies kept, noise only where there are copies."""

from types import SimpleNamespace

import pytest
import torch

from treewise.experimental.grow import widening
from treewise.experimental.grow.widening import Widening, role_of, widened

CONFIG = SimpleNamespace(hidden_size=6, num_attention_heads=2, num_key_value_heads=1, head_dim=3)
UP, DOWN = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
FUSED = "model.layers.0.self_attn.qkv_proj.weight"


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize(("name", "shape"), [(UP, (10, 6)), (DOWN, (6, 10)), (FUSED, (12, 6))])
def test_blocks_of_rows_are_the_whole(name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    small = matrix(*shape)
    role, rule = role_of(name, shape, CONFIG), Widening(3)
    whole = widened(name, small, role, rule)
    noisy = widened(name, small, role, Widening(3, noise=0.3))
    monkeypatch.setattr(widening, "BLOCK_VALUES", 50)
    assert torch.equal(widened(name, small, role, rule), whole)
    assert tuple(whole.shape) == rule.grown_shape(role, shape)
    columns = rule.factors(role)[1]
    sums = noisy.unflatten(1, (columns, -1)).sum(1)
    torch.testing.assert_close(sums, whole.unflatten(1, (columns, -1)).sum(1), rtol=1e-5, atol=1e-6)
    noise = (noisy - whole).std() * columns / small.std()
    assert float(noise) == pytest.approx(0.3 * (1 - 1 / columns) ** 0.5, rel=0.2)  # less what keeps the sums


def test_parts_of_a_fused_projection_are_repeated_apart() -> None:
    small = torch.arange(12.0)[:, None].repeat(1, 6)
    rows = widened(FUSED, small, role_of(FUSED, (12, 6), CONFIG), Widening(2))[:, 0] * 2
    queries, keys, values = list(range(6)), [6, 7, 8], [9, 10, 11]
    assert rows.tolist() == [*queries, *queries, *keys, *keys, *values, *values]


def test_noise_of_a_silent_branch_is_free() -> None:
    role, rule = role_of(UP, (10, 6), CONFIG), Widening(2, noise=0.5)
    small = matrix(10, 6)
    exact = widened(UP, small, role, Widening(2)).unflatten(1, (2, -1)).sum(1)
    kept, free = (
        widened(UP, small, role, rule, is_silent=silent).unflatten(1, (2, -1)).sum(1) for silent in (False, True)
    )
    torch.testing.assert_close(kept, exact)
    assert float((free - exact).std()) > 0.1
