"""Settings of a run: accepted, rejected, taken over and passed on."""

import json
from dataclasses import fields

import pytest
from transformers import TrainingArguments

import treewise.trainer.arguments
from treewise.distributed.fsdp import ShardSettings
from treewise.errors import ConfigError
from treewise.nn.platform.releases import clips_by_accelerator
from treewise.objectives import NORMALIZATIONS
from treewise.testing import families
from treewise.trainer import TreeTrainingArguments
from treewise.tree.forest import WEIGHTINGS


def test_fsdp_in_any_form_is_taken_over(tmp_path, monkeypatch):
    common = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True}
    (tmp_path / "fsdp.json").write_text(json.dumps({"state_dict_type": "FULL_STATE_DICT"}))
    by_flag = TreeTrainingArguments(fsdp="full_shard", fsdp_config=str(tmp_path / "fsdp.json"), **common)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    by_launcher = TreeTrainingArguments(**common)
    assert by_flag.shard_settings() == ShardSettings(whole_checkpoints=True)
    assert by_launcher.shard_settings() == ShardSettings(reshard_after_forward=False)
    assert not by_flag.fsdp
    again = TreeTrainingArguments(sharded=by_flag.sharded, shard_config=by_flag.shard_config, **common)
    assert again.shard_settings() == by_flag.shard_settings()


def test_a_launcher_that_starts_one_process_of_several_is_refused(tmp_path, monkeypatch):
    common = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True}
    for name in ("ACCELERATE_USE_CPU", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    TreeTrainingArguments(**common)  # asked for one
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ConfigError, match="asked for several processes and started one"):
        TreeTrainingArguments(**common)


def test_settings_of_the_engine_reach_it(make_trainer, trees):
    model = families.tiny_model("mixtral")
    trainer = make_trainer(trees, model=model, offload=True, router_z_coefficient=0.1)
    assert trainer.engine.offload
    assert trainer.engine.router_loss_rule.z_coefficient == 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fsdp_config": "none.json"}, r"fsdp_config: 'none\.json' cannot be read \(No such file"),
        ({"fsdp_config": "/dev/zero"}, r"fsdp_config: '/dev/zero' cannot be read \(a pipe or a device"),
        ({"accelerator_config": "{"}, "accelerator_config: '{' cannot be read .not valid JSON"),
        ({"fp16": True}, "fp16=True cannot be used: .* use bf16"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"dataloader_drop_last": True}, "no tree is dropped"),
        ({"max_tokens": 0}, "max_tokens=0; give a positive"),
        ({"attention": "sdpa"}, "attention='sdpa' is unknown"),
        ({"weighting": "twice"}, "weighting='twice' is unknown"),
        ({"normalization": "constant"}, "constant"),
        ({"train_sampling_strategy": "group_by_length"}, "choose random or sequential"),
        ({"per_device_train_batch_size": 0}, "must be at least 1"),
        ({"router_z_coefficient": -0.1}, r"router_z_coefficient=-0\.1 must be 0 or positive"),
        ({"shard_config": {"dp_replicate_size": 2}}, "give sharded: true"),
        ({"max_token": 16}, r"no setting 'max_token'\. Did you mean 'max_tokens'\?"),
        ({"max_length": 16}, r"no setting 'max_length'\. It is of records: TreeTrainer\(..., render="),
        ({"adam_beta2": 1.0}, "adam_beta2=1 must be 0 or positive and below 1"),
        ({"torch_compile": True, "compile_layers": "never"}, "compile_layers=never and torch_compile .* contradict"),
        ({"compile_layers": "true"}, "compile_layers='true' is unknown; choose one of auto, always, never"),
        ({"use_liger_kernel": True}, r"use_liger_kernel needs liger-kernel 0\.8 or later, and it is not installed"),
        ({"torch_compile_mode": "reduce-overhead"}, "records CUDA graphs"),
        ({"torch_compile_backend": "cuda"}, "torch_compile_backend='cuda' is unknown"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_hold_on_trees_are_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        TreeTrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, **settings)


@pytest.mark.parametrize(("name", "choices"), [("weighting", WEIGHTINGS), ("normalization", NORMALIZATIONS)])
def test_every_choice_is_documented_and_accepted(tmp_path, name, choices):
    doc = " ".join(TreeTrainingArguments.__doc__.split())
    described = doc[doc.index(f" {name}: ") :].split(f" {'normalization' if name == 'weighting' else 'constant'}: ")[0]
    for choice in choices:
        assert f"`{choice}`" in described
        constant = {"constant": 2.0} if choice in ("rollout_sum", "constant") else {}
        args = TreeTrainingArguments(str(tmp_path), report_to="none", use_cpu=True, **{name: choice}, **constant)
        assert getattr(args.sft_objective(), name) == choice


def test_the_backend_of_ranks_is_left_alone_in_one_process(tmp_path):
    """accelerate would look for a group of that backend, and there is none."""
    args = TreeTrainingArguments(output_dir=str(tmp_path), report_to="none", ddp_backend="gloo")
    assert (args.ddp_backend, args.world_size) == ("gloo", 1)


def test_settings_that_nothing_reads_are_named(tmp_path, caplog):
    """Once, and only where they are set to something else than their default."""
    TreeTrainingArguments(output_dir=str(tmp_path), report_to="none", dataloader_pin_memory=True, label_names=[])
    assert "without effect" not in caplog.text
    TreeTrainingArguments(
        output_dir=str(tmp_path), report_to="none", dataloader_pin_memory=False, label_names=["a"], seed=3
    )
    assert "without effect on trees: dataloader_pin_memory, label_names; leave them out" in caplog.text


def test_a_runs_own_settings_on_a_cpu_are_read_back_without_a_warning(tmp_path, caplog):
    """transformers puts `dataloader_pin_memory` out there."""
    args = TreeTrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    TreeTrainingArguments(**{name: getattr(args, name) for name in ("output_dir", "use_cpu", "dataloader_pin_memory")})
    assert "without effect" not in caplog.text


def test_counting_tokens_needs_a_release(tmp_path, monkeypatch):
    settings = {"output_dir": str(tmp_path), "report_to": "none", "include_num_input_tokens_seen": True}
    if not clips_by_accelerator():
        assert TreeTrainingArguments(**settings).include_num_input_tokens_seen == "all"
    monkeypatch.setattr(treewise.trainer.arguments, "clips_by_accelerator", lambda: True)
    with pytest.raises(ConfigError, match=r"include_num_input_tokens_seen needs pip install 'transformers>=5\.3'"):
        TreeTrainingArguments(**settings)


def test_settings_of_transformers_keep_its_defaults(tmp_path):
    """They are declared again for their limits alone."""
    known = {item.name: item.default for item in fields(TrainingArguments)}
    arguments = TreeTrainingArguments(output_dir=str(tmp_path), report_to="none")
    for name in ("seed", "data_seed", "learning_rate", "weight_decay", "max_grad_norm", "adam_epsilon", "adam_beta1"):
        assert getattr(arguments, name) == known[name]
