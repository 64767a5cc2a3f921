"""What waits in host memory: activations of held micro-batches, once, and no weights. Gateways hold their own bytes."""

from typing import Any

import pytest
import torch

from tests.engine.test_carried import conversations
from treewise import TreeEngine
from treewise.engine.step import Walk
from treewise.nn import host_memory
from treewise.nn.attention import Gateway
from treewise.nn.host_memory import HostMemory, SavedOnHost
from treewise.nn.model import split_model
from treewise.nn.model_flops import flop_model
from treewise.planning.planner import plan
from treewise.testing import flat_sft, gradient_error, gradients_of, tiny_model
from treewise.tree.forest import Forest


def storages(tensors: Any) -> dict[int, int]:
    """Bytes of each distinct storage by its address."""
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return {address: size for address, size in found.items() if size}


@pytest.mark.parametrize(("family", "has_checkpoints"), [("phi3", False), ("qwen3_moe", False), ("llama", True)])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_held_graphs_take_activations_and_no_weights(
    family: str, has_checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, items = tiny_model(family), conversations()
    _, _, expected = flat_sft(model, items)
    if has_checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    of_model = storages([*model.parameters(), *model.buffers()])
    taken, copied = [], []
    pack, copy = SavedOnHost._pack, host_memory.on_host

    def noticing(self: SavedOnHost, tensor: torch.Tensor) -> Any:
        taken.append(tensor)  # alive, so that an address is that of one tensor
        return pack(self, tensor)

    monkeypatch.setattr(SavedOnHost, "_pack", noticing)
    monkeypatch.setattr(host_memory, "on_host", lambda tensor: copied.append(tensor) or copy(tensor))
    monkeypatch.setattr(HostMemory, "holding", lambda self, lm: SavedOnHost(lm.model))  # as on a GPU
    model.zero_grad()
    TreeEngine(model, 10, hold="always", offload=True, check=False).step(items)
    assert gradient_error(gradients_of(model), expected) < 1e-5
    assert not storages(copied).keys() & of_model.keys()
    assert has_checkpoints or storages(taken).keys() & of_model.keys()  # autograd saves some: else nothing is tested
    views = [(each.data_ptr(), each.shape, each.stride(), each.dtype, each._version) for each in copied if each.numel()]
    assert len(views) == len(set(views))
    assert {each.data_ptr() for each in taken if each.untyped_storage().data_ptr() not in of_model} == {
        each.data_ptr() for each in copied
    }


VIEWS = {
    "heads of a token side by side": lambda: torch.randn(1, 5, 3, 4).transpose(1, 2),
    "a part of a fused projection": lambda: torch.randn(1, 5, 30)[..., 6:18].view(1, 5, 3, 4).transpose(1, 2),
    "expanded": lambda: torch.randn(1, 3, 1, 4).expand(2, 3, 5, 4),
    "expanded and permuted, with gaps": lambda: torch.randn(3, 6, 4)[:, ::2, None].expand(3, 3, 5, 4).mT,
    "axes of one": lambda: torch.randn(7).as_strided((1, 7, 1), (91, 1, 13)),
    "windows that overlap": lambda: torch.randn(2, 9).unfold(1, 4, 1),
    "no axis": lambda: torch.randn(()),
    "no number": lambda: torch.randn(3, 0, 2).transpose(0, 2),
    "integers": lambda: torch.arange(12).view(3, 4).t(),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_what_comes_back_lies_in_memory_as_before(view) -> None:
    """Backwards that were compiled for these strides take no others."""
    tensor = view()
    saved = SavedOnHost(torch.nn.Module())._pack(tensor)
    back = host_memory._unpack(saved)
    assert saved.kept.numel() <= tensor.numel()
    assert saved.kept.is_contiguous()
    assert torch.equal(back, tensor)
    assert (back.stride(), back.dtype, back.shape) == (tensor.stride(), tensor.dtype, tensor.shape)


def test_views_of_the_same_numbers_are_kept_once() -> None:
    rows = torch.randn(5, 3, 4)
    hooks = SavedOnHost(torch.nn.Module())
    saved = [hooks._pack(each) for each in (rows, rows.transpose(0, 1), rows[None].transpose(1, 2))]
    rows.add_(1)
    later = hooks._pack(rows)
    assert len({each.kept.data_ptr() for each in saved}) == 1
    assert torch.equal(host_memory._unpack(saved[1]) + 1, host_memory._unpack(later).transpose(0, 1))


def test_weights_that_autocast_cast_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, copied, copy = tiny_model(), [], host_memory.on_host
    monkeypatch.setattr(host_memory, "on_host", lambda tensor: copied.append(tensor) or copy(tensor))
    monkeypatch.setattr(HostMemory, "holding", lambda self, lm: SavedOnHost(lm.model))
    with torch.autocast("cpu", torch.bfloat16):
        TreeEngine(model, 10, hold="always", offload=True, check=False).step(conversations())
    held = {
        each.num_tokens for each in plan(Forest.from_trajectories(conversations()), 10, hold="always").micro_batches
    }
    weights = {each.shape for each in model.parameters()} | {each.t().shape for each in model.parameters()}
    assert copied
    assert held.isdisjoint({32, 64})
    assert not weights & {each.shape for each in copied if each.ndim == 2}


@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("family", ["phi3", "gpt_neox", "llama", "deepseek_v3", "gpt2", "falcon_h1", "lfm2"])
@pytest.mark.parametrize("hold", ["never", "always"])
def test_gateways_hold_their_own_bytes(
    family: str, hold: str, is_offloaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of Phi-3 and GPT-NeoX are parts of fused projections, of which a gateway once kept the whole."""
    model, forest = tiny_model(family), Forest.from_trajectories(conversations())
    found, write = [], Gateway.write

    def noticing(self: Gateway, call: Any, key: torch.Tensor, value: torch.Tensor) -> None:
        write(self, call, key, value)
        kept = (self.keys[call], self.values[call])
        for given, own in zip((key, value), kept, strict=True):
            is_own = given.untyped_storage().nbytes() <= given.numel() * given.itemsize
            assert (own.data_ptr() == given.data_ptr()) == is_own  # no copy where none is needed
            assert torch.equal(own, given)
        found.extend(kept)

    monkeypatch.setattr(Gateway, "write", noticing)
    run = plan(forest, 10, hold=hold)
    Walk(split_model(model), run, "cascade", [HostMemory()] * is_offloaded).train(lambda output: output.hidden.sum())
    own_bytes = sum(each.numel() * each.itemsize for each in found)
    assert sum(storages(found).values()) == own_bytes
    opened = sum(each.num_tokens for each in run.micro_batches if each.is_open)
    assert own_bytes == opened * flop_model(model).gateway_values * 4  # what the estimate counts


def test_states_in_gateways_are_their_own() -> None:
    gateway, states = Gateway(), torch.randn(6, 4)
    gateway.write_states("a", states[2:4], None)
    gateway.write_states("b", states, None)
    assert gateway.states["a"].untyped_storage().nbytes() == 2 * 4 * 4
    assert gateway.states["b"].data_ptr() == states.data_ptr()
