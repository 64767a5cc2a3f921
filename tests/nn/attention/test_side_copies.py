"""Copies beside the kernels, on a pretended GPU: each way to get their order wrong shows."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.cuda_pretend import CUDA, PretendCuda, pretend_cuda
from tests.cuda_streams import UNORDERED, PretendStream
from treewise.nn.attention import Gateway, GatewayRead, gateway
from treewise.nn.attention.side_copies import SideCopies


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):
    with pretend_cuda(monkeypatch) as found:
        yield found


def there_and_back(copies: SideCopies) -> torch.Tensor:
    """A kernel makes a tensor, which is freed as soon as it was sent; a kernel uses rows of what comes back."""
    made = torch.arange(12.0, device=CUDA).reshape(4, 3) * 2
    kept = copies.to_host(made)
    del made
    arrival = copies.to_device(kept[1:3])
    used = arrival() + 1
    del arrival
    return used


def test_what_comes_back_is_what_went(pretend: PretendCuda) -> None:
    used = there_and_back(SideCopies(CUDA))
    assert not pretend.waits
    assert pretend.streams.num_beside == 2
    assert pretend.streams.faults == []
    assert used.tolist() == [[7, 9, 11], [13, 15, 17]]


@pytest.mark.parametrize("left_out", ["wait_stream", "wait_event"])
def test_a_stream_that_does_not_wait_is_noticed(
    left_out: str, pretend: PretendCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PretendStream, left_out, lambda *_: None)
    with pytest.raises(RuntimeError, match=UNORDERED):
        there_and_back(SideCopies(CUDA))


def test_memory_that_a_stream_may_still_use_is_noticed(pretend: PretendCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    there_and_back(SideCopies(CUDA))
    assert pretend.streams.faults == ["freed before a copy was done", "freed before a kernel was done"]


LAYERS = range(4)


@pytest.mark.parametrize(
    ("order", "begun"),
    [
        ([*LAYERS], [[0, 1], [2], [3], []]),
        ([*LAYERS, 3, 2, 1, 0], [[0, 1], [2], [3], [], [3], [2, 1], [0], []]),  # layers that are computed again
    ],
)
def test_the_next_layer_is_on_its_way_and_each_is_copied_once(
    order: list[int], begun: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of layers are told apart by their first value."""
    rows = np.arange(5)
    kept = Gateway(is_offloaded=True)
    for layer in LAYERS:
        kept.keys[layer] = kept.values[layer] = torch.full((1, 2, 5, 3), float(layer))
    copied: list[int] = []

    def fetched(tensor: torch.Tensor, _: torch.device) -> Callable[[], torch.Tensor]:
        copied.append(int(tensor[0, 0, 0]))
        return lambda: tensor

    monkeypatch.setattr(gateway, "fetched", fetched)
    read, found = GatewayRead(kept, slice(1, 4), len(rows)), []
    for layer in order:
        copied.clear()
        key, value = read.keys_and_values(layer, torch.device("meta"))
        assert key.shape == value.shape == (1, 2, 3, 3)
        assert key[0, 0, 0, 0] == value[0, 0, 0, 0] == layer
        found.append(copied[::2])
    assert found == begun
