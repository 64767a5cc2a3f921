"""Order, queue and turns: many clients at once, more of them than models fit in memory, and a queue that is full. What
failed requests leave, and what a worker without HTTP runs again after another one on the same folder was dropped at
once, as a kill does it."""

import json
import math
import re
import sqlite3
import threading
import time

import numpy as np
import pytest
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from tests.damage import no_room
from tests.serve.servers import KEY, RATE, Served, call, running, same, tree_of_data
from treewise.errors import CheckpointError, DiskError, SamplerError
from treewise.rl.samplers.protocol import TextStops
from treewise.serve import worker as worker_module
from treewise.serve.journal import FAILED, REFUSED, QueuedRequest, digest_of
from treewise.serve.sampling import answers
from treewise.serve.store import CheckpointName
from treewise.serve.weights import ServedModel
from treewise.serve.wire import PROTOBUF
from treewise.serve.worker import PATIENCE_SECONDS, RefusedBeforeError
from treewise.testing.families import tiny_model

pytestmark = pytest.mark.xdist_group("test_serve_worker")
ADAM = types.AdamParams(learning_rate=2e-2)


def train(address, number, seen):
    """Two steps, a sample after each; every third client also sends what is wrong. What it ends with."""
    client = tinker.ServiceClient(base_url=address.url, api_key=KEY)
    run = client.create_lora_training_client(base_model="tiny", rank=2 + number % 2, seed=number).result()
    tokens = []
    for step in range(2):
        data = tree_of_data("cross_entropy", seed=10 * number + step)
        run.forward_backward(data, "cross_entropy").result()
        if number % 3 == 0:
            with pytest.raises(tinker.RequestFailedError):
                run.forward_backward(data, "ppo").result()
        run.optim_step(ADAM).result()
        sampler = run.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=4, seed=step, temperature=0.0, stop=[])
        drawn = sampler.sample(types.ModelInput.from_ints([number, 1, 2]), 2, params).result()
        tokens.append([each.tokens for each in drawn.sequences])
    output = run.forward(tree_of_data("cross_entropy"), "cross_entropy").result()
    seen[number] = tokens, np.concatenate([each["logprobs"].to_numpy() for each in output.loss_fn_outputs])
    client.close("success").result()


@pytest.mark.slow
def test_clients_at_once_end_as_each_alone(tmp_path):
    """Four runs, of which two are in memory at a time: bit for bit what they are one after the other."""
    alone, together = {}, {}
    with running(tmp_path / "alone", tiny_model("llama")) as address:
        for number in range(4):
            train(address, number, alone)
    with running(tmp_path / "together", tiny_model("llama"), max_models=2) as address:
        threads = [threading.Thread(target=train, args=(address, number, together)) for number in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert set(together) == set(alone)
    for number, (tokens, logprobs) in alone.items():
        assert together[number][0] == tokens
        assert np.array_equal(together[number][1], logprobs)


def test_a_full_queue_is_an_answer_and_what_it_waits_for_is_taken(tmp_path):
    with running(tmp_path, tiny_model("llama"), max_queue=3, max_request_mb=1) as address:
        client = tinker.ServiceClient(base_url=address.url, api_key=KEY)
        run = client.create_lora_training_client(base_model="tiny", rank=2, seed=0).result()

        def send(seq):
            asked = {"adam_params": {"learning_rate": 0.1}, "model_id": run.model_id, "seq_id": seq}
            return address.ask("/api/v1/optim_step", asked)

        assert [send(seq)[0] for seq in (4, 3, 2, 5)] == [200, 200, 200, 429]
        assert "max_queue" in send(5)[1]["error"]
        assert send(1)[0] == 200  # lets the others go
        future = {"request_id": f"{run.model_id}:4"}
        assert address.ask("/api/v1/retrieve_future", future)[1]["metrics"]["step:max"] == 4
        assert send(5)[0] == 200
        status, content = address.ask("/api/v1/optim_step", b"x" * (1 << 20) + b"y")
        assert (status, "max_request_mb" in content["error"]) == (413, True)
        assert address.ask("/api/v1/optim_step", {}, **{"Content-Encoding": "zstd"})[0] == 415
        client.close("success").result()


class Killed(BaseException):
    """What no handler of errors stops."""


def killed(*_, **__):
    raise Killed


def test_a_restart_runs_again_what_trained_and_nothing_else(tmp_path):
    """A load that failed then would succeed now; a checkpoint that was deleted stays deleted."""
    served = Served(tmp_path)
    names = "a:train:0", "b:train:0"
    for name in names:
        served.run(name)
        served.ask(name, 1, "forward_backward", call(3 if name == "a:train:0" else 4))
        served.ask(name, 2, "optim_step", RATE)
    assert (
        "no such"
        in served.ask("a:train:0", 3, "load_weights", {"path": "tinker://b:train:0/weights/late", "optimizer": False})[
            "error"
        ]
    )
    served.ask("b:train:0", 3, "save_weights", {"path": "late"})
    served.ask("a:train:0", 4, "save_weights", {"path": "gone"})
    served.store.delete(CheckpointName("a:train:0", "weights", "gone"))
    wanted = served.values("a:train:0")
    served = served.died()
    served.ask("a:train:0", 5, "save_weights", {"path": "kept"})
    assert same(served.values("a:train:0"), wanted)
    assert [place.name for place in served.store.places("a:train:0")] == ["kept"]


def test_what_was_loaded_stays_when_its_checkpoint_goes(tmp_path, monkeypatch):
    """The answer and the snapshot are written together, so a kill between them cannot be."""
    served = Served(tmp_path)
    served.run("b:train:0")
    served.ask("b:train:0", 1, "forward_backward", call())
    served.ask("b:train:0", 2, "optim_step", RATE)
    served.ask("b:train:0", 3, "save_weights", {"path": "one"})
    served.run("a:train:0", seed=2)
    load = {"path": "tinker://b:train:0/weights/one", "optimizer": True}
    with monkeypatch.context() as patch:
        patch.setattr(served.store, "snapshot", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        before = served.values("a:train:0")
        assert "disk full" in served.ask("a:train:0", 1, "load_weights", load)["error"]
        assert same(served.values("a:train:0"), before)
    served.ask("a:train:0", 2, "load_weights", load)
    assert served.journal.snapshot_seq("a:train:0") == 2
    wanted = served.values("a:train:0")
    assert same(wanted, served.values("b:train:0"))
    served.store.delete(CheckpointName("b:train:0", "weights", "one"))
    served = served.died()
    served.ask("a:train:0", 3, "save_weights", {"path": "again"})
    assert same(served.values("a:train:0"), wanted)


def test_a_call_that_fails_adds_no_gradient(tmp_path, monkeypatch):
    """Neither with a loss that is no number nor when memory ends halfway; what earlier calls added stays."""
    served, alone = Served(tmp_path / "a"), Served(tmp_path / "b")
    for each in (served, alone):
        each.run("a:train:0")
        each.ask("a:train:0", 1, "forward_backward", call())
    bad = call(1, logprobs=[-4000, 1, 1], advantages=[1e30, 1, 1])
    assert "not a number" in served.ask("a:train:0", 2, "forward_backward", bad)["error"]
    step = served.model.engine.step

    def half(*args):
        step(*args)
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(served.model.engine, "step", half)
        assert "no memory" in served.ask("a:train:0", 3, "forward_backward", call(2))["error"]
    norm = served.ask("a:train:0", 4, "optim_step", RATE)["metrics"]["grad_norm:mean"]
    assert norm == alone.ask("a:train:0", 2, "optim_step", RATE)["metrics"]["grad_norm:mean"] > 0
    assert same(served.values("a:train:0"), alone.values("a:train:0"))
    served = served.died()
    served.ask("a:train:0", 5, "save_weights", {"path": "again"})
    assert same(served.values("a:train:0"), alone.values("a:train:0"))
    huge = call(1, weights=[5e37, 1, 1])  # a finite loss, and gradients whose norm is not
    served.ask("a:train:0", 6, "forward_backward", huge)
    assert "gradients are not numbers" in served.ask("a:train:0", 7, "optim_step", RATE)["error"]
    assert same(served.values("a:train:0"), alone.values("a:train:0"))


WRONG = {"learning_rate": None}, {"beta1": 1.0}, {"beta2": 2.0}, {"eps": -1.0}, {"learning_rate": 1e38}, {"eps": 1e39}


@pytest.mark.parametrize("wrong", [*WRONG, {"learning_rate": 1e30, "weight_decay": 1e30}])
def test_adams_settings_are_checked_before_anything_changes(wrong, tmp_path):
    served = Served(tmp_path)
    served.run("a:train:0")
    served.ask("a:train:0", 1, "forward_backward", call())
    said = served.ask("a:train:0", 2, "optim_step", {"adam_params": wrong})
    assert (next(iter(wrong)) in said["error"], said["category"]) == (True, "user")
    assert served.worker.held.of("a:train:0").weights.optimizer.state == {}


@pytest.mark.parametrize(
    ("adam", "how"),
    [
        ({"learning_rate": 1e30}, r"became so large \(up to 1.0e\+30\) in step 1 with learning_rate=1e\+30 that"),
        ({"eps": 0.0, "learning_rate": 0.1}, "became non-finite in step 1 with learning_rate=0.1, eps=0;"),
        (
            {"weight_decay": 1e35, "learning_rate": 1.0},
            r"became so large .* in step 1 with learning_rate=1, weight_decay=",
        ),
    ],
)
def test_weights_that_a_step_ruined_are_named_and_not_the_data(adam, how, tmp_path):
    """At the next call, before a restart, after it, and after one from a snapshot; until others are loaded."""
    served, name = Served(tmp_path), "a:train:0"
    served.run(name)
    served.ask(name, 1, "save_weights", {"path": "good"})
    served.ask(name, 2, "forward_backward", call())
    served.ask(name, 3, "optim_step", {"adam_params": adam})
    for seq in (4, 5, 6):
        said = served.ask(name, seq, "forward_backward", call(1))
        assert re.search(f"^the weights of run {name} {how}", said["error"])
        assert (said["category"], "datum" in said["error"]) == ("user", False)
        if seq == 5:
            served.worker.held.save(name, served.worker.held.of(name))
        served = served.died()
    load = {"path": f"tinker://{name}/weights/good", "optimizer": True}
    assert "path" in served.ask(name, 7, "load_weights", load)
    assert isinstance(served.ask(name, 8, "forward_backward", call(1)), bytes)


def test_a_step_whose_weights_are_not_finite_says_so_itself(tmp_path):
    served, name = Served(tmp_path), "a:train:0"
    served.run(name)
    served.ask(name, 1, "forward_backward", call())
    said = served.ask(name, 2, "optim_step", {"adam_params": {"learning_rate": 0.1, "eps": 0.0}})
    assert f"the weights of run {name} became non-finite in step 1 with learning_rate=0.1, eps=0" in said["error"]


def test_gradients_that_are_not_numbers_come_with_the_size_of_the_weights(tmp_path):
    served, name = Served(tmp_path), "a:train:0"
    served.run(name)
    for seq in (1, 3):
        served.ask(name, seq, "forward_backward", call(1))
        said = served.ask(name, seq + 1, "optim_step", {"adam_params": {"learning_rate": 1e12}})
    assert "The largest of the weights is 1.0e+12, since step 1 with learning_rate=1e+12." in said["error"]


def test_one_request_that_fails_leaves_the_samples_of_others(tmp_path):
    """Requests of several clients are drawn at once; that of one cannot be."""
    served = Served(tmp_path)
    served.journal.put("sampler", "s:sample:0", "s", {"base_model": "tiny", "model_path": None})
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    good = {"prompt": prompt, "sampling_params": {"max_tokens": 2}, "sampling_session_id": "s:sample:0"}
    odd = {**good, "sampling_params": {"max_tokens": 2, "temperature": 1e-320}, "prompt_alt_tokens_k": 2}
    for index, body in enumerate((good, odd, good)):
        served.send("s:sample:0", index, "sample", body)
    served.work()
    found = [served.journal.find(f"s:sample:0:{index}").media for index in range(3)]
    assert (found[0], found[2]) == ("application/x-protobuf",) * 2


def test_a_sampler_is_read_once_however_many_of_its_requests_wait(tmp_path, monkeypatch):
    served, asked = Served(tmp_path), []
    for index in range(12):
        served.send(f"s:sample:{index % 2}", index, "sample", {})
    path_of = served.worker._path_of
    monkeypatch.setattr(served.worker, "_path_of", lambda owner: (asked.append(owner), path_of(owner))[1])
    assert len(served.worker._take()) == 12
    assert sorted(asked) == ["s:sample:0", "s:sample:1"]


def test_a_server_that_is_away_is_waited_for_once(tmp_path, monkeypatch):
    """Not by each of the requests that are drawn together, one after the other."""
    served, calls = Served(tmp_path), []

    def away(model, weights, requests):
        calls.append(len(requests))
        error = SamplerError("no answer for 300 s")
        error.is_away = True
        raise error

    served.journal.put("sampler", "s:sample:0", "s", {"base_model": "tiny", "model_path": None})
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {"max_tokens": 2}}
    monkeypatch.setattr("treewise.serve.worker.answers", away)
    for index in range(3):
        served.send("s:sample:0", index, "sample", body)
    served.work()
    assert calls == [3]
    assert all("no answer" in json.loads(served.journal.find(f"s:sample:0:{i}").answer)["error"] for i in range(3))


@pytest.mark.parametrize("kind", ["forward_backward", "sample"])
def test_a_request_that_ends_the_process_is_refused_after_some_starts(kind, tmp_path, monkeypatch):
    """Those of other clients, and later ones of the same, run; of samples drawn together only the one at fault."""
    served = Served(tmp_path, max_starts=3)
    served.run("a:train:0")
    if kind == "sample":
        owner, name = "s:sample:0", "treewise.serve.worker.answers"
        served.journal.put("sampler", owner, "s", {"base_model": "tiny", "model_path": None})
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
            "sampling_params": {"max_tokens": 1},
        }
        bad = {**body, "num_samples": 2}
        drawn = answers

        def patched(model, weights, requests):
            return (
                killed() if any(each.asked.num_samples == 2 for each in requests) else drawn(model, weights, requests)
            )

    else:
        owner, body, bad, name, patched = "a:train:0", call(), call(), "treewise.serve.weights.TreeEngine.step", killed
    served.send(owner, 1, kind, bad)
    served.send(owner, 2, kind if kind == "sample" else "optim_step", body if kind == "sample" else RATE)
    with monkeypatch.context() as patch:
        patch.setattr(name, patched)
        for _ in range(3):
            with pytest.raises(Killed):
                served.work()
            served = served.died()
        if kind == "sample":
            served.work()
    served.work()
    _, media, content = served.journal.find(f"{owner}:1")
    assert (media, "max_starts" in json.loads(content)["error"]) == (REFUSED, True)
    assert served.journal.find(f"{owner}:2").media not in (FAILED, REFUSED)


@pytest.fixture
def gapped(tmp_path):
    """Requests 3 and 5 of a model wait for 1, 2 and 4."""
    served = Served(tmp_path)
    served.run("a:train:0")
    served.send("a:train:0", 3, "forward_backward", call())
    served.send("a:train:0", 5, "optim_step", RATE)
    return served


def test_requests_wait_for_lower_numbers_and_run_without_those_that_never_come(gapped):
    """What is passed over has an answer, comes too late, and stays passed over after a kill."""
    gapped.worker._close_gaps(time.monotonic() + PATIENCE_SECONDS - 5)
    gapped.work()
    assert gapped.worker.num_waiting == 2
    gapped.worker._close_gaps(time.monotonic() + PATIENCE_SECONDS + 1)
    gapped.work()
    assert json.loads(gapped.journal.find("a:train:0:5").answer)["metrics"]["step:max"] == 1
    for seq, says in ((1, "requests 1 to 2 of the model never came"), (2, "has passed"), (4, "requests 4 to 4")):
        assert says in gapped.ask("a:train:0", seq, "save_weights", {"path": "late"})["error"]
    wanted = gapped.values("a:train:0")
    again = gapped.died()
    assert "path" in again.ask("a:train:0", 6, "save_weights", {"path": "again"})
    assert same(again.values("a:train:0"), wanted)


def test_a_request_that_is_the_last_one_under_way_waits_for_none(gapped):
    """As the SDK sends all but parts of a call: those before it have failed at the client."""
    gapped.worker.submit(QueuedRequest("a:train:0:7", "a:train:0", 7, "save_weights"), b'{"path": "now"}', 0.0)
    gapped.work()
    assert [place.name for place in gapped.store.places("a:train:0")] == ["now"]
    assert gapped.worker.num_waiting == 0


def test_a_body_that_is_under_way_is_waited_for(gapped):
    gapped.worker.uploaded = lambda key: math.inf if key == digest_of(KEY) else 0.0
    gapped.worker._close_gaps(time.monotonic() + 10 * PATIENCE_SECONDS)
    gapped.work()
    assert gapped.worker.num_waiting == 2


def test_a_model_whose_requests_may_have_been_forgotten_says_so_once(tmp_path):
    """After a start, numbers are missing between the journal's last and the first that comes: a power failure."""
    served = Served(tmp_path)
    served.run("a:train:0")
    served.ask("a:train:0", 1, "forward_backward", call())
    served.ask("a:train:0", 2, "optim_step", RATE)
    wanted = served.values("a:train:0")
    served = served.died()
    for seq, kind, body in ((7, "forward_backward", call(1)), (8, "optim_step", RATE)):
        served.worker.submit(
            QueuedRequest(f"a:train:0:{seq}", "a:train:0", seq, kind),
            json.dumps(body).encode() if kind == "optim_step" else body,
        )
    served.work()
    served.worker._close_gaps(time.monotonic() + PATIENCE_SECONDS + 1)
    for seq in (7, 8):
        error = json.loads(served.journal.find(f"a:train:0:{seq}").answer)["error"]
        assert "requests 3 to 6 of a:train:0, before this one, are not in the server's journal" in error
    assert "path" in served.ask("a:train:0", 9, "save_weights", {"path": "now"})
    assert same(served.values("a:train:0"), wanted)


def test_a_refused_number_is_passed_over_also_after_a_restart(tmp_path):
    """Before and behind what waits, between two calls of one forest, and again when it comes again."""
    served = Served(tmp_path)
    served.run("a:train:0")
    name = "a:train:0"
    served.send(name, 4, "forward_backward", call(1))
    for seq in (1, 3, 3):
        served.worker.refuse(QueuedRequest(f"{name}:{seq}", name, seq, "optim_step"), "learning_rate=nan", 400)
    served.send(name, 2, "forward_backward", call(2))
    served.work()
    assert served.worker.num_waiting == 0
    batches = [work.batch for work in served.journal.works(name) if work.kind == "forward_backward"]
    assert batches == [2, 2]
    with pytest.raises(RefusedBeforeError, match="learning_rate=nan") as said:
        served.send(name, 3, "save_weights", {})
    assert said.value.status_code == 400
    assert served.ask(name, 5, "optim_step", RATE)["metrics"]["step:max"] == 1
    wanted = served.values(name)
    served = served.died()
    with pytest.raises(RefusedBeforeError):
        served.send(name, 1, "optim_step", RATE)
    assert "path" in served.ask(name, 6, "save_weights", {"path": "again"})
    assert same(served.values(name), wanted)


def test_a_refusal_takes_no_number_that_is_taken_or_far_ahead(tmp_path):
    served = Served(tmp_path, max_queue=4)
    served.run("a:train:0")
    served.send("a:train:0", 1, "forward_backward", call())
    for seq in (1, 7, 2**50):
        served.worker.refuse(QueuedRequest(f"a:train:0:{seq}", "a:train:0", seq, "optim_step"), "wrong", 400)
    served.work()
    assert served.journal.find("a:train:0:1").media == PROTOBUF
    assert served.journal.find("a:train:0:7") is None


def test_calls_before_a_step_are_one_forest(tmp_path):
    """A token that two of them hold is computed once, and counted with the first."""
    served = Served(tmp_path)
    served.run("a:train:0")
    for seq in (1, 2, 3):
        served.send("a:train:0", seq, "forward_backward", call(seed=seq // 3))
    served.work()
    counts = []
    for seq in (1, 2, 3):
        output = pb.ForwardBackwardOutput.FromString(served.journal.find(f"a:train:0:{seq}").answer)
        counts.append([output.metrics[f"{name}:sum"] for name in ("flat_tokens", "tree_tokens")])
    assert counts == [[4, 4], [4, 0], [4, 4]]
    share = served.ask("a:train:0", 4, "optim_step", RATE)["metrics"]["share_ratio:mean"]
    assert share == 12 / 8


def test_a_call_that_fails_is_no_failure_of_those_that_came_with_it(tmp_path):
    """Their answers and gradients are those without it."""
    served, without = (Served(tmp_path / name) for name in ("with", "without"))
    for each in (served, without):
        each.run("a:train:0")
    bad = call(5, advantages=[1.0] * 3, logprobs=[-1000.0] * 3)  # an infinite ratio
    for seq, body in ((1, call(3)), (2, bad), (3, call(4))):
        served.send("a:train:0", seq, "forward_backward", body)
    served.work()
    media = [served.journal.find(f"a:train:0:{seq}").media for seq in (1, 2, 3)]
    assert media == [PROTOBUF, FAILED, PROTOBUF]
    for seq, seed in ((1, 3), (2, 4)):
        without.ask("a:train:0", seq, "forward_backward", call(seed))
    served.ask("a:train:0", 4, "optim_step", RATE)
    without.ask("a:train:0", 3, "optim_step", RATE)
    assert same(served.values("a:train:0"), without.values("a:train:0"))


def test_calls_that_end_the_process_run_one_by_one_at_half_of_the_starts(tmp_path, monkeypatch):
    served = Served(tmp_path, max_starts=4)
    served.run("a:train:0")
    for seq in (1, 2):
        served.send("a:train:0", seq, "forward_backward", call(seq))
    computed = ServedModel.compute

    def patched(model, weights, rows, *window, **options):
        return killed() if len(rows) > 1 else computed(model, weights, rows, *window, **options)

    with monkeypatch.context() as patch:
        patch.setattr("treewise.serve.weights.ServedModel.compute", patched)
        for _ in range(3):
            with pytest.raises(Killed):
                served.work()
            served = served.died()
        served.work()
    assert [served.journal.find(f"a:train:0:{seq}").media for seq in (1, 2)] == [PROTOBUF, PROTOBUF]


def test_a_request_that_was_answered_at_last_runs_again(tmp_path, monkeypatch):
    """However often the server ended before: its effect belongs to the model. `max_starts` ends what has no answer."""
    served = Served(tmp_path, max_starts=2)
    served.run("a:train:0")
    served.send("a:train:0", 1, "forward_backward", call())
    with monkeypatch.context() as patch:
        patch.setattr("treewise.serve.weights.TreeEngine.step", killed)
        with pytest.raises(Killed):
            served.work()
    served = served.died()
    assert served.ask("a:train:0", 2, "optim_step", RATE)["metrics"]["grad_norm:mean"] > 0
    assert [work.begun for work in served.journal.works() if not work.is_done] == [2, 1]
    wanted = served.values("a:train:0")
    served = served.died()
    served.ask("a:train:0", 3, "save_weights", {"path": "one"})
    assert same(served.values("a:train:0"), wanted)


def test_a_run_that_goes_on_goes_on_with_its_curve(tmp_path):
    """Steps that run again after a kill are in it once."""
    served = Served(tmp_path)
    served.run("a:train:0")
    for number in range(3):
        served.ask("a:train:0", 1 + 2 * number, "forward_backward", call(number))
        served.ask("a:train:0", 2 + 2 * number, "optim_step", RATE)
    before = served.journal.get("curve", "a:train:0")
    assert [point[0] for point in before] == [1, 2, 3]
    served = served.died()
    assert served.journal.get("curve", "a:train:0") == before
    served.ask("a:train:0", 7, "forward_backward", call(3))
    served.ask("a:train:0", 8, "optim_step", RATE)
    after = served.journal.get("curve", "a:train:0")
    assert [point[:5] for point in after[:3]] == [point[:5] for point in before]
    assert [point[0] for point in after] == [1, 2, 3, 4]


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_a_load_without_the_optimizer_begins_with_a_new_one(with_optimizer, tmp_path):
    """The step after it is that of a run which began with these weights."""
    served = Served(tmp_path)
    for name in ("a:train:0", "b:train:0"):
        served.run(name)
        served.ask(name, 1, "forward_backward", call(len(name)))
        served.ask(name, 2, "optim_step", RATE)
    served.ask("a:train:0", 3, "save_weights", {"path": "one"})
    load = {"path": "tinker://a:train:0/weights/one", "optimizer": with_optimizer}
    served.ask("b:train:0", 3, "forward_backward", call(5))
    served.ask("b:train:0", 4, "load_weights", load)
    served.run("c:train:0", path=load["path"], optimizer=with_optimizer)
    for name, seq in (("b:train:0", 5), ("c:train:0", 1)):
        served.ask(name, seq, "forward_backward", call(9))
        served.ask(name, seq + 1, "optim_step", RATE)
    assert same(served.values("b:train:0"), served.values("c:train:0"))


def test_samples_that_have_begun_end_when_they_are_cancelled(tmp_path, monkeypatch):
    """At the next token; what was drawn with them is what it would have been."""
    served = Served(tmp_path)
    served.journal.put("sampler", "s:sample:0", "s", {"base_model": "tiny", "model_path": None})
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    asked = {"prompt": prompt, "sampling_params": {"max_tokens": 40, "stop": [], "seed": 1}}
    plain, calls = TextStops.is_stopped, []

    def counted(self, ids):
        calls.append(len(ids))
        if len(calls) == 3:
            served.worker.cancel("s:sample:0:0")
        return plain(self, ids)

    with monkeypatch.context() as patch:
        patch.setattr(TextStops, "is_stopped", counted)
        said = served.ask("s:sample:0", 0, "sample", asked)
    assert ("cancelled" in said["error"], max(calls) < 6) == (True, True)
    served.worker.cancel("s:sample:0:0")  # has its answer
    assert isinstance(served.ask("s:sample:0", 1, "sample", asked), bytes)


# -- a full disk ------------------------------------------------------------------------------------------------------


def until(condition):
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.01)
    pytest.fail("it does not come")


def stepped(served, *, work):
    """A run with gradients and a step; work: whether it is there at once."""
    served.run("a:train:0")
    served.ask("a:train:0", 1, "forward_backward", call())
    served.send("a:train:0", 2, "optim_step", RATE)
    if work:
        served.work()
    return served


def test_a_request_waits_for_room_with_what_it_computed(tmp_path, monkeypatch):
    """The worker lives, its answer comes once there is room, and the step is taken once."""
    monkeypatch.setattr(worker_module, "LOOK_SECONDS", 0.01)
    wanted = stepped(Served(tmp_path / "whole"), work=True).values("a:train:0")
    served = stepped(Served(tmp_path / "full"), work=False)
    served.journal._all("PRAGMA wal_checkpoint(TRUNCATE)")
    with no_room(1000):
        served.worker.start()
        until(lambda: served.worker.full is not None)
        with pytest.raises(DiskError, match=r"cannot be written .* free on its disk. Make room"):
            served.send("a:train:0", 3, "optim_step", RATE)
        assert served.worker.is_alive()
        assert served.journal.find("a:train:0:2").answer is None
    until(lambda: served.journal.find("a:train:0:2").answer is not None)
    assert json.loads(served.journal.find("a:train:0:2").answer)["metrics"]["step:max"] == 1
    until(lambda: served.worker.full is None)
    served.worker.stop()
    assert same(served.values("a:train:0"), wanted)


def test_an_end_while_there_is_no_room_loses_nothing(tmp_path, monkeypatch):
    """What was computed and not answered is in no snapshot, and runs again, once."""
    monkeypatch.setattr(worker_module, "LOOK_SECONDS", 0.01)
    wanted = stepped(Served(tmp_path / "whole"), work=True).values("a:train:0")
    served = stepped(Served(tmp_path / "full"), work=False)
    answer = served.journal.answer
    monkeypatch.setattr(served.journal, "answer", lambda *given: full(served.journal, lambda: answer(*given)))
    served.worker.start()
    until(lambda: served.worker.full is not None)
    served.worker.stop()
    assert not served.worker.is_alive()
    served = served.died()
    served.work()
    assert json.loads(served.journal.find("a:train:0:2").answer)["metrics"]["step:max"] == 1
    assert same(served.values("a:train:0"), wanted)


def full(journal, write):
    """A write for which there is no room, as the journal tries it."""

    def tried():
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    del write
    journal._tried(tried)


def test_a_model_without_room_for_its_snapshot_runs_its_requests_again(tmp_path, monkeypatch):
    wanted = stepped(Served(tmp_path / "whole"), work=True).values("a:train:0")
    served = stepped(Served(tmp_path / "one", max_models=1), work=True)

    def no_snapshot(*_):
        raise CheckpointError("no room.")

    with monkeypatch.context() as patch:
        patch.setattr(served.store, "snapshot", no_snapshot)
        served.run("b:train:0")  # for which the other goes
        served.work()
        assert served.journal.snapshot_seq("a:train:0") == -1
        served.ask("a:train:0", 3, "save_weights", {"path": "one"})
        served.work()
    assert same(served.values("a:train:0"), wanted)


def test_a_full_disk_is_an_answer_until_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_module, "LOOK_SECONDS", 0.01)
    with running(tmp_path, tiny_model("llama")) as address:
        assert address.ask("/api/v1/create_session", SESSION)[0] == 200
        with no_room(1000):
            status, content = address.ask("/api/v1/create_session", SESSION)
            assert (status, "free on its disk" in content["error"]) == (507, True)
            assert address.ask("/api/v1/healthz")[0] == 507
        until(lambda: address.ask("/api/v1/healthz")[0] == 200)
        assert address.ask("/api/v1/create_session", SESSION)[0] == 200


SESSION = {"tags": [], "user_metadata": {}, "sdk_version": "0", "type": "create_session"}
