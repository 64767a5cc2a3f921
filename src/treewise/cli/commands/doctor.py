"""`treewise doctor`: what this machine has, which attention and kernels will run, and one check that they are right:
gradients against flat training, and the sampler's log-probs against the engine's.

With `--gpu` also comparisons on a GPU for at most ten minutes, each printed as it ends, also before a SIGTERM; with
`--calibrate` before them a minute in which its products, attention, launches and copies are timed and stored; with
`--sampler URL` a server that samples is looked at in their place. Exit code 1 where a check fails or time ran out
before all ran, 2 where a server does not answer, 143 after SIGTERM; what is missing but optional is only shown.
"""

import argparse
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import starmap
from pathlib import Path
from time import perf_counter
from typing import Any

from annotated_types import Ge, Gt

from treewise.cli.data_arguments import add_flags, check_numbers
from treewise.errors import ConfigError, SamplerError, StoppedError

LATE = "for lack of time (--max_seconds)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_flags(parser, "device", "json", model={"help": "with --sampler: whose weights the server should have"})
    parser.add_argument(
        "--sampler", metavar="URL", nargs="+", help="servers that sample: ids, log-probs, weights, lengths"
    )
    parser.add_argument("--gpu", action="store_true", help="kernels against the reference: ten minutes at most")
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FOLDER",
        nargs="?",
        const=Path(),
        help="time products, attention, launches and copies for a minute; writes calibration-CARD.json",
    )
    parser.add_argument(
        "--max_seconds", type=float, default=600.0, help="of --gpu (600); what is under way then is ended"
    )
    parser.add_argument("--processes", type=int, help="of --gpu: that compile side by side; by cores, at most 8")


def run(args: argparse.Namespace) -> int:
    """Prints the facts as they are found; returns 1 where a check fails or was left out."""
    begun = perf_counter()
    check_numbers(args, max_seconds=Gt(0), processes=Ge(0))
    if args.sampler or args.model:
        return _check_servers(args)
    import torch

    from treewise.bench.gpu_facts import KernelChecks, gpu_facts
    from treewise.nn.device import chosen_device
    from treewise.report.analysis.machine_facts import machine_facts, self_check
    from treewise.report.analysis.misfits import installed, misfit

    device = chosen_device(args.device)
    if args.gpu and device.type == "cpu" and args.device is None:
        why = misfit(installed()) or f"torch {torch.__version__} finds no GPU here"
        raise ConfigError(f"--gpu: {why}; --device cpu runs the checks on the CPU.")
    say = (lambda *_: None) if args.json else _print
    tell = (lambda _: None) if args.json else partial(print, flush=True)
    facts: dict[str, Any] = machine_facts(device)
    if device.type == "cuda":
        facts["card"] = gpu_facts(device)
    for title, lines in facts.items():
        say(title, lines)
    checks = KernelChecks()
    stopped: StoppedError | KeyboardInterrupt | None = None
    facts["self-check"] = {"passed": False, "error": "not run"}
    try:
        with _sigterm_raises():
            facts["self-check"] = self_check(device)
            say("self-check", facts["self-check"])
            if args.calibrate is not None:
                facts["calibration"] = _calibrated(device, args.calibrate, tell)
            if args.gpu:
                tell("gpu")
                on_case = lambda name, each: tell(f"  {case_line(name, each)}")  # noqa: E731
                checks.run(device, begun + args.max_seconds, args.processes, on_case)
    except _Terminated:
        stopped = StoppedError("ended by SIGTERM before all checks ran; what ran is above.")
        stopped.exit_code = 128 + signal.SIGTERM
    except KeyboardInterrupt as error:
        stopped = error
    passed = facts["self-check"]["passed"]
    failed = not passed and stopped is None
    if args.gpu:
        facts["gpu"] = found = checks.facts(device)
        passed, failed = passed and found["passed"], failed or found["issue"] is not None
        for line in _last_lines(found, LATE if stopped is None else "for it was ended before"):
            tell(f"  {line}")
    if args.json:
        print(json.dumps(facts, indent=1), flush=True)
    else:
        print("ready" if passed else "a check FAILED" if failed else "not all checks RAN", flush=True)
    if stopped is not None:
        raise stopped
    return 0 if passed else 1


def _calibrated(device: Any, folder: Path, tell: Callable[[str], object]) -> dict[str, Any]:
    """Measures, writes the file and tells it; what was measured, and where it is."""
    from treewise.base.durable import write_atomically
    from treewise.bench.calibration.measure import USUAL, calibrate
    from treewise.bench.calibration.rates import as_json
    from treewise.bench.results import file_of

    tell("calibration")
    dtype, shape, size = USUAL[device.type]
    found = calibrate(device, dtype, shape, size=size, say=lambda line: tell(f"  {line}"))
    path = file_of(folder, "calibration")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, as_json(found))
    tell(f"  products {found.roofline.flops / 1e12:.3g} TFLOP/s, memory {found.roofline.bandwidth / 1e9:.3g} GB/s")
    tell(f"  launches {1e6 * found.host_seconds:.3g} us of the host in a step; written to {path}")
    return {**found.about, "file": str(path)}


class _Terminated(BaseException):
    """SIGTERM came. No `Exception`, which a check would take for its own, and no `OSError`, which who waits would."""


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Inside, SIGTERM is `_Terminated`, so that what was found until then is shown."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_servers(args: argparse.Namespace) -> int:
    """Prints what servers are and do; returns 1 where one cannot sample for a run. Raises `SamplerError` where one does
    not answer.
    """
    if not args.sampler:
        raise ConfigError("--model is whose weights a server should have; give --sampler, its address, too.")
    from treewise.models.load_model import load_weights
    from treewise.nn.device import chosen_device, on_device
    from treewise.rl.samplers.server_check import check_server

    model = None if args.model is None else on_device(load_weights(args.model), chosen_device(args.device))
    found = {url: check_server(url, model) for url in args.sampler}
    if args.json:
        print(json.dumps({url: [asdict(finding) for finding in findings] for url, findings in found.items()}, indent=1))
    for url, findings in {} if args.json else found.items():
        print("\n".join([url, *(finding.as_line() for finding in findings)]))
    for url, findings in found.items():
        if findings[0].passed is False:
            raise SamplerError(f"{url} does not answer as a server that samples, so nothing of it was checked.")
    return int(any(finding.passed is False for findings in found.values() for finding in findings))


def _print(title: str, lines: dict[str, Any]) -> None:
    """Lines below a title, at once, whoever reads them."""
    if not lines:
        return
    print(title)
    for name, line in lines.items():
        text = line
        if isinstance(line, float):
            text = f"{line:.6f} (1: none)" if name == "logprob_gap" else f"{line:.1e}"
        print(f"  {name:18} {text}")
    sys.stdout.flush()


def as_lines(facts: dict[str, Any], why_left_out: str = LATE) -> list[str]:
    """The facts of `--gpu` for a terminal."""
    return [*starmap(case_line, facts["kernels"].items()), *_last_lines(facts, why_left_out)]


def case_line(name: str, each: dict[str, Any]) -> str:
    """Name, verdict and seconds of a case that was compared on the GPU."""
    times = ", ".join(f"{seconds:.1f}" for seconds in each["seconds"])
    verdict = "as it should be" if each["passed"] else "WRONG"
    return f"{name:34} {verdict:15} {f'({times} s)' if times else '':14} {each['shown']}"


def _last_lines(facts: dict[str, Any], why_left_out: str) -> list[str]:
    lines = []
    if facts["kernels"]:
        lines.append(f"compiled in {facts['compile_seconds']:.0f} s, all cases together")
    if facts["not run"]:
        lines.append(f"not run, {why_left_out}: {', '.join(facts['not run'])}")
    if facts["issue"] is not None:
        lines.append(f"for an issue: {facts['issue']}")
    return lines
