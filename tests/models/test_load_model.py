"""Folders of adapters are models: their base model is found, and what is loaded computes what was saved."""

import json
import shutil

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file

from tests import needs
from tests.cli.helpers import save_tiny_model
from tests.damage import damages
from treewise.errors import ConfigError
from treewise.models.load_costs import load_costs
from treewise.models.load_model import load_config, load_shapes, load_tokenizer, load_weights, locate
from treewise.nn.adapters import adapted
from treewise.testing import tiny_model

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
    with pytest.raises(ConfigError, match=r"model: the folder holds no tokenizer; save one there\."):
        load_tokenizer(str(folder / "lora"))
    assert locate(str(folder / "lora"))[0].endswith("model")


def test_damaged_settings_of_adapters_change_no_output_silently(folders):
    folder, model = folders
    ids = torch.arange(1, 20)[None]
    expected = model(input_ids=ids).logits
    config = folder / "lora" / "adapter_config.json"
    outcomes = set()
    for how in damages(config, num_flips=40, num_cuts=4):
        try:
            found = load_weights(str(folder / "lora")).eval()
        except ConfigError as error:
            outcomes.add("named" if str(folder / "lora") in str(error) else str(error))
        else:
            outcomes.add("equal" if torch.equal(found(input_ids=ids).logits, expected) else how)
    assert outcomes == {"named", "equal"}
    settings = json.loads(config.read_text())
    for changed in settings["target_modules"]:  # of which peft would leave the weights out
        rest = [name for name in settings["target_modules"] if name != changed]
        config.write_text(json.dumps(settings | {"target_modules": rest}))
        with pytest.raises(ConfigError, match=r"weights that adapter_config\.json has no place for, the first .*lora_"):
            load_weights(str(folder / "lora"))


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


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 2**31 - 1},
        {"intermediate_size": 2**31 - 1},
        {"hidden_size": 2**20},
        {"num_hidden_layers": 10_000},
        {"head_dim": 2**30},
    ],
)
def test_a_configuration_of_a_larger_model_asks_for_no_memory(folders, changes):
    folder, _ = folders
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ConfigError, match=r"config\.json (describes|names) .* config\.json describes another model"):
        load_weights(str(folder / "model"))


@pytest.mark.parametrize("changes", [{"r": 10**9}, {"rank_pattern": {"q_proj": 10**9}}])
def test_a_rank_beyond_all_that_is_saved_asks_for_no_memory(folders, changes):
    folder, _ = folders
    config = folder / "lora" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    for load in (load_weights, load_shapes):
        with pytest.raises(ConfigError, match=r"adapter_config\.json: .* is 1,000,000,000, and adapter_model\.saf"):
            load(str(folder / "lora"))


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

    write(["ab", "bb"])  # transformers before 5.20 reads a list of one merge as its letters
    parse, parsed = gguf.GGUFReader, []
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", lambda *args: parsed.append(args) or parse(*args))
        first = read()
    assert len(parsed) <= (1 if Version("5.20") <= needs.RELEASE else 2)  # a newer one reads most files without it
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
    write(["ab", "bb", "aba"])
    assert len(read()[1]) < len(first[1])


NAMES = [
    ("q_proj", {"q_proj"}),
    (" q_proj ", {"q_proj"}),
    ("q_proj, v_proj", {"q_proj", "v_proj"}),
    ("self_attn.q_proj", {"q_proj"}),
    ("model.layers.0.self_attn.q_proj", {"q_proj"}),
    (r".*\.(q|v)_proj", {"q_proj", "v_proj"}),
    (["o_proj"], {"o_proj"}),
    ("all-linear", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
]


@pytest.mark.parametrize(("given", "found"), NAMES)
def test_one_name_is_a_name_and_a_regular_expression_one(given, found):
    settings = {"r": 2, "target_modules": given}
    model = adapted(tiny_model(), settings)
    adapters = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert {name.split(".lora_A")[0].rpartition(".")[2] for name in adapters} == found
    assert settings == {"r": 2, "target_modules": given}  # peft writes into its lists


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": "q_prj"}, r"lora\.target_modules: no module is called q_prj\. There are .*q_proj, k_proj"),
        ({"target_modules": ["q_proj", "x", "y"]}, r"no module is called x, y\. There are embed_tokens, q_proj"),
        ({"target_modules": ".*q_prj"}, r"\.\*q_prj not found .*There are embed_tokens, q_proj, .*lm_head\.$"),
        ({"target_modules": "q_proj", "modules_to_save": ["hed"]}, r"lora\.modules_to_save: .* hed\. .*lm_head\.$"),
        ({"target_modules": "q_proj", "trainable_token_indices": {"hed": [3]}}, r"'hed'.*There are .*lm_head\.$"),
        ({"target_modules": "q_proj", "exclude_modules": "k_prj"}, r"lora\.exclude_modules: no module is called k_prj"),
        ({"target_modules": "q_proj", "target_parameters": ["a.b"]}, r"target_parameters: no parameter .* a\.b\."),
        ({"target_modules": "q_proj", "trainable_token_indices": [3, 64]}, r"64 is named twice, or .* 64 tokens"),
        ({"target_modules": "q_proj", "trainable_token_indices": {"lm_head": [-1]}}, r"-1 is .* 64 tokens of lm_head"),
        ({"target_modules": "q_proj", "trainable_token_indices": [3, 5, 3]}, r"token_indices: 3 is named twice"),
    ],
    ids=str,
)
def test_names_that_nothing_has_are_an_error_with_those_that_there_are(settings, message):
    with pytest.raises(ConfigError, match=message):
        adapted(tiny_model(), settings)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft, that it saves tables
@pytest.mark.parametrize("num_tokens", [99, 90])
def test_adapters_bring_their_vocabulary(tmp_path, num_tokens):
    base = save_tiny_model(tmp_path / "model")
    model = load_weights(str(base))
    model.resize_token_embeddings(num_tokens)
    model = adapted(model, {"r": 2, "init_lora_weights": False}, str(base))
    model.save_pretrained(tmp_path / "lora")
    ids = torch.arange(1, num_tokens)[None]
    loaded = load_weights(str(tmp_path / "lora")).eval()
    assert torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert load_config(str(tmp_path / "lora")).vocab_size == num_tokens
    assert load_costs(str(tmp_path / "lora")).vocabulary == num_tokens
    weights = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    del weights["base_model.model.lm_head.weight"]
    save_file(weights, tmp_path / "lora" / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(
        ConfigError, match=f"with {num_tokens} tokens, the base model has 97, and they do not hold lm_h"
    ):
        load_weights(str(tmp_path / "lora"))
