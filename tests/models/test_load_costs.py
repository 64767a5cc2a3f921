"""Costs of a model by name are those of the model, and are kept only for what they were counted of."""

import json
from pathlib import Path

import pytest

from tests.cli.helpers import save_tiny_model
from tests.damage import damages
from tests.image_capability import image_model
from treewise.errors import ConfigError
from treewise.models import load_costs as module
from treewise.models.load_costs import load_costs
from treewise.models.load_model import load_shapes
from treewise.nn.model_flops import flop_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREEWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "costs"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that are built from now on."""
    built: list[str] = []

    def build(name: str, *args: object, **more: object) -> object:
        built.append(name)
        return load_shapes(name, *args, **more)

    monkeypatch.setattr(module, "load_shapes", build)
    return built


def test_they_are_counted_once_for_each_configuration(tmp_path, cache, monkeypatch) -> None:
    built, name = counted(monkeypatch), str(save_tiny_model(tmp_path / "model"))
    first = load_costs(name)
    assert first == flop_model(load_shapes(name))
    assert load_costs(name) == first
    assert built == [name]
    adapted = load_costs(name, lora={"r": 2, "target_modules": "all-linear"})
    assert adapted.num_trained_parameters < first.num_trained_parameters
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert load_costs(name).linear < first.linear
    assert len(built) == 3
    monkeypatch.setattr(module, "version", lambda package: f"another {package}")
    assert load_costs(name).linear < first.linear
    assert len(built) == 4


def test_damaged_costs_are_counted_again_with_a_line(tmp_path, cache, monkeypatch, caplog) -> None:
    built, name = counted(monkeypatch), str(save_tiny_model(tmp_path / "model"))
    first = load_costs(name)
    monkeypatch.setattr("treewise.nn.model_flops.flop_model", lambda _: first)  # takes no time
    [kept] = cache.iterdir()
    for number, how in enumerate(damages(kept), start=2):
        caplog.clear()
        assert load_costs(name) == first, how
        [line] = caplog.messages
        assert line.startswith(f"{kept}: ")
        assert line.endswith("; the model's costs are counted again.")
        assert len(built) == number
        assert [each.name for each in cache.iterdir()] == [kept.name]
    caplog.clear()
    assert load_costs(name) == first
    assert not caplog.messages


def test_those_of_images_are_kept_whole(tmp_path, monkeypatch) -> None:
    image_model("llava").save_pretrained(tmp_path / "model")
    built, name = counted(monkeypatch), str(tmp_path / "model")
    first = load_costs(name)
    assert first.vision is not None
    assert first.vision.is_trained
    assert load_costs(name) == first
    assert built == [name]


def test_a_model_that_is_not_there_is_an_error_each_time(tmp_path, cache) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="no such model folder"):
            load_costs(str(tmp_path / "nothing"))
    assert not cache.exists()
