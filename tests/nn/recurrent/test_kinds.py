"""The recurrences that are written here, against one step per token in float64; padding leaves states alone."""

import pytest
import torch

from treewise.nn.recurrent.kinds import decayed_attention, linear_recurrence, padded_chunk, tree_selective_scan

B, L, H, D, N = 2, 11, 3, 4, 5
LENGTHS = (L, 7)  # of the two sequences, padded on the right


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def padded(tensor: torch.Tensor) -> torch.Tensor:
    is_token = torch.arange(L) < torch.tensor(LENGTHS)[:, None]
    return tensor * is_token.reshape(B, L, *[1] * (tensor.dim() - 2))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("has_initial", [False, True])
def test_lightning_attention(block_size: int, has_initial: bool) -> None:
    query, key, value = (padded(random(B, L, H, D)) for _ in range(3))
    decay = padded(-torch.rand(H, dtype=torch.float64).expand(B, L, H))
    initial = random(B, H, D, D) if has_initial else None
    out, end = decayed_attention(query, key, value, decay, initial, block_size)
    for row, length in enumerate(LENGTHS):
        state = initial[row] if has_initial else torch.zeros(H, D, D, dtype=torch.float64)
        for step in range(length):
            state = state * decay[row, step].exp()[:, None, None]
            state = state + key[row, step, :, :, None] * value[row, step, :, None, :]
            expected = torch.einsum("hk,hkv->hv", query[row, step], state)
            torch.testing.assert_close(out[row, step], expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(end[row], state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("has_initial", [False, True])
def test_linear_recurrence(has_initial: bool) -> None:
    inputs, gate = padded(random(B, L, D)), padded(torch.rand(B, L, D, dtype=torch.float64))
    is_token = padded(torch.ones(B, L, 1, dtype=torch.float64))
    initial = random(B, D) if has_initial else None
    out, end = linear_recurrence([inputs, gate, is_token], initial, True)
    for row, length in enumerate(LENGTHS):
        state = initial[row] if has_initial else torch.zeros(D, dtype=torch.float64)
        for step in range(length):
            state = gate[row, step] * state + inputs[row, step]
            torch.testing.assert_close(out[row, step], state, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(end[row], state, rtol=1e-12, atol=1e-12)


def test_selective_scan_from_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zero-state function plus what the state adds is the recurrence from that state."""
    x, step_size, B_in, C_in = padded(random(B, L, D)), padded(random(B, L, D).abs()), random(B, L, N), random(B, L, N)
    A, initial = -torch.rand(D, N, dtype=torch.float64), random(B, D, N)
    found = {}

    def scan_once(place, inputs, scan):
        rows = [x, step_size, padded(B_in), padded(C_in)]
        found["out"], found["end"] = scan(rows, initial, True)
        return found["out"]

    def from_zero(x, dt, A, B, C):
        state, outs = torch.zeros(x.shape[0], D, N, dtype=torch.float64), []
        for at in range(x.shape[2]):
            state = (dt[..., at, None] * A).exp() * state + (dt * x)[..., at, None] * B[:, None, :, at]
            outs.append((state * C[:, None, :, at]).sum(-1))
        return torch.stack(outs, dim=-1)

    monkeypatch.setattr("treewise.nn.recurrent.kinds.tree_scan", scan_once)
    by_channel = [each.transpose(1, 2) for each in (x, step_size, B_in, C_in)]
    tree_selective_scan(None, from_zero, by_channel[0], by_channel[1], A, by_channel[2], by_channel[3])
    for row, length in enumerate(LENGTHS):
        state = initial[row]
        for at in range(length):
            state = (step_size[row, at, :, None] * A).exp() * state
            state = state + (step_size * x)[row, at, :, None] * B_in[row, at]
            torch.testing.assert_close(found["out"][row, at], state @ C_in[row, at], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found["end"][row], state, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("length", "chunk"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 64), (1000, 64)])
def test_chunks_of_short_segments_are_short(length: int, chunk: int) -> None:
    assert padded_chunk(length, 64) == chunk
    assert padded_chunk(length, 8) == 8
