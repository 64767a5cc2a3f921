"""What `treewise doctor --gpu` shows: kernels against the reference, speed, memory, versions with known faults."""

import platform
import time
from typing import Any

import torch
from packaging.specifiers import SpecifierSet

import treewise
from treewise.bench.contestants import Settings
from treewise.bench.model_shapes import random_model
from treewise.bench.suite import measure_workload
from treewise.bench.workloads import make
from treewise.engine.step_memory import step_memory
from treewise.errors import TreewiseError, bytes_as_text
from treewise.nn.attention.flex import flex_attention_tree
from treewise.nn.attention.kernel_cases import CASES, is_within, kernel_errors, shown
from treewise.nn.device import synchronized_clock
from treewise.nn.support_table import installed_version
from treewise.planning.planner import plan as make_plan
from treewise.tree.forest import Forest

# Distribution, versions, and what is wrong with them.
KNOWN_FAULTS = (
    ("torch", "<2.13", "FlexAttention's FLASH backend returns a wrong log-sum-exp (pytorch #181645)"),
    ("flash-attn-4", "<4.0.0b26", "its backward races on Hopper (flash-attention #2756)"),
)
KERNEL_SHARE = 0.6  # of the time, for the comparison of kernels; each compiles for seconds
# Model, workload and its size for the step that is timed, and the dtype.
STEPS = {
    "cuda": ("qwen3-0.6b", "grpo", "full", torch.bfloat16),
    "cpu": ("qwen3-tiny", "grpo", "tiny", torch.float32),
}


def check_gpu(device: torch.device, max_seconds: float) -> dict[str, Any]:
    """Facts as plain JSON values: `faults`, `kernels` by case, `step`, `passed`, and `issue`, None where all is well.

    On a CPU, FlexAttention's uncompiled operator stands in for the kernels. No case begins after its share of
    `max_seconds`; those left out are named under `not run`.
    """
    kernels, left_out = _kernels(device, time.perf_counter() + KERNEL_SHARE * max_seconds)
    step = _step(device, (1 - KERNEL_SHARE) * max_seconds)
    wrong = [f"{name}: {each['shown']}" for name, each in kernels.items() if not each["passed"]]
    if "failed" in step:
        wrong.append(f"step: {step['failed']}")
    return {
        "faults": known_faults(),
        "kernels": kernels,
        "not run": left_out,
        "step": step,
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


def _step(device: torch.device, max_seconds: float) -> dict[str, Any]:
    """One step on the tree beside flat training: speed beside the FLOP bound, memory beside the estimate."""
    shape, kind, size, dtype = STEPS[device.type]
    try:
        model = random_model(shape, dtype, device)
        workload = make(kind, size, model.get_input_embeddings().weight.shape[0])
        attention = "flex" if device.type == "cuda" else "auto"
        settings = Settings(("flat",), (), attention, repetitions=2, reference="flat", max_seconds=max_seconds)
        row = measure_workload(model, workload, settings)
    except (TreewiseError, RuntimeError) as error:
        return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    flat, tree = row["contestants"]["flat"], row["contestants"]["tree"]
    if "skipped" in tree or "skipped" in flat:
        return {"failed": tree.get("skipped") or flat["skipped"]}
    whole = make_plan(Forest.from_trajectories(workload.trajectories))
    return {
        "what": f"{shape}, {workload.name}, {str(dtype).removeprefix('torch.')}",
        "speed_up": row["speed_up"]["flat"]["tree"],
        "flop_bound": row["flop_bound"],
        "gradient_error": tree["gradient_error"],
        "peak_bytes": tree["peak_bytes"],
        "estimated_bytes": step_memory(model, whole, device.type).total,
    }


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
    step = facts["step"]
    if "failed" in step:
        lines.append(f"step {step['failed']}")
    else:
        lines.append(
            f"step of {step['what']}: {step['speed_up']:.2f} times flat (FLOPs allow {step['flop_bound']:.2f}), "
            f"gradient {step['gradient_error']:.1e} from flat"
        )
        if step["peak_bytes"] is not None:
            peak, estimate = bytes_as_text(step["peak_bytes"]), bytes_as_text(step["estimated_bytes"])
            lines.append(f"activations: peak {peak}, estimate {estimate}")
    if facts["issue"] is not None:
        lines.append(f"for an issue: {facts['issue']}")
    return lines
