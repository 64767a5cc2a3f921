"""Configurations: every key is checked, every value has its type, flags win, and errors say where."""

import pytest
import yaml

from tests.cli.helpers import save_tiny_model, write_rows
from treewise.cli.config import parse_flags, read_config, resolved_text
from treewise.cli.main import main
from treewise.cli.training_run import training_arguments
from treewise.errors import ConfigError

BASE = "model: m\ndata: rows.jsonl\noutput_dir: out\nreport_to: none\nuse_cpu: true\n"


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def test_flags_win_over_the_file(write):
    path = write(BASE + "learning_rate: 1e-5\nlora: {r: 8, lora_alpha: 16}\nchat_template_kwargs: {a: 1}\n")
    flags = ["--learning-rate", "3e-4", "--lora.r", "4", "--bf16", "--data", "a.jsonl", "b.jsonl", "--max_steps=-1"]
    config = read_config(path, [*flags, "--chat_template_kwargs.enable_thinking", "false"])
    assert config.training["learning_rate"] == 3e-4
    assert config.training["bf16"] is True
    assert config.training["max_steps"] == -1
    assert config.lora == {"r": 4, "lora_alpha": 16}
    assert config.data == ["a.jsonl", "b.jsonl"]
    assert config.render.chat_template_kwargs == {"a": 1, "enable_thinking": False}


MISTAKES = {
    "unknown key": ("max_token: 8", r"run.yaml:6: unknown key 'max_token'. Did you mean 'max_tokens'\?"),
    "unknown part": ("lora: {rank: 8}", r"run.yaml:6: unknown key 'lora.rank'. Did you mean 'lora.r'\?"),
    "type": ("learning_rate: fast", "run.yaml:6: learning_rate must be a number, found 'fast' .text."),
    "fraction": ("max_tokens: 8.5", "max_tokens must be an integer or text or nothing, found 8.5"),
    "part's type": ("lora: {r: eight}", "lora.r must be an integer, found 'eight'"),
    "item": ("eval_data: [rows.jsonl, 2]", r"run.yaml:6: eval_data\[1\] must be text or a mapping, found 2"),
    "bool for text": ("run_name: yes", "run_name must be text or nothing, found True .* Quote it"),
    "choice": ("save_strategy: step", r"choose one of no, steps, epoch, best. Did you mean 'steps'\?"),
    "not finite": ("learning_rate: .nan", "learning_rate must be a finite number, found nan"),
    "twice": ("model: other", r"run.yaml:6: model is given twice \(first at .*run.yaml:1\)"),
    "elsewhere": ("resume_from_checkpoint: x", "use --resume"),
    "no evaluation set": ("eval_strategy: steps", "there is no eval_data"),
    "rendering": ("thinking: kep", "thinking is 'kep'"),
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named_with_its_place(write, line, message):
    with pytest.raises(ConfigError, match=message):
        read_config(write(BASE + line + "\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("# nothing\n", "empty"),
        ("- a\n- b\n", "is a mapping"),
        ("model: [\n", "not valid YAML"),
        ("model: m\n  data: d\n", "run.yaml:2: not valid YAML"),
        ("model: m\noutput_dir: o\n", "no data; add it to the file, or give --data"),
        ("model: !!python/object/apply:os.system [ls]\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(write, text, message):
    with pytest.raises(ConfigError, match=message):
        read_config(write(text))


@pytest.mark.parametrize("words", [["value"], ["--a", "1", "--a", "2"]])
def test_flags_without_sense_are_refused(words):
    with pytest.raises(ConfigError):
        parse_flags(words)


def test_the_resolved_configuration_gives_the_same_run(write, tmp_path):
    config = read_config(write(BASE + "learning_rate: 1e-5\nlora: {r: 8}\nsave_strategy: no\nmax_tokens: 64\n"))
    arguments = training_arguments(config)
    text = resolved_text(config, arguments)
    again = read_config(write(text))
    assert training_arguments(again).to_dict() == arguments.to_dict()
    assert (again.lora, again.render, again.data) == (config.lora, config.render, config.data)
    assert yaml.safe_load(text)["weighting"] == "per_trajectory"
    assert resolved_text(again, training_arguments(again)) == text


def test_data_in_the_place_of_a_configuration_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"token_ids": [1, 2]}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl holds data, not a configuration; give it as --data"):
        read_config(path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num_workers", "-3"], "num_workers is -3; give 0"),
        (["--save_steps", "0"], "save_steps=0 must be positive; save_strategy=no for never"),
        (["--save_total_limit", "0"], "save_total_limit=0 must be at least 1"),
        (["--chat_template", "{% if %}"], "chat_template: line 1 is not valid Jinja"),
    ],
)
def test_settings_that_mean_nothing_are_refused_also_where_the_data_would_not_ask(flags, message, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [{"token_ids": [1, 2, 3], "group": "a"}])
    model = save_tiny_model(tmp_path / "model")
    words = ["--model", str(model), "--data", str(rows), "--output_dir", str(tmp_path / "out"), "--use_cpu"]
    assert main(["train", *words, "--dry_run", "--report_to", "none", *flags]) == 2
    assert message in capsys.readouterr().err


def test_an_update_without_data_and_tasks_says_both(capsys):
    assert main(["rl", "--model", "m", "--output_dir", "o", "--objective", "grpo"]) == 2
    assert "give --data, recorded rollouts to train on, or --tasks" in capsys.readouterr().err
    assert (
        main(["rl", "--dataset", "absent.jsonl", "--model", "m/m/m", "--output_dir", "o", "--objective", "grpo"]) == 2
    )
    assert "no such model folder" in capsys.readouterr().err


def test_a_part_that_stands_alone_is_true_where_it_may_be(write) -> None:
    path = write(BASE + "learning_rate: 1e-5\n")
    flags = ["--lora.use_rslora", "--lora.r", "4", "--chat_template_kwargs.enable_thinking"]
    config = read_config(path, flags)
    assert config.lora == {"use_rslora": True, "r": 4}
    assert config.render.chat_template_kwargs == {"enable_thinking": True}
    with pytest.raises(ConfigError, match=r"lora\.r needs a value"):
        read_config(path, ["--lora.r", "--bf16"])


def test_one_name_of_a_flag_goes_with_settings_that_want_a_list(write) -> None:
    flags = ["--lora.target_modules", "q_proj", "--lora.layers_to_transform", "0"]
    config = read_config(write(BASE + "learning_rate: 1e-5\n"), flags)
    assert config.lora == {"target_modules": "q_proj", "layers_to_transform": 0}
    with pytest.raises(ConfigError, match="cannot be used when `target_modules` is a str"):
        read_config(write(BASE + "learning_rate: 1e-5\n"), ["--lora.target_modules", ".*q_proj", *flags[2:]])
