"""What a kernel of attention needs: a card, packages, a dtype, sizes of heads, and what it can do for a layer.

The facts of each kernel beyond Triton's stand in `NEEDS`, and are checked before anything is computed; the first that
does not hold is one error, which names it and a choice that works. Nothing else is taken in its place. Which of them
`auto` takes on a card is measured: `measured.json` has the rows of benchmarks/results in which one was right and faster
(`benchmarks/attention_kernels.py adopt` writes it).

Letters: D head size of queries and keys, and of values.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.version import Version

from treewise.errors import ConfigError, TreewiseError, UnsupportedModelError
from treewise.nn.platform.versions import installed_version

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from treewise.nn.attention.mask import LayerRule, TreeMask

FASTER = 1.02  # than Triton's, at least, where `auto` takes another kernel
Capability = tuple[int, int]
Sizes = tuple[int, int]
WINDOWS, CHUNKS, CAPS, SINKS = "sliding windows", "chunks", "score caps", "attention sinks"


class Heads(NamedTuple):
    """Sizes of heads that a kernel takes: of keys and of values up to `most`, in steps of `step`, and some `pairs`."""

    most: int
    step: int = 8
    pairs: tuple[Sizes, ...] = ()

    def include(self, sizes: Sizes) -> bool:
        """Whether it takes heads of these sizes (of keys, of values)."""
        return sizes in self.pairs or all(0 < size <= self.most and size % self.step == 0 for size in sizes)

    def __str__(self) -> str:
        pairs = "".join(f", or {key} with values of {value}" for key, value in self.pairs)
        return f"{self.step} to {self.most} in steps of {self.step}{pairs}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What the layers of a model ask of attention. sizes: (D of keys, of values); features: `WINDOWS`, `SINKS`, ..."""

    sizes: frozenset[Sizes] = frozenset()
    features: frozenset[str] = frozenset()

    @classmethod
    def by_call(cls, sizes: Sizes, rule: "LayerRule", *, has_sinks: bool) -> "Asked":
        """What one call of a layer asks."""
        given = {WINDOWS: rule.window, CHUNKS: rule.chunk, CAPS: rule.softcap, SINKS: has_sinks or None}
        return cls(frozenset({sizes}), frozenset(name for name, value in given.items() if value is not None))


@dataclass(frozen=True, slots=True)
class Needs:
    """cards: heads that it has kernels for, by compute capability of NVIDIA's GPUs. packages: least versions, with
    what to install. dtypes: names of those of queries, keys and values. lacks: features that it has not, or from a
    version of a package on. is_repeatable: whether its backward may be asked to give the same bits each time."""

    cards: Mapping[Capability, Heads]
    packages: Mapping[str, tuple[str, str]]
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    lacks: Mapping[str, tuple[str, str] | None] = field(default_factory=dict)
    is_repeatable: bool = True

    def refusal(self, name: str, place: "Place", asked: Asked) -> TreewiseError | None:
        """The first fact that does not hold, as an error; None where the kernel `name` can be taken."""
        who = f"attention={name!r}"
        if place.device_type != "cuda":
            return ConfigError(f"{who} runs on CUDA, and the model is on {place.device_type}; use attention='auto'.")
        instead = "use attention='reference'" if place.dtype == "float64" else "use attention='flex'"
        heads = None if place.capability is None else self.cards.get(place.capability)
        if heads is None:
            known = ", ".join(".".join(map(str, card)) for card in self.cards)
            has = "this is none of NVIDIA's" if place.capability is None else f"this one has {_number(place)}"
            return ConfigError(f"{who} has kernels for GPUs of compute capability {known}, and {has}; {instead}.")
        for package, (least, command) in self.packages.items():
            if (wrong := _too_old(package, least)) is not None:
                return ConfigError(f"{who} needs {package} {least} or later, and {wrong}: {command}; or {instead}.")
        if place.dtype is not None and place.dtype not in self.dtypes:
            return ConfigError(f"{who} computes in {' and '.join(self.dtypes)}, not in {place.dtype}; {instead}.")
        if place.is_repeatable and not self.is_repeatable:
            return ConfigError(
                f"{who} has no backward that gives the same bits each time, which "
                f"torch.use_deterministic_algorithms asks for; {instead}."
            )
        for key, value in sorted(asked.sizes):
            if not heads.include((key, value)):
                sizes = f"{key}" if key == value else f"{key} and values of {value}"
                return UnsupportedModelError(
                    f"{who} takes heads of {heads} on compute capability {_number(place)}, and the model has some of "
                    f"{sizes}; {instead}."
                )
        for feature in sorted(asked.features & self.lacks.keys()):
            since = self.lacks[feature]
            if since is None:
                return UnsupportedModelError(f"{who} has no {feature}, which the model has; {instead}.")
            if (wrong := _too_old(*since)) is not None:
                return UnsupportedModelError(
                    f"{who} has {feature}, which the model has, from {' '.join(since)} on, and {wrong}; {instead}."
                )
        return None


class Place(NamedTuple):
    """Where attention runs. capability: of NVIDIA's GPUs; None elsewhere. dtype: of queries, by name; None: any.
    is_repeatable: torch was told to give the same bits each time."""

    device_type: str
    capability: Capability | None
    dtype: str | None
    is_repeatable: bool = False


def place_of(device_type: str, dtype: "torch.dtype | None") -> Place:
    """The present device of a type, with a dtype."""
    if device_type != "cuda":
        return Place(device_type, None, _short(dtype))
    import torch

    from treewise.nn.platform.card import capability_of

    capability = capability_of(torch.device(device_type)) if torch.cuda.is_available() else None
    asks = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return Place(device_type, capability, _short(dtype), asks)


def asked_by(decoder: "nn.Module") -> Asked:
    """What the attention layers of a model say of themselves; calls are compared with it again, one by one."""
    sizes, features = set[Sizes](), set[str]()
    for module in decoder.modules():
        size = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
        if not isinstance(size, int) or not hasattr(module, "is_causal") or not hasattr(module, "layer_idx"):
            continue
        sizes.add((size, getattr(module, "v_head_dim", None) or size))
        given = {CAPS: "attn_logit_softcapping", SINKS: "sinks", WINDOWS: "sliding_window"}
        features |= {feature for feature, name in given.items() if getattr(module, name, None) is not None}
        if "chunked_attention" in (getattr(getattr(module, "config", None), "layer_types", None) or ()):
            features.add(CHUNKS)
    return Asked(frozenset(sizes), frozenset(features))


def _too_old(package: str, least: str) -> str | None:
    """What is wrong with an installed version; None where it will do."""
    installed = installed_version(package)
    if installed is None:
        return "it is not installed"
    return None if Version(installed) >= Version(least) else f"{installed} is installed"


def _number(place: Place) -> str:
    return ".".join(map(str, place.capability or ()))


def _short(dtype: "torch.dtype | None") -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def require(name: str, place: Place, asked: Asked) -> None:
    """Raises the error of the first fact that a kernel needs and that does not hold."""
    refusal = NEEDS[name].refusal(name, place, asked)
    if refusal is not None:
        raise refusal


def require_of_call(
    mask: "TreeMask", name: str, query: "Tensor", value: "Tensor", rule: "LayerRule", sinks: Any
) -> None:
    """Raises as `require` what one call of a layer asks, looked at once in a micro-batch for each kind of layer."""
    sizes = query.shape[3], value.shape[3]
    mask.derived(_checked, name, query.device.type, query.dtype, sizes, rule, sinks is not None)


def _checked(
    _: "TreeMask",
    name: str,
    device_type: str,
    dtype: "torch.dtype",
    sizes: tuple[int, int],
    rule: "LayerRule",
    has_sinks: bool,
) -> None:
    require(name, place_of(device_type, dtype), Asked.by_call(sizes, rule, has_sinks=has_sinks))


# -- what was measured ------------------------------------------------------------------------------------------------


def fastest(device_type: str, dtype: "torch.dtype | None", decoder: "nn.Module") -> str | None:
    """The kernel that was the fastest, beyond Triton's, for all head sizes of a model on such a card, and right for
    every feature; None where none was, or where it cannot be taken."""
    place, asked = place_of(device_type, dtype), asked_by(decoder)
    if place.capability is None or not asked.sizes:
        return None
    speeds: dict[str, float] = {}
    for name, needs in NEEDS.items():
        if needs.refusal(name, place, asked) is not None:
            continue
        packages = {package: installed_version(package) for package in needs.packages}
        rows = [_row_of(name, place, sizes, packages) for sizes in asked.sizes]
        if all(row is not None and asked.features <= set(row["features"]) for row in rows):
            speeds[name] = min(row["speed"] for row in rows if row is not None)
    best = max(speeds, key=speeds.__getitem__, default=None)
    return best if best is not None and speeds[best] >= FASTER else None


def _row_of(
    name: str, place: Place, sizes: tuple[int, int], packages: Mapping[str, str | None]
) -> Mapping[str, Any] | None:
    """What was measured of a kernel with these very releases on such a card; the last row counts."""
    wanted = {
        "kernel": name,
        "capability": list(place.capability or ()),
        "dtype": place.dtype,
        "head_sizes": list(sizes),
        "packages": {package: _release(version) for package, version in packages.items()},
    }
    found = [row for row in measured() if all(row[key] == value for key, value in wanted.items())]
    return found[-1] if found else None


def _release(version: str | None) -> str | None:
    """A version without what says how it was built (`+cu130`)."""
    return None if version is None else version.partition("+")[0]


@cache
def measured() -> list[dict[str, Any]]:
    """Rows of `measured.json`: kernel, capability, dtype, head_sizes, packages (with their versions), features (for
    which it was right), speed (over Triton's forward and backward), result (the file in benchmarks/results)."""
    text = resources.files("treewise.nn.attention").joinpath("measured.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)["rows"]
    return rows


# -- the table --------------------------------------------------------------------------------------------------------

_OF_CUTE = Heads(most=128)  # what both kernels in CuTe DSL have on every card

NEEDS: dict[str, Needs] = {
    # FlashAttention 4. Before b26 its backward raced on Hopper (Dao-AILab/flash-attention #2756); torch 2.10 has no
    # backward under a mask, and before 2.14 none for the log-sum-exp.
    "flash": Needs(
        cards={(9, 0): _OF_CUTE, (10, 0): _OF_CUTE, (10, 3): _OF_CUTE},
        packages={
            "torch": ("2.11", "pip install --upgrade torch"),
            "flash-attn-4": ("4.0.0b26", "pip install --pre 'flash-attn-4[cu13]'"),
        },
        lacks={SINKS: ("torch", "2.14")},
        is_repeatable=False,
    ),
    # It takes no function of scores.
    "cudnn": Needs(
        cards=dict.fromkeys(((9, 0), (10, 0), (10, 3)), _OF_CUTE._replace(pairs=((192, 128), (256, 256)))),
        packages={
            "nvidia-cudnn-frontend": ("1.32", "pip install nvidia-cudnn-frontend"),
            "nvidia-cutlass-dsl": ("4.8", "pip install 'nvidia-cutlass-dsl[cu13]'"),
        },
        lacks={CAPS: None},
    ),
}
