"""The model that was saved is what is uploaded, by the Hub's own client to a local server; failures are warnings."""

import pytest
import torch
from huggingface_hub import HfApi, constants
from transformers import AutoModelForCausalLM

from tests.trainer.hub_server import hub_server
from treewise.errors import ConfigError
from treewise.nn.platform.releases import is_before


@pytest.fixture
def server(monkeypatch):
    with hub_server() as running:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        api = HfApi(endpoint=running.url, token="a token")
        monkeypatch.setattr("treewise.trainer.hub.hub_api", lambda: api)
        if is_before("5.10"):
            monkeypatch.setattr("transformers.trainer.create_repo", api.create_repo)
        else:
            monkeypatch.setattr("transformers.trainer.hf_api", lambda: api)
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


def test_checkpoints_are_not_uploaded(make_trainer, trees, server):
    make_trainer(trees, **settings(save_strategy="steps", save_steps=1)).train()
    assert not server.commits
    with pytest.raises(ConfigError, match="hub_strategy: the model is uploaded at the end"):
        make_trainer(trees, **settings(hub_strategy="checkpoint"))


def test_an_upload_that_fails_is_a_warning_and_the_run_succeeds(make_trainer, trees, server, tmp_path, caplog):
    trainer = make_trainer(trees, **settings(save_strategy="steps", save_steps=1))
    server.fails = True
    trainer.train()
    trainer.save_model()
    assert f"the model was not uploaded; later: hf upload someone/model {tmp_path / 'run'}" in caplog.text
    assert "the quota of someone is used up" in caplog.text
    assert trainer.uploaded is None
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    server.fails = False
    trainer.push_to_hub()  # later, by hand
    assert server.files["model.safetensors"] == (tmp_path / "run" / "model.safetensors").read_bytes()
