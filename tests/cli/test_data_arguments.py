"""What is inspected, planned, verified and measured is what is trained."""

import json

import pytest

from tests.cli.helpers import save_tiny_model
from treewise.cli.data_arguments import add_data_arguments, apply_config
from treewise.cli.main import main
from treewise.cli.parser import Parser
from treewise.data import RenderOptions
from treewise.errors import ConfigError

RUN = """\
model: model
data: [a.jsonl]
output_dir: out
max_tokens: 64
thinking: keep
chat_template_kwargs: {enable_thinking: false}
on_drift: error
max_length: 9
merge_siblings: false
"""


def parsed(words):
    parser = Parser()
    add_data_arguments(parser)
    for name in ("model", "tokenizer", "dtype", "command"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--max_tokens", type=int)
    return parser.parse_args(words)


def test_a_configuration_gives_what_flags_do_not(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    args = parsed(
        ["--config", str(path), "--max_length", "12", "--chat_template_kwargs", "{a: 1}", "--dtype", "float64"]
    )
    apply_config(args, ("data", "model"), dtype="float32")
    assert (args.data, args.model, args.max_tokens, args.dtype) == (["a.jsonl"], "model", 64, "float64")
    assert args.render == RenderOptions(
        thinking="keep", chat_template_kwargs={"a": 1}, on_drift="error", max_length=12, merge_siblings=False
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--chat_template_kwargs", "["], "is not valid YAML"),
        (["a", "--chat_template_kwargs", "3"], "is not a mapping"),
        ([], "give data files, or a run's configuration"),
    ],
)
def test_wrong_flags_are_named(words, message):
    with pytest.raises(ConfigError, match=message):
        apply_config(parsed(words), ("data",))


def test_commands_read_the_data_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(json.dumps({"token_ids": [1, 2, 3, 4], "loss_weights": [0, 0, 1, 1]}) + "\n")
    (tmp_path / "run.yaml").write_text(RUN)
    for command in ("inspect", "plan", "verify"):
        assert main([command, "--config", "run.yaml", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)
    assert main(["inspect", "--config", "run.yaml", "--max_length", "3"]) == 2
    assert "4 tokens, more than max_length 3" in capsys.readouterr().err
    assert main(["verify", "a.jsonl"]) == 2
    assert "give --model" in capsys.readouterr().err
