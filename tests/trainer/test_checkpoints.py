"""A checkpoint is complete or none, belongs to one run, and a resumed run is the uninterrupted one, bit for bit."""

import errno
import json
import os
import resource
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from tests.trainer.helpers import losses, some_trees, tiny_model
from treewise.errors import CheckpointError
from treewise.testing.families import tiny_model as family_model
from treewise.trainer import TreeTrainer
from treewise.trainer.checkpoint import store
from treewise.trainer.checkpoint.json_values import to_plain
from treewise.trainer.checkpoint.store import MANIFEST, identity, read_manifest, sealed_text
from treewise.trainer.survey import survey


def state_of(trainer):
    """Everything that a step changes."""
    parameters = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    states = trainer.optimizer.state_dict()["state"].values()
    moments = [torch.as_tensor(value) for state in states for value in state.values()]
    return parameters, moments, trainer.lr_scheduler.state_dict()["last_epoch"]


def assert_same_state(one, other):
    for left, right in zip((*one[0], *one[1]), (*other[0], *other[1]), strict=True):
        assert torch.equal(left, right)
    assert one[2] == other[2]


def adapted():
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny_model(), lora)


RUNS = {
    # 7 trees in batches of 2 are 4 steps an epoch (2 with two accumulations): mid-epoch, at an epoch's end, after it.
    **{
        f"{num}-{step}": (
            tiny_model,
            {"max_steps": 8, "save_steps": step, "max_tokens": 40, "gradient_accumulation_steps": num},
        )
        for num in (1, 2)
        for step in (3, 4, 5)
    },
    **{name: (tiny_model, {"optim": name}) for name in ("adamw_torch", "sgd", "adafactor", "adagrad", "rmsprop")},
    # Experts are saved one by one and held as one tensor: transformers' own resume would leave them as they are.
    **{name: (partial(family_model, name), {"max_steps": 3}) for name in ("mixtral", "qwen3_moe", "gemma")},
    "adapters": (adapted, {}),
}


@pytest.mark.representatives("2-3", "mixtral", "adapters")
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(make_trainer, name):
    make_model, more = RUNS[name]
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **more}
    whole = make_trainer(some_trees(), model=make_model(), folder="whole", **settings)
    whole.train()
    fresh = make_model()
    for parameter in fresh.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    resumed = make_trainer(some_trees(), model=fresh, folder="resumed", **settings)
    torch.rand(17)  # another process has drawn other numbers
    checkpoint = Path(whole.args.output_dir) / f"checkpoint-{settings['save_steps']}"
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same_state(state_of(whole), state_of(resumed))
    assert losses(whole) == losses(resumed)
    assert (checkpoint / "adapter_model.safetensors").is_file() == (name == "adapters")


def saved_run(make_trainer, trees, **settings):
    trainer = make_trainer(trees, **{"max_steps": 4, "save_strategy": "steps", "save_steps": 1, **settings})
    trainer.train()
    return store.checkpoints(trainer.args.output_dir)


def test_a_checkpoint_loads_with_transformers_alone(make_trainer, trees):
    trainer = make_trainer(trees, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    (folder,) = store.checkpoints(trainer.args.output_dir)
    config = json.loads((folder / "config.json").read_text())
    assert "treewise" not in json.dumps(config)
    assert config["use_cache"] is True
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".safetensors", ".json"}
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 6, "do_sample": False}
    trainer.model.eval()
    assert torch.equal(loaded(prompt).logits, trainer.model(prompt).logits)
    assert torch.equal(loaded.generate(prompt, **options), trainer.model.generate(prompt, **options))


def test_other_data_other_trees_of_a_step_and_another_model_are_refused(make_trainer, trees):
    *_, last = saved_run(make_trainer, trees)
    then, now = json.loads((last / "treewise.json").read_text())["data"], survey(some_trees(seed=1)).fingerprint
    resized = tiny_model()
    resized.resize_token_embeddings(64)
    for data, settings, message in (
        (some_trees(seed=1), {}, f"other data: fingerprint {then}, now {now}"),
        (trees[::-1], {}, "other data"),
        (trees, {"seed": 4}, "would train on other trees"),
        (trees, {"per_device_train_batch_size": 3}, "would train on other trees"),
        (trees, {"model": resized}, r"made with the model LlamaForCausalLM of .* now LlamaForCausalLM of"),
    ):
        with pytest.raises(CheckpointError, match=message):
            make_trainer(data, **settings).train(resume_from_checkpoint=str(last))


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


@pytest.mark.representatives("unsealed", "flipped")
@pytest.mark.parametrize("how", ["unsealed", "missing", "short", "flipped"])
def test_a_damaged_checkpoint_is_named_and_an_earlier_one_is_taken(make_trainer, trees, how):
    *_, before, last = saved_run(make_trainer, trees)
    damage(last, how)
    with pytest.raises(CheckpointError, match="incomplete" if how == "unsealed" else "model.safetensors"):
        make_trainer(trees).train(resume_from_checkpoint=str(last))
    found, passed_over = store.newest(last.parent)
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
    publish = store.publish

    def watched(folder, facts):
        published = publish(folder, facts)
        seen.append([path.name for path in store.checkpoints(folder.parent)])
        return published

    monkeypatch.setattr(store, "publish", watched)
    kept = saved_run(make_trainer, trees, save_total_limit=1)
    assert seen[-1] == ["checkpoint-3", "checkpoint-4"]
    assert [path.name for path in kept] == ["checkpoint-4"]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_best_model_has_all_weights_of_its_checkpoint(make_trainer, trees, family):
    settings = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "greater_is_better": True}
    settings |= {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "metric_for_best_model": "eval_loss"}
    trainer = make_trainer(trees, model=family_model(family), eval_dataset=trees[:2], **settings)
    trainer.train()
    assert trainer.state.best_global_step == 1  # the loss falls, and the greatest is taken
    best = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    for one, two in zip(best.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_model_made_by_a_function_trains(make_trainer, trees, tmp_path):
    args = make_trainer(trees, max_steps=2).args
    trainer = TreeTrainer(args=args, model_init=lambda trial: tiny_model(), train_dataset=trees)
    trainer.train()
    assert len(losses(trainer)) == 2


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "random.pkl"])
def test_a_pickled_file_in_a_checkpoint_is_refused_unread(make_trainer, trees, name):
    *_, last = saved_run(make_trainer, trees)
    (last / name).write_bytes(b"cos\nsystem\n(S'echo ran'\ntR.")
    with pytest.raises(CheckpointError, match="pickled files are never read"):
        make_trainer(trees).train(resume_from_checkpoint=str(last))


@pytest.mark.parametrize("name", ["../outside.json", "link.json"])
def test_a_seal_that_names_a_file_elsewhere_is_refused(make_trainer, trees, name):
    *_, last = saved_run(make_trainer, trees)
    (last.parent / "outside.json").write_text("{}")
    (last / "link.json").symlink_to(last.parent / "outside.json")
    content = json.loads((last / MANIFEST).read_text())
    del content["checksum"]
    content["files"][name] = identity(last.parent / "outside.json")
    (last / MANIFEST).write_text(sealed_text(content))
    with pytest.raises(CheckpointError, match="not a file of the checkpoint"):
        read_manifest(last)


def test_a_finished_run_resumes_to_its_end_and_trains_no_step_more(make_trainer, trees):
    *_, last = saved_run(make_trainer, trees, max_steps=5)  # in the middle of the second epoch
    trainer = make_trainer(trees, model=tiny_model(seed=9), max_steps=5)
    assert trainer.train(resume_from_checkpoint=str(last)).global_step == 5
    for name, value in AutoModelForCausalLM.from_pretrained(last).state_dict().items():
        assert torch.equal(value, trainer.model.state_dict()[name])


def test_the_end_of_a_run_is_its_best_model_where_that_is_asked_for(make_trainer, trees):
    settings = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "greater_is_better": True}
    settings |= {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "metric_for_best_model": "eval_loss"}
    before = make_trainer(trees, eval_dataset=trees, **settings)
    before.train()
    assert before.state.best_global_step == 1  # the loss falls, and the greatest is taken
    trainer = make_trainer(trees, eval_dataset=trees, model=tiny_model(seed=9), **settings)
    trainer.train(resume_from_checkpoint=True)
    for one, two in zip(before.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_checkpoint_without_its_optimizer_is_refused(make_trainer, trees):
    *_, last = saved_run(make_trainer, trees, save_only_model=True)
    with pytest.raises(CheckpointError, match="without its optimizer"):
        make_trainer(trees, max_steps=9).train(resume_from_checkpoint=str(last))


def test_an_optimizer_of_other_parameters_is_refused(make_trainer, trees):
    *_, last = saved_run(make_trainer, trees)
    frozen = tiny_model()
    trainer = make_trainer(trees, model=frozen, max_steps=9)
    frozen.lm_head.weight.requires_grad_(False)  # after the fingerprint was taken
    with pytest.raises(CheckpointError, match="trained other parameters"):
        trainer.train(resume_from_checkpoint=str(last))


@pytest.mark.representatives("full")
@pytest.mark.parametrize("failing", ["mkdir", "full", "read back"])
def test_a_disk_that_refuses_is_a_clear_error_and_harms_nothing(make_trainer, trees, monkeypatch, failing):
    *_, last = saved_run(make_trainer, trees, max_steps=2)
    before = {path: path.read_bytes() for path in last.rglob("*") if path.is_file()}
    trainer = make_trainer(trees, max_steps=4, save_strategy="steps", save_steps=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if failing == "mkdir":
        monkeypatch.setattr(Path, "mkdir", raises_on_saving(Path.mkdir))
    elif failing == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    else:
        monkeypatch.setattr(store, "safe_open", reads_damaged)
    try:
        with pytest.raises(CheckpointError, match=r"step 3 could not be saved .*it takes .* [KM]iB, .* free\. Earlier"):
            trainer.train(resume_from_checkpoint=str(last))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert before == {path: path.read_bytes() for path in last.rglob("*") if path.is_file()}
    assert sorted(path.name for path in last.parent.iterdir()) == ["checkpoint-1", "checkpoint-2"]


def raises_on_saving(mkdir):
    def refuse(path, *args, **kwargs):
        if path.name.endswith(".saving"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        mkdir(path, *args, **kwargs)

    return refuse


def reads_damaged(path, **kwargs):
    raise SafetensorError("header too short")


def test_a_failed_save_may_be_survived(make_trainer, trees, monkeypatch, caplog):
    monkeypatch.setattr(Path, "mkdir", raises_on_saving(Path.mkdir))
    trainer = make_trainer(trees, max_steps=3, save_strategy="steps", save_steps=2, on_save_failure="continue")
    trainer.train()
    assert len(losses(trainer)) == 3
    assert "Read-only file system" in caplog.text


def test_an_optimizer_state_that_needs_pickle_is_refused():
    with pytest.raises(CheckpointError, match="weird is a object, which cannot be saved without pickle"):
        to_plain({"weird": object()})


def test_prune_counts_good_checkpoints_alone_and_keeps_the_best(tmp_path):
    for step in range(1, 7):
        folder = store.new_folder(tmp_path, step)
        (folder / "a.json").write_text("{}")
        store.publish(folder, {"step": step})
    for step in (5, 6):
        (tmp_path / f"checkpoint-{step}" / MANIFEST).unlink()  # torn by an earlier version
    store.prune(tmp_path, 1, keep=str(tmp_path / "checkpoint-2"))
    assert [path.name for path in store.checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in (2, 4, 5, 6)]
