"""What `treewise doctor --gpu` shows: kernels against the reference, versions with known faults."""

import platform
import time
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

import treewise
from treewise.nn.attention.flex import flex_attention_tree
from treewise.nn.attention.kernel_cases import CASES, is_within, kernel_errors, shown
from treewise.nn.device import synchronized_clock
from treewise.nn.support_table import installed_version

# Distribution, versions, and what is wrong with them.
KNOWN_FAULTS = (
    ("torch", "<2.13", "FlexAttention's FLASH backend returns a wrong log-sum-exp (pytorch #181645)"),
    ("flash-attn-4", "<4.0.0b26", "its backward races on Hopper (flash-attention #2756)"),
)


def check_gpu(device: torch.device, max_seconds: float) -> dict[str, Any]:
    """Facts as plain JSON values: `faults`, `kernels` by case, `passed`, and `issue`, None where all is well.

    On a CPU, FlexAttention's uncompiled operator stands in for the kernels. No case begins after
    `max_seconds`; those left out are named under `not run`.
    """
    kernels, left_out = _kernels(device, time.perf_counter() + max_seconds)
    wrong = [f"{name}: {each['shown']}" for name, each in kernels.items() if not each["passed"]]
    return {
        "faults": known_faults(),
        "kernels": kernels,
        "not run": left_out,
        "passed": not wrong,
        "issue": f"{_machine(device)}: {'; '.join(wrong)}" if wrong else None,
    }


def known_faults() -> list[str]:
    """Faults of the installed packages."""
    faults = []
    for name, versions, fault in KNOWN_FAULTS:
        installed = installed_version(name)
        if installed is not None and SpecifierSet(versions, prereleases=True).contains(installed):
            faults.append(f"{name} {installed}: {fault}")
    return faults


def _kernels(device: torch.device, deadline: float) -> tuple[dict[str, Any], list[str]]:
    """Each case: whether it is as it should be, its errors, and seconds of the first and a second call.

    The first call compiles; the second one takes the kernel of the same family from the cache.
    """
    kernels: dict[str, Any] = {}
    for name, case in CASES.items():
        if time.perf_counter() > deadline:
            break
        try:
            seconds = []
            for _ in range(2):
                started = synchronized_clock(device)
                errors = kernel_errors(flex_attention_tree, case, device)
                seconds.append(synchronized_clock(device) - started)
            passed, text = is_within(errors) is not case.is_broken, shown(errors)
            if case.is_broken and not passed:
                text = f"a wrong key was not noticed ({text})"
        except Exception as error:  # whatever a broken installation raises is what the user is to see
            passed, text, seconds = False, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}", []
        kernels[name] = {"passed": passed, "shown": text, "seconds": seconds}
    return kernels, [name for name in CASES if name not in kernels]


def _machine(device: torch.device) -> str:
    name = platform.machine()
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}, CUDA {torch.version.cuda})"
    installed = {each: installed_version(each) for each in ("torch", "triton", "transformers")}
    versions = ", ".join(f"{each} {found}" for each, found in installed.items() if found)
    return f"treewise {treewise.__version__}, {versions}, {name}"


def as_lines(facts: dict[str, Any]) -> list[str]:
    """The facts for a terminal."""
    lines = [f"known fault of {each}" for each in facts["faults"]]
    for name, each in facts["kernels"].items():
        times = ", ".join(f"{seconds:.1f}" for seconds in each["seconds"])
        verdict = "as it should be" if each["passed"] else "WRONG"
        lines.append(f"{name:34} {verdict:15} {f'({times} s)' if times else '':14} {each['shown']}")
    if facts["not run"]:
        lines.append(f"not run, for lack of time: {', '.join(facts['not run'])}")
    if facts["issue"] is not None:
        lines.append(f"for an issue: {facts['issue']}")
    return lines
