"""What this machine has, which attention will run, and a check that a tiny model is right on it."""

import os
import platform
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import LlamaConfig

import treewise
from treewise.engine.engine import TreeEngine
from treewise.errors import bytes_as_text, pip_install
from treewise.nn.attention import AUTO, choose
from treewise.nn.attention.flex import COMPILED_FOR, RUN_ON
from treewise.nn.device import half_precision_times
from treewise.nn.platform.card import card
from treewise.nn.platform.memory import free_bytes
from treewise.nn.platform.versions import installed_version, untested_torch
from treewise.nn.support_table import CapabilityTable
from treewise.objectives import logprob_gap
from treewise.report.analysis.misfits import installed, misfit
from treewise.rl.samplers import SampleRequest, TransformersSampler
from treewise.tree.trajectory import Trajectory
from treewise.verification.compare import verify

TESTED_SYSTEM = "Linux"
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "numpy")
_OPTIONAL = {
    "peft": "adapters",
    "trl": "TRL's trainers",
    "tree_recurrence": "a contestant of the benchmarks of hybrids",
    "gguf": "models from GGUF files",
}
# Relative error of the whole gradient that float32 may have between flat and tree.
_LIMIT = 1e-4


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Facts as plain JSON values by title."""
    versions = {name: installed_version(name) or "not installed" for name in _PACKAGES}
    if versions["transformers"] != (made_with := CapabilityTable.load().transformers):
        versions["transformers"] += f" (the table of `treewise models` was made with {made_with})"
    devices = {"cpu": f"{os.cpu_count()} cores, {bytes_as_text(free_bytes(torch.device('cpu')))} free"}
    for each in (torch.device("cuda", index) for index in range(torch.cuda.device_count())):
        devices[str(each)] = f"{torch.cuda.get_device_name(each)}, {bytes_as_text(free_bytes(each))} free"
    return {
        "environment": {
            "treewise": treewise.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "threads": torch.get_num_threads(),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        },
        "packages": versions,
        "devices": devices,
        "attention": _attention(device),
        "precision": _precision(device),
        "does not fit": {} if (why := misfit(installed())) is None else {"gpu": why},
        "not tested": untested(device),
        "missing": {
            name: f"{why}: {pip_install(name.replace('_', '-'))}"
            for name, why in _OPTIONAL.items()
            if find_spec(name) is None
        },
    }


def _attention(device: torch.device) -> dict[str, str]:
    """What `attention="auto"` takes on a device, and why."""
    name = choose(AUTO, device.type)
    if name == "flex":
        triton = "with Triton" if find_spec("triton") else "but Triton is missing, without which it does not compile"
        why = f"{device} is a CUDA device; FlexAttention, {triton}"
    elif name == "cascade":
        why = "torch's flash kernel for CPU takes grouped heads"
    elif device.type == "cpu":
        why = "this torch's flash kernel for CPU takes no grouped heads (torch 2.13 does)"
    else:
        why = f"no faster implementation for {device.type}"
    return {"auto": name, "why": why}


def _precision(device: torch.device) -> dict[str, str]:
    """What bfloat16 costs on a device."""
    times = half_precision_times(device.type)
    if times is None:
        return {}
    verdict = "" if times <= 1 else ": it saves memory here, and no time"
    return {"bfloat16": f"matrix products take {times:.2f} times as long as in float32{verdict}"}


def self_check(device: torch.device) -> dict[str, Any]:
    """A tiny model: loss and gradients of a tree against flat training, whole and in parts, and log-probs of a sampler
    against the engine's; `passed`, and the errors."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    config = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = AutoModelForCausalLM.from_config(config).to(device)
    base = [3, 1, 4, 1, 5, 9, 2, 6]
    rollouts = [Trajectory(np.array([*base, *rest])) for rest in ([5, 3, 5], [8, 9, 7, 9], [5, 3, 8])]
    try:
        budgets = {"whole": len(base) * len(rollouts), "max_tokens=6": 6}
        errors = {name: verify(model, rollouts, [budget]).gradient_error for name, budget in budgets.items()}
        sampler = _sampler_gap(model, base)
    except Exception as error:  # whatever a broken installation raises is what this command is to show
        return {"passed": False, "error": f"{type(error).__name__}: {error}"}
    passed = all(gap <= _LIMIT for gap in errors.values()) and sampler - 1 <= _LIMIT
    return {"passed": passed, "limit": _LIMIT, **errors, "logprob_gap": sampler}


def _sampler_gap(model: torch.nn.Module, base: list[int]) -> float:
    """`logprob_gap` of rollouts of the embedded sampler: mean of exp(|engine - sampler|); 1: no gap."""
    request = SampleRequest(tuple(base), num_continuations=4, max_new_tokens=12)
    rows = []
    for completion in TransformersSampler(model).sample([request])[0]:
        logprobs = np.concatenate([np.zeros(len(base)), completion.logprobs])
        weights = np.repeat([0.0, 1.0], [len(base), completion.num_tokens])
        ids = np.concatenate([base, completion.token_ids])
        rows.append(Trajectory(ids, weights, sampler_logprobs=logprobs))
    return logprob_gap(TreeEngine(model).scored(rows, stream="old_logprobs"))


def untested(device: torch.device) -> dict[str, str]:
    """What of this machine no test has run on, by what it is; the checks of this command are then all there is."""
    found = {}
    if platform.system() != TESTED_SYSTEM:
        found["system"] = f"{platform.system()}: tests run on {TESTED_SYSTEM}"
    if (torch_release := untested_torch(torch.__version__)) is not None:
        found["torch"] = torch_release
    if device.type == "cuda":
        capability = card(device).capability
        ran, compiled = (", ".join(f"{major}.{minor}" for major, minor in each) for each in (RUN_ON, COMPILED_FOR))
        if capability not in RUN_ON:
            name = "ROCm" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
            found["gpu"] = f"{name}: kernels ran on NVIDIA's {ran}, and were compiled, without a GPU, for {compiled}"
    return found
