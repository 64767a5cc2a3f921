"""The model that was saved is what is uploaded, by the Hub's own client to a local server; failures are warnings."""

import pytest
import torch
from huggingface_hub import HfApi, constants
from transformers import AutoModelForCausalLM

from tests.trainer.hub_server import hub_server
from treewise.trainer.checkpoint import store
from treewise.trainer.checkpoint.store import read_manifest


@pytest.fixture
def server(monkeypatch):
    with hub_server() as running:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for module in ("transformers.trainer", "treewise.trainer.hub"):
            monkeypatch.setattr(f"{module}.hf_api", lambda: HfApi(endpoint=running.url, token="a token"))
        yield running


def settings(**changes):
    return {"max_steps": 2, "push_to_hub": True, "hub_model_id": "someone/model", **changes}


def test_the_model_at_the_end_is_uploaded_and_nothing_else_of_the_folder(make_trainer, trees, server, tmp_path):
    trainer = make_trainer(trees, **settings())
    (tmp_path / "run" / "scored.safetensors").write_bytes(b"not of the model")
    trainer.train()
    trainer.save_model()
    files = server.files
    assert {"model.safetensors", "config.json", "README.md"} <= set(files)
    assert not {name for name in files if name.startswith((".", "checkpoint", "scored"))}
    for name, content in files.items():
        assert content == (tmp_path / "run" / name).read_bytes()
        target = tmp_path / "downloaded" / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(content)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "downloaded")
    for one, two in zip(trainer.model.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, two)
    assert trainer.uploaded.commit_url.endswith("/commit/1")


@pytest.mark.parametrize("is_async", [False, True])
def test_verified_checkpoints_are_uploaded_as_asked(make_trainer, trees, server, tmp_path, is_async):
    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "hub_always_push": True}
    trainer = make_trainer(
        trees, **settings(**saves, hub_strategy="checkpoint", async_checkpoints=is_async, max_steps=3)
    )
    trainer.train()
    (last,) = store.checkpoints(tmp_path / "run")
    listed = set(read_manifest(last)["files"]) | {"treewise.json"}
    model, whole = server.commits[-2:]
    assert whole == {f"last-checkpoint/{name}": (last / name).read_bytes() for name in listed}
    assert model["model.safetensors"] == (last / "model.safetensors").read_bytes()
    assert not {name for name in model if name.startswith(("optimizer", "random", "trainer_state"))}
    assert len(server.commits) == 6
    assert not list((tmp_path / "run").glob(".checkpoint-*"))


def test_an_upload_that_fails_is_a_warning_and_the_run_succeeds(make_trainer, trees, server, tmp_path, caplog):
    trainer = make_trainer(trees, **settings(save_strategy="steps", save_steps=1))
    server.fails = True
    trainer.train()
    trainer.save_model()
    assert "push_to_hub: checkpoint-1 was not uploaded (" in caplog.text
    assert f"the model was not uploaded; later: hf upload someone/model {tmp_path / 'run'}" in caplog.text
    assert "the quota of someone is used up" in caplog.text
    assert trainer.uploaded is None
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    server.fails = False
    trainer.push_to_hub()  # later, by hand
    assert server.files["model.safetensors"] == (tmp_path / "run" / "model.safetensors").read_bytes()
