"""A client that sends one datum at a time and waits for its answer: windows against rows alone and the tree of all;
kills and faults in the middle of one."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.image_models import FAMILIES, num_rows, png, seeing_model
from tests.serve.servers import ERRORS, KEY, RATE, Served, call, datum, running, same, tree_of_data
from treewise.engine.window import chunks
from treewise.errors import ConfigError
from treewise.serve.settings import ServeSettings
from treewise.testing.families import tiny_model
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

pytestmark = pytest.mark.xdist_group("test_serve_step_window")
ADAM = types.AdamParams(learning_rate=2e-2)
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "custom")
CLOSE = 5e-6  # of answers in float32, after three steps; relative to 1 and more


def squares(data, logprobs):
    return sum((each**2).sum() for each in logprobs), {}


def apart_by(found, expected):
    return (np.abs(found - expected) / (1 + np.abs(expected))).max()


def union_tokens(data):
    rows = [[*each.model_input.to_ints(), int(each.loss_fn_inputs["target_tokens"].data[-1])] for each in data]
    return Forest.from_trajectories([Trajectory(row) for row in rows]).num_tokens


def serial(url, loss, steps=3, order=0):
    """Each step's data one by one, in a drawn order, with an evaluation in between: losses and log-probs of all calls,
    and of each step its norm, share ratio and computed tokens."""
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    run = client.create_lora_training_client(base_model="tiny", rank=2, seed=1).result()
    curve, counts, draw = [], [], random.Random(order)
    for step in range(steps):
        data = tree_of_data("cross_entropy" if loss == "custom" else loss, seed=step)
        draw.shuffle(data)
        computed = tree = 0.0
        for index, each in enumerate(data):
            if loss == "custom":
                found = run.forward_backward_custom([each], squares).result()
            else:
                found = run.forward_backward([each], loss).result()
            curve += [found.metrics["loss:sum"]] if loss != "custom" else []
            curve += found.loss_fn_outputs[0]["logprobs"].data if loss != "custom" else []
            computed += found.metrics["computed_tokens:sum"]
            tree += found.metrics["tree_tokens:sum"]
            if index in (2, 5):
                seen = run.forward(tree_of_data("cross_entropy", seed=step)[:3], "cross_entropy").result()
                curve += [value for each in seen.loss_fn_outputs for value in each["logprobs"].data]
            if index == 3:
                run.save_state(f"at-{step}").result()
        metrics = run.optim_step(ADAM).result().metrics
        curve.append(metrics["grad_norm:mean"])
        counts.append((computed, tree, union_tokens(data), metrics["share_ratio:mean"], metrics.get("apart_calls:sum")))
    client.close("success").result()
    return np.array(curve), counts


@pytest.mark.representatives("ppo", "gspo", "custom")
@pytest.mark.parametrize("loss", LOSSES)
def test_one_datum_at_a_time_trains_as_rows_alone(loss, tmp_path):
    """In float64 the curve is that of rows alone, and each token of a step is computed once."""
    model = tiny_model("llama", torch.float64)
    with running(tmp_path / "alone", model, share="none") as address:
        expected, alone = serial(address.url, loss)
    with running(tmp_path / "window", tiny_model("llama", torch.float64)) as address:
        found, counts = serial(address.url, loss)
    assert apart_by(found, expected) < CLOSE
    for (computed, tree, union, ratio, apart), (by_rows, *_) in zip(counts, alone, strict=True):
        assert computed == tree == union < by_rows
        assert ratio == pytest.approx(by_rows / union)
        assert apart is None


@pytest.mark.representatives("12", "7-45")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_tokens": "auto"}, id="auto"),
        pytest.param({"max_tokens": "12"}, id="12"),
        pytest.param({"window": "60"}, id="60"),
        pytest.param({"max_tokens": "7", "window": "45"}, id="7-45"),
    ],
)
def test_budgets_and_bounds(settings, tmp_path):
    """Graphs that are not held, and windows that end before their step because they are full."""
    with running(tmp_path / "alone", tiny_model("llama", torch.float64), share="none") as address:
        expected, _ = serial(address.url, "ppo", order=1)
    with running(tmp_path / "window", tiny_model("llama", torch.float64), **settings) as address:
        found, counts = serial(address.url, "ppo", order=1)
    assert apart_by(found, expected) < CLOSE
    assert counts[-1][3] > 1.2


def test_windows_can_be_turned_off(tmp_path):
    with running(tmp_path, tiny_model("llama"), window="none") as address:
        _, counts = serial(address.url, "cross_entropy", steps=1)
    assert counts[0][3] == 1
    with pytest.raises(ConfigError, match="window='some' must be"):
        ServeSettings(model="tiny", window="some")


def test_a_client_whose_calls_share_nothing_keeps_nothing(tmp_path):
    """After the first step, until they would share again."""
    served, name = Served(tmp_path), "a:train:0"
    served.run(name)
    kept, seq = [], 0
    for calls in ((1, 2), (3, 4), (5, 5), (6, 6), (7,)):
        for seed in calls:
            seq += 1
            served.ask(name, seq, "forward_backward", call(seed))
        kept.append(served.worker.held.of(name).window.num_tokens)
        seq += 1
        served.ask(name, seq, "optim_step", RATE)
    assert kept == [8, 0, 0, 4, 4]


def test_images_are_computed_by_themselves_and_counted(tmp_path):
    """Between calls of text that share."""
    model, images, picture, text = seeing_model("llava"), FAMILIES["llava"].images(), png(1), [1, 2, 3, 4]
    image = types.ImageChunk(data=picture, format="png", expected_tokens=num_rows(model, images, picture))
    chunks = [types.EncodedTextChunk(tokens=text), image, types.EncodedTextChunk(tokens=[7, 8])]
    targets = [*[-1] * (len(text) + image.length), 5, 6]
    seeing = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": targets})
    data = [datum([*text, 5, 9]), seeing, datum([*text, 5, 10]), seeing, datum([*text, 11])]
    processor = SimpleNamespace(image_processor=images, tokenizer=None)

    def train(share):
        with running(tmp_path / share, copy.deepcopy(model), processor, share=share) as address:
            client = tinker.ServiceClient(base_url=address.url, api_key=KEY)
            run = client.create_lora_training_client(base_model="tiny", rank=2, seed=1).result()
            seen = []
            for _ in range(2):
                for each in data:
                    seen.append(run.forward_backward([each], "cross_entropy").result().metrics["loss:sum"])
                metrics = run.optim_step(ADAM).result().metrics
                seen.append(metrics["grad_norm:mean"])
            client.close("success").result()
        return np.array(seen), metrics

    (expected, alone), (found, metrics) = train("none"), train("all")
    assert np.abs(found / expected - 1).max() < 1e-3
    assert (metrics["apart_calls:sum"], "apart_calls:sum" in alone) == (2, False)


# -- kills and faults -------------------------------------------------------------------------------------------------


def requests(seed, count):
    """A call, and after every third the step."""
    return [("forward_backward", call(seed)), *[("optim_step", RATE)] * (count % 3 == 0)]


def steps_of(served, name, seeds, seq=0):
    """Calls one by one, each with its answer."""
    for count, seed in enumerate(seeds, 1):
        for kind, body in requests(seed, count):
            seq += 1
            served.ask(name, seq, kind, body)


SEEDS = (1, 2, 1, 3, 3, 3, 4, 5, 6, 7, 7, 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbs."""
    served = Served(tmp_path_factory.mktemp("whole"), snapshot_every=2)
    served.run("a:train:0")
    steps_of(served, "a:train:0", SEEDS)
    return served


@pytest.mark.representatives("1", "3", "7", "15")
@pytest.mark.parametrize("killed_after", range(1, 16, 2))
def test_a_run_that_is_killed_within_a_window_ends_with_the_same_bits(killed_after, whole, tmp_path):
    name = "a:train:0"
    served = Served(tmp_path / "killed", snapshot_every=2)
    served.run(name)
    seq = 0
    for count, seed in enumerate(SEEDS, 1):
        for kind, body in requests(seed, count):
            seq += 1
            served.ask(name, seq, kind, body)
            if seq == killed_after:
                served = served.died()
                served.run(name)
    assert same(served.values(name), whole.values(name))
    assert served.worker.held.of(name).window.is_worth_it is whole.worker.held.of(name).window.is_worth_it is True


def test_a_run_that_is_evicted_within_a_window_ends_with_the_same_bits(tmp_path):
    """Two runs take turns in a memory for one."""
    names, seeds = ("a:train:0", "b:train:0"), SEEDS[:6]
    served, alone = Served(tmp_path / "both", max_models=1), Served(tmp_path / "alone")
    for name in names:
        served.run(name)
        alone.run(name)
    steps_of(alone, names[0], seeds)
    steps_of(alone, names[1], seeds[::-1])
    seqs = dict.fromkeys(names, 0)
    for count in range(1, len(seeds) + 1):
        for name, own in zip(names, (seeds, seeds[::-1]), strict=True):
            for kind, body in requests(own[count - 1], count):
                seqs[name] += 1
                served.ask(name, seqs[name], kind, body)
    for name in names:
        assert same(served.values(name), alone.values(name))


def test_a_step_whose_window_cannot_end_is_an_error_and_none_of_its_gradients_count(tmp_path, monkeypatch):
    """Also after a kill, where it would succeed: the client was told that they were dropped."""
    name, alone = "a:train:0", Served(tmp_path / "alone")
    alone.run(name)
    steps_of(alone, name, (1, 1, 2))
    served = Served(tmp_path / "lost")
    served.run(name)
    for seq, seed in ((1, 1), (2, 1)):
        served.ask(name, seq, "forward_backward", call(seed))

    def ends(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "backward", ends)
        said = served.ask(name, 3, "optim_step", RATE)
    assert "could not be computed (out of memory even with one token at a time" in said["error"]
    assert served.journal.find(f"{name}:3").media in ERRORS
    assert said["category"] == "server"
    assert not served.worker.held.of(name).has_gradients
    served = served.died()
    for seq, seed in ((4, 1), (5, 1), (6, 2)):
        served.ask(name, seq, "forward_backward", call(seed))
    served.ask(name, 7, "optim_step", RATE)
    assert same(served.values(name), alone.values(name))


def test_a_call_that_fails_within_a_window_leaves_it_as_it_was(tmp_path, monkeypatch):
    """With a loss that is no number, and when memory ends in its forward."""
    name, alone, served = "a:train:0", Served(tmp_path / "alone"), Served(tmp_path / "failed")
    for each in (alone, served):
        each.run(name)
    steps_of(alone, name, (1, 2, 1))
    served.ask(name, 1, "forward_backward", call(1))
    bad = call(1, logprobs=[-4000, 1, 1], advantages=[1e30, 1, 1])
    assert "not a number" in served.ask(name, 2, "forward_backward", bad)["error"]
    served.ask(name, 3, "forward_backward", call(2))

    def ends(*_, **__):
        raise RuntimeError("a kernel failed")

    with monkeypatch.context() as patch:
        patch.setattr(chunks, "run_decoder", ends)
        assert "a kernel failed" in served.ask(name, 4, "forward_backward", call(8))["error"]
    served.ask(name, 5, "forward_backward", call(1))
    served.ask(name, 6, "optim_step", RATE)
    assert same(served.values(name), alone.values(name))


def test_weights_that_are_loaded_forget_the_window(tmp_path):
    name, served = "a:train:0", Served(tmp_path)
    served.run(name)
    served.ask(name, 1, "save_weights", {"path": "first"})
    served.ask(name, 2, "forward_backward", call(1))
    assert served.worker.held.of(name).has_gradients
    served.ask(name, 3, "load_weights", {"path": f"tinker://{name}/weights/first", "optimizer": True})
    assert not served.worker.held.of(name).has_gradients
    assert served.ask(name, 4, "optim_step", RATE)["metrics"]["grad_norm:mean"] == 0


def test_windows_of_all_runs_hold_graphs_of_one_budget(tmp_path):
    """Those of others are let go, and end with the same gradients."""
    names = [f"{letter}:train:0" for letter in "abc"]
    served = Served(tmp_path / "together", max_tokens="12")
    for name in names:
        served.run(name)
    for seq, seeds in enumerate(((1, 1, 1), (2, 2, 2), (1, 1, 1)), 1):
        for name, seed in zip(names, seeds, strict=True):
            served.ask(name, seq, "forward_backward", call(seed))
            held = [served.worker.held.of(each).window.num_held for each in names]
            assert sum(held) <= 12
    for name in names:
        served.ask(name, 4, "optim_step", RATE)
    alone = Served(tmp_path / "alone")
    alone.run(names[0])
    for seq, seed in enumerate((1, 2, 1), 1):
        alone.ask(names[0], seq, "forward_backward", call(seed))
    alone.ask(names[0], 4, "optim_step", RATE)
    for name in names:
        for found, wanted in zip(served.values(name), alone.values(names[0]), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
