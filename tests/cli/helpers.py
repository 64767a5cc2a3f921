"""Calls a command as the dispatcher does, on rows and a model made here."""

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM


def call(command: str, *arguments: object) -> int:
    """The exit code of `treewise COMMAND ARGUMENTS`."""
    module = import_module(f"treewise.cli.commands.{command}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return module.run(parser.parse_args([str(argument) for argument in arguments]))


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save_tiny_model(folder: Path) -> Path:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
