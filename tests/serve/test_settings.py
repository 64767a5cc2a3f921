"""Who may reach a server: hosts, tokens and sessions."""

import pytest
import tinker
from safetensors.numpy import load_file
from tinker import types

from tests.serve.servers import KEY, running
from treewise.errors import ConfigError
from treewise.serve.settings import ServeSettings
from treewise.testing.families import tiny_model

pytestmark = pytest.mark.xdist_group("test_serve_settings")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"host": "0.0.0.0"}, "can be reached from other machines"),
        ({"host": "192.168.0.2"}, "give --token"),
        ({"token": "secret"}, "must begin with tml-"),
        ({"max_tokens": "0"}, "positive integer, auto or none"),
        ({"port": 70000}, "port"),
    ],
)
def test_what_is_refused_before_a_server_starts(settings, says):
    with pytest.raises(ConfigError, match=says):
        ServeSettings(model="tiny", **settings)


def test_a_server_for_others_wants_its_token(tmp_path):
    """And answers to any of its names; one on this machine alone to no other (test_app.py)."""
    model, made = tiny_model("llama"), {"tags": [], "user_metadata": None, "sdk_version": "0"}
    with running(tmp_path, model, host="0.0.0.0", token="tml-secret") as address:
        for key, status in (("tml-wrong", 401), ("tml-secre", 401), ("", 401), ("tml-secret", 200)):
            headers = {"X-API-Key": key, "Host": "server.example.org"}
            assert address.ask("/api/v1/get_server_capabilities", **headers)[0] == status
            assert address.ask("/api/v1/create_session", made, **headers)[0] == status


def test_who_may_call(tmp_path):
    """A server on this machine: whoever sends a key to one of its own names."""
    with running(tmp_path, tiny_model("llama")) as address:
        assert address.ask("/api/v1/create_session?key=x", {}, **{"X-API-Key": ""})[0] == 401
        assert address.ask("/api/v1/healthz", **{"X-API-Key": ""})[0] == 401
        assert address.ask("/api/v1/healthz", **{"Host": "example.org"})[0] == 400
        assert address.ask("/")[0] == 200


def test_a_session_that_has_ended_is_gone(tmp_path):
    """As is one that never was: the SDK then tells its user."""
    with running(tmp_path, tiny_model("llama")) as address:
        made = {"tags": [], "user_metadata": None, "sdk_version": "0"}
        session = address.ask("/api/v1/create_session", made)[1]["session_id"]
        assert address.ask("/api/v1/session_heartbeat", {"session_id": session})[0] == 200
        assert address.ask(f"/api/v1/sessions/{session}/finish", b"")[0] == 204
        assert address.ask("/api/v1/session_heartbeat", {"session_id": session})[0] == 410
        assert address.ask("/api/v1/session_heartbeat", {"session_id": "none"})[0] == 410


def test_servers_with_one_seed_draw_alike(tmp_path):
    """Adapters and samples of clients that bring no seed. Their sessions have other ids on each server."""

    def drawn(seed, name):
        with running(tmp_path / name, tiny_model("llama"), seed=seed) as address:
            client = tinker.ServiceClient(base_url=address.url, api_key=KEY)
            run = client.create_lora_training_client(base_model="tiny", rank=2).result()
            run.save_weights_external("start").result()
            (file,) = (tmp_path / name).rglob("adapter_model.safetensors")
            sampler = client.create_sampling_client(base_model="tiny").result()
            asked = types.ModelInput.from_ints([5, 6, 7]), 2, types.SamplingParams(max_tokens=8)
            tokens = [[each.tokens for each in sampler.sample(*asked).result().sequences] for _ in range(2)]
            client.close("success").result()
        return {key: value.tolist() for key, value in load_file(file).items()}, tokens

    (weights, tokens), same, other, free = drawn(1, "one"), drawn(1, "two"), drawn(2, "three"), drawn(None, "four")
    assert (weights, tokens) == same
    assert tokens[0] != tokens[1]  # another request
    for each in (other, free):
        assert each[0] != weights
        assert each[1] != tokens
