"""The JSON schema: the examples satisfy it, mistakes do not, and the files beside the examples are current."""

import json
from pathlib import Path

import pytest
import yaml

from tests.needs import release_of
from treewise.cli.aliases import names_of
from treewise.cli.keys import GROUPS, help_of, keys_text, schema
from treewise.cli.main import main

jsonschema = pytest.importorskip("jsonschema")

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
EXAMPLES = sorted(CONFIGS.glob("*.yaml"))


def of(path):
    return "rl" if path.stem == "rl" else "train"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_satisfy_the_schema_that_they_name(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# yaml-language-server: $schema={of(path)}.schema.json\n")
    jsonschema.validate(yaml.safe_load(text), json.loads((CONFIGS / f"{of(path)}.schema.json").read_text()))


@release_of("transformers", "5.24", "keys as in examples/configs")
@release_of("peft", "0.21", "keys of lora as in examples/configs")
@pytest.mark.parametrize("name", ["train", "rl"])
def test_the_files_are_what_the_command_prints(name, capsys):
    assert main(["schema", name]) == 0
    printed = json.loads(capsys.readouterr().out)
    written = json.loads((CONFIGS / f"{name}.schema.json").read_text())
    ours = [key for keys in GROUPS.values() for key in keys if key in written["properties"]]
    assert len(ours) > 60
    for key in ours:  # further keys follow the installed transformers
        assert printed["properties"].get(key) == written["properties"].get(key), f"treewise schema {name} > its file"


def test_every_key_of_a_group_exists_and_has_help():
    from treewise.cli.commands import rl

    known = schema(rl.all_keys())
    grouped = [key for keys in GROUPS.values() for key in keys]
    assert {names_of(known).get(key, key) for key in grouped} <= set(known)
    assert len(set(grouped)) == len(grouped)
    assert all(help_of(key) for key in grouped)
    text = keys_text(schema())
    assert not any(heading in text for heading in ("Reinforcement learning", "Online runs"))
    assert all(key in text for key in schema())
    recompute = next(key for key in ("activation_checkpointing", "gradient_checkpointing") if key in known)
    assert f"\n  {recompute}" in text.split("Further keys of transformers")[0]  # by the name that this release has
    text = keys_text(known)
    assert "save_every" in text.split("Online runs")[1].split("Further keys of transformers")[0]
    assert "(also: save_every" not in text


def test_completion_holds_commands_keys_and_aliases(capsys):
    pytest.importorskip("shtab")
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert all(word in script for word in ("inspect", "--learning_rate", "--lr", "--clip_high", "--max_tokens"))
