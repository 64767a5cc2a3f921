"""`treewise models`: the capability table, or one family of it."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from treewise.errors import ConfigError, did_you_mean
from treewise.nn.adapters import adapter_folder, base_of
from treewise.nn.platform.versions import installed_version
from treewise.nn.support_table import REFUSED, SUPPORTED, UNTRIED, Capability, CapabilityTable

_COLOURS = {SUPPORTED: "green", REFUSED: "red", UNTRIED: "yellow"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "family", nargs="?", help="a model_type, or a folder of a model or adapters; all where not given"
    )
    parser.add_argument("--supported", action="store_true", help="only supported families")
    parser.add_argument("--refused", action="store_true", help="only families that cannot follow a tree")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(args: argparse.Namespace) -> int:
    """Prints rows; exit code 1 where a single family is not supported."""
    table = CapabilityTable.load()
    wanted = [status for status, flag in ((SUPPORTED, args.supported), (REFUSED, args.refused)) if flag]
    of_status = (table.of_status(status) for status in wanted or (SUPPORTED, REFUSED, UNTRIED))
    rows = [_find(table, args.family)] if args.family else [row for rows in of_status for row in rows]
    if args.json:
        print(json.dumps({"transformers": table.transformers, "rows": [asdict(row) for row in rows]}, indent=1))
    elif args.family:
        _print_one(rows[0])
    else:
        _print_all(table, rows)
    if not args.json:
        installed = installed_version("transformers") or "none"
        differs = "" if installed == table.transformers else f"; installed: {installed}"
        print(f"made with transformers {table.transformers}{differs}")
    return 0 if not args.family or rows[0].status == SUPPORTED else 1


def _find(table: CapabilityTable, name: str) -> Capability:
    adapters = adapter_folder(name)
    if adapters is not None:
        with base_of(adapters) as base:
            return _find(table, base)
    config, family = Path(name) / "config.json", name
    if config.is_file():
        try:
            family = json.loads(config.read_text(encoding="utf-8"))["model_type"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                f"{config}: names no model_type; is this the configuration of a transformers model?"
            ) from None
    elif "/" in name or Path(name).is_dir():
        raise ConfigError(f"{name}: no config.json, so this is no folder of a model; name one, or a family.")
    row = table.find(family)
    if row is None:
        hint = did_you_mean(family, [row.family for row in table.rows], "`treewise models` lists all.")
        raise ConfigError(
            f"no family {family!r} in the table of transformers {table.transformers}.{hint} A model that is not "
            "listed may still work: the engine tries it before its first step."
        )
    return row


def _print_one(row: Capability) -> None:
    print(f"{row.family} ({row.model}): {row.status}" if row.model else f"{row.family}: {row.status}")
    if row.reason:
        print(row.reason)
    if row.layers:
        print(f"layers: {', '.join(row.layers)}")
    if row.error is not None:
        print(f"largest relative difference from flat training, whole and in parts, float32: {row.error:.0e}")
    if row.image_error is not None:
        print(f"images: supported, too; the same difference with images: {row.image_error:.0e}")
    elif row.image_reason:
        print(f"images: refused: {row.image_reason}")


def _print_all(table: CapabilityTable, rows: list[Capability]) -> None:
    shown = Table(box=None, pad_edge=False)
    for column in ("family", "status", "layers, or why not"):
        shown.add_column(column, overflow="fold")
    for row in rows:
        colour = _COLOURS[row.status]
        shown.add_row(row.family, f"[{colour}]{row.status}[/{colour}]", escape(row.reason or ", ".join(row.layers)))
    Console().print(shown)
    counts = table.counts()
    print(", ".join(f"{counts[status]} {status}" for status in (SUPPORTED, REFUSED, UNTRIED)))
    print(f"with images, too: {', '.join(table.with_images())}")
