"""`grow` as a whole: files, errors, symmetry, what is kept and what is not."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.experimental.grow.test_families import save_random
from treewise.errors import ConfigError, UnsupportedModelError
from treewise.experimental.grow import checkpoint, grow
from treewise.experimental.grow.configuration import layer_sources
from treewise.experimental.grow.growth import largest_difference


def test_the_output_is_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    save_random(tmp_path / "small", "llama")
    (tmp_path / "small" / "tokenizer_config.json").write_text("{}")
    report = grow(tmp_path / "small", tmp_path / "big", width=2, num_layers=3)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "big", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (model.config.hidden_size, model.config.num_hidden_layers, model.config.head_dim) == (64, 3, 8)
    assert report.num_parameters_after == sum(
        each.numel() for each in load_file(tmp_path / "big/model.safetensors").values()
    )
    tokens = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, 7)
    assert (tmp_path / "big" / "tokenizer_config.json").is_file()
    facts = json.loads((tmp_path / "big" / "grow.json").read_text())
    assert facts["operator"] == "copy"
    assert len(facts["source_sha256"]) == 64
    assert facts["logit_difference"] < 1e-5
    assert not list(tmp_path.glob(".*growing*"))


def test_noise_that_does_not_cancel_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(tmp_path / "small", "llama")
    monkeypatch.setattr(torch.Tensor, "mean", lambda self, *_, **__: torch.zeros(()))
    with pytest.raises(UnsupportedModelError, match="logits differ"):
        grow(tmp_path / "small", tmp_path / "big", width=2, noise=0.05)
    assert not list(tmp_path.glob("*big*"))


def test_stacking_changes_logits_and_says_so(tmp_path: Path) -> None:
    save_random(tmp_path / "small", "llama")
    report = grow(tmp_path / "small", tmp_path / "big", num_layers=4, operator="stack")
    assert not report.keeps_function
    assert report.logit_difference > 1e-3


def test_layers_of_depth() -> None:
    assert layer_sources(2, 5, "zero") == [0, 0, 0, 1, 1]
    assert layer_sources(2, 5, "stack") == [0, 1, 0, 1, 0]


def test_shards_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = save_random(tmp_path / "small", "qwen3")
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20_000)
    grow(tmp_path / "small", tmp_path / "middle", width=2)
    assert len(list((tmp_path / "middle").glob("model-*-of-*.safetensors"))) > 2
    grow(tmp_path / "middle", tmp_path / "big", num_layers=3)
    assert largest_difference(small, AutoModelForCausalLM.from_pretrained(tmp_path / "big")) < 1e-5


def test_the_new_layers_learn_from_the_first_step(tmp_path: Path) -> None:
    for family in ("llama", "gemma3_text"):
        save_random(tmp_path / family, family)
        grow(tmp_path / family, tmp_path / f"big {family}", num_layers=4)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"big {family}", dtype=torch.float32)
        tokens = torch.randint(0, 61, (2, 12))
        model(input_ids=tokens, labels=tokens).loss.backward()
        largest = max(float(p.grad.abs().max()) for name, p in model.named_parameters() if "layers.0." in name)
        new = [float(p.grad.abs().max()) for name, p in model.named_parameters() if "layers.1." in name]
        assert 0 < max(new) < 20 * largest


def test_training_parts_the_copies(tmp_path: Path) -> None:
    """Of every matrix no two halves stay alike; without noise those of the first layer do, for ever."""
    save_random(tmp_path / "small", "qwen2")
    for name, noise in (("noisy", 0.02), ("plain", 0.0)):
        grow(tmp_path / "small", tmp_path / name, width=2, noise=noise)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            tokens = torch.randint(0, 61, (4, 12), generator=torch.Generator().manual_seed(step))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for key, parameter in model.named_parameters():
            weight = parameter.detach()
            if ".layers." in key and weight.dim() == 2:
                # What each copy makes of the sum over copies, in which the first noise cancels.
                weight = weight.unflatten(1, (2, -1)).sum(1)
                first, second = weight.chunk(2)
                parted = float((first - second).abs().max() / weight.abs().max())
                if noise:
                    assert parted > 1e-5, key
                elif "layers.0" in key:
                    assert parted < 1e-6, key


def test_a_killed_growth_leaves_nothing_and_the_next_one_clears_up(tmp_path: Path) -> None:
    save_random(tmp_path / "small", "llama")
    child = os.fork()
    if child == 0:
        checkpoint.flush_file = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # all is written, nothing is renamed
        grow(tmp_path / "small", tmp_path / "big", width=2, check=False)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / "big").exists()
    assert len(list(tmp_path.glob(".big.growing-*"))) == 1
    grow(tmp_path / "small", tmp_path / "big", width=2)
    assert not list(tmp_path.glob(".big*"))


@pytest.mark.parametrize(
    ("field", "value"), [("vocab_size", 60), ("head_dim", 4), ("hidden_size", 40), ("intermediate_size", 50)]
)
def test_a_configuration_that_does_not_fit_the_weights_is_named(field: str, value: int, tmp_path: Path) -> None:
    save_random(tmp_path / "small", "qwen3")
    values = json.loads((tmp_path / "small/config.json").read_text())
    (tmp_path / "small/config.json").write_text(json.dumps(values | {field: value}))
    with pytest.raises(ConfigError, match=r"is \[.*\] in the checkpoint, and \[.*\] by config\.json"):
        grow(tmp_path / "small", tmp_path / "big", width=2)
    assert not list(tmp_path.glob("*big*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing grows"),
        ({"width": 0}, "width is 0"),
        ({"width": 1.5}, "width is 1.5; give a whole factor"),
        ({"width": -1}, "width is -1"),
        ({"noise": float("nan"), "width": 2}, "noise=nan must be"),
        ({"num_layers": 1}, "fewer than the 2"),
        ({"width": 2, "operator": "net2net"}, "choose one of copy"),
        ({"width": 2, "operator": "mango"}, "give data"),
    ],
)
def test_impossible_targets(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    save_random(tmp_path / "small", "llama")
    with pytest.raises(ConfigError, match=message):
        grow(tmp_path / "small", tmp_path / "big", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "big").exists()


def test_an_existing_output_is_kept(tmp_path: Path) -> None:
    save_random(tmp_path / "small", "llama")
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        grow(tmp_path / "small", tmp_path / "big", width=2)
    assert (tmp_path / "big" / "notes").read_text() == "mine"


def test_unknown_tensors_fields_and_families_are_named(tmp_path: Path) -> None:
    save_random(tmp_path / "small", "llama")
    tensors = load_file(tmp_path / "small" / "model.safetensors")
    save_file({**tensors, "model.layers.0.extra": torch.zeros(2, 2)}, tmp_path / "small" / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"model.layers.0.extra \[2, 2\]"):
        grow(tmp_path / "small", tmp_path / "big", width=2)
    assert not list(tmp_path.glob("*big*"))
    save_random(tmp_path / "opt", "opt", layer_norm_elementwise_affine=False)
    with pytest.raises(UnsupportedModelError, match="no weights in its last norm"):
        grow(tmp_path / "opt", tmp_path / "big", width=2)
    save_random(tmp_path / "granite", "granite", embedding_multiplier=3.0)
    with pytest.raises(UnsupportedModelError, match="granite cannot be grown"):
        grow(tmp_path / "granite", tmp_path / "big", width=2)


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    save_random(tmp_path / "small", "llama")
    weights = tmp_path / "small" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ConfigError, match="not a whole safetensors file"):
        grow(tmp_path / "small", tmp_path / "big", width=2)
    weights.unlink()
    with pytest.raises(ConfigError, match="no such file"):
        grow(tmp_path / "small", tmp_path / "big", width=2)
