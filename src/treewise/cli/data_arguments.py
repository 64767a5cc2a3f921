"""The arguments that several commands have: DATA and how it is read, and flags of models, budgets and devices."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, get_type_hints

from treewise.base.progress import busy_with, tell_progress
from treewise.cli.config import RunConfig, read_config
from treewise.cli.keys import RL, help_of, rl_aliases
from treewise.cli.values import choices_of, kinds_of, read_mapping
from treewise.data import RenderOptions, Trees, load_trees
from treewise.data.records import NEEDS_TOKENIZER
from treewise.errors import ConfigError, DataError, beyond_limits, num
from treewise.models.load_model import DTYPES, load_processor
from treewise.nn.attention import IMPLEMENTATIONS


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
    for name, annotation in get_type_hints(RenderOptions, include_extras=True).items():
        kinds = kinds_of(annotation)
        how.add_argument(
            f"--{name}",
            help=help_of(name),
            choices=("true", "false") if bool in kinds else choices_of(annotation) or None,
            type=int if int in kinds else str,
            metavar="YAML" if dict in kinds else None,
        )
    parser.add_argument("--num_workers", type=int, help="processes that render; 0 for none")
    parser.add_argument(
        "--on_bad_record", choices=("error", "quarantine"), help="stop at it, or write it out and go on"
    )


_FLAGS: dict[str, dict[str, Any]] = {
    "model": {"help": "folder, Hub name, .gguf file or smollm2-demo"},
    "tokenizer": {"help": "folder or name of a tokenizer; the model's where not given"},
    "dtype": {"choices": DTYPES, "help": "of the model (float32)"},
    "device": {"help": "cpu, cuda, cuda:1, ...; the first GPU where there is one"},
    "attention": {"choices": ("auto", *IMPLEMENTATIONS)},
    "max_tokens": {"type": int, "help": "budget of a micro-batch"},
    "limit": {"type": int, "default": 32, "help": "the first K trajectories (32; 0 for all)"},
    "json": {"action": "store_true", "help": "print the same facts as JSON"},
}


def add_flags(parser: Any, *names: str, **changed: Mapping[str, Any]) -> None:
    """Adds flags that several commands have; `changed` are their names with what is different here."""
    for name in dict.fromkeys((*names, *changed)):
        parser.add_argument(f"--{name}", **{**_FLAGS.get(name, {}), **changed.get(name, {})})


def check_numbers(args: argparse.Namespace, **limits: object) -> None:
    """Raises `ConfigError` for a flag beyond its limit (`annotated_types`); flags that were not given have none."""
    for name, limit in limits.items():
        value = getattr(args, name)
        for each in value if isinstance(value, list) else () if value is None else (value,):
            if wanted := beyond_limits(each, (limit,)):
                raise ConfigError(f"--{name} is {each}; it must be {wanted}.")


def apply_config(args: argparse.Namespace, required: Sequence[str] = (), **defaults: object) -> RunConfig | None:
    """Fills arguments that were not given from `--config`, then from `defaults`; `args.render` is how data is read.

    Returns the configuration; None without one. required: arguments that must be there in the end.

    Raises:
        ConfigError: a configuration that `treewise train` or `treewise rl` would not take, or a missing argument.
    """
    render, config = RenderOptions(), None
    if args.config is not None:
        config = read_config(args.config, more=RL, aliases=rl_aliases())
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
            raise ConfigError(f"give {flag}, or a run's configuration with it: --config RUN.yaml.")
    given = {item.name: getattr(args, item.name, None) for item in fields(RenderOptions)}
    values = {name: value for name, value in given.items() if value is not None}
    for name in {"merge_siblings", "images_from_network", "images_from_local_network"} & set(values):
        values[name] = values[name] == "true"
    if "chat_template_kwargs" in values:
        values["chat_template_kwargs"] = read_mapping("--chat_template_kwargs", values["chat_template_kwargs"])
    args.render = replace(render, **values)
    return config


_FROM_RUN = ("data", "model", "gguf_file", "tokenizer", "dtype", "num_workers", "on_bad_record")
_LISTS = {"bench": ("data", "model", "max_tokens"), **dict.fromkeys(("inspect", "plan", "verify"), ("data",))}


@contextmanager
def naming_who_lacks_a_tokenizer(tokenizer: object, model: object, way: str) -> Iterator[None]:
    """Inside, an error of records that need a tokenizer says that the model has none. way: to give one."""
    try:
        yield
    except DataError as error:
        if tokenizer is not None or model is None or NEEDS_TOKENIZER not in str(error):
            raise
        lacks = f"holds text, which needs a tokenizer, and {model} holds none; {way}."
        raise DataError(str(error).replace(NEEDS_TOKENIZER, lacks)) from None


@contextmanager
def told_reading(
    what: str, tokenizer: object, args: argparse.Namespace | RunConfig
) -> Iterator[Callable[[int, int], None]]:
    """Around a load; gives what `load_trees(progress=)` calls with the bytes and records of each batch.

    Where the records need a tokenizer that the model in `args` does not have, the error says so.
    """
    read = 0

    def advance(_num_bytes: int, num_records: int) -> None:
        nonlocal read
        read += num_records
        tell_progress(what, read, None, "record")

    model = ", ".join(args.model) if isinstance(args.model, list) else args.model
    with naming_who_lacks_a_tokenizer(tokenizer, model, "give --tokenizer, or save one there"), busy_with(what):
        yield advance


def load_data(args: argparse.Namespace, tokenizer: object, *, progress: bool) -> Trees:
    """The trees that the arguments name, after `apply_config`. `progress`: with the number of records read so far."""
    with told_reading("reading data", tokenizer, args) as advance:
        return load_trees(
            args.data,
            tokenizer,
            options=args.render,
            num_workers=args.num_workers,
            progress=progress and advance,
            on_bad_record=args.on_bad_record,
        )


def rendering_note(args: argparse.Namespace, data: Trees) -> str:
    """Why there are more trajectories than records, as a line for the terminal; empty where there are not."""
    report = data.report
    if args.render.thinking == "keep" or report.num_trajectories <= report.num_records:
        return ""
    return (
        f"{num(report.num_trajectories, 'trajectory', 'trajectories')} of {num(report.num_records, 'record')}: each "
        "row, trained turn, logged call, completion or leaf is one (with --thinking keep, each chat)"
    )


def data_tokenizer(args: argparse.Namespace | RunConfig) -> Any:
    """The tokenizer or processor of `tokenizer`, or else of `model`; None where there is none."""
    if args.tokenizer is not None:
        return load_processor(args.tokenizer)
    if args.model is not None:
        return load_processor(args.model, args.gguf_file, required=False)
    return None
