"""DATA and how it is read: the arguments that every command which reads data shares, and the trees that they name."""

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from treewise.cli.config import RunConfig, read_config
from treewise.cli.yaml_file import read_mapping
from treewise.data import RenderOptions, Trees, load_trees
from treewise.data.io.options import ON_DRIFT, ON_HIDDEN, THINKING, TRAIN_ON
from treewise.errors import ConfigError
from treewise.nn.load_model import load_processor


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds DATA, its rendering, and `--config`; `apply_config` fills in what a run's configuration gives."""
    parser.add_argument(
        "data",
        nargs="*",
        help=".jsonl, .jsonl.gz, .json, .parquet or .arrow files, folders or globs of them; hf:org/name[split]",
    )
    parser.add_argument("--config", metavar="RUN.yaml", help="data, model, rendering and budget of a training run")
    parser.add_argument("--gguf_file", help="a GGUF file inside the model's folder")
    how = parser.add_argument_group("rendering (the same keys as in RUN.yaml)")
    how.add_argument("--chat_template", help="a Jinja template, a file that holds one, or chatml")
    how.add_argument(
        "--chat_template_kwargs", metavar="YAML", help="variables of the template: '{enable_thinking: no}'"
    )
    how.add_argument("--thinking", choices=THINKING)
    how.add_argument("--train_on", choices=TRAIN_ON)
    how.add_argument("--max_length", type=int, help="longest trajectory allowed, in tokens; a longer one is an error")
    how.add_argument("--on_drift", choices=ON_DRIFT, help="where a row's text gives other token ids than the row holds")
    how.add_argument("--on_hidden", choices=ON_HIDDEN, help="where the template leaves out a field of a message")
    how.add_argument(
        "--images_from_network", choices=("true", "false"), help="download images of http and https addresses"
    )
    how.add_argument("--merge_siblings", choices=("true", "false"), help="declared siblings with equal tokens")
    how.add_argument("--max_record_bytes", type=int, help="longest line allowed, in bytes")
    how.add_argument("--max_image_bytes", type=int, help="largest image allowed, in bytes as stored")
    how.add_argument("--group_by", help="field that names a record's tree, in place of group or task_id")
    parser.add_argument("--num_workers", type=int, help="processes that render; 0 for none")
    parser.add_argument(
        "--on_bad_record", choices=("error", "quarantine"), help="stop at it, or write it out and go on"
    )


def apply_config(args: argparse.Namespace, required: Sequence[str] = (), **defaults: Any) -> RunConfig | None:
    """Fills arguments that were not given from `--config`, then from `defaults`; `args.render` is how data is read.

    Returns the configuration; None without one. required: arguments that must be there in the end.

    Raises:
        ConfigError: a configuration that `treewise train` or `treewise rl` would not take, or a missing argument.
    """
    render, config = RenderOptions(), None
    if args.config is not None:
        from treewise.cli.commands.rl import KEYS, aliases  # slow to import

        config = read_config(args.config, more=KEYS, aliases=aliases())
        render = config.render
        values = {name: getattr(config, name) for name in _FROM_RUN} | {
            name: config.training.get(name) for name in ("max_tokens", "attention")
        }
        if isinstance(values["max_tokens"], str) and args.command != "profile":  # measured on the training machine
            values["max_tokens"] = None
        if values["dtype"] == "auto" and args.command != "verify":
            values["dtype"] = None
        for name, value in values.items():
            if value is not None and getattr(args, name, ...) in (None, []):
                is_list = isinstance(value, list)
                setattr(args, name, [value] if name in _LISTS.get(args.command, ()) and not is_list else value)
    for name, value in {"on_bad_record": "error", **defaults}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in required:
        if getattr(args, name) in (None, []):
            flag = "data files" if name == "data" else f"--{name}"
            raise ConfigError(f"give {flag}, or a run's configuration that names them: --config RUN.yaml.")
    args.render = replace(render, **_rendering(args))
    return config


_FROM_RUN = ("data", "model", "gguf_file", "tokenizer", "dtype", "num_workers", "on_bad_record")
_LISTS = {"bench": ("data", "model", "max_tokens"), **dict.fromkeys(("inspect", "plan", "verify"), ("data",))}


def _rendering(args: argparse.Namespace) -> dict[str, Any]:
    """The rendering that flags give."""
    names = [item.name for item in fields(RenderOptions)]
    values = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    for name in {"merge_siblings", "images_from_network"} & set(values):
        values[name] = values[name] == "true"
    if "chat_template_kwargs" in values:
        values["chat_template_kwargs"] = read_mapping("--chat_template_kwargs", values["chat_template_kwargs"])
    return values


def load_data(args: argparse.Namespace, tokenizer: Any, *, progress: bool) -> Trees:
    """The trees that the arguments name, after `apply_config`. `progress`: with a bar on a terminal."""
    return load_trees(
        args.data,
        tokenizer,
        options=args.render,
        num_workers=args.num_workers,
        progress=progress,
        on_bad_record=args.on_bad_record,
    )


def data_tokenizer(args: argparse.Namespace) -> Any:
    """The tokenizer or processor of `--tokenizer`, or else of `--model`; None where there is none."""
    if args.tokenizer is not None:
        return load_processor(args.tokenizer)
    if args.model is not None:
        return load_processor(args.model, args.gguf_file, required=False)
    return None
