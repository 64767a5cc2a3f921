"""A checkpoint is complete or none, belongs to one run, and a resumed run is the uninterrupted one, bit for bit."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from trainer.helpers import losses, some_trees, tiny_model
from treewise.errors import CheckpointError
from treewise.trainer import TreeTrainer
from treewise.trainer import checkpoint as seals


def state_of(trainer):
    """Everything that a step changes."""
    parameters = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    moments = [value for state in trainer.optimizer.state_dict()["state"].values() for value in state.values()]
    return parameters, moments, trainer.lr_scheduler.state_dict()["last_epoch"]


def assert_same_state(one, other):
    for left, right in zip((*one[0], *one[1]), (*other[0], *other[1]), strict=True):
        assert torch.equal(left, right)
    assert one[2] == other[2]


# 7 trees in batches of 2 are 4 steps an epoch (2 with two accumulations): mid-epoch, at an epoch's end, after it.
@pytest.mark.parametrize("stop_at", [3, 4, 5])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(make_trainer, stop_at, accumulation):
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": stop_at, "max_tokens": 40}
    settings["gradient_accumulation_steps"] = accumulation
    whole = make_trainer(some_trees(), folder="whole", **settings)
    whole.train()
    resumed = make_trainer(some_trees(), model=tiny_model(seed=9), folder="resumed", **settings)
    torch.rand(17)  # another process has drawn other numbers
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-{stop_at}")
    assert_same_state(state_of(whole), state_of(resumed))
    assert losses(whole) == losses(resumed)


def saved_run(make_trainer, trees, **settings):
    trainer = make_trainer(trees, **{"max_steps": 4, "save_strategy": "steps", "save_steps": 1, **settings})
    trainer.train()
    return seals.checkpoints(trainer.args.output_dir)


def test_a_checkpoint_loads_with_transformers_alone(make_trainer, trees):
    trainer = make_trainer(trees, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    (folder,) = seals.checkpoints(trainer.args.output_dir)
    config = json.loads((folder / "config.json").read_text())
    assert "treewise" not in json.dumps(config)
    assert config["use_cache"] is True
    assert not list(folder.glob("*.bin.index.json")) + list(folder.glob("pytorch_model*"))
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 6, "do_sample": False}
    trainer.model.eval()
    assert torch.equal(loaded(prompt).logits, trainer.model(prompt).logits)
    assert torch.equal(loaded.generate(prompt, **options), trainer.model.generate(prompt, **options))


def test_other_data_is_refused_with_both_fingerprints(make_trainer, trees):
    *_, last = saved_run(make_trainer, trees)
    other = make_trainer(some_trees(seed=1), folder="other")
    then, now = json.loads((last / "treewise.json").read_text())["data"], other.data_facts.fingerprint
    with pytest.raises(CheckpointError, match=f"other data: fingerprint {then}, now {now}"):
        other.train(resume_from_checkpoint=str(last))


def test_data_in_another_order_is_other_data(make_trainer, trees):
    *_, last = saved_run(make_trainer, trees)
    with pytest.raises(CheckpointError, match="other data"):
        make_trainer(trees[::-1]).train(resume_from_checkpoint=str(last))


@pytest.mark.parametrize("settings", [{"seed": 4}, {"per_device_train_batch_size": 3}], ids=["seed", "batch"])
def test_settings_that_choose_other_trees_are_refused(make_trainer, trees, settings):
    *_, last = saved_run(make_trainer, trees)
    with pytest.raises(CheckpointError, match="would train on other trees"):
        make_trainer(trees, **settings).train(resume_from_checkpoint=str(last))


def test_the_same_step_in_other_parts_may_resume(make_trainer, trees):
    *_, last = saved_run(make_trainer, trees)
    trainer = make_trainer(trees, max_steps=5, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    trainer.train(resume_from_checkpoint=str(last))
    assert trainer.state.global_step == 5


def damage(folder, how):
    weights = folder / "model.safetensors"
    if how == "unsealed":
        (folder / "treewise.json").unlink()
    elif how == "missing":
        weights.unlink()
    elif how == "short":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        content = bytearray(weights.read_bytes())
        content[-7] ^= 1
        weights.write_bytes(content)


@pytest.mark.parametrize("how", ["unsealed", "missing", "short", "flipped"])
def test_a_damaged_checkpoint_is_named_and_an_earlier_one_is_taken(make_trainer, trees, how):
    *_, before, last = saved_run(make_trainer, trees)
    damage(last, how)
    with pytest.raises(CheckpointError, match="incomplete" if how == "unsealed" else "model.safetensors"):
        make_trainer(trees).train(resume_from_checkpoint=str(last))
    found, passed_over = seals.newest(last.parent)
    assert found == before
    assert len(passed_over) == 1
    trainer = make_trainer(trees, max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert len(losses(trainer)) == 4


def test_nothing_to_resume_from_is_an_error(make_trainer, trees, tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        make_trainer(trees).train(resume_from_checkpoint=True)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        make_trainer(trees).train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))


def test_old_checkpoints_go_only_after_the_new_one_is_sealed(make_trainer, trees, monkeypatch):
    seen = []
    write = seals.write_seal

    def watched(folder, facts):
        seen.append([path.name for path in seals.checkpoints(folder.parent)])
        write(folder, facts)

    monkeypatch.setattr(seals, "write_seal", watched)
    kept = saved_run(make_trainer, trees, save_total_limit=1)
    assert seen[-1] == ["checkpoint-3", "checkpoint-4"]
    assert [path.name for path in kept] == ["checkpoint-4"]


def test_the_best_checkpoint_is_kept_and_loaded(make_trainer, trees):
    settings = {"save_total_limit": 1, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    kept = saved_run(make_trainer, trees, eval_dataset=trees[:2], learning_rate=0.5, **settings)
    assert kept


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
def test_adapters_train_save_and_resume(make_trainer, trees):
    peft = pytest.importorskip("peft")

    def adapted():
        lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(tiny_model(), lora)

    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(trees, model=adapted(), folder="whole", **settings)
    whole.train()
    resumed = make_trainer(trees, model=adapted(), folder="resumed", **settings)
    resumed.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
    assert (seals.checkpoints(whole.args.output_dir)[0] / "adapter_model.safetensors").is_file()
    assert_same_state(state_of(whole), state_of(resumed))
    assert losses(whole) == losses(resumed)


def test_a_model_made_by_a_function_trains(make_trainer, trees, tmp_path):
    args = make_trainer(trees, max_steps=2).args
    trainer = TreeTrainer(args=args, model_init=lambda trial: tiny_model(), train_dataset=trees)
    trainer.train()
    assert len(losses(trainer)) == 2
