"""Norms, rotary positions and MLPs of the installed liger-kernel in place of a model's plain ones: fewer kernels.

The package patches the modules of one model, and the rotary function of its module in transformers for the whole
process. Its losses are left out: ours are computed in chunks from log-probs. Its kernels are Triton's, so they need a
GPU. Its MLPs overwrite what they saved for the backward, so a graph can be run backward once, as steps do; its rotary
function takes cosines and sines by row, so depths of tokens are as good as positions.
"""

import inspect
from typing import Any

import torch
from torch import nn

from treewise.errors import ConfigError, UnsupportedModelError
from treewise.nn.platform.versions import installed_version
from treewise.nn.wrapped import base_model

PACKAGE, LEAST = "liger-kernel", "0.8"
# For `liger_kernel_config` of transformers, which applies the same.
PARTS = {
    **dict.fromkeys(("rope", "rms_norm", "layer_norm", "swiglu", "geglu"), True),
    **dict.fromkeys(("cross_entropy", "fused_linear_cross_entropy"), False),
}


def require_liger() -> Any:
    """The module of the package that has a function for each family.

    Raises:
        ConfigError: it is not installed, or older than what was read.
    """
    from packaging.version import Version

    found = installed_version(PACKAGE)
    if found is None or Version(found) < Version(LEAST):
        has = "it is not installed" if found is None else f"{found} is installed"
        raise ConfigError(
            f"use_liger_kernel needs {PACKAGE} {LEAST} or later, and {has}: pip install --upgrade {PACKAGE}; or leave "
            "it out: compile_layers fuses the same."
        )
    from liger_kernel.transformers import monkey_patch

    return monkey_patch


def use_liger(model: nn.Module, device: torch.device) -> list[str]:
    """Patches a model; returns the names of the parts that the package has for its family.

    Raises:
        ConfigError: see `require_liger`; or a device without Triton.
        UnsupportedModelError: the package has nothing for the model's family.
    """
    package = require_liger()
    if device.type != "cuda":
        raise ConfigError(
            f"use_liger_kernel: its kernels run on a GPU, and the model is on {device.type}; leave it out."
        )
    plain = base_model(model)
    family = plain.config.model_type
    patch = package.MODEL_TYPE_TO_APPLY_LIGER_FN.get(family)
    if patch is None:
        raise UnsupportedModelError(
            f"use_liger_kernel: {PACKAGE} {installed_version(PACKAGE)} has nothing for {family}; leave it out: "
            "compile_layers fuses the same."
        )
    known = inspect.signature(patch).parameters
    patch(model=plain, **{name: is_on for name, is_on in PARTS.items() if name in known})
    return [name for name, is_on in PARTS.items() if is_on and name in known]
