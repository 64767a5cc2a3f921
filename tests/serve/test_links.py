"""Links to files: who may follow them, how long, and that they hold no key."""

import json

import pytest

from tests.serve.servers import KEY, OTHER_KEY, Served, running
from treewise.errors import ConfigError
from treewise.serve import links
from treewise.serve.links import LIFE_SECONDS, Links
from treewise.testing.families import tiny_model

pytestmark = pytest.mark.xdist_group("test_serve_links")
ONE = "/api/v1/training_runs/s:train:0/checkpoints/external_weights"


def saved(folder, names):
    served = Served(folder)
    served.run("s:train:0")
    for seq, name in enumerate(names, start=1):
        assert "path" in served.ask("s:train:0", seq, "save_weights_external", {"path": name})
    served.journal.close()


@pytest.mark.parametrize("token", [None, KEY])
def test_a_link_fetches_its_file_and_no_other_within_its_hour(token, tmp_path, monkeypatch):
    """Without a key, or with another's; it names neither key nor token."""
    saved(tmp_path / "served", ("one", "two"))
    with running(tmp_path / "served", tiny_model("llama"), token=token) as address:
        found, other = (address.ask(f"{ONE}/{name}/external_weights_urls")[1] for name in ("one", "two"))
        assert KEY not in json.dumps(found)
        paths = {name: url.removeprefix(address.url) for name, url in found["urls"].items()}
        content = (
            tmp_path / "served/runs/s.train.0/external_weights/one/checkpoint-1/adapter_config.json"
        ).read_bytes()
        for key in ("", OTHER_KEY):
            status, got = address.ask(paths["adapter_config.json"], **{"X-API-Key": key})
            assert (status, got) == (200, json.loads(content))
        path, query = paths["adapter_config.json"].split("?")
        expires, signature = query.split("&")
        for wrong in (
            f"{paths['adapter_model.safetensors'].split('?')[0]}?{query}",
            f"{path.replace('/one/', '/two/')}?{query}",
            f"{path.replace('/one/', '/none/')}?{query}",
            f"{path}?expires=99999999999&{signature}",
            f"{path}?{expires}&signature=",
            f"{path}?{expires}&signature=%ff%fe",
            f"{path}?{signature}",
            f"{path}?{other['urls']['adapter_config.json'].split('?')[1]}",
            f"{path}?key={KEY}&{expires}&signature=0",
        ):
            status, said = address.ask(wrong, **{"X-API-Key": ""})
            assert (status, "not one of this server" in said["error"]) == (403, True), wrong
        assert address.ask(f"{path}?key={KEY}", **{"X-API-Key": ""})[0] == 401
        assert address.ask(path)[0] == 200  # its owner, by the key
        now = links.time.time()
        for later, status in ((LIFE_SECONDS - 10, 200), (LIFE_SECONDS + 1, 403)):
            monkeypatch.setattr(links.time, "time", lambda later=later: now + later)
            assert address.ask(paths["adapter_config.json"], **{"X-API-Key": ""})[0] == status


def test_a_link_ends_with_its_checkpoint(tmp_path):
    """One that is saved in its place has others."""
    saved(tmp_path / "served", ("one",))
    with running(tmp_path / "served", tiny_model("llama")) as address:
        urls = address.ask(f"{ONE}/one/external_weights_urls")[1]["urls"]
        link = urls["adapter_config.json"].removeprefix(address.url)
        assert address.ask(f"{ONE}/one", method="DELETE")[0] == 204
        assert address.ask(link, **{"X-API-Key": ""})[0] == 403
        body = {"model_id": "s:train:0", "seq_id": 2, "path": "one"}
        assert address.ask("/api/v1/save_weights_external", body)[0] == 200
        assert "path" in address.ask("/api/v1/retrieve_future", {"request_id": "s:train:0:2"})[1]
        assert address.ask(link, **{"X-API-Key": ""})[0] == 403


def test_the_secret_is_its_owners_alone(tmp_path):
    """Made once, before anything is signed with it; a wider mode is set back, a cut one is named."""
    secret = tmp_path / "secret"
    link = Links(secret).made("file", 1e9)
    assert secret.stat().st_mode & 0o777 == 0o600
    secret.chmod(0o644)
    assert Links(secret).made("file", 1e9) == link
    assert secret.stat().st_mode & 0o777 == 0o600
    secret.write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes of 32; remove it"):
        Links(secret)
    secret.unlink()
    assert Links(secret).made("file", 1e9) != link
