"""Errors of compilers told as what they are: which kernels, on which card, with which versions, and the reason."""

from collections.abc import Iterator

import torch

from treewise.errors import UnsupportedModelError
from treewise.nn.platform.card import card_name
from treewise.nn.platform.versions import installed_version

_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")
_ADVICE = ("Set TORCHDYNAMO_VERBOSE", "Set TORCH_LOGS", "You can suppress", "For more info")  # that torch appends


def compiler_failure(error: BaseException, kernels: str, device: torch.device) -> UnsupportedModelError | None:
    """An error of torch's compiler or of Triton, as one that names the kernels; None for any other error.

    kernels: what was compiled, with dtype and head size.
    """
    if isinstance(error, UnsupportedModelError):
        return None
    chain = list(_causes(error))
    if not any(type(each).__module__.startswith(_COMPILERS) for each in chain):
        return None
    found = {name: installed_version(name) for name in ("torch", "triton")}
    versions = ", ".join(f"{name} {version or 'is not installed'}" for name, version in found.items())
    return UnsupportedModelError(
        f"{kernels} do not compile on {card_name(device)}, {versions}: "
        f"{type(chain[-1]).__name__}: {_reason(chain[-1])} attention='reference' computes the same without kernels of "
        "its own; `treewise doctor --gpu` tries them all."
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that it wraps, the innermost last."""
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__


def _reason(error: BaseException) -> str:
    """The last line of a message that says something: before it stands the source of the kernel."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.strip().startswith(_ADVICE)]
    reason = (lines[-1] if lines else repr(error))[:300]
    return reason if reason.endswith((".", "!", "?")) else f"{reason}."
