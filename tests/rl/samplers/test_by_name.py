"""Samplers by name, those of the package and one of a user's file: made in one way by `rl`, `record` and `serve`."""

from pathlib import Path

import pytest

from tests.rl.tasks.test_episode import byte_tokenizer
from treewise.errors import ConfigError
from treewise.rl.agents.record import loaded
from treewise.rl.agents.record_settings import RecordSettings
from treewise.rl.samplers import SAMPLERS, SampleRequest, TransformersSampler, sampler_named
from treewise.rl.samplers.by_name import SamplerEntry, check_sampler, entry_of
from treewise.testing.families import tiny_model

OWN = '''
"""A sampler of a user's."""
from treewise.rl.samplers import TransformersSampler


class Shouting:
    def __init__(self, model, *, loud=False):
        self.inner, self.loud, self.updates, self.closed = TransformersSampler(model), loud, 0, False

    def sample(self, requests):
        return self.inner.sample(requests)

    def update(self, model):
        self.updates += 1
        self.inner.update(model)

    def close(self):
        self.closed = True


class Silent:
    def sample(self, requests):
        return []


number = 3
'''


@pytest.fixture
def own(tmp_path) -> str:
    (tmp_path / "own_sampler.py").write_text(OWN)
    return f"{tmp_path}/own_sampler.py"


def test_one_of_a_file_gets_the_model_and_its_settings(own):
    model = tiny_model("llama")
    sampler = sampler_named(f"{own}:Shouting", {"loud": True}, model, of_servers={"weights_folder": "x"}, processor=1)
    assert sampler.loud
    request = SampleRequest((5, 6), max_new_tokens=4, seed=3)
    (found,), (same,) = sampler.sample([request])[0], TransformersSampler(model).sample([request])[0]
    assert found.token_ids.tolist() == same.token_ids.tolist()
    check_sampler(f"{own}:Shouting", None)


def test_one_that_is_given_a_name(own, monkeypatch):
    monkeypatch.setitem(SAMPLERS, "shouting", SamplerEntry(entry_of(f"{own}:Shouting").make, {"loud": True}))
    assert sampler_named("shouting", {}, tiny_model("llama")).loud
    with pytest.raises(ConfigError, match="Did you mean 'shouting'"):
        entry_of("shoutin")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Silent", "has no update, close"),
        ("number", "has no sample, update, close"),
        ("Shout", "has no 'Shout'"),
        ("", "module:name or file.py:name"),
    ],
)
def test_what_is_no_sampler_is_named(name, says, own):
    with pytest.raises(ConfigError, match=says):
        entry_of(f"{own}:{name}")


def test_a_setting_that_it_does_not_have(own):
    with pytest.raises(ConfigError, match="quiet"):
        sampler_named(f"{own}:Shouting", {"quiet": 1}, tiny_model("llama"))
    with pytest.raises(ConfigError, match="base_url"):
        sampler_named("transformers", {"base_url": "http://127.0.0.1:1"}, tiny_model("llama"))


def test_record_samples_with_it(own, tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    settings = RecordSettings(
        model=str(tmp_path / "model"),
        output=str(tmp_path / "rows.jsonl"),
        sampler=f"{own}:Shouting",
        sampler_settings={"loud": True},
    )
    assert loaded(settings)[1].loud


def test_serve_samples_with_it(own, tmp_path):
    pytest.importorskip("tinker")
    from treewise.serve.settings import ServeSettings
    from treewise.serve.weights import ServedModel

    settings = ServeSettings(model="tiny", folder=str(tmp_path / "runs"), sampler=f"{own}:Shouting")
    served = ServedModel(settings, tiny_model("llama"))
    sampler = served.sampler_of(None)
    assert sampler.updates == 1
    served.close()
    assert sampler.closed
    assert not Path(tmp_path / "runs" / "server_weights").exists()
