"""Names of other libraries: one table, every entry of which leads to a key that exists."""

import pytest

from treewise.cli.aliases import ALIASES, EARLIER, INSTEAD, names_of
from treewise.cli.commands import rl
from treewise.cli.config import read_config, resolved_text
from treewise.cli.keys import schema
from treewise.cli.main import main
from treewise.errors import ConfigError
from treewise.trainer import TreeTrainingArguments

KEYS = schema()
BASE = ["--model", "m", "--data", "rows.jsonl", "--output_dir", "out"]


def test_no_alias_hides_a_key_and_each_leads_to_one():
    assert not set(ALIASES) & set(KEYS)
    assert not set(INSTEAD) & {*KEYS, *ALIASES}
    assert {name.split(".")[0] for name in ALIASES.values()} <= set(KEYS)
    assert not set(names_of(rl.all_keys())) & set(rl.all_keys())  # `save_every` of an online run is no alias


def test_keys_that_transformers_renamed_are_taken_by_an_earlier_release_too(tmp_path):
    for new, old in EARLIER.items():
        assert old in KEYS
        assert names_of({old})[new] == old
        assert new not in names_of({old, new})
        assert new not in names_of({"max_tokens"})  # of a command without it
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: rows.jsonl\noutput_dir: out\nactivation_checkpointing: true\n")
    config = read_config(path, [])
    name = next(name for pair in EARLIER.items() for name in pair if name in KEYS)
    assert config.training.pop(name) is True
    args = TreeTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **{name: True})
    assert f"{name}: true" in resolved_text(config, args)


def test_flags_and_files_take_aliases(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("base_model: m\ntrain_file: rows.jsonl\nmicro_batch_size: 4\nlora_rank: 8\nlr: 1e-4\n")
    config = read_config(path, ["--out", "run", "--lr", "2e-4", "--max-seq-length", "99"])
    assert (config.model, config.data, config.lora) == ("m", "rows.jsonl", {"r": 8})
    assert config.training["learning_rate"] == 2e-4
    assert config.training["per_device_train_batch_size"] == 4
    assert config.render.max_length == 99
    assert ("lr", "learning_rate") in config.renamed


def test_an_alias_beside_its_key_is_an_error():
    with pytest.raises(ConfigError, match=r"(lr and learning_rate|learning_rate and lr) are the same key"):
        read_config(None, [*BASE, "--learning_rate", "1e-4", "--lr", "1e-5"])


@pytest.mark.parametrize("word", ["packing", "adapter", "attn_implementation"])
def test_a_word_without_a_counterpart_gets_advice(word):
    with pytest.raises(ConfigError, match=INSTEAD[word].split(":")[0].split("(")[0].strip()):
        read_config(None, [*BASE, f"--{word}", "x"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora_dropout", "0.1"], "lora.lora_dropout is 0.1; a shared token is computed once"),
        (["--lora.alora_invocation_tokens", "[1, 2]"], "lora.alora_invocation_tokens cannot be used"),
        (["--lora.r", "0"], "lora.r is 0; it must be positive"),
        (["--lora.task_type", "SEQ_CLS"], "lora.task_type is 'SEQ_CLS'"),
        (["--load_in_4bit"], "load_in_4bit: quantised weights cannot be trained themselves; add adapters"),
        (["--load_in_4bit", "--load_in_8bit", "--lora.r", "4"], "choose one"),
    ],
)
def test_adapters_are_checked_before_anything_is_loaded(flags, message):
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=message):
        read_config(None, [*BASE, *flags])


def test_what_was_resolved_is_printed(capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"token_ids": [1, 2, 3], "group": "a"}\n')
    assert main(["plan", str(tmp_path / "rows.jsonl"), "--max-tokens", "2", "--precision", "bfloat16"]) == 0
    assert "read as: precision -> dtype" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["runs/nothing/here", "./nothing", "checkpoint-7", "model.gguf", "models/absent"])
def test_a_local_looking_path_is_no_name_of_the_hub(name, tmp_path, monkeypatch, capsys):
    (tmp_path / "models" / "present").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: pytest.fail("asked the Hub"))
    assert main(["train", "--model", name, *BASE[2:], "--report_to", "none"]) == 2
    err = capsys.readouterr().err
    assert f"{name}: no such model folder" in err
    assert ("Did you mean 'present'?" in err) is (name == "models/absent")


def test_roles_to_train_is_what_the_model_sampled(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: d\noutput_dir: o\nroles_to_train: [assistant]\n")
    assert read_config(path).render.train_on == "all_assistant"
    for roles in ("[assistant, user]", "[]", "3"):
        path.write_text(f"model: m\ndata: d\noutput_dir: o\nroles_to_train: {roles}\n")
        with pytest.raises(ConfigError, match=r"run.yaml.*roles_to_train is .*only what the model sampled"):
            read_config(path)
