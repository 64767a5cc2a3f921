"""Two keys on one server: what one of them made is to the other what is not there, on every route."""

import json
import re
import uuid

import numpy as np
import pytest
import tinker
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from tests.serve.servers import KEY, OTHER_KEY, datum, running, tree_of_data
from treewise.testing.families import tiny_model

pytestmark = pytest.mark.xdist_group("test_serve_catalog")
OPEN = {"/", "/api/v1/client/config", "/api/v1/client/dynamic_config", "/api/v1/telemetry"}  # the same for every key
OPEN |= {"/api/v1/healthz", "/api/v1/get_server_capabilities", "/api/v1/create_session"}
LISTS = {f"/api/v1/{name}" for name in ("sessions", "training_runs", "checkpoints", "status")}
PROMPT, PARAMS = types.ModelInput.from_ints([5, 6, 7]), types.SamplingParams(max_tokens=4, seed=1, stop=[])


class Client:
    """One key's client, a run with two steps, a checkpoint of each kind, and a sampler."""

    def __init__(self, address, key):
        self.address, self.key = address, key
        self.service = tinker.ServiceClient(base_url=address.url, api_key=key)
        self.run = self.service.create_lora_training_client(base_model="tiny", rank=2, seed=1).result()
        for _ in range(2):
            self.run.forward_backward(tree_of_data("cross_entropy"), "cross_entropy").result()
            self.run.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        self.paths = [
            self.run.save_state("one").result().path,
            self.run.save_weights_for_sampler("one").result().path,
            self.run.save_weights_external("one").result().path,
        ]
        self.sampler = self.run.save_weights_and_get_sampling_client().result()
        self.text = self.sampler.sample(PROMPT, 1, PARAMS).result().sequences[0].tokens

    def ask(self, path, body=None, method=None):
        return self.address.ask(path, body, method=method, **{"X-API-Key": self.key})

    def logprobs(self):
        (found,) = self.run.forward([datum([1, 2, 3, 4])], "cross_entropy").result().loss_fn_outputs
        return found["logprobs"].to_numpy()


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    with running(tmp_path_factory.mktemp("served"), tiny_model("llama")) as address:
        made = [Client(address, key) for key in (KEY, OTHER_KEY)]
        yield made
        for each in made:
            each.service.close("success").result()


def requests_about(session, asker):
    """Every request that names what a session made: route, path, body and method. asker: a session of who sends it."""
    run, sampler, sent = f"{session}:train:0", f"{session}:sample:0", f"{session}:train:0:2"
    place, call = f"tinker://{run}/weights/one", {"model_id": run, "seq_id": 20}
    asked = types.ForwardBackwardInput(data=[datum([1, 2, 3])], loss_fn="cross_entropy")
    message = types.ForwardBackwardRequest(forward_backward_input=asked, **call)
    sample = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
    made = {"session_id": session, "model_seq_id": 7, "base_model": "tiny"}
    loaded = {"session_id": asker, "model_seq_id": 9, "path": place, "optimizer": True}
    yield "session_heartbeat", "session_heartbeat", {"session_id": session}, "POST"
    yield "sessions/{session}/finish", f"sessions/{session}/finish", {}, "POST"
    yield "create_model", "create_model", {**made, "lora_config": {"rank": 2}}, "POST"
    yield "load_weights", "load_weights", loaded, "POST"
    yield "load_weights", "load_weights", {**loaded, "session_id": session}, "POST"
    yield "load_weights", "load_weights", {"path": place, "optimizer": False, **call}, "POST"
    yield "get_info", "get_info", {"model_id": run}, "POST"
    yield "weights_info", "weights_info", {"tinker_path": place}, "POST"
    yield "forward_backward", "forward_backward", forward_backward_request_to_proto(message).SerializeToString(), "POST"
    for adam in ({"learning_rate": 0.5}, {"learning_rate": None}):
        yield "optim_step", "optim_step", {"adam_params": adam, **call}, "POST"
    for kind in ("save_weights", "save_weights_for_sampler", "save_weights_external"):
        yield kind, kind, {"path": "theirs", **call}, "POST"
    for more in ({"model_path": place}, {"base_model": "tiny"}):
        body = {"session_id": session if "base_model" in more else asker, "sampling_session_seq_id": 3, **more}
        yield "create_sampling_session", "create_sampling_session", body, "POST"
    yield "asample", "asample", {**sample, "sampling_session_id": sampler, "seq_id": 20}, "POST"
    yield "retrieve_future", "retrieve_future", {"request_id": sent}, "POST"
    yield "cancel_future", "cancel_future", {"request_id": f"{sampler}:0"}, "POST"
    yield "samplers/{sampler}", f"samplers/{sampler}", None, "GET"
    yield "sessions/{session}", f"sessions/{session}", None, "GET"
    yield "training_runs/{run}", f"training_runs/{run}", None, "GET"
    yield "training_runs/{run}/checkpoints", f"training_runs/{run}/checkpoints", None, "GET"
    one, path = "training_runs/{run}/checkpoints/{kind}/{name}", f"training_runs/{run}/checkpoints/weights/one"
    yield f"{one}/ttl", f"{path}/ttl", {"ttl_seconds": 0}, "PUT"
    yield f"{one}/external_weights_urls", f"{path}/external_weights_urls", None, "GET"
    yield f"{one}/files/{{file}}", f"{path}/files/checkpoint.json", None, "GET"
    yield one, path, None, "DELETE"


def answers(asker, session, own):
    """Status and content of each, without the ids."""
    found = {}
    for number, (route, path, body, method) in enumerate(requests_about(session, own)):
        status, content = asker.ask(f"/api/v1/{path}", body, method)
        found[number, route] = status, re.sub(session, "SESSION", json.dumps(content, default=str))
    return found


def test_what_is_anothers_is_answered_as_what_is_not_there(clients):
    mine, other = clients
    session, own = (each.run.model_id.partition(":")[0] for each in (mine, other))
    before = mine.logprobs()
    found, unknown = answers(other, session, own), answers(other, str(uuid.uuid4()), own)
    assert found == unknown
    statuses = {(route, status) for (_, route), (status, _) in found.items() if status != 404}
    assert statuses == {
        ("cancel_future", 204),
        ("optim_step", 400),
        ("retrieve_future", 410),
        ("session_heartbeat", 410),
    }
    assert np.array_equal(mine.logprobs(), before)
    rest = mine.service._rest_client()
    assert {each.tinker_path for each in rest.list_checkpoints(mine.run.model_id).result().checkpoints} >= set(
        mine.paths
    )
    assert mine.sampler.sample(PROMPT, 1, PARAMS).result().sequences[0].tokens == mine.text
    assert mine.ask("/api/v1/session_heartbeat", {"session_id": session})[0] == 200


def test_every_route_is_open_a_list_or_asked_above(clients):
    """A new route has to be added to one of them."""
    from treewise.serve.app import Api

    handlers = Api.__new__(Api)
    handlers.settings = type("Settings", (), {"max_request_mb": 1})
    routes = {each.path for each in handlers._routes()}
    asked = {f"/api/v1/{route}" for route, *_ in requests_about("s", "s")}
    assert routes | {"/"} == asked | OPEN | LISTS


def test_lists_and_the_page_show_ones_own(clients):
    """And what the others' work is counted as, or sampled, is not in them."""
    for own, other in (clients, clients[::-1]):
        names = [each.run.model_id.partition(":")[0] for each in (own, other)]
        for path in sorted(LISTS):
            status, found = own.ask(path)
            text = json.dumps(found)
            assert (status, names[0] in text, names[1] in text, other.key in text) == (200, True, False, False), path
        assert len(own.ask("/api/v1/training_runs")[1]["training_runs"]) == 1
    stranger = {path: clients[0].address.ask(path, **{"X-API-Key": "tml-third"})[1] for path in sorted(LISTS)}
    assert [stranger[f"/api/v1/{name}"][name] for name in ("checkpoints", "sessions", "training_runs")] == [[], [], []]
    seen = stranger["/api/v1/status"]
    assert (seen["flat_tokens"], seen["samples"], seen["curves"], seen["clients"]) == (0, [], {}, 0)


def test_a_load_into_ones_own_run_finds_no_checkpoint_of_another(clients):
    """Which the worker does, with the same answer as for a name that is not there; the run goes on."""
    mine, other = clients
    for path in (mine.paths[0], mine.paths[0].replace("/one", "/none")):
        with pytest.raises(tinker.RequestFailedError, match=f"{path}: no such checkpoint"):
            other.run._load_state_impl(path, True, None).result()
    assert np.isfinite(other.logprobs()).all()


def test_a_key_finds_its_own_after_a_restart(tmp_path):
    """With a token too, if it is the key with which the runs were made."""
    with running(tmp_path, tiny_model("llama")) as address:
        made = Client(address, KEY)
        made.service.close("success").result()
    for token in (None, KEY):
        with running(tmp_path, tiny_model("llama"), token=token) as address:
            client = tinker.ServiceClient(base_url=address.url, api_key=KEY)
            listed = client._rest_client().list_checkpoints(made.run.model_id).result().checkpoints
            assert {each.tinker_path for each in listed} >= set(made.paths)
            client.create_training_client_from_state(made.paths[0]).result()
            client.close("success").result()
