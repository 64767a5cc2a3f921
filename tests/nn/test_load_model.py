"""Folders of adapters are models: their base model is found, and what is loaded computes what was saved."""

import json
import shutil

import pytest
import torch

from tests.cli.helpers import save_tiny_model
from tests.damage import damages
from treewise.errors import ConfigError
from treewise.nn.adapters import adapted
from treewise.nn.load_model import load_config, load_shapes, load_tokenizer, load_weights, locate

pytest.importorskip("peft")


@pytest.fixture
def folders(tmp_path):
    """A model, and adapters on it whose second factor is not zero."""
    base = save_tiny_model(tmp_path / "model")
    model = adapted(load_weights(str(base)), {"r": 2, "init_lora_weights": False}, str(base))
    model.save_pretrained(tmp_path / "lora")
    return tmp_path, model.eval()


@pytest.mark.parametrize("place", ["as saved", "from the folder"])
def test_adapters_are_loaded_on_their_base_model(folders, place):
    folder, model = folders
    if place == "from the folder":
        settings = json.loads((folder / "lora" / "adapter_config.json").read_text())
        (folder / "lora" / "adapter_config.json").write_text(
            json.dumps(settings | {"base_model_name_or_path": "../model"})
        )
    ids = torch.arange(1, 20)[None]
    loaded = load_weights(str(folder / "lora")).eval()
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    plain = load_weights(str(folder / "model")).eval()
    assert not torch.allclose(plain(input_ids=ids).logits, loaded(input_ids=ids).logits)
    trained = {name for name, each in loaded.named_parameters() if each.requires_grad}
    assert trained == {name for name, each in model.named_parameters() if each.requires_grad} != set()
    shapes = load_shapes(str(folder / "lora"))
    assert {name for name, each in shapes.named_parameters() if each.requires_grad} == trained
    assert load_config(str(folder / "lora")).hidden_size == plain.config.hidden_size
    assert load_tokenizer(str(folder / "lora"), required=False) is None
    assert locate(str(folder / "lora"))[0].endswith("model")


def test_what_cannot_be_loaded_is_said(folders):
    folder, _ = folders
    lora, moved = str(folder / "lora"), folder / "moved"
    (folder / "model").rename(moved)
    for load in (load_weights, load_shapes, load_config, locate):
        with pytest.raises(ConfigError, match=r"lora: its base model: .*no such model folder.*base_model_name_or_path"):
            load(lora)
    moved.rename(folder / "model")
    with pytest.raises(ConfigError, match="trained further without lora"):
        adapted(load_weights(lora), {"r": 2})
    with pytest.raises(ConfigError, match="not read on a mesh"):
        load_weights(lora, load_on_mesh=lambda *_, **__: None)
    shutil.copy(folder / "lora" / "adapter_model.safetensors", folder / "kept")
    (folder / "lora" / "adapter_model.safetensors").rename(folder / "lora" / "adapter_model.bin")
    with pytest.raises(ConfigError, match="read from safetensors alone"):
        load_weights(lora)
    settings = json.loads((folder / "lora" / "adapter_config.json").read_text())
    (folder / "lora" / "adapter_config.json").write_text(
        json.dumps(settings | {"target_modules": [*settings["target_modules"], "k_proj"]})
    )
    shutil.copy(folder / "kept", folder / "lora" / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="weights of the adapters are not there"):
        load_weights(lora)
    (folder / "lora" / "adapter_config.json").write_text(json.dumps(settings | {"peft_type": "NOPE"}))
    with pytest.raises(ConfigError, match=r"adapter_config\.json: peft_type is 'NOPE', which this peft does not have"):
        load_shapes(lora)
    shutil.copytree(folder / "lora", folder / "second")
    for name, base in (("lora", "second"), ("second", "lora")):
        text = json.dumps(settings | {"base_model_name_or_path": str(folder / base)})
        (folder / name / "adapter_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"base_model_name_or_path is .*second, which holds adapters; name a model"):
        load_weights(lora)
    for text in ("{}", "[]"):
        (folder / "lora" / "adapter_config.json").write_text(text)
        with pytest.raises(ConfigError, match="write the folder or name of the base model there"):
            load_weights(lora)


def test_what_a_gguf_file_holds_is_kept(tmp_path, monkeypatch, caplog):
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("TREEWISE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"

    def write(words):
        writer = gguf.GGUFWriter(file, "llama")
        for name, value in {"block_count": 1, "context_length": 64, "embedding_length": 8, "head_count": 2}.items():
            getattr(writer, f"add_{name}")(value)
        writer.add_feed_forward_length(8)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["<s>", "a", "b", *words])
        writer.add_token_types([3, *[1] * (len(words) + 2)])
        writer.add_token_merges([f"{word[:-1]} {word[-1]}" for word in words])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()

    def read():
        tokenizer, config = load_tokenizer(str(file)), load_config(str(file))
        return tokenizer.backend_tokenizer.to_str(), tokenizer("aaba")["input_ids"], config.to_dict()

    write(["ab"])
    parse, parsed = gguf.GGUFReader, []
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", lambda *args: parsed.append(args) or parse(*args))
        first = read()
    assert len(parsed) <= 1  # a newer transformers reads most files without it
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", None)
        assert read() == first
    (folder,) = (each.parent for each in tmp_path.rglob("tokenizer.json"))
    for name in ("tokenizer.json", "treewise.json"):
        for how in damages(folder / name, num_flips=10, num_cuts=2):
            caplog.clear()
            assert load_tokenizer(str(file)).backend_tokenizer.to_str() == first[0], how
            [line] = caplog.messages
            assert line.startswith(f"{folder}/treewise.json: ")
            assert line.endswith("the GGUF file is read again.")
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", None)
        assert read() == first  # it was kept again
    write(["ab", "aba"])
    assert len(read()[1]) < len(first[1])
