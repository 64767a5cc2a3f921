"""The peak memory of a step, before it runs: the walk itself on tensors without data, every allocation counted.

Tensors on torch's `meta` device have shapes and storages but no memory, so the model's own layers, the gateways, the
head, adapters and gradient checkpointing allocate and free there as they will in the step, whatever the architecture;
nothing is fitted. Of a plan with many micro-batches only those run that are alive at its fullest pass.

Not counted: what an objective keeps beside the values that it reads, and a vision tower, but for what it keeps for the
backward (`nn.flops`).
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from treewise.base.progress import busy_with
from treewise.engine.edge_scorer import EdgeScorer
from treewise.engine.step import LossOf, Walk
from treewise.errors import UnsupportedModelError
from treewise.nn.flops import FlopModel, gateway_bytes
from treewise.nn.guest import Guest, MeetsImages, MicroBatchOutput
from treewise.nn.lm_head import sized_as
from treewise.nn.model import mixes_in_order, split_model
from treewise.nn.model_flops import flop_model
from treewise.nn.platform.releases import asks_every_device_for_autocast
from treewise.nn.platform.tensors import has_data
from treewise.nn.platform.versions import part_of_torch
from treewise.nn.router_loss import RouterCounts, RouterLoss, RouterLossRule
from treewise.planning.plans import BACKWARD, FORWARD, HOLD, TRAIN, Plan
from treewise.tree.forest import Forest

if TYPE_CHECKING:
    from torch._ops import OpOverload

Arguments = tuple[Any, ...]  # of an operation
_grouped_mm = part_of_torch("ops.aten._grouped_mm.default")
_attention = part_of_torch("ops.aten._scaled_dot_product_flash_attention_for_cpu.default")
_attention_backward = part_of_torch("ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
_aten = torch.ops.aten
_device = torch.ops.prim.device.default  # what a tensor that claims to be elsewhere is asked for its device by
_CPU, _META = torch.device("cpu"), torch.device("meta")
_sum = _aten.add.Tensor
_running_node = part_of_torch("_C._current_autograd_node")
_num_owners = part_of_torch("_C._storage_Use_Count")
_without_dispatch = part_of_torch("_C._DisableTorchDispatch")
_IN_PLACE = "the tensor that was given"
_POINTWISE = (_aten.add, _aten.add_, _aten.sub, _aten.mul, _aten.mul_)
_TILES = ((768, 256), (192, 64), (0, 32))  # of attention on a CPU: queries from which on, rows of a tile
# Over what operations return: what their kernels allocate inside, for sorting or a contiguous copy.
INSIDE_KERNELS = 1.03
# Of the resident set, on a CPU: an allowance above all but two cases measured (LOG.md). Holes in
# glibc's heap, as a part of what is alive: tensors are aligned to 64 bytes, for which glibc looks for 96 bytes more, so
# none fits the hole of another of its size. Pages of libraries and buffers of MKL that a larger step is the first to
# touch. Kernels that oneDNN compiles for each size of a micro-batch in half precision, with their work space, as long
# as it keeps them (`nn.platform.memory.keep_few_kernels`).
HOLES, LIBRARIES, KERNELS, KEPT_KERNELS = 1 / 3, 44 * 2**20, 14 * 2**20, 56 * 2**20


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes at the peak of a step, beside the model and its gradients.

    activations: what autograd keeps for live micro-batches. gateways: keys, values and their gradients. images: the
    graph of the tower. others: logits, gradients between layers, the head's. allocator: what the resident set
    of a CPU process has beyond tensors.
    """

    activations: int
    gateways: int
    images: int
    others: int
    allocator: int = 0

    @property
    def live(self) -> int:
        """Bytes of all tensors that are alive at the peak."""
        return self.activations + self.gateways + self.images + self.others

    @property
    def total(self) -> int:
        """Bytes of live tensors and of what the allocator keeps beside them."""
        return self.live + self.allocator


def without_data(model: nn.Module, *, claims_cpu: bool = False) -> nn.Module:
    """A copy of a model on the `meta` device, in training mode, with gradients; a model that is there is not copied.

    claims_cpu: its tensors claim to be on the CPU.
    """
    tensors = [*model.parameters(), *model.buffers()]
    stand_ins: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        shape = OnCpu(shape) if claims_cpu else shape
        stand_ins[id(tensor)] = nn.Parameter(shape, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shape
    is_there = not claims_cpu and all(each.is_meta for each in tensors)
    twin = (model if is_there else copy.deepcopy(model, stand_ins)).train()
    for parameter in twin.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    return twin


@busy_with("predicting the memory of a step")
def step_memory(
    model: nn.Module,
    plan: Plan,
    device_type: str = "cpu",
    *,
    autocast: torch.dtype | None = None,
    router_loss: RouterLossRule | None = None,
    outputs: tuple[str, ...] = ("log_probs",),
    measured: tuple[str, ...] = (),
) -> StepMemory:
    """The largest moment of a step of `plan`, whose tokens all count as trained as they do in SFT.

    model: a transformers causal language model, PEFT-wrapped or not, with or without data. device_type: where it will
    run. autocast: the dtype of the autocast around the step. outputs: what the objective reads of each token
    (`Objective.outputs`). measured: those that its loss has no gradient for.

    Raises:
        UnsupportedModelError: layers whose shapes depend on values, as loops over the experts that were chosen.
    """
    costs = flop_model(model)
    dtype = autocast or next(model.parameters()).dtype
    fullest = _fullest(plan, costs, dtype, has_states=mixes_in_order(model))
    asks_for_autocast = autocast is not None or _adapts_parameters(model) or asks_every_device_for_autocast()
    stand_in = "cpu" if asks_for_autocast else "meta"  # torch has no autocast for `meta`, nor can it be disabled there
    under_autocast = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    with sized_as(device_type, stand_in), under_autocast:
        twin = without_data(model, claims_cpu=asks_for_autocast)
        lm = split_model(twin)
        by_rows: AbstractContextManager[object] = nullcontext()
        if not plan.is_whole and device_type == "cpu":
            by_rows = lm.decoder.get_input_embeddings().register_forward_hook(_row_gradients)
        guests = list[Guest]([MeetsImages()] if plan.forest.has_images else [])
        guests += [] if router_loss is None else [_CountedRouters(router_loss, plan.forest)]
        walk = Walk(lm, fullest, "cascade", guests)
        with by_rows, LiveBytes(twin) as live:
            loss_of, kept = _loss(plan.forest, outputs, measured), [0]

            def of_micro_batch(output: MicroBatchOutput) -> torch.Tensor | None:
                kept[0] = live.now
                return loss_of(output)

            try:
                walk.train(of_micro_batch)
            except UnsupportedModelError:
                raise
            except NotImplementedError as error:  # of torch, on `meta`
                raise UnsupportedModelError(
                    f"{type(model).__name__}: what a step takes cannot be predicted, because shapes of its layers "
                    "depend on values, as those of a loop over the experts that were chosen do; transformers' "
                    f"experts_implementation=grouped_mm has no such loop. {str(error).partition('. ')[0]}"
                ) from error
    peak = round(INSIDE_KERNELS * live.peak)
    gateways = gateway_bytes(costs.gateway_values, dtype.itemsize) * fullest.timeline[-1][0]
    activations = max(0, kept[0] - gateways)
    images = dtype.itemsize * costs.kept_image_values(plan)
    allocator = 0
    if device_type == "cpu":  # bytes of the resident set of the process beyond its tensors
        sizes = {batch.num_tokens for batch in plan.micro_batches} if dtype.itemsize < 4 else ()
        allocator = round(HOLES * peak) + LIBRARIES + min(KERNELS * len(sizes), KEPT_KERNELS)
    return StepMemory(activations, gateways, images, peak - activations - gateways, allocator)


def _adapts_parameters(model: nn.Module) -> bool:
    """Whether adapters of PEFT stand on parameters, as on experts: these disable autocast in their forward."""
    return any(getattr(each, "target_parameters", None) for each in getattr(model, "peft_config", {}).values())


class _CountedRouters(Guest):
    """The losses of routers, whose choices the step has counted."""

    reads_routers = True

    def __init__(self, rule: RouterLossRule, forest: Forest) -> None:
        self._rule, self._multiplicity = rule, forest.multiplicity

    def loss(self, output: MicroBatchOutput) -> torch.Tensor:
        counts = RouterCounts(np.ones(output.router_logits[0].shape[-1]), 1.0)
        return RouterLoss(self._rule, self._multiplicity, counts).part(output.router_logits, output.positions)


def _loss(forest: Forest, outputs: tuple[str, ...], measured: tuple[str, ...]) -> LossOf:
    """A loss on the values of trained tokens."""
    score = EdgeScorer(forest, np.flatnonzero((forest.parent >= 0) & forest.is_trained), outputs=outputs)

    def of_part(values: dict[str, torch.Tensor], *_: object) -> torch.Tensor:
        return torch.stack([each.sum() for name, each in values.items() if name not in measured]).sum()

    def of_outputs(output: MicroBatchOutput) -> torch.Tensor | None:
        found = score.loss(output, of_part)
        return None if found is None else found[0]

    return of_outputs


def _fullest(plan: Plan, costs: FlopModel, dtype: torch.dtype, *, has_states: bool = False) -> Plan:
    """The plan with only those passes that its fullest ones need to find alive what they do in the step.

    These are the forwards whose gateways or graphs are alive then, what ends those of an earlier one, and the backward
    before, by which gateways and head have gradients. The fullest are the pass with most graphs, each of which may hold
    casts of weights, that with most live tokens and gateways, the largest one (with gradient checkpointing tokens that
    are held take little), and of a model with recurrent states the largest with others below it, as those states have
    gradients. Of equal ones the deepest counts, which sees most keys, then the last, which finds most gradients.
    """
    if plan.is_whole:
        return plan
    width = dtype.itemsize
    token, gateway = width * costs.activation_values, gateway_bytes(costs.gateway_values, width)
    opened: dict[int, int] = {}  # micro-batch: index of its first pass
    ends: dict[int, int] = {}  # index of the first pass of an open micro-batch: that of its last
    alive: list[list[int]] = []  # at each pass, the indices of those
    # Of passes with a backward: graphs held, bytes, own tokens, the deepest of these (which sees most keys), index.
    backwards: list[tuple[int, int, int, int, int]] = []
    for index, (step, (gateway_tokens, live_tokens)) in enumerate(zip(plan.schedule, plan.timeline, strict=True)):
        if step.action in (FORWARD, HOLD):
            opened[step.micro_batch] = index
        alive.append(list(opened.values()))
        if step.action in (TRAIN, BACKWARD):
            num_bytes = token * live_tokens + gateway * gateway_tokens
            num_graphs = sum(plan.schedule[each].action == HOLD for each in alive[-1])
            depths = plan.forest.depth[plan.micro_batches[step.micro_batch].positions()]
            backwards.append((num_graphs, num_bytes, len(depths), int(depths.max()), index))
            if step.micro_batch in opened:
                ends[opened.pop(step.micro_batch)] = index
    fullest = {max(backwards, key=lambda each: each[by:])[-1] for by in range(3)}
    opening = [
        backward for backward in backwards if plan.micro_batches[plan.schedule[backward[-1]].micro_batch].is_open
    ]
    if opening and has_states:
        fullest.add(max(opening, key=lambda each: each[2:])[-1])
    before = {max((each[-1] for each in backwards if each[-1] < index), default=index) for index in fullest}
    needed, found = fullest | before, set[int]()
    while needed != found:
        found = set(needed)
        needed |= {each for index in found for each in alive[index]}
        needed |= {ends[index] for index in found if ends.get(index, len(alive)) < max(fullest)}
    return replace(plan, schedule=tuple(plan.schedule[index] for index in sorted(needed)))


def _row_gradients(module: nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
    """In place of a sparse gradient of the embedding, which `meta` lacks, that of its rows; both are of one size."""
    return output.detach().requires_grad_() if module.weight.requires_grad else output


class OnCpu(torch.Tensor):
    """A tensor on `meta` that claims to be on the CPU, so what depends on the device, as autocast does, finds one."""

    @staticmethod
    def __new__(cls, meta: torch.Tensor) -> "OnCpu":
        """In the storage of `meta`."""
        made: OnCpu = torch.Tensor._make_subclass(  # noqa: SLF001
            cls, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=_CPU
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: "OpOverload", types: object, args: Arguments = (), kwargs: dict[str, object] | None = None
    ) -> object:
        return _CPU if func is _device else _on_meta(func, args, kwargs or {})


class LiveBytes(TorchDispatchMode):
    """Inside, the bytes of storages that operations made and that are alive (`now`), and the most so far (`peak`).

    Those of `model` and of its gradients are left out. Where its tensors claim to be on the CPU, so do new ones.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        tensors = [*model.parameters(), *model.buffers()]
        self._results = Results(makes_shapes=any(isinstance(each, OnCpu) for each in tensors))
        for each in [*tensors, *(tensor.grad for tensor in tensors if tensor.grad is not None)]:
            self._watch(each.untyped_storage(), 0)

    def __torch_dispatch__(
        self, func: "OpOverload", types: object, args: Arguments = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if func is _device:
            return _CPU
        if func is _sum and _adds_in_place(args[0], args[1]):
            return args[0]
        result = self._results.of(func, args, kwargs or {})
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor) and each.layout is torch.strided:
                storage = each.untyped_storage()
                self._watch(storage, storage.nbytes())
        self.peak = max(self.peak, self.now + _work_space(func, args, result))
        return result

    def _watch(self, storage: torch.UntypedStorage, size: int) -> None:
        if id(storage) in self._known:
            return
        self._known.add(id(storage))
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, id(storage), size).atexit = False

    def _free(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.now -= size


def _adds_in_place(first: object, second: object) -> bool:
    """Whether this sum is one of two gradients of one tensor, by autograd itself, which does it in place where nothing
    else holds the first; but not under a mode that sees operations, nor on `meta`.
    """
    if torch.is_grad_enabled() or isinstance(_running_node(), NoneType | BackwardCFunction) or first is second:
        return False
    assert isinstance(first, torch.Tensor)
    return _num_owners(first.untyped_storage()._cdata) == 2  # noqa: SLF001 (it and the object of this line)


class Results:
    """What operations on tensors without data return, remembered by what they were given: torch derives it in Python,
    and most layers give the same.

    makes_shapes: what is made from no tensor claims to be on the CPU.
    """

    def __init__(self, *, makes_shapes: bool = False) -> None:
        self._makes_shapes = makes_shapes
        self._known: dict[
            object, object
        ] = {}  # forms of what an operation returned, by it and the forms of its arguments

    def of(self, func: "OpOverload", args: Arguments, kwargs: dict[str, object]) -> object:
        """What `func` returns, without data, of a form that is kept for the next call."""
        if func.is_view:  # of one tensor, the first, and torch knows the shape at once
            return func(*args, **kwargs) if type(args[0]) is not OnCpu else _view(func, args, kwargs)
        target = kwargs.get("out", args[0] if args else None)
        key = func, _forms(args), _forms(tuple(kwargs.items()))
        known = self._known.get(key)
        if known is not None:
            return target if known is _IN_PLACE else _made(known)
        result = _on_meta(
            _grouped_product if func is _grouped_mm else func, args, kwargs, makes_shapes=self._makes_shapes
        )
        if _is_new(result, (args, *kwargs.values())):
            self._known[key] = _forms(result)
            return result
        is_same = result is target and isinstance(result, torch.Tensor) and not has_data(result)
        if is_same and key[1:] == (_forms(args), _forms(tuple(kwargs.items()))):
            self._known[key] = _IN_PLACE
        return result


def _view(func: "OpOverload", args: Arguments, kwargs: dict[str, object]) -> object:
    return _wrapped(func(_twin(args[0]), *args[1:], **kwargs), {})


def _on_meta(
    func: Callable[..., object], args: Arguments, kwargs: dict[str, object], *, makes_shapes: bool = False
) -> object:
    """What `func` returns. In place of tensors that claim to be on the CPU it sees their twins on `meta`, in the same
    storages, and so in place of tensors with data beside them. makes_shapes: of no tensors, too."""
    given = _tensors((args, *kwargs.values()))
    if not any(type(each) is OnCpu for each in given) and not (makes_shapes and not given and "device" in kwargs):
        return func(*args, **kwargs)
    if torch.Tag.inplace_view in getattr(func, "tags", ()):  # another shape of the tensor itself: no data count
        with _without_dispatch():
            return func(*args, **kwargs)
    # No nested functions that call themselves: a cycle would hold the twins, and their storages, until it is collected.
    twins = {id(each): _twin(each) for each in given}
    found = func(
        *(_replaced(each, twins) for each in args), **{name: _replaced(each, twins) for name, each in kwargs.items()}
    )
    return _wrapped(found, {id(twins[id(each)]): each for each in given})


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in _tensors(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def _replaced(value: object, twins: dict[int, torch.Tensor]) -> object:
    """With twins in place of tensors, and `meta` of devices."""
    if isinstance(value, tuple | list):
        return [_replaced(each, twins) for each in value]
    return _META if isinstance(value, torch.device) else twins.get(id(value), value)


def _wrapped(value: object, given: dict[int, torch.Tensor]) -> object:
    """With the tensors that were given in place of their twins, and on the CPU what is new, by its own account."""
    if isinstance(value, tuple | list):
        return type(value)(_wrapped(each, given) for each in value)
    return given[id(value)] if id(value) in given else OnCpu(value) if isinstance(value, torch.Tensor) else value


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor on `meta`: in its storage, if it has no data."""
    if has_data(tensor):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
    alike = torch.empty(0, dtype=tensor.dtype, device=_META)
    return alike.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _made(forms: Any) -> object:
    """A value of these forms."""
    kind, *rest = forms
    if kind is not torch.Tensor and kind is not OnCpu:
        return kind(_made(each) for each in rest) if kind in (tuple, list) else rest[0]
    size, strides, dtype, _ = rest
    made = torch.empty_strided(size, strides, dtype=dtype, device=_META)
    return made if kind is torch.Tensor else OnCpu(made)


def _forms(value: object) -> tuple[object, ...]:
    """Of tensors without data whether they claim to be on the CPU, size, strides, dtype; of other values their type and
    they themselves."""
    if type(value) is OnCpu:
        return OnCpu, value.shape, value.stride(), value.dtype, None
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, tuple | list):
        return type(value), *map(_forms, value)
    return type(value), value


def _is_new(result: object, given: object) -> bool:
    """Whether a result is tensors without data in storages of their own, each no larger than it needs."""
    before = {id(tensor.untyped_storage()) for tensor in _tensors(given)}
    for each in result if isinstance(result, tuple | list) else (result,):
        if not isinstance(each, torch.Tensor) or has_data(each):
            return False
        storage = each.untyped_storage()
        alike = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta").untyped_storage()
        if id(storage) in before or storage.nbytes() != alike.nbytes():
            return False
        before.add(id(storage))
    return True


def _work_space(func: "OpOverload", args: Sequence[torch.Tensor], result: object) -> int:
    """Bytes that a kernel of the CPU allocates inside, where they are more than a few.

    Attention: scores of a tile in float32 and their gradients, for each thread, in half precision both once more, and
    keys and values for every head. Sums and products of two dtypes: a copy of the narrower tensor. Log-sum-exp: terms.
    """
    if func is _aten.logsumexp.default:
        return args[0].nbytes
    if func in (_attention, _attention_backward):
        query, key = args[func is _attention_backward :][:2]
        rows = next(most for least, most in _TILES if query.shape[2] >= least)
        tile = min(query.shape[2], rows) * min(key.shape[2], 512) * torch.get_num_threads()
        if query.itemsize >= 4:
            return 2 * 4 * tile
        return 2 * 6 * tile + 2 * key.shape[2] * query.shape[1] * query.shape[3] * query.itemsize
    if func.overloadpacket in _POINTWISE:
        assert isinstance(result, torch.Tensor)
        narrow = (each for each in args if isinstance(each, torch.Tensor) and each.dtype != result.dtype)
        return sum(each.numel() for each in narrow) * result.itemsize
    return 0


def _grouped_product(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The result of `aten::_grouped_mm` without data, which torch has in bfloat16 alone."""
    shape = (left.shape[0], right.shape[-1])
    return left.new_empty(shape if right.dim() == 3 else (len(offsets), *shape))
