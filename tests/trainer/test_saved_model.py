"""A saved model is read back and compared: what is right passes, and each kind of damage is an error by name."""

import json
import logging
import time
from functools import partial
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.test_mesh import fork_ranks
from tests.trainer.helpers import some_trees
from treewise.errors import CheckpointError
from treewise.nn import adapters
from treewise.testing import tiny_model
from treewise.trainer import TreeTrainer, TreeTrainingArguments, saved_model
from treewise.trainer.checkpoint import contents

WEIGHTS = "model.safetensors"
GATE = "model.layers.1.mlp.gate_proj.weight"


def trained(folder, model, **settings):
    """A trainer after one step."""
    args = TreeTrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, learning_rate=1e-2, max_tokens=64,
        **{"max_steps": 1, "save_strategy": "no", **settings},
    )  # fmt: skip
    trainer = TreeTrainer(model, args, train_dataset=some_trees())
    trainer.train()
    return trainer


def adapted(base):
    tiny_model().save_pretrained(base)
    model = tiny_model()
    model.name_or_path = str(base)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, settings)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def changed_json(folder, name, **values):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def changed_weights(folder, change, name=WEIGHTS):
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})


def one_weight(folder):
    changed_weights(folder, lambda tensors: tensors[GATE].mul_(1.05))


def cast(folder):
    changed_weights(folder, lambda tensors: tensors.update({key: each.bfloat16() for key, each in tensors.items()}))
    changed_json(folder, "config.json", dtype="bfloat16")


def fewer_tokens(folder):
    names = ("model.embed_tokens.weight", "lm_head.weight")
    changed_weights(folder, lambda tensors: tensors.update({key: tensors[key][:60].clone() for key in names}))
    changed_json(folder, "config.json", vocab_size=60)


DAMAGES = {
    "a weight": (one_weight, rf"log-probs of \d+ tokens differ by .*{GATE} differs most, by 5.0e-02 of its largest"),
    "dtype": (cast, "was saved in bfloat16 and trained in float32"),
    "vocabulary": (fewer_tokens, r"model.embed_tokens.weight was saved with the shape \(60, 32\), and has \(64, 32\)"),
    "untied": (partial(changed_json, name="config.json", tie_word_embeddings=False), "lm_head.weight is not in it"),
    "scale": (
        partial(changed_json, name="adapter_config.json", lora_alpha=16),
        "Every parameter is the same, so a setting of its configuration is another one",
    ),
}


def damaging(monkeypatch, damage):
    """Every save is damaged after it was written."""
    save_model = contents.save_model

    def save(folder, *args):
        names = save_model(folder, *args)
        damage(folder)
        return names

    monkeypatch.setattr(contents, "save_model", save)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(name, tmp_path, monkeypatch) -> None:
    damage, message = DAMAGES[name]
    if name == "scale":
        model = adapted(tmp_path / "base")
    else:
        model = tiny_model(tie_word_embeddings=name == "untied")
    trainer = trained(tmp_path / "run", model)
    damaging(monkeypatch, damage)
    with pytest.raises(CheckpointError, match=f"run: .*{message}"):
        trainer.save_model()


@pytest.mark.parametrize("kind", ["whole", "tied", "bfloat16", "adapters", "hybrid"])
def test_what_is_right_passes(kind, tmp_path, caplog) -> None:
    models = {
        "whole": tiny_model,
        "tied": partial(tiny_model, tie_word_embeddings=True),
        "bfloat16": partial(tiny_model, dtype=torch.bfloat16),
        "adapters": partial(adapted, tmp_path / "base"),
        "hybrid": partial(tiny_model, "qwen3_next"),
    }
    trainer = trained(tmp_path / "run", models[kind]())
    state = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    drawn = torch.get_rng_state()
    with caplog.at_level(logging.INFO, "treewise"):
        trainer.save_model()
    assert f"read back by transformers{' and PEFT' * (kind == 'adapters')}, log-probs of" in caplog.text
    assert torch.equal(drawn, torch.get_rng_state())  # observing changes nothing
    assert all(torch.equal(each, state[name]) for name, each in trainer.model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "text"),
    [("memory", "host memory, and 10 bytes is free"), ("base", "its base model .* is not on this machine")],
)
def test_what_cannot_be_read_back_is_told(name, text, tmp_path, monkeypatch, caplog) -> None:
    model = adapted(tmp_path / "base") if name == "base" else tiny_model()
    if name == "base":
        model.peft_config["default"].base_model_name_or_path = "no/such-model"
    else:
        monkeypatch.setattr(saved_model, "free_bytes", lambda device: 10)
    trainer = trained(tmp_path / "run", model)
    with caplog.at_level(logging.INFO, "treewise"):
        trainer.save_model()
    assert [each for each in caplog.messages if "not read back, because" in each]
    assert text.split(".*")[-1] in caplog.text


def test_packages_of_others_warn_of_nothing(tmp_path, recwarn, caplog) -> None:
    """What PEFT says of tied tables when adapters are made, saved and read back stands in one line of our own."""
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    given = {"r": 4, "target_modules": ["q_proj", "lm_head"]}
    model = adapters.adapted(tiny_model(tie_word_embeddings=True), given, str(tmp_path / "base"))
    trained(tmp_path / "run", model).save_model()
    assert [str(each.message) for each in recwarn] == []
    assert len([each for each in caplog.messages if "lm_head has adapters of its own" in each]) == 1


def test_it_can_be_turned_off(tmp_path, monkeypatch) -> None:
    trainer = trained(tmp_path / "run", tiny_model(), verify_saves=False)
    damaging(monkeypatch, one_weight)
    trainer.save_model()


def test_of_checkpoints_the_first_of_a_process_is_read_back(tmp_path, monkeypatch, caplog):
    """And what ends the run; a damaged one ends it, whatever else may fail."""
    saves = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "on_save_failure": "continue"}
    with caplog.at_level(logging.INFO, "treewise"):
        trained(tmp_path / "run", tiny_model(), **saves).save_model()
    lines = [each for each in caplog.messages if ": read back by transformers, log-probs of" in each]
    assert [each.split(":")[0].removeprefix(str(tmp_path)) for each in lines] == ["/run/checkpoint-1", "/run"]
    write_model = contents.write_model

    def damaged(folder, *args, **kwargs):
        write_model(folder, *args, **kwargs)
        one_weight(folder)

    monkeypatch.setattr(contents, "write_model", damaged)
    with pytest.raises(CheckpointError, match=f"checkpoint-1: .*{GATE}"):
        trained(tmp_path / "damaged", tiny_model(), **saves)


@pytest.mark.parametrize("first", ["default", "other"])
def test_adapters_of_any_name_are_compared(first, tmp_path, monkeypatch, caplog):
    """Of another name than the usual PEFT writes them into a folder of their own."""
    tiny_model().save_pretrained(tmp_path / "base")
    model = tiny_model()
    model.name_or_path = str(tmp_path / "base")
    given = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**given), adapter_name=first)
    trainer = trained(tmp_path / "run", model)
    with caplog.at_level(logging.INFO, "treewise"):
        trainer.save_model()
    assert "read back by transformers and PEFT" in caplog.text
    name = "adapter_model.safetensors" if first == "default" else f"{first}/adapter_model.safetensors"
    damaging(monkeypatch, partial(changed_weights, change=lambda tensors: tensors[max(tensors)].mul_(1.05), name=name))
    with pytest.raises(CheckpointError, match=rf"lora_B\.{first}\.weight differs most"):
        trainer.save_model()


def sharded_save(folder):
    """What each of two ranks is told of a save that is right, and of one that is not."""
    trainer = trained(folder / "run", tiny_model(), sharded=True)
    trainer.save_model()
    with pytest.MonkeyPatch.context() as monkeypatch:
        damaging(monkeypatch, lambda path: one_weight(path) if trainer.args.process_index == 0 else None)
        with pytest.raises(CheckpointError) as raised:
            trainer.save_model()
    return str(raised.value)


def test_two_ranks_are_told_of_damage(tmp_path) -> None:
    first, second = fork_ranks(2, lambda: sharded_save(tmp_path), tmp_path)
    assert first == second
    assert f"{GATE} differs most" in first


def read_late(folder) -> bool:
    """Whether the last rank had its answer when this process went on."""
    asleep, awake = folder / "asleep", folder / "awake"

    def sleep(_: float) -> None:
        asleep.touch()
        time.sleep(0.3)
        awake.touch()

    def work() -> dict:
        while not asleep.exists():
            time.sleep(0.01)
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_model, "time", SimpleNamespace(sleep=sleep))
        saved_model._on_first_rank(work)
    return awake.exists()


def test_rank_0_whose_end_may_be_the_stores_goes_on_when_all_have_read(tmp_path) -> None:
    assert fork_ranks(2, lambda: read_late(tmp_path), tmp_path) == [True, True]
