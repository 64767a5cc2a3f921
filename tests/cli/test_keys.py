"""Each key of each command that trains, as a flag and in a file, reaches the object that computes with it."""

import argparse
import dataclasses
import inspect
import re
import typing
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import yaml

import treewise.data
import treewise.rl.online
import treewise.rl.samplers.servers
from tests.cli.helpers import save_tiny_model, write_rows
from treewise.cli import data_arguments, online_run, progress, run_folder, training_run
from treewise.cli.commands import rl, train
from treewise.cli.keys import key_names, schema
from treewise.cli.main import main
from treewise.cli.parser import COMMANDS, module_of
from treewise.cli.values import choices_of, kinds_of
from treewise.data import RenderOptions
from treewise.models import load_model
from treewise.rl import checks, update
from treewise.rl.online import OnlineSettings, tasks_by_name
from treewise.trainer import TreeTrainingArguments

KEYS = {"train": train.KEYS, "rl": rl.KEYS, "online": rl.all_keys()}
# The parameter of a recorded call that a key becomes; fields of `RenderOptions`, `TreeTrainingArguments` and
# `OnlineSettings` are recorded under their own names.
CALLS = {
    **{key: f"load_weights.{key}" for key in ("model", "dtype")},
    "gguf_file": "load_weights.policy_gguf",
    **{key: f"load_trees.{key}" for key in ("num_workers", "on_bad_record")},
    **{key: f"load_trees of {key}" for key in ("data", "eval_data")},
    **{key: f"task_named.{key}" for key in ("reward_functions", "reward_weights")},
    **{key: f"credited.{key}" for key in ("objective", "objective_settings", "drop_flat_groups", "max_failed")},
    "load_in_4bit": "load_weights.bits",
    "load_in_8bit": "load_weights.bits",
    "lora": "adapted.lora",
    "tokenizer": "load_processor.name",
    "eval_split": "split_for_evaluation.fraction",
    "advantages": "credited.method",
    "advantages_settings": "credited.settings",
    "old_logprobs": "with_streams.old_logprobs",
    "mini_batches": "trees_per_batch.num_mini_batches",
    "logprob_gap_limit": "GapWarning.limit",
    "reference": "load_weights.reference",
    "tasks": "task_named.name",
    "tasks_settings": "task_named.settings",
    "tasks_seed": "task_named.seed",
    "sampler_settings": "ServerSampler.settings",
    "sampler": "ServerSampler.name",
}
SEEN_AS = {"load_in_4bit": 4, "load_in_8bit": 8}
# Other keys get a value of their type that is not their default.
GIVEN = {
    "eval_strategy": "epoch", "objective": "cispo", "objective_settings": {"beta": 0.25}, "curriculum": "gain",
    "curriculum_settings": {"force": True}, "logprob_gap_limit": 7.0, "lora": {"r": 3}, "on_drift": "error",
    "on_hidden": "warn", "on_bad_record": "quarantine", "thinking": "keep", "train_on": "last_assistant",
    "advantages": "turns", "advantages_settings": {"discount": 0.5}, "old_logprobs": "recompute", "sampler": "vllm",
    "max_length": 77, "max_record_bytes": 7777, "template_date": "2024-02-03",
    "tasks": "sum", "dtype": "bfloat16", "max_tokens": 64, "branching": "random", "eval_split": 0.25,
    "branching_settings": {"variations": 3}, "book_settings": {"decay": 0.5}, "check_items": 5, "check_rollouts": 6,
    "num_items": 9, "on_reward_error": "raise", "reward_weights": [0.5, 0.25],
    "max_failed": 0.25, "reward_functions": ["a:b", "c:d"], "steps_per_epoch": 3,
}  # fmt: skip
SUM = {"weighting", "normalization", "constant"}  # in `rl`, settings of the objective
LEFT_OUT = {
    "train": set[str](),
    "rl": {"eval_data", "eval_split", "eval_strategy", "per_device_train_batch_size", *SUM},
    # agent and its settings: tests/cli/test_agent_run.py
    "online": {"data", "eval_data", "agent", "agent_settings", *SUM, *online_run.ELSEWHERE},
}
EITHER = ("eval_split", "load_in_8bit")  # exclude eval_data and load_in_4bit: a run of their own


def value_of(key, annotation):
    """A value of the key's type that is not its default."""
    if key in GIVEN:
        return GIVEN[key]
    default = getattr(TreeTrainingArguments, key, None)
    kinds = kinds_of(annotation)
    if key.endswith("_kwargs"):  # transformers declares some of these as text, too
        return {"a": 1}
    if names := choices_of(annotation):
        return next(each for each in names if each not in (default, "no", "best"))
    if bool in kinds and not {int, str} & kinds:
        return key not in ("merge_siblings",) and default is not True
    values = {int: 3, float: 0.5, str: f"a-{key}", list: ["a"], dict: {"a": 1}, bool: True}
    return next(value for kind, value in values.items() if kind in kinds)


def as_flags(values):
    for key, value in values.items():
        for inner, each in value.items() if isinstance(value, dict) else [("", value)]:
            yield from (f"--{key}.{inner}".rstrip("."), *map(str, each if isinstance(each, list) else [each]))


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """Parameters of every recorded call, as `function.parameter`. Models and data are tiny; nothing is trained."""
    monkeypatch.chdir(tmp_path)
    rows = [{"token_ids": [1, 2, 3 + i], "group": "a", "reward": i} for i in range(2)]
    trees = treewise.data.load_trees(write_rows(tmp_path / "rows.jsonl", rows))
    model = training_run.load_weights(str(save_tiny_model(tmp_path / "tiny")))
    found = {}

    def record(owner, name, result=None):
        original = getattr(owner, name)
        signature = inspect.signature(original)

        def stand_in(*given, **named):
            bound = signature.bind(*given, **named).arguments
            found.update({f"{name}.{parameter}": value for parameter, value in bound.items()})
            return result(bound) if callable(result) else result

        monkeypatch.setattr(owner, name, stand_in)

    def arguments(self, _init=TreeTrainingArguments.__init__, **values):
        found.update(values)
        _init(self, values["output_dir"], use_cpu=True, report_to="none", steps_per_epoch=values.get("steps_per_epoch"))

    def loaded(bound):
        name = "eval_data" if bound["data"] == "a-eval_data" else "data"
        found[f"load_trees of {name}"] = bound["data"]
        found.update({each: getattr(bound["options"], each) for each in RenderOptions.__slots__})
        return trees

    def weights(bound):
        if bound["name"] == "a-reference":
            found["load_weights.reference"] = bound["name"]
        else:
            found["load_weights.model"] = bound["name"]
            found["load_weights.policy_gguf"] = bound["gguf_file"]
        return model

    def objective_seen(bound):
        found["credited.objective"] = getattr(bound["objective"], "surrogate", "dpo")
        found["credited.objective_settings"] = {"beta": bound["objective"].beta}

    def looped(bound):
        found.update({each: getattr(bound["settings"], each) for each in OnlineSettings.__slots__})
        objective_seen(bound)
        return SimpleNamespace(train=lambda _: None)

    def trained(bound):
        if bound["objective"] is not None:
            objective_seen(bound)

    monkeypatch.setattr(TreeTrainingArguments, "__init__", arguments)
    for owner, name, result in (
        (treewise.data, "load_trees", loaded),
        (treewise.data, "split_for_evaluation", (trees, trees)),
        (training_run, "load_weights", weights),
        (load_model, "load_weights", weights),
        (data_arguments, "load_processor", None),
        (load_model, "load_tokenizer", lambda bound: found.update({"load_processor.name": bound["name"]})),
        (training_run, "adapted", lambda _: model),
        (training_run, "locate", None),
        (training_run, "check_settings", None),
        (training_run, "train", lambda bound: trained(bound["trainer_settings"])),
        (run_folder, "opened", lambda _: nullcontext(run_folder.OpenedFolder(None))),
        (rl, "_print_update", None),
        (update, "credited", lambda bound: objective_seen(bound) or SimpleNamespace(trees=bound["trees"])),
        (update, "with_streams", lambda bound: bound["update"]),
        (update, "scored", lambda bound: bound["update"]),
        (update, "save_scores", None),
        (update, "trees_per_batch", 1),
        (checks, "warnings_of", []),
        (progress, "GapWarning", None),
        (tasks_by_name, "task_named", SimpleNamespace(name="sum")),
        (treewise.rl.online, "OnlineTrainer", looped),
    ):
        record(owner, name, result)
    monkeypatch.setattr("peft.prepare_model_for_kbit_training", lambda model, **_: model)

    def server(**given):
        own = {name: value for name, value in given.items() if name not in ("base_url", "weights", "weights_folder")}
        found.update({"ServerSampler.name": "vllm", "ServerSampler.settings": own})

    monkeypatch.setattr(treewise.rl.samplers.servers, "ServerSampler", server)
    return found


@pytest.mark.parametrize("form", ["flags", "file"])
@pytest.mark.parametrize("command", list(KEYS))
def test_every_key_reaches_what_computes(command, form, seen, tmp_path, capsys):
    pytest.importorskip("peft")
    known = schema(KEYS[command])
    keys = {key: value_of(key, known[key]) for key in known if key not in LEFT_OUT[command]}
    if command == "train":
        keys["objective"] = "dpo"
    lost = {}
    for own in (set(keys) - set(EITHER), set(keys) - {"eval_data", "load_in_4bit"}):
        seen.clear()
        values = {key: value for key, value in keys.items() if key in own}
        words = list(as_flags(values))
        if form == "file":
            (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
            words = ["run.yaml"]
        code = main([command.replace("online", "rl"), *words])
        assert code == 0, capsys.readouterr().err
        for key, value in values.items():
            name = key if key in OnlineSettings.__slots__ and command == "online" else CALLS.get(key, key)
            wanted = SEEN_AS.get(key, value)
            if seen.get(name) != wanted:
                lost[key] = (wanted, seen.get(name))
    assert not lost


@pytest.mark.parametrize("command", list(KEYS))
def test_help_lists_the_keys_of_the_schema(command):
    """Help reads their names from source, without importing what declares them."""
    assert key_names(KEYS[command]) == list(schema(KEYS[command]))


class ReadError(Exception):
    """Ends a command where it reads its data."""


FLAGS = {"inspect": (), "plan": (), "verify": ("--model", "m"), "profile": ("--model", "m"), "bench": ("--model", "m")}


@pytest.mark.parametrize("command", FLAGS)
def test_flags_of_rendering_reach_what_reads(command, tmp_path, monkeypatch):
    """Every option of `RenderOptions`, `num_workers` and `on_bad_record`, of each command that reads data."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [{"token_ids": [1, 2, 3]}])
    options = [each.name for each in dataclasses.fields(RenderOptions)]
    types = typing.get_type_hints(RenderOptions)
    values = {name: value_of(name, types[name]) for name in options}
    values |= {"merge_siblings": False, "num_workers": 3, "on_bad_record": "quarantine"}
    words = [
        word
        for name, value in values.items()
        for word in (
            f"--{name}",
            value if isinstance(value, str) else yaml.safe_dump(value).removesuffix("...\n").strip(),
        )
    ]

    def load(data, tokenizer, *, options, num_workers, on_bad_record, **_):
        given = {name: getattr(options, name) for name in RenderOptions.__slots__}
        assert given | {"num_workers": num_workers, "on_bad_record": on_bad_record} == values
        raise ReadError

    module_of(command)  # imported before what it imports is replaced
    monkeypatch.setattr(data_arguments, "load_trees", load)
    model = save_tiny_model(tmp_path / "m")
    (model / "tokenizer.json").unlink(missing_ok=True)
    with pytest.raises(ReadError):
        main([command, "rows.jsonl", *FLAGS[command], *words, "--debug"])


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"train", "rl"}))
def test_every_flag_of_a_command_is_read(command):
    """By the command's module, or by what reads data for all of them."""
    parser = argparse.ArgumentParser()
    module = module_of(command)
    module.add_arguments(parser)
    text = inspect.getsource(module) + inspect.getsource(data_arguments)
    own = {each.dest for each in parser._actions} - {"help"}
    elsewhere = set(RenderOptions.__slots__) if "apply_config" in dir(module) else set()
    for name in ("ServeSettings", "RecordSettings", "LaunchSettings"):  # all of its fields, and no other flag
        if name in dir(module):
            elsewhere = {each.name for each in dataclasses.fields(getattr(module, name))}
    assert {name for name in own - elsewhere if not re.search(rf"args\.{name}\b", text)} == set()
