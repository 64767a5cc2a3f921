"""What a GPU and its software are, and whether the attention kernels are right on it: case by case, side by side."""

import os
import platform
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch

import treewise
from treewise.bench.side_by_side import Died, side_by_side
from treewise.bench.varlen import kernels
from treewise.nn.attention import AUTO, choose
from treewise.nn.attention.flex import flex_attention_tree
from treewise.nn.attention.kernel_cases import CASES, is_within, kernel_errors, shown
from treewise.nn.device import synchronized_clock
from treewise.nn.platform.card import card_name
from treewise.nn.platform.versions import installed_version

# Packages with kernels that attention or layers may run, of treewise, of transformers or of the baselines.
_KERNELS = (
    *("triton", "flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cudnn-frontend", "kernels", "liger-kernel"),
    *("flash-linear-attention", "causal-conv1d", "mamba-ssm"),
)
MAX_PROCESSES = 8  # each takes half a GiB of the GPU, and compiles on one core
_ONE_THREAD = "TORCHINDUCTOR_COMPILE_THREADS"  # else every process starts others, to compile one kernel


def gpu_facts(device: torch.device) -> dict[str, str]:
    """Card, driver, software, kernels that are installed and those that will run, as text by name."""
    found = {name: version for name in _KERNELS if (version := installed_version(name)) is not None}
    facts = {
        "card": card_name(device),
        "driver": _driver(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "kernels": ", ".join(f"{name} {version}" for name, version in found.items()) or "none installed",
        "not installed": ", ".join(name for name in _KERNELS if name not in found),
        "compiled kernels": _cache_folder(),
    }
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        tree, flat = choose(AUTO, device.type, dtype), kernels(device.type, dtype)
        which = flat[0] if len(flat) == 1 else f"the fastest of {', '.join(flat)}"
        facts[f"in {name}"] = f"trees take {tree}, packed flat rows of the benchmarks {which}"
    return facts


def _driver() -> str:
    """The version of NVIDIA's driver, as its own command says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown (nvidia-smi does not answer)"


def _cache_folder() -> str:
    """Where kernels are kept once they are compiled."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()


# -- kernels against the reference ------------------------------------------------------------------------------------


@dataclass(slots=True)
class KernelChecks:
    """Cases that ended, by name: `passed`, `shown` (errors beside what is allowed) and `seconds` of a first call, which
    compiles, and of a second. They fill up while `run` is under way, so that who interrupts it has what was there."""

    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(
        self,
        device: torch.device,
        deadline: float,
        num_processes: int | None = None,
        on_case: Callable[[str, dict[str, Any]], None] = lambda *_: None,
    ) -> None:
        """All cases until `deadline` (of `time.perf_counter`). On a CPU, FlexAttention's uncompiled operator stands in.

        num_processes: that compile side by side, and are ended at the deadline whatever they do; 0: all in this one,
        which looks at the time between cases. None: as many as cores, on a GPU; 0 on a CPU.
        """
        if num_processes is None:
            num_processes = min(MAX_PROCESSES, os.cpu_count() or 1) if device.type == "cuda" else 0
        names = list(CASES)
        results: Generator[tuple[str, dict[str, Any] | Died]]
        if num_processes == 0:
            results = ((name, check_case(device, name)) for name in names if perf_counter() < deadline)
        else:
            results = side_by_side(partial(check_case, device), names, num_processes, deadline)
        with _one_thread(), closing(results):
            for name, found in results:
                each = _of_dead(found) if isinstance(found, Died) else found
                self.kernels[name] = each
                on_case(name, each)

    def facts(self, device: torch.device) -> dict[str, Any]:
        """Plain JSON values: `kernels`, `not run`, `passed`, `compile_seconds`, `issue` (None: nothing is wrong)."""
        wrong = [f"{name}: {each['shown']}" for name, each in self.kernels.items() if not each["passed"]]
        installed = {each: installed_version(each) for each in ("torch", "triton", "transformers")}
        versions = ", ".join(f"{each} {found}" for each, found in installed.items() if found)
        machine = platform.machine()
        if device.type == "cuda":
            machine = f"{card_name(device)}, CUDA {torch.version.cuda}, driver {_driver()}"
        left_out = [name for name in CASES if name not in self.kernels]
        return {
            "kernels": {name: self.kernels[name] for name in CASES if name in self.kernels},
            "not run": left_out,
            "passed": not wrong and not left_out,
            "compile_seconds": sum(
                max(0.0, each["seconds"][0] - each["seconds"][1]) for each in self.kernels.values() if each["seconds"]
            ),
            "issue": f"treewise {treewise.__version__}, {versions}, {machine}: {'; '.join(wrong)}" if wrong else None,
        }


def check_case(device: torch.device, name: str) -> dict[str, Any]:
    """One case, twice: the second call takes the kernel of the same family from memory."""
    case, seconds = CASES[name], []
    try:
        for _ in range(2):
            started = synchronized_clock(device)
            errors = kernel_errors(flex_attention_tree, case, device)
            seconds.append(synchronized_clock(device) - started)
    except Exception as error:  # whatever a broken installation raises is what the user is to see
        first, *_ = str(error).splitlines() or [""]
        return {"passed": False, "shown": f"{type(error).__name__}: {first[:400]}", "seconds": []}
    passed, text = is_within(errors) is not case.is_broken, shown(errors)
    if case.is_broken and not passed:
        text = f"a wrong key was not noticed ({text})"
    return {"passed": passed, "shown": text, "seconds": seconds}


def _of_dead(found: Died) -> dict[str, Any]:
    return {"passed": False, "shown": f"its process ended by itself, with code {found.exit_code}", "seconds": []}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, processes that are started compile in themselves, unless the environment says otherwise."""
    is_given = _ONE_THREAD in os.environ
    os.environ.setdefault(_ONE_THREAD, "1")
    try:
        yield
    finally:
        if not is_given:
            os.environ.pop(_ONE_THREAD, None)
