"""`treewise doctor`: what this machine has, which attention and kernels will run, and one check that they are right:
gradients against flat training, and the sampler's log-probs against the engine's.

With `--gpu` also ten minutes of comparisons on a GPU; with `--sampler URL` a server that samples is looked at in their
place. Exit code 1 where a check fails or time ran out before all ran, 2 where a server does not answer; what is missing
but optional is only shown.
"""

import argparse
import json
from dataclasses import asdict
from typing import Any

from annotated_types import Gt

from treewise.cli.data_arguments import add_flags, check_numbers
from treewise.errors import ConfigError, SamplerError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_flags(parser, "device", "json", model={"help": "with --sampler: whose weights the server should have"})
    parser.add_argument(
        "--sampler", metavar="URL", nargs="+", help="servers that sample: ids, log-probs, weights, lengths"
    )
    parser.add_argument("--gpu", action="store_true", help="kernels against the reference: ten minutes at most")
    parser.add_argument("--max_seconds", type=float, default=600.0, help="of --gpu (600)")


def run(args: argparse.Namespace) -> int:
    """Prints the facts; returns 1 where a check fails or was left out."""
    check_numbers(args, max_seconds=Gt(0))
    if args.sampler or args.model:
        return _check_servers(args)
    import torch

    from treewise.nn.device import chosen_device
    from treewise.report.analysis.machine_facts import check_gpu, machine_facts

    device = chosen_device(args.device)
    if args.gpu and device.type == "cpu" and args.device is None:
        raise ConfigError(
            f"--gpu: torch {torch.__version__} finds no GPU here; --device cpu runs the checks on the CPU."
        )
    facts = machine_facts(device)
    passed, lines = facts["self-check"]["passed"], []
    failed = not passed
    if args.gpu:
        facts["gpu"] = check_gpu(device, args.max_seconds)
        passed, lines = passed and facts["gpu"]["passed"], as_lines(facts["gpu"])
        failed = failed or facts["gpu"]["issue"] is not None
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        _print({name: each for name, each in facts.items() if name != "gpu"}, lines)
        print("ready" if passed else "a check FAILED" if failed else "not all checks RAN")
    return 0 if passed else 1


def _check_servers(args: argparse.Namespace) -> int:
    """Prints what servers are and do; returns 1 where one cannot sample for a run. Raises `SamplerError` where one does
    not answer.
    """
    if not args.sampler:
        raise ConfigError("--model is whose weights a server should have; give --sampler, its address, too.")
    from treewise.nn.device import chosen_device
    from treewise.nn.load_model import load_weights
    from treewise.rl.samplers.server_check import check_server

    model = None if args.model is None else load_weights(args.model).to(chosen_device(args.device))
    found = {url: check_server(url, model) for url in args.sampler}
    if args.json:
        print(json.dumps({url: [asdict(each) for each in findings] for url, findings in found.items()}, indent=1))
    for url, findings in {} if args.json else found.items():
        print("\n".join([url, *(each.as_line() for each in findings)]))
    for url, findings in found.items():
        if findings[0].passed is False:
            raise SamplerError(f"{url} does not answer as a server that samples, so nothing of it was checked.")
    return int(any(each.passed is False for findings in found.values() for each in findings))


def _print(facts: dict[str, dict[str, Any]], gpu: list[str]) -> None:
    for title, lines in facts.items():
        if not lines:
            continue
        print(title)
        for name, line in lines.items():
            text = line
            if isinstance(line, float):
                text = f"{line:.6f} (1: none)" if name == "logprob_gap" else f"{line:.1e}"
            print(f"  {name:18} {text}")
    for line in ["gpu", *(f"  {each}" for each in gpu)] if gpu else []:
        print(line)


def as_lines(facts: dict[str, Any]) -> list[str]:
    """The facts for a terminal."""
    lines: list[str] = []
    for name, each in facts["kernels"].items():
        times = ", ".join(f"{seconds:.1f}" for seconds in each["seconds"])
        verdict = "as it should be" if each["passed"] else "WRONG"
        lines.append(f"{name:34} {verdict:15} {f'({times} s)' if times else '':14} {each['shown']}")
    if facts["not run"]:
        lines.append(f"not run, for lack of time (--max_seconds): {', '.join(facts['not run'])}")
    if facts["issue"] is not None:
        lines.append(f"for an issue: {facts['issue']}")
    return lines
