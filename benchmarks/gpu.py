"""Ten minutes on a GPU: stages in order of worth, each a process with a time limit, each saving what it has at once.

    make gpu [MINUTES=10] [WHEELS=folder]
    python benchmarks/gpu.py [--minutes 10] [--wheels FOLDER] [--stages found kernels ...] [--device cpu] [--out FOLDER]

Needs the standard library alone, and a Python that has torch: `$PYTHON`, the one that runs this, `python3`, or that of
`.venv`, the first whose torch finds a GPU. Nothing is installed. Packages that it lacks come out of `--wheels`, which
are unpacked beside it; what needs one that is nowhere is skipped by name (`--fetch_wheels FOLDER` downloads those that
images with torch and transformers often lack). A stage that fails or is cut short stops none that follow, and leaves
the results that it had. All is in `build/gpu/CARD`: a JSON of each stage, `run.json`, `log.txt`, and `summary.md`, one
page.

With `--device cpu` all stages run on a CPU with tiny shapes, to try them out; tests that need a GPU are skipped.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS_TO_END = 5.0  # from SIGTERM to SIGKILL
# Packages of treewise itself, by the modules that are imported.
CORE = (
    *("accelerate", "annotated_types", "jinja2", "lazy_loader", "numpy", "psutil", "pyarrow", "yaml", "rich"),
    *("safetensors", "torch", "transformers", "typing_extensions"),
)
TESTING = (*CORE, "pytest", "hypothesis", "peft")
# Wheels that `--fetch_wheels` downloads: what treewise or its tests need, and images with torch often lack.
FETCHED = ("annotated-types", "lazy-loader", "beartype", "trl", "liger-kernel", "datasets", "dill", "multiprocess")
# With `--fetch_kernels`, for the stage `attention`: a quarter of a gigabyte.
KERNELS = (
    *("flash-attn-4", "quack-kernels", "einops", "torch-c-dlpack-ext", "apache-tvm-ffi", "nvidia-cudnn-frontend"),
    *(
        "nvidia-cutlass-dsl",
        "nvidia-cutlass-dsl-libs-base",
        "nvidia-cutlass-dsl-libs-core",
        "nvidia-cutlass-dsl-libs-cu13",
    ),
    *("cuda-python", "cuda-bindings", "cuda-pathfinder"),
)

# What treewise uses of a package that is small enough to be written down here, where neither it nor a wheel is there.
STAND_INS = {
    "annotated_types": """
from dataclasses import make_dataclass
Ge, Gt, Le, Lt = (make_dataclass(name, [name.lower()], frozen=True) for name in ("Ge", "Gt", "Le", "Lt"))
"""
}


@dataclass(frozen=True)
class Stage:
    """One row of the table. what: it measures, for people. command: words, in which {python}, {device}, {size}, {out},
    {seconds} and {workers} are filled in. least: seconds below which it does not begin; most: after which it is ended.
    needs: modules. summary: lines of the page, from its JSON."""

    name: str
    what: str
    command: tuple[str, ...]
    least: int
    most: int
    needs: tuple[str, ...] = CORE
    summary: "Callable[[Any], Iterator[str]]" = lambda _: iter(())
    is_pytest: bool = False


def main(argv: list[str] | None = None) -> int:
    """Runs the stages; returns 0 where all that ran to their end passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="for all stages (10)")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels for what this machine lacks")
    parser.add_argument("--stages", nargs="+", choices=[each.name for each in STAGES], help="of the table (all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes, to try it out")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu", help="a folder for CARD/STAGE.json (build/gpu)"
    )
    parser.add_argument(
        "--fetch_wheels", type=Path, metavar="FOLDER", help="download wheels for such a machine, and end"
    )
    parser.add_argument(
        "--fetch_kernels",
        action="store_true",
        help="with --fetch_wheels: FlashAttention 4 and cuDNN's, a quarter of a GB",
    )
    parser.add_argument("--for_python", default="3.12", help="of that machine, with --fetch_wheels (3.12)")
    args = parser.parse_args(argv)
    if args.fetch_wheels is not None:
        names = (*FETCHED, *KERNELS) if args.fetch_kernels else FETCHED
        return fetch_wheels(args.fetch_wheels, args.for_python, names)
    begun = time.monotonic()
    machine = find_machine(args.device, args.wheels)
    if isinstance(machine, str):
        print(machine, file=sys.stderr)
        return 2
    chosen = [each for each in STAGES if not args.stages or each.name in args.stages]
    run = Run(machine, args.device, args.out / machine.card, begun + 60 * args.minutes)
    with ending_by_signal():
        run.all(chosen)
    print(run.page())
    print(f"written to {run.folder}")
    return int(any(each["status"] == "failed" for each in run.done))


# -- the machine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Of the Python that was chosen: its command, versions, the card's name, its cores, modules that it lacks, and
    folders that its processes import from."""

    python: str
    card: str
    facts: dict[str, Any]
    missing: tuple[str, ...]
    paths: tuple[str, ...]
    cores: int


PROBE = """
import importlib.util, json, os, platform, sys
import torch
has_gpu = torch.cuda.is_available()
found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
found |= {"has_gpu": has_gpu, "card": torch.cuda.get_device_name() if has_gpu else None}
found["missing"] = [each for each in sys.argv[1:] if importlib.util.find_spec(each) is None]
print(json.dumps(found))
"""


def find_machine(device: str, wheels: Path | None) -> Machine | str:
    """The first Python that has what the device needs; else a sentence on what each lacks."""
    own = ROOT / ".venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    candidates = dict.fromkeys(filter(None, (os.environ.get("PYTHON"), sys.executable, "python3", str(own))))
    why = []
    for python in candidates:
        facts = probe(python, ())
        if isinstance(facts, str):
            why.append(f"  {python}: {facts}")
        elif device == "cuda" and not facts["has_gpu"]:
            why.append(f"  {python}: torch {facts['torch']} finds no GPU")
        else:
            return _machine(python, device, wheels)
    what = "a torch that finds a GPU (--device cpu tries the stages without one)" if device == "cuda" else "torch"
    return "\n".join([f"no Python here has {what}:", *why])


def _machine(python: str, device: str, wheels: Path | None) -> Machine:
    paths = [str(ROOT / "src"), str(ROOT)]
    if wheels is not None:
        paths.append(str(unpack(wheels, ROOT / "build" / "gpu" / "wheels")))
    facts = probe(python, tuple(paths))
    assert not isinstance(facts, str), facts
    for name in STAND_INS.keys() & set(facts["missing"]):
        folder = ROOT / "build" / "gpu" / "stand_ins"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text(STAND_INS[name])
        print(f"{name} is not installed: a few lines of benchmarks/gpu.py stand in for it")
        facts["missing"].remove(name)
        paths = [*dict.fromkeys([*paths, str(folder)])]
    is_cpu = device == "cpu"
    card = f"cpu-{platform.machine()}" if is_cpu else facts["card"].lower().replace(" ", "-")
    return Machine(python, card, facts, tuple(facts.pop("missing")), tuple(paths), len(os.sched_getaffinity(0)))


def probe(python: str, paths: tuple[str, ...]) -> dict[str, Any] | str:
    """Versions, card and modules that are missing, or why there is nothing to say."""
    modules = {each for stage in STAGES for each in stage.needs} | {"xdist", "beartype", "trl", "datasets"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    command = [python, "-c", PROBE, *sorted(modules)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        return (
            json.loads(ran.stdout.strip().splitlines()[-1])
            if ran.returncode == 0
            else ran.stderr.strip().splitlines()[-1]
        )
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


def unpack(wheels: Path, folder: Path) -> Path:
    """Wheels are zip files of what is imported, so no installer is needed."""
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise SystemExit(f"--wheels {wheels}: no wheel (*.whl) is there")
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    if any(folder.glob("*.pth")):  # Python reads them in folders of packages alone (nvidia-cutlass-dsl has one)
        lines = ("import pathlib", "import site", "site.addsitedir(str(pathlib.Path(__file__).parent))")
        (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    print(f"unpacked {', '.join(each.name for each in found)}")
    return folder


def fetch_wheels(folder: Path, python: str, names: tuple[str, ...]) -> int:
    """Downloads wheels without what they need, for another machine."""
    platforms = [word for number in (28, 17) for word in ("--platform", f"manylinux_2_{number}_x86_64")]
    return subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--implementation", "cp"),
            *(
                "--python-version",
                python,
                *platforms,
                "--platform",
                "manylinux2014_x86_64",
                "-d",
                str(folder),
                *names,
            ),
        ]
    ).returncode


# -- running ----------------------------------------------------------------------------------------------------------


class Ended(BaseException):
    """A signal to end this process."""


@dataclass
class Run:
    """One run of the stages. deadline: of `time.monotonic`. done: a record of each stage, in order."""

    machine: Machine
    device: str
    folder: Path
    deadline: float
    done: list[dict[str, Any]] = field(default_factory=list)

    def all(self, stages: list[Stage]) -> None:
        """Runs what fits, and saves after each stage; a signal ends the one that runs, and the rest is left out."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "log.txt").write_text("")
        facts = self.machine.facts
        self.say(f"{self.machine.card}: Python {facts['python']}, torch {facts['torch']}, {self.machine.cores} cores")
        if self.machine.missing:
            self.say(f"missing here: {', '.join(self.machine.missing)}")
        is_ended = False
        for stage in stages:
            record = {"stage": stage.name, "what": stage.what, "status": "", "why": "", "seconds": 0.0}
            self.done.append(record)
            lacks = [each for each in stage.needs if each in self.machine.missing]
            left = self.deadline - time.monotonic()
            if lacks:
                record |= {"status": "skipped", "why": f"{', '.join(lacks)} is not installed (WHEELS=)"}
            elif is_ended or left < stage.least:
                why = (
                    "the run was ended" if is_ended else f"{max(0.0, left):.0f} s are left, and it needs {stage.least}"
                )
                record |= {"status": "skipped", "why": why}
            else:
                is_ended = not self._one(stage, record, min(float(stage.most), left))
            self.say(f"== {stage.name}: {record['status']}{record['why'] and ', '}{record['why']}")
            self.save()

    def _one(self, stage: Stage, record: dict[str, Any], seconds: float) -> bool:
        """Runs a stage, and notes how it ended; False where a signal came."""
        out = self.folder / f"{stage.name}.json"
        out.unlink(missing_ok=True)
        self.say(f"== {stage.name}: {stage.what} (at most {seconds:.0f} s)")
        begun = time.monotonic()
        results = TestResults(out) if stage.is_pytest else None
        try:
            code = self._call(self._words(stage, out, seconds), begun + seconds, results)
        except Ended:
            record |= {"status": "cut short", "why": "the run was ended", "seconds": time.monotonic() - begun}
            return False
        except Exception as error:  # of one stage: the next ones run
            record |= {"status": "failed", "why": f"{type(error).__name__}: {error}"}
            return True
        record["seconds"] = time.monotonic() - begun
        if code is None:
            record |= {"status": "cut short", "why": f"after {seconds:.0f} s; what it had is saved"}
        else:
            record |= {"status": "failed", "why": f"exit code {code}"} if code else {"status": "passed", "why": ""}
        return True

    def _words(self, stage: Stage, out: Path, seconds: float) -> list[str]:
        workers = min(8, self.machine.cores)
        filled = {
            "python": self.machine.python,
            "device": self.device,
            "size": "tiny" if self.device == "cpu" else "full",
            "out": str(out),
            "seconds": str(max(1, int(seconds) - 2)),
            "workers": str(workers),
        }
        words = [each.format(**filled) for each in stage.command]
        if stage.is_pytest and "xdist" in self.machine.missing and "-n" in words:
            del words[words.index("-n") : words.index("-n") + 2]
        return words

    def _call(self, words: list[str], deadline: float, results: "TestResults | None") -> int | None:
        """The exit code of a command, whose lines are shown as they come; None where its time was over."""
        paths = [*self.machine.paths, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # processes side by side compile in themselves
        }
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

        def show() -> None:
            assert process.stdout is not None
            with process.stdout as lines:
                for line in lines:
                    self.say(f"   {line.rstrip()}")
                    if results is not None:
                        results.read(line)

        reader = threading.Thread(target=show, daemon=True)
        reader.start()
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_group(process)
            reader.join(SECONDS_TO_END)
        return process.returncode

    def say(self, line: str) -> None:
        """A line for people, and for the log."""
        print(line, flush=True)
        with (self.folder / "log.txt").open("a") as log:
            log.write(line + "\n")

    def save(self) -> None:
        """Writes what is known now."""
        facts = {**self.machine.facts, "missing": self.machine.missing, "commit": commit(), "device": self.device}
        (self.folder / "run.json").write_text(json.dumps({"machine": facts, "stages": self.done}, indent=1) + "\n")
        (self.folder / "summary.md").write_text(self.page() + "\n")

    def page(self) -> str:
        """One page on all stages."""
        facts = self.machine.facts
        lines = [
            f"# treewise {commit()} on {facts['card'] or self.machine.card}",
            "",
            f"Python {facts['python']}, torch {facts['torch']}; missing: {', '.join(self.machine.missing) or 'none'}.",
            "",
            "| stage | | seconds | |",
            "|---|---|---:|---|",
            *(f"| {each['stage']} | {each['status']} | {each['seconds']:.0f} | {each['why']} |" for each in self.done),
        ]
        by_name = {each.name: each for each in STAGES}
        for record in self.done:
            file = self.folder / f"{record['stage']}.json"
            if record["status"] != "skipped" and file.exists():
                lines += ["", f"**{record['stage']}**: {record['what']}", ""]
                lines += summarised(by_name[record["stage"]], file)
        return "\n".join(lines)


def summarised(stage: Stage, file: Path) -> list[str]:
    """A stage's lines of the page; a file of another form, as of a stage that was ended, gives a line that says so."""
    try:
        return list(stage.summary(json.loads(file.read_text())))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        return [f"{file.name} cannot be read: {type(error).__name__}: {error}"]


def end_group(process: "subprocess.Popen[str]") -> None:
    """Ends a process and all that it started: those that live on hold memory of the GPU."""
    for number, seconds in ((signal.SIGTERM, SECONDS_TO_END), (signal.SIGKILL, SECONDS_TO_END)):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """Inside, SIGTERM and SIGINT end the stage that runs, and leave out the rest."""

    def end(*_: object) -> None:
        raise Ended

    before = {each: signal.signal(each, end) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        with suppress(Ended):  # between two stages
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def commit() -> str:
    """Of this checkout; empty where there is none."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


# -- results of tests -------------------------------------------------------------------------------------------------


@dataclass
class TestResults:
    """Outcomes of pytest by test, read from its lines as they come and saved at once."""

    __test__ = False  # pytest collects by name

    file: Path
    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    _OUTCOME = re.compile(
        r"(?:^(?P<a>tests/\S+?::\S.*?) |\b)(?P<o>PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b(?: (?P<b>tests/\S+?::.*))?"
    )

    def read(self, line: str) -> None:
        """A line of `pytest -v`, with xdist or without, or of the summary at its end."""
        found = self._OUTCOME.search(line.strip())
        if found is None:
            return
        name = found["a"] or found["b"]
        if name is None:
            return
        name, _, reason = name.partition(" - ")
        self.outcomes[name.split(" (")[0].strip()] = found["o"].lower()
        if reason:
            self.reasons[name.strip()] = reason.strip()
        counts = {each: list(self.outcomes.values()).count(each) for each in sorted(set(self.outcomes.values()))}
        results = {"counts": counts, "outcomes": self.outcomes, "reasons": self.reasons}
        self.file.write_text(json.dumps(results, indent=1) + "\n")


# -- the table --------------------------------------------------------------------------------------------------------


def of_tests(found: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{count} {what}" for what, count in found["counts"].items())
    for name, outcome in found["outcomes"].items():
        if outcome in ("failed", "error"):
            yield f"* {outcome}: `{name.rpartition('::')[2]}` {found['reasons'].get(name, '')[:160]}"


def of_found(found: dict[str, Any]) -> Iterator[str]:
    for title in ("card", "not tested"):
        for name, text in found.get(title, {}).items():
            yield f"* {name}: {text}"
    for dtype, rate in found.get("products", {}).items():
        yield f"* products in {dtype}: {rate / 1e12:.0f} TFLOP/s"


def of_kernels(found: dict[str, Any]) -> Iterator[str]:
    right = sum(each["passed"] for each in found["kernels"].values())
    yield f"{right} of {len(found['kernels'])} right, compiled in {found['compile_seconds']:.0f} s, all together"
    if found["not run"]:
        yield f"* not run: {', '.join(found['not run'])}"
    if found["issue"]:
        yield f"* {found['issue']}"


def of_attention(found: dict[str, Any]) -> Iterator[str]:
    yield "| kernel, head size | right | backwards beyond roundings | new graphs | forward, both, ms | speed |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, kernel in found["kernels"].items():
        for size, each in kernel.get("sizes", {}).items():
            right = [row["passed"] for row in each.get("right", {}).values()]
            backwards, seconds = each.get("backwards", {}), each.get("seconds", {})
            times = ", ".join(
                f"{key} {1000 * one['forward']:.2f} {1000 * one['both']:.2f}" for key, one in seconds.items()
            )
            cells = (f"{sum(right)} of {len(right)}", f"{backwards.get('beyond', '')} of {backwards.get('times', '')}")
            speed = each.get("speed")
            graphs = each.get("lengths", {}).get("graphs", "")
            shown = "" if speed is None else f"{speed:.2f}"
            yield f"| {name}, {size} | {' | '.join(cells)} | {graphs} | {times} | {shown} |"
        if (why := kernel.get("skipped") or kernel.get("why")) is not None:
            yield f"| {name}: {why} | | | | | |"


def of_bench(found: dict[str, Any]) -> Iterator[str]:
    columns = "contestant", "s", "over flat", "of the FLOP bound", "MFU", "peak GiB", "first step, s"
    yield f"| model, workload, layers, flat kernel | {' | '.join(columns)} |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for row in found["rows"]:
        more = (row.get(key, "") for key in ("workload", "layers", "varlen_kernel"))
        what = ", ".join(filter(None, (row["model"], *more)))
        if "skipped" in row:
            yield f"| {what} | {row['skipped']} | | | | | | |"
        for name, each in row.get("contestants", {}).items():
            if "skipped" in each:
                yield f"| {what} | {name}: {each['skipped']} | | | | | | |"
                continue
            speed = row["speed_up"].get("flat", {}).get(name)
            of_bound = "" if speed is None else f"{speed / row['flop_bound']:.2f}"
            mfu = "" if each.get("mfu") is None else f"{each['mfu']:.0%}"
            cells = (f"{each['seconds']['median']:.3f}", "" if speed is None else f"{speed:.2f}", of_bound, mfu)
            by = f" by {each['kernel']['name']}" if "kernel" in each else ""
            peak = "" if each["peak_bytes"] is None else f"{each['peak_bytes'] / 2**30:.1f}"
            yield f"| {what} | {name}{by} | {' | '.join(cells)} | {peak} | {each['first_seconds']:.1f} |"


def of_layers(found: dict[str, Any]) -> Iterator[str]:
    yield "| layers, workload | first step, s | s | launches, of a layer | busy | MFU |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, of_workloads in found["layers"].items():
        for workload, each in of_workloads.items():
            if workload in ("skipped", "failed"):
                yield f"| {name}: {each} | | | | | |"
                continue
            mfu = "" if each["mfu"] is None else f"{each['mfu']:.0%}"
            launches = f"{each['launches']:,}, {each['launches_per_layer']:.0f}"
            cells = (f"{each['first_seconds']:.1f}", f"{each['seconds']:.3f}", launches, f"{each['busy']:.0%}", mfu)
            yield f"| {name}, {workload} | {' | '.join(cells)} |"


def of_calibration(found: dict[str, Any]) -> Iterator[str]:
    rates, about = found["roofline"], found["about"]
    yield f"products {rates['flops'] / 1e12:.3g} TFLOP/s, memory {rates['bandwidth'] / 1e9:.3g} GB/s"
    for kind, rate in rates["attention"].items():
        yield f"* {kind.replace('_', ' ')}: {rate / 1e12:.3g} TFLOP/s"
    yield f"* host: {1e6 * found['launch_seconds']:.3g} us a launch, {1e6 * found['host_seconds']:.3g} us in a step"
    yield f"* left out: {'; '.join(about['left out for lack of time']) or 'nothing'}"


def of_profile(found: dict[str, Any]) -> Iterator[str]:
    for name, each in found.items():
        if not isinstance(each, dict):
            continue
        if "failed" in each:
            yield f"{name}: {each['failed']}"
            continue
        kernels = f"kernels {each['kernel_seconds']:.3f} s in {each['launches']:,} launches"
        yield f"{name}: {each['seconds']:.3f} s, {kernels}"
        parts = sorted(each["parts"].items(), key=lambda item: -item[1]["seconds"])
        for part, cost in parts[:8]:
            yield f"* {part}: {cost['seconds']:.3f} s, {cost['seconds'] / each['seconds']:.0%}"


def ours(name: str) -> tuple[str, ...]:
    """The command of a stage of `gpu_stages.py`."""
    script = "benchmarks/gpu_stages.py"
    return (
        "{python}",
        script,
        name,
        "--device",
        "{device}",
        "--size",
        "{size}",
        "--seconds",
        "{seconds}",
        "--out",
        "{out}",
    )


def attention() -> tuple[str, ...]:
    """The command of the stage of attention's kernels, a script of its own."""
    script = "benchmarks/attention_kernels.py"
    places = ("--device", "{device}", "--size", "{size}", "--seconds", "{seconds}", "--out", "{out}")
    return "{python}", script, "run", *places


def tests(*words: str) -> tuple[str, ...]:
    """The command of a stage of tests. Warnings are for those who change treewise, not for its users' machines."""
    quiet = ("-p", "no:benchmark", "-p", "no:cacheprovider", "-W", "ignore")
    return "{python}", "-m", "pytest", "-m", "gpu", "-v", "--tb=short", *quiet, "tests/test_cuda_first.py", *words


MEMORY = "runs_out_of_memory or measured_budget"
# In order of worth. Another stage is one row here, with a function of gpu_stages.py or a command of its own.
STAGES = (
    Stage("found", "card, driver, versions, kernels that are installed", ours("found"), 5, 60, CORE, of_found),
    Stage(
        "kernels", "attention kernels against the reference, side by side", ours("kernels"), 40, 130, CORE, of_kernels
    ),
    Stage(
        *("calibration", "products, attention, launches and copies by size, for predictions", ours("calibration")),
        *(30, 90, CORE, of_calibration),
    ),
    Stage(
        *("tests", "whole models, trainers, waits, on the GPU", tests("-n", "{workers}", "-k", f"not ({MEMORY})")),
        *(50, 150, TESTING, of_tests, True),
    ),
    Stage(
        *("attention", "Triton's, FlashAttention 4's and cuDNN's kernels on one mask", attention(), 45, 150, CORE),
        of_attention,
    ),
    Stage("layers", "plain, compiled and Liger's layers at two lengths", ours("layers"), 40, 120, CORE, of_layers),
    Stage("speed", "steps of Qwen3-1.7B beside packed flat rows", ours("speed"), 40, 150, CORE, of_bench),
    Stage("large", "steps of Qwen3-8B beside packed flat rows", ours("large"), 60, 180, CORE, of_bench),
    Stage("profile", "where the time of a step goes, by part and kernel", ours("profile"), 25, 60, CORE, of_profile),
    Stage("memory", "budgets that are measured or too large", tests("-k", MEMORY), 25, 60, TESTING, of_tests, True),
    Stage("long", "a tree of 83,003 tokens with long paths", ours("long"), 60, 150, CORE, of_bench),
    Stage("largest", "steps of Qwen3-14B, where the card holds it", ours("largest"), 60, 180, CORE, of_bench),
    Stage(
        *("mixture", "as many layers of Qwen3-30B-A3B as fit beside packed flat rows", ours("mixture"), 40, 120),
        *(CORE, of_bench),
    ),
    Stage("trl", "TRL's tree rows beside ours on tau2", ours("trl"), 30, 90, (*CORE, "trl"), of_bench),
)


if __name__ == "__main__":
    sys.exit(main())
