"""What each process of a mesh holds and sends: predictions from a model's configuration and a plan, not measurements.

Counts what transformers' tensor- and expert-parallel plans split, what FSDP2 shards of it, and what every process holds
whole.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from treewise.distributed.mesh import check_mesh_sizes
from treewise.errors import ConfigError
from treewise.nn.flops import gateway_bytes, state_bytes
from treewise.nn.model_flops import flop_model
from treewise.nn.tensor_parallel import key_heads_per_rank
from treewise.nn.wrapped import named_modules
from treewise.report.analysis.plan_facts import USABLE

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

AXES = ("tp", "ep", "fsdp", "dp")
# transformers' styles that split a parameter, and the dimension (from the end) that they split of a matrix.
_SPLIT = {
    **dict.fromkeys(("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", "embedding_rowwise"), 2),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "embedding_colwise"), 1),
}
_EXPERTS = "grouped_gemm"  # splits experts
_WHOLE_LAYERS = 3  # a layer, its gradients and the next layer


@dataclass(frozen=True, slots=True)
class MeshReport:
    """Bytes of one process of a mesh.

    processes: of all axes. bytes_whole: where parameters are sharded, those outside the layers with their gradients,
    which are whole during a step, and of the largest layer: itself, its gradients, and the next one, which FSDP2
    gathers meanwhile. bytes_per_gateway_token: keys, values and their gradients. bytes_per_activation_token: an
    estimate. max_tokens: activations that fit beside everything else, without gateways; None without the size of a GPU.
    """

    mesh: dict[str, int]
    processes: int
    bytes_weights: int
    bytes_gradients: int
    bytes_optimizer: int
    bytes_whole: int
    bytes_per_gateway_token: int
    bytes_per_activation_token: int
    gpu_bytes: int | None = None
    max_tokens: int | None = None

    @property
    def bytes_static(self) -> int:
        """What a process holds whatever the batch."""
        return self.bytes_weights + self.bytes_gradients + self.bytes_optimizer + self.bytes_whole

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable names."""
        return asdict(self) | {"bytes_static": self.bytes_static}


def read_mesh(text: str) -> dict[str, int]:
    """Sizes by axis from `tp=2,fsdp=4`; those left out are 1.

    Raises:
        ConfigError: an unknown axis, no whole number, or sizes that do not fit the processes (tp x fsdp x dp).
    """
    sizes = dict.fromkeys(AXES, 1)
    for part in text.replace(" ", "").split(","):
        axis, _, size = part.partition("=")
        if axis not in sizes or not size.isdigit() or int(size) < 1:
            raise ConfigError(
                f"--mesh {text!r}: {part!r} is not an axis and its size; give some of {', '.join(AXES)}, each at "
                "least 1, as tp=2,fsdp=4."
            )
        sizes[axis] = int(size)
    processes = sizes["tp"] * sizes["fsdp"] * sizes["dp"]
    try:
        check_mesh_sizes(sizes["tp"], sizes["ep"], processes)
    except ConfigError as error:
        raise ConfigError(f"--mesh {text!r}, of tp x fsdp x dp = {processes} processes: {error}") from None
    return sizes


def read_bytes_setting(text: str) -> int:
    """Bytes from `80GiB`, `80GB` or a number.

    Raises:
        ConfigError: something else.
    """
    units = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6, "": 1}
    number = text.strip().rstrip("GiMB ")
    unit = text.strip()[len(number) :].strip()
    try:
        size = int(float(number) * units[unit])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise ConfigError(f"--gpu_memory {text!r}: give a size like 80GiB, 80GB or a number of bytes.")
    return size


def report_mesh(
    config: "PreTrainedConfig",
    mesh: dict[str, int],
    dtype: torch.dtype,
    gpu_bytes: int | None = None,
    optim: str | None = None,
) -> MeshReport:
    """Bytes of each process of a mesh (`read_mesh`) that trains every parameter of a model in `dtype`. optim: the name
    of the optimizer; None: AdamW.

    Raises:
        ConfigError: the family has no plan for tensor or expert parallelism, or heads that ranks cannot share.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    for axis in ("tp", "ep"):
        if mesh[axis] > 1 and not getattr(model, f"{axis}_plan"):  # before 5.20 transformers has no `ep_plan`
            raise ConfigError(f"{type(model).__name__} has no plan for {axis}={mesh[axis]}; leave {axis} out.")
    text, width = config.get_text_config(), dtype.itemsize
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    layers = [f"{name}." for name, module in named_modules(model) if type(module).__name__ in kinds]  # FSDP2's units
    held = whole = split_sizes = all_sizes = 0.0
    in_layers: dict[str, float] = defaultdict(float)
    for name, parameter, parts, sizes, experts in _parts(model, mesh):
        numel = parameter.numel() / parts
        data = mesh["fsdp"] if not experts else max(1, mesh["fsdp"] * mesh["tp"] // mesh["ep"])
        held += numel / data
        layer = next((each for each in layers if name.startswith(each)), None)
        if layer is None:
            whole += 2 * numel
        else:
            in_layers[layer] += numel
            all_sizes += sum(parameter.shape[-2:])
            split_sizes += sizes
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    local_heads = heads if mesh["tp"] == 1 else key_heads_per_rank(model.tp_plan, heads, mesh["tp"])
    if local_heads is None:
        raise ConfigError(f"{heads} heads of keys cannot be shared by tp={mesh['tp']} processes; give a divisor.")
    flops = flop_model(model)
    local_values = flops.gateway_values * local_heads // heads
    gathered = whole + _WHOLE_LAYERS * max(in_layers.values(), default=0) if mesh["fsdp"] > 1 else 0
    state = state_bytes(optim, width)
    static = held * (2 * width + state) + width * gathered
    activation = max(1, round(width * flops.activation_values * split_sizes / max(1.0, all_sizes)))
    room = None if gpu_bytes is None else max(0, int((USABLE * gpu_bytes - static) / activation))
    return MeshReport(
        mesh={axis: size for axis, size in mesh.items() if size > 1},
        processes=mesh["tp"] * mesh["fsdp"] * mesh["dp"],
        bytes_weights=round(width * held),
        bytes_gradients=round(width * held),
        bytes_optimizer=round(held * state),
        bytes_whole=round(width * gathered),
        bytes_per_gateway_token=gateway_bytes(local_values, width),
        bytes_per_activation_token=activation,
        gpu_bytes=gpu_bytes,
        max_tokens=room,
    )


def _parts(model: "PreTrainedModel", mesh: dict[str, int]) -> Iterator[tuple[str, nn.Parameter, int, float, bool]]:
    """Of each parameter: name, itself, processes that split it, input and output sizes there, whether of experts."""
    for name, parameter in model.named_parameters():
        sizes: list[float] = list(parameter.shape[-2:])
        if mesh["ep"] > 1 and _style(name, model.ep_plan) == _EXPERTS:
            yield name, parameter, mesh["ep"], sum(sizes), True
            continue
        dimension = _SPLIT.get(_style(name, model.tp_plan) or "") if mesh["tp"] > 1 else None
        if dimension is None or (dimension == 1 and parameter.ndim == 1):
            yield name, parameter, 1, sum(sizes), False
            continue
        if len(sizes) >= dimension:
            sizes[-dimension] /= mesh["tp"]
        yield name, parameter, mesh["tp"], sum(sizes), False


def _style(name: str, plan: dict[str, str]) -> str | None:
    """The style of a parameter: its own, or that of its module."""
    from treewise.nn.tensor_parallel import with_wildcards

    generic = with_wildcards(name)
    return plan.get(generic, plan.get(generic.rpartition(".")[0]))
