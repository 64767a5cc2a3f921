"""Losses, log-probs and gradients of served rows against a plain forward and backward of each row alone."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.replayed_rows import replayed
from tests.serve.servers import flat_losses, tree_of_data
from treewise.errors import DataError
from treewise.serve.adapter_slots import Shape
from treewise.serve.settings import ServeSettings
from treewise.serve.weights import ServedModel
from treewise.serve.wire import call_answer, read_head, read_rows
from treewise.testing.families import tiny_model
from treewise.tree.trajectory import Trajectory

from tinker import types  # isort: skip
from tinker.proto import tinker_public_pb2 as pb  # isort: skip
from tinker.proto.request_conv import forward_backward_request_to_proto  # isort: skip

LOSSES = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.3},
    "cispo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.05},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.2},
}

ADAM = types.AdamParams(learning_rate=0.1, eps=1e-12, weight_decay=0.1, grad_clip_norm=1.0)


def rows_of(data, loss, settings, model=None):
    asked = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=settings)
    message = forward_backward_request_to_proto(
        types.ForwardBackwardRequest(forward_backward_input=asked, model_id="m", seq_id=1)
    )
    facts = SimpleNamespace(vocabulary=64, image_token=None, settings=ServeSettings(model="tiny"))
    return read_rows(message.SerializeToString(), model or facts)


def served(family="llama", max_tokens="none", share="all", **settings):
    chosen = ServeSettings(model="tiny", max_tokens=max_tokens, share=share, **settings)
    return ServedModel(chosen, tiny_model(family))


def noisy(model, shape=None):
    """New weights, with adapters that do something."""
    weights = model.new_weights(shape or Shape(4), 0)
    torch.manual_seed(1)
    for each in weights.parameters.values():
        torch.nn.init.normal_(each, std=0.05)
    return weights


def flat(model, weights, data, loss, settings, dtype):
    """Sum of losses, log-probs and gradients of each row alone, in a dtype."""
    with model.using(weights):
        alone = copy.deepcopy(model.model).to(dtype)
    base = alone.get_base_model()
    base.set_attn_implementation("eager")
    alone.zero_grad(set_to_none=True)
    total, logprobs = 0.0, []
    for each in data:
        own, values = flat_losses(alone, each, loss, settings)
        own.backward()
        total, logprobs = total + own.item(), [*logprobs, values.detach().numpy()]
    return total, logprobs, {name: each.grad for name, each in alone.named_parameters() if each.grad is not None}


def relative(found, wanted):
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("seq_id", [0, 1, 127, 128, 300, (1 << 31) - 1])
def test_the_head_of_a_call_is_what_protobuf_reads(seq_id, forward_only):
    """Also with fields in another order and of kinds that the schema does not have; a cut body is refused."""
    message = pb.ForwardBackwardRequest(model_id="s:train:0", seq_id=seq_id, forward_only=forward_only, loss_fn="ppo")
    message.loss_fn_config["beta"] = 0.5
    message.data.add().loss_fn_inputs["weights"].dense = bytes(range(256)) * 3
    unknown = b"\xf9\x01" + bytes(8) + b"\xfd\x01" + bytes(4)  # number 31: of 8 bytes and of 4
    body = message.SerializeToString()
    for given in (body, unknown + body, pb.ForwardBackwardRequest(model_id="old").SerializeToString() + body + unknown):
        assert read_head(given) == ("s:train:0", seq_id, forward_only)
        pb.ForwardBackwardRequest().ParseFromString(given)
    for cut in (body[:-1], body[:12], body + b"\x0b", body + b"\x1a\x05ab", body + b"\x10" + b"\xff" * 12):
        with pytest.raises(DataError, match="no ForwardBackwardRequest"):
            read_head(cut)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("max_tokens", "share"), [("none", "all"), ("16", "all"), ("none", "none")])
def test_equal_to_rows_alone(loss, max_tokens, share):
    model, settings, data = served(max_tokens=max_tokens, share=share), LOSSES[loss], tree_of_data(loss)
    weights = noisy(model)
    wanted, logprobs, gradients = flat(model, weights, data, loss, settings, torch.float64)
    found, facts = model.compute(weights, rows_of(data, loss, settings), gradients=True)
    assert found.losses.sum() == pytest.approx(wanted, rel=1e-5)
    assert np.abs(found.logprobs - np.concatenate([each.ravel() for each in logprobs])).max() < 1e-5
    for name, each in weights.parameters.items():
        assert relative(each.grad, gradients[name]) < 1e-5, name
    lengths = sum(each.model_input.length + 1 for each in data)
    assert facts["flat_tokens"] == lengths
    assert facts["tree_tokens"] == lengths if share == "none" else facts["tree_tokens"] < 0.7 * lengths
    assert found.num_new.sum() == facts["tree_tokens"]


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_after_a_step_are_those_of_rows_alone(loss):
    """An optimizer of torch on gradients of each row alone, in float64."""
    model, settings, data = served(max_tokens="16"), LOSSES[loss], tree_of_data(loss)
    weights = noisy(model)
    before = {name: each.detach().clone() for name, each in weights.parameters.items()}
    _, _, gradients = flat(model, weights, data, loss, settings, torch.float64)
    alone = {name: torch.nn.Parameter(each.double()) for name, each in before.items()}
    for name, each in alone.items():
        each.grad = gradients[name]
    torch.nn.utils.clip_grad_norm_(alone.values(), 1.0)
    torch.optim.AdamW(alone.values(), lr=0.05, eps=1e-2, weight_decay=0.1).step()
    model.compute(weights, rows_of(data, loss, settings), gradients=True)
    model.optimize(weights, ADAM.model_copy(update={"learning_rate": 0.05, "eps": 1e-2}))
    for name, each in weights.parameters.items():
        assert (each.double() - alone[name]).abs().max() < 1e-5, name
    assert any((each.detach() - before[name]).abs().max() > 1e-2 for name, each in weights.parameters.items())


def test_targets_that_are_not_the_next_tokens():
    """Two columns of any tokens, dense and sparse, and -1 for none."""
    model, rng = served(max_tokens="12"), np.random.default_rng(3)
    weights, data, prefix = noisy(model), [], rng.integers(0, 64, 6).tolist()
    for size in (3, 5, 4):
        ids = prefix + rng.integers(0, 64, size).tolist()
        targets = torch.tensor(rng.integers(1, 64, (len(ids), 6)))
        values = torch.tensor(rng.normal(size=targets.shape), dtype=torch.float32)
        values[torch.rand(values.shape) < 0.7] = 0
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(ids),
                loss_fn_inputs={"target_tokens": targets, "weights": values},
            )
        )
    assert data[0].loss_fn_inputs["weights"].sparse_crow_indices is not None
    wanted, logprobs, gradients = flat(model, weights, data, "cross_entropy", {}, torch.float64)
    found, _ = model.compute(weights, rows_of(data, "cross_entropy", {}), gradients=True)
    assert found.losses.sum() == pytest.approx(wanted, rel=1e-5)
    assert np.abs(found.logprobs - np.concatenate([each.ravel() for each in logprobs])).max() < 1e-5
    assert all(relative(each.grad, gradients[name]) < 1e-5 for name, each in weights.parameters.items())


def test_recorded_experts_are_taken():
    """Of rows whose routes part, whole and in parts, against each row alone with its own."""
    for max_tokens in ("none", "16"):
        model, data = served("qwen3_moe", max_tokens=max_tokens), tree_of_data("ppo")
        rng = np.random.default_rng(1)
        drawn = {}
        for number, each in enumerate(data):
            ids = each.model_input.to_ints()
            prefixes = [(tuple(ids[: at + 1]), number if at > 4 else 0) for at in range(len(ids))]
            tables = [
                drawn.setdefault(prefix, rng.permuted(np.tile(np.arange(4), (3, 1)), axis=1)) for prefix in prefixes
            ]
            inputs = {**each.loss_fn_inputs, "routed_experts": torch.from_numpy(np.stack(tables)[..., :2].copy())}
            data[number] = types.Datum(model_input=each.model_input, loss_fn_inputs=inputs)
        weights = noisy(model)
        rows = rows_of(data, "ppo", LOSSES["ppo"], model)
        found, _ = model.compute(weights, rows, gradients=True)
        alone = noisy(model)
        for row in rows:
            model.compute(alone, [row], gradients=True)
        live, _ = model.compute(noisy(model), rows_of(tree_of_data("ppo"), "ppo", LOSSES["ppo"], model), gradients=True)
        assert np.abs(found.logprobs - live.logprobs).max() > 1e-3
        with model.using(weights):
            trajectory = Trajectory(rows[2].token_ids, routed_experts=rows[2].routed_experts)
            with torch.no_grad(), replayed(model.model) as replayer, replayer.row(trajectory):
                logits = model.model(input_ids=torch.from_numpy(rows[2].token_ids).long()[None]).logits[0, :-1]
        own = logits.log_softmax(-1).gather(1, torch.from_numpy(rows[2].targets))[:, 0].numpy()
        assert np.abs(found.logprobs[found.bounds[2] : found.bounds[3]] - own).max() < 1e-5
        for name, each in weights.parameters.items():
            assert relative(each.grad, alone.parameters[name].grad) < 1e-5, name


def test_what_was_not_recorded_is_taken_from_no_other_datum():
    """Data that begin alike, some with experts, some with none and some with those of the last tokens alone."""
    model, data, rng = served("qwen3_moe"), tree_of_data("ppo"), np.random.default_rng(1)
    for number, each in enumerate(data):
        length = each.model_input.length
        tables = rng.permuted(np.tile(np.arange(4), (length, 3, 1)), axis=-1)[..., :2].copy()
        tables[: length // 2 if number % 3 == 1 else 0] = -1
        if number % 3 != 2:
            inputs = {**each.loss_fn_inputs, "routed_experts": torch.from_numpy(tables)}
            data[number] = types.Datum(model_input=each.model_input, loss_fn_inputs=inputs)
    rows = rows_of(data, "ppo", {}, model)
    weights, alone = noisy(model), noisy(model)
    found, _ = model.compute(weights, rows, gradients=True)
    for index, row in enumerate(rows):
        own, _ = model.compute(alone, [row], gradients=True)
        assert np.abs(found.logprobs[found.bounds[index] : found.bounds[index + 1]] - own.logprobs).max() < 1e-5
    for name, each in weights.parameters.items():
        assert relative(each.grad, alone.parameters[name].grad) < 1e-5, name


def test_the_gap_to_the_sampler_with_recorded_experts_and_without_is_answered():
    """Of the first datum that has experts and trained targets, against plain forwards of it; in every answer."""
    model, data, rng = served("qwen3_moe"), tree_of_data("ppo"), np.random.default_rng(2)
    for number in (1, 3, 4):
        inputs, length = data[number].loss_fn_inputs, data[number].model_input.length
        experts = rng.permuted(np.tile(np.arange(4), (length, 3, 1)), axis=-1)[..., :2].copy()
        changes = {"routed_experts": torch.from_numpy(experts)}
        if number == 1:  # a prompt alone: nothing is trained
            changes["advantages"] = torch.zeros(length)
        if number == 3:
            changes["advantages"] = inputs["advantages"].to_torch() * (torch.arange(length) > 2)
        data[number] = types.Datum(model_input=data[number].model_input, loss_fn_inputs={**inputs, **changes})
    weights = noisy(model)
    rows = rows_of(data, "ppo", {}, model)
    found, facts = model.compute(weights, rows, gradients=True)
    gaps, row = [], rows[3]
    with model.using(weights), torch.no_grad(), replayed(model.model) as replayer:
        for trajectory in (
            Trajectory(row.token_ids, routed_experts=row.routed_experts),
            Trajectory(row.token_ids),
        ):
            with replayer.row(trajectory):
                logits = model.model(input_ids=torch.from_numpy(row.token_ids).long()[None]).logits[0, :-1]
            own = logits.log_softmax(-1).gather(1, torch.from_numpy(row.targets))[3:, 0].double().numpy()
            gaps.append(np.exp(np.abs(own - row.inputs["logprobs"][3:, 0])).mean())
    assert abs(gaps[0] - gaps[1]) > 5e-5
    for low in (0, 5):
        metrics = pb.ForwardBackwardOutput.FromString(call_answer(found, low, low + 5, facts)).metrics
        assert metrics["replayed_gap:mean"] == pytest.approx(gaps[0], rel=1e-5)
        assert metrics["live_gap:mean"] == pytest.approx(gaps[1], rel=1e-5)
        assert 0 < metrics["routed_otherwise:mean"] <= 1
    without, facts = model.compute(weights, rows_of(tree_of_data("ppo"), "ppo", {}, model), gradients=True)
    assert "routed_otherwise:mean" not in pb.ForwardBackwardOutput.FromString(call_answer(without, 0, 5, facts)).metrics
    plain, _ = model.compute(weights, rows_of(data[3:4], "ppo", {}, model), gradients=False)
    assert plain.replay.keys() == {"routed_otherwise"}  # a forward costs no second one


@pytest.mark.parametrize(
    ("family", "table", "says"),
    [
        ("llama", (3, 2), r"data\[0\]: routed_experts are given, but the model is no mixture"),
        ("qwen3_moe", (2, 2), r"routed_experts of 2 layers, but the model has 3 routers"),
        ("qwen3_moe", (3, 1), r"routed_experts of 1 expert a token, but layer 0 of the model chooses 2"),
        ("phimoe", (3, 2), r"data\[0\]: routed_experts: .*chooses experts in another way"),
    ],
)
def test_experts_of_another_model_are_named(family, table, says):
    data = tree_of_data("cross_entropy")[:1]
    length = data[0].model_input.length
    experts = torch.from_numpy(np.tile(np.arange(table[1]), (length, table[0], 1)))
    inputs = {**data[0].loss_fn_inputs, "routed_experts": experts}
    data = [types.Datum(model_input=data[0].model_input, loss_fn_inputs=inputs)]
    with pytest.raises(DataError, match=says):
        rows_of(data, "cross_entropy", {}, served(family))


def test_losses_of_several_calls_in_one_forest():
    model = served(max_tokens="16")
    weights = noisy(model)
    parts = {loss: tree_of_data(loss) for loss in LOSSES}
    rows = [row for loss, data in parts.items() for row in rows_of(data, loss, LOSSES[loss])]
    total, sums = 0.0, {}
    for loss, data in parts.items():
        own, _, gradients = flat(model, weights, data, loss, LOSSES[loss], torch.float64)
        total += own
        sums = {name: each + sums.get(name, 0) for name, each in gradients.items()}
    found, facts = model.compute(weights, rows, gradients=True)
    assert found.losses.sum() == pytest.approx(total, rel=1e-5)
    assert all(relative(each.grad, sums[name]) < 1e-5 for name, each in weights.parameters.items())
    assert facts["tree_tokens"] * 5 < facts["flat_tokens"]


@pytest.mark.parametrize("shape", [Shape(2, attn=False, unembed=False), Shape(3, mlp=False), Shape(0)])
def test_what_is_trained(shape):
    model = served(train="full" if not shape.rank else "lora")
    data, weights = tree_of_data("ppo"), noisy(model, shape)
    names = " ".join(weights.parameters)
    if shape.rank:
        assert ("mlp" in names, "self_attn" in names, "lm_head" in names) == (shape.mlp, shape.attn, shape.unembed)
    model.compute(weights, rows_of(data, "ppo", {}), gradients=True)
    with model.using(weights):
        alone = copy.deepcopy(model.model).double()
    alone.set_attn_implementation("eager") if not shape.rank else alone.get_base_model().set_attn_implementation(
        "eager"
    )
    alone.zero_grad(set_to_none=True)
    sum(flat_losses(alone, each, "ppo", {})[0] for each in data).backward()
    gradients = {name: each.grad for name, each in alone.named_parameters() if each.grad is not None}
    assert set(gradients) == set(weights.parameters)
    assert all(relative(each.grad, gradients[name]) < 1e-5 for name, each in weights.parameters.items())


def test_clients_on_one_model_are_apart():
    """Adapters of one shape and of two, trained in turns: each as if it were alone, bit for bit."""

    def steps(turns):
        model = served()
        clients = {}
        for name, (rank, seed) in {"a": (4, 1), "b": (4, 2), "c": (2, 1)}.items():
            if name in turns:
                clients[name] = model.new_weights(Shape(rank), seed)
        for name in turns:
            weights = clients[name]
            model.compute(weights, rows_of(tree_of_data("ppo", ord(name)), "ppo", {}), gradients=True)
            model.optimize(weights, ADAM)
        return {name: each.parameters for name, each in clients.items()}

    together = steps("abcacbbca")
    for name in "abc":
        alone = steps(name * 3)[name]
        assert all(torch.equal(each, together[name][key]) for key, each in alone.items())
