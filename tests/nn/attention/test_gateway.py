"""Gateways: cutting a computation at its keys and values and sending gradients back gives those of the joint one."""

import pytest
import torch

from treewise.nn.attention.gateway import Gateway, GatewayRead, extend, inject, take

HKV, N, T, D, DV, LAYER = 2, 7, 4, 3, 5, 11


def above(weights, double=torch.float64):
    """Keys and values that an open micro-batch makes out of its parameters."""
    inputs = torch.linspace(-1, 1, N, dtype=double)[:, None]
    key = torch.sin(inputs * weights[:D]).expand(1, HKV, N, D)
    value = torch.cos(inputs * weights[D:]).expand(1, HKV, N, DV)
    return key, value


def below(key, value, own):
    """Some function of gateway rows and own rows that mixes all of them."""
    return torch.tanh(key.sum((1, 2)) @ own) + (value**2).sum() * own.sum()


def rows_of(kind, first, last):
    if kind == "slice":
        return slice(first, last)
    return torch.tensor([row for row in range(first, last) if kind == "tensor" or row % 2 == 0])


def leaf(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("kind", ["slice", "tensor", "gaps"])
def test_walking_down_and_up_gives_the_joint_gradient(kind):
    weights, own, own_key, own_value = leaf(D + DV), leaf(D), leaf(1, HKV, T, D), leaf(1, HKV, T, DV)
    reads = [rows_of(kind, 1, 5), rows_of(kind, 2, N)]
    # Jointly: two micro-batches read overlapping rows; the open one has a loss of its own.
    key, value = above(weights)
    loss = (key.sum() * value.sum()) ** 2
    for rows in reads:
        keys, values = (torch.cat([take(a, rows), b], dim=2) for a, b in ((key, own_key), (value, own_value)))
        loss = loss + below(keys, values, own)
    expected = torch.autograd.grad(loss, [weights, own, own_key, own_value])
    # The walk: down without a graph, each reader forward and backward, then the open one again.
    gateway = Gateway()
    with torch.no_grad():
        gateway.write(LAYER, *above(weights))
    for rows in reads:
        read = GatewayRead(gateway, rows, take(gateway.keys[LAYER], rows).shape[2])
        below(*extend(own_key, own_value, (read,), LAYER), own).backward()
    key, value = inject(*above(weights), gateway, LAYER)
    ((key.sum() * value.sum()) ** 2).backward()
    for tensor, grad in zip((weights, own, own_key, own_value), expected, strict=True):
        torch.testing.assert_close(tensor.grad, grad, rtol=1e-12, atol=1e-12)


def test_several_gateways_come_in_order_before_the_own_rows():
    gateways = [Gateway(), Gateway()]
    for gateway in gateways:
        gateway.write(0, leaf(1, HKV, N, D), leaf(1, HKV, N, DV))
    reads = (GatewayRead(gateways[0], slice(2, 4), 2), GatewayRead(gateways[1], torch.tensor([0, 6, 3]), 3))
    own_key, own_value = leaf(1, HKV, T, D), leaf(1, HKV, T, DV)
    key, value = extend(own_key, own_value, reads, 0)
    assert torch.equal(key[:, :, :2], gateways[0].keys[0][:, :, 2:4])
    assert torch.equal(value[:, :, 2:5], gateways[1].values[0][:, :, [0, 6, 3]])
    assert torch.equal(key[:, :, 5:], own_key)
    key_grad, value_grad = torch.randn_like(key), torch.randn_like(value)
    torch.autograd.backward([key, value], [key_grad, value_grad])
    assert torch.equal(own_key.grad, key_grad[:, :, 5:])
    assert torch.equal(own_value.grad, value_grad[:, :, 5:])
    assert torch.equal(gateways[0].key_grads[0][:, :, 2:4], key_grad[:, :, :2])
    assert torch.equal(gateways[1].value_grads[0][:, :, [0, 6, 3]], value_grad[:, :, 2:5])
    assert gateways[0].key_grads[0][:, :, [0, 1, 4, 5, 6]].abs().max() == 0


def test_written_keys_are_detached_and_the_first_write_stays():
    gateway, key, value = Gateway(), leaf(1, HKV, N, D), leaf(1, HKV, N, DV)
    gateway.write(0, key, value)
    gateway.write(0, key + 1, value + 1)  # a recomputation by gradient checkpointing
    assert torch.equal(gateway.keys[0], key)
    assert not gateway.keys[0].requires_grad
    assert not gateway.values[0].requires_grad


def test_gradients_of_one_row_read_many_times_add_up_in_float32():
    gateway = Gateway()
    gateway.write(0, torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16))
    one, tiny = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16), torch.full((1, 1, 1, 1), 2.0**-10, dtype=torch.bfloat16)
    gateway.add_gradients(0, slice(0, 1), one, one)
    for _ in range(512):  # each alone is lost when added to 1 in bfloat16
        gateway.add_gradients(0, slice(0, 1), tiny, tiny)
        gateway.add_gradients(0, torch.tensor([0]), tiny, tiny)
    assert gateway.key_grads[0].dtype == gateway.value_grads[0].dtype == torch.float32
    assert gateway.key_grads[0].item() == gateway.value_grads[0].item() == 2.0


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
)
def test_gradients_are_float32_or_wider_and_come_back_in_the_models_dtype(dtype, wide):
    gateway, key, value = Gateway(), leaf(1, HKV, N, D, dtype=dtype), leaf(1, HKV, N, DV, dtype=dtype)
    gateway.write(0, key, value)
    own = torch.zeros(1, HKV, 0, D, dtype=dtype), torch.zeros(1, HKV, 0, DV, dtype=dtype)
    own[0].requires_grad_()
    keys, values = extend(*own, (GatewayRead(gateway, slice(0, N), N),), 0)
    (keys.sum() + 2 * values.sum()).backward()
    assert gateway.key_grads[0].dtype == gateway.value_grads[0].dtype == wide
    keys, values = inject(key, value, gateway, 0)
    (keys.sum() + values.sum()).backward()
    assert key.grad.dtype == dtype
    assert torch.equal(key.grad, torch.full_like(key, 2))
    assert torch.equal(value.grad, torch.full_like(value, 3))
