"""Values of a whole forest as one differentiable function, at any budget; and losses that need all of them at once.

A `Reader` maps the output of each micro-batch to entries of a result over the whole forest. With one micro-batch the
result is an ordinary graph. With several, the forward runs without a graph, and the backward is the walk, whose
gradients autograd gets as those of the trained parameters; so a result may be used in any loss, more than once in a
graph, under autocast, and with `torch.autograd.grad`, `inputs=` and hooks. Second derivatives are an error.

A loss that is no sum over single tokens (ratios of sequences, preferences, a caller's function) walks twice: a visit
for the values, then the loss on them, then a training with its gradients (`JointLoss`, `FunctionLoss`).

Letters: T tokens of a micro-batch or of the forest, E entries of a micro-batch, F tokens of all trajectories.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from treewise.base.progress import tell_progress
from treewise.base.shapes import Bool, Context, Float, Int
from treewise.engine.carried import refuse_no_gradient
from treewise.engine.edge_scorer import EdgeScorer, Entries, Values
from treewise.engine.prepared import StepOutput
from treewise.engine.step import LossOf, StepLoss, Walk, step_output
from treewise.errors import ConfigError
from treewise.nn.gradient_hooks import spare_hooks_no_gradient
from treewise.nn.gradients import gradients_restored
from treewise.nn.guest import MicroBatchOutput
from treewise.nn.platform.tensors import Autocast, to_device
from treewise.objectives.sft import described
from treewise.tree.forest import Forest

LossFunction = Callable[[list[Tensor]], Tensor]  # from the log-probs of each trajectory to a scalar


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """How to read values from the micro-batches of a walk.

    read: the entries of one micro-batch, each of which no other micro-batch may give; None if it has none. names: of
    the values. num_entries: length of the result. without_gradient: names of values that carry no gradient.
    reads_routers: whether `read` needs router logits. places: [n] int64, where each entry stands in the result; None:
    at its own index.
    """

    read: Callable[[MicroBatchOutput], Entries | None]
    names: tuple[str, ...]
    num_entries: int
    without_gradient: tuple[str, ...] = ()
    reads_routers: bool = False
    places: np.ndarray | None = None

    def where(self, index: Int[np.ndarray, " E"], device: torch.device) -> Int[Tensor, " E"]:
        """Where entries stand in the result, on a device."""
        return to_device(index if self.places is None else self.places[index], device)


def tree_values(walk: Walk, readers: Sequence[Reader]) -> list[Values]:
    """For each reader, its [num_entries, ...] tensors by name; entries that no micro-batch gives are zero.

    Raises:
        ConfigError: in lockstep with gradients enabled, unless walks may run within a backward; in the backward, if
            weights changed since the forward.
    """
    if walk.in_lockstep and walk.within_backward is None and torch.is_grad_enabled():
        raise ConfigError(
            "with sharded parameters, values that carry gradients would run their backward outside of a step, where "
            "other ranks do not take part; give the loss to engine.step as a function, or use torch.no_grad()."
        )
    if not torch.is_grad_enabled():
        return _visited(walk, readers)  # by which guests count, too
    if walk.is_one_graph:
        return _in_one_graph(_only_forward(walk), readers)
    # Has autograd call the backward also where no parameter is trained, which is an error there.
    anchor = torch.zeros((), device=walk.lm.device, requires_grad=True)
    parameters = walk.lm.model.parameters() if walk.within_backward is None else ()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    tensors = iter(_TreeValues.apply(anchor, walk, tuple(readers), *trained))
    return [{name: next(tensors) for name in reader.names} for reader in readers]


def backward_through(
    walk: Walk, readers: Sequence[Reader], loss_of: Callable[[list[Values]], Tensor]
) -> Float[Tensor, ""]:
    """Backward of a loss on values of the whole forest; returns the loss, a scalar that is detached.

    The training with the loss's gradients runs after the backward of the loss and not inside of it, as it would with
    `tree_values`: modules that are sharded by FSDP2 take a forward within a backward for a recomputation, keep their
    parameters whole after it and gather none in the backward. Their collectives would then differ from those of a rank
    whose empty pass runs outside of a backward, and memory would hold the whole model.

    loss_of: maps each reader's tensors by name to a scalar that requires a gradient.

    Raises:
        UnsupportedModelError: nothing that the walk computes requires a gradient.
    """
    if walk.is_one_graph:
        output = _only_forward(walk)
        values, more = _in_one_graph(output, readers), walk.loss_of_guests(output)
        if not any(tensor.requires_grad for value in values for tensor in value.values()):
            refuse_no_gradient(walk.lm, walk.guests)
            _set_leaves(values, readers)  # text where a tower alone is trained: the loss may ask for a gradient
        loss = loss_of(values)
        (loss if more is None else loss + more.to(loss.dtype)).backward()
        return loss.detach()
    values = _visited(walk, readers)
    _set_leaves(values, readers)
    loss = loss_of(values)
    loss.backward()
    grads_of = [{name: tensor.grad for name, tensor in tensors.items()} for tensors in values]
    walk.train(_loss_with_gradients(readers, grads_of))
    return loss.detach()


def _set_leaves(values: Sequence[Values], readers: Sequence[Reader]) -> None:
    """Has a loss of values without a graph find its gradients by them."""
    for reader, tensors in zip(readers, values, strict=True):
        for name, tensor in tensors.items():
            tensor.requires_grad_(name not in reader.without_gradient)


def token_reader(
    forest: Forest, is_needed: Bool[np.ndarray, " T"] | None = None, outputs: tuple[str, ...] = ("log_probs",)
) -> Reader:
    """Reads [T] values of the tree's own tokens, by tree position.

    is_needed: [T] bool; other tokens, and first tokens, are 0 and cost no projection. outputs: names out of
    `lm_head.OUTPUTS`.
    """
    has_parent = forest.parent >= 0
    positions = np.flatnonzero(has_parent if is_needed is None else has_parent & is_needed)
    return Reader(EdgeScorer(forest, positions, outputs=outputs), outputs, forest.num_tokens, places=positions)


def logprob_reader(forest: Forest, *, trained_only: bool) -> Reader:
    """Reads [T] log-probs by tree position, 0 for first tokens; `trained_only`: for all that no trajectory trains."""
    return token_reader(forest, forest.is_trained if trained_only else None)


def hidden_reader(forest: Forest) -> Reader:
    """Reads the [T, M] hidden rows by tree position."""
    return Reader(lambda output: (output.positions, {"hidden": output.hidden}), ("hidden",), forest.num_tokens)


def restored_logprobs(values: Values, forest: Forest, *, trained_only: bool) -> list[Tensor]:
    """[length - 1] log-probs of each trajectory, or those of its trained tokens, from those of the tree's tokens."""
    if trained_only:
        return restore(values["log_probs"], forest, forest.flat_stream("loss_weights") != 0)
    return [logprobs[1:] for logprobs in restore(values["log_probs"], forest)]


class JointLoss(StepLoss):
    """The loss of an objective whose terms depend on one another, as sequence-level ratios do: walked twice."""

    def backward(self, walk: Walk) -> None:
        backward_through(walk, [self._reader()], lambda values: self.of_terms(values[0]))

    def evaluate(self, walk: Walk) -> None:
        self.of_terms(tree_values(walk, [self._reader()])[0])

    def output(self, walk: Walk, *, is_part: bool = False) -> StepOutput:
        """What the step reports; the values of all ranks' tokens were added up before the loss."""
        return super().output(walk, is_part=is_part)

    def _reader(self) -> Reader:
        """Reads the [P] values of all terms, in their order."""
        return Reader(self.score, self.objective.outputs, len(self.terms.positions))


class FunctionLoss:
    """The loss of a function of all trajectories' log-probs, of trained tokens alone if `trained_only`."""

    def __init__(self, forest: Forest, function: LossFunction, *, trained_only: bool) -> None:
        self._forest, self._function, self._trained_only = forest, function, trained_only
        self._value: Tensor | None = None

    def backward(self, walk: Walk) -> None:
        """Raises `ConfigError`: the function returns no scalar, or one without a gradient."""
        self._value = backward_through(walk, [self._reader()], self._with_gradient)

    def evaluate(self, walk: Walk) -> None:
        """Raises `ConfigError`: the function returns no scalar."""
        self._value = self._of(tree_values(walk, [self._reader()]))

    def output(self, walk: Walk) -> StepOutput:
        """What the step reports, after its walks."""
        assert self._value is not None
        return step_output(walk, float(self._value), self._forest.num_flat_tokens - self._forest.num_trajectories)

    def _reader(self) -> Reader:
        return logprob_reader(self._forest, trained_only=self._trained_only)

    def _of(self, values: list[Values]) -> Tensor:
        loss = self._function(restored_logprobs(values[0], self._forest, trained_only=self._trained_only))
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise ConfigError(f"an objective must return a scalar tensor, found {described(loss)}.")
        return loss

    def _with_gradient(self, values: list[Values]) -> Tensor:
        loss = self._of(values)
        if not loss.requires_grad:
            raise ConfigError("the loss that the function returned has no gradient; compute it from the log-probs.")
        return loss


def restore(
    values_T: Float[Tensor, "T ..."], forest: Forest, is_wanted_F: Bool[np.ndarray, " F"] | None = None
) -> list[Float[Tensor, "_ ..."]]:
    """Values of each trajectory's tokens, [length, ...], from those of the tree's ([T, ...]).

    The transpose of this gather is gradient restoration: gradients of a shared token add up. is_wanted_F: only those
    tokens, chosen on the host, which would have to wait for a mask of the device.
    """
    index_F, lengths_N = forest.path_index, forest.path_lengths
    if is_wanted_F is not None:
        index_F = index_F[is_wanted_F]
        lengths_N = np.add.reduceat(is_wanted_F, forest.path_offsets[:-1], dtype=np.int64)
    return list(values_T[to_device(index_F, values_T.device)].split(lengths_N.tolist()))


def _only_forward(walk: Walk) -> MicroBatchOutput:
    """The only micro-batch of a forest. Its backward, two thirds of the work, is the caller's."""
    num_tokens, what = walk.plan.forest.num_tokens, "forward and backward"
    tell_progress(what, 0, num_tokens)
    output = walk.forward(0)
    tell_progress(what, num_tokens // 3, num_tokens)
    return output


def _in_one_graph(output: MicroBatchOutput, readers: Sequence[Reader]) -> list[Values]:
    """Each reader's values of the only micro-batch of a forest, in its graph."""
    values = [_joined([reader.read(output)], reader, output.hidden) for reader in readers]
    return [{name: _FirstOrder.apply(tensor) for name, tensor in value.items()} for value in values]


class _FirstOrder(torch.autograd.Function):
    """Identity whose backward is an error with `create_graph=True`."""

    @staticmethod
    def forward(_: object, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_: object, grad: Tensor) -> Tensor:
        _refuse_second_order()
        return grad


class _TreeValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        _: Tensor,
        walk: Walk,
        readers: tuple[Reader, ...],
        *trained: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.walk, ctx.readers, ctx.trained = walk, readers, trained
        ctx.autocast = Autocast.now(walk.lm.device.type)
        versions = [(parameter, _version(parameter)) for parameter in walk.lm.model.parameters()]
        results = _visited(walk, readers)
        # PEFT's parametrised experts bump `_version` in every forward; such parameters are excluded from the
        # changed-weights check.
        ctx.versions = [(each, version) for each, version in versions if _version(each) == version]
        tensors = [
            (values[name], name in reader.without_gradient)
            for reader, values in zip(readers, results, strict=True)
            for name in reader.names
        ]
        ctx.mark_non_differentiable(*(tensor for tensor, is_constant in tensors if is_constant))
        ctx.set_materialize_grads(False)
        return tuple(tensor for tensor, _ in tensors)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the walk, which starts with none; autograd adds them to those that are there."""
        _refuse_second_order()
        if any(_version(each) != version for each, version in ctx.versions):
            raise ConfigError(
                "weights were changed between the forward and the backward of values on a tree, which the backward "
                "computes again. Call backward before the optimizer's step."
            )
        walk: Walk = ctx.walk
        readers: Sequence[Reader] = ctx.readers
        trained: Sequence[nn.Parameter] = ctx.trained
        tensors = iter(grads)
        grads_of = [{name: next(tensors) for name in reader.names} for reader in readers]
        came: list[Tensor | None] = [None] * len(trained)
        if any(grad is not None for grad in grads):
            within = walk.within_backward  # of a program that takes gradients where they are; else they are handed on
            with (
                gradients_restored(walk.lm.model) if within is None else within(),
                torch.enable_grad(),
                ctx.autocast.again(),
            ):
                walk.train(_loss_with_gradients(readers, grads_of))
                came = [each.grad for each in trained]
        spare_hooks_no_gradient(each for each, grad in zip(trained, came, strict=True) if grad is None)
        return None, None, None, *came


def _refuse_second_order() -> None:
    """Within a backward, gradients are enabled exactly with `create_graph=True`."""
    if torch.is_grad_enabled():
        raise ConfigError(
            "values on a tree have first derivatives only; create_graph=True asks for more. Leave it out, or compute "
            "this term with the model's own forward."
        )


def _loss_with_gradients(readers: Sequence[Reader], grads_of: Sequence[dict[str, Tensor | None]]) -> LossOf:
    """The loss of each micro-batch whose gradients with respect to its values are the given ones of the result."""

    def loss_of(output: MicroBatchOutput) -> Tensor | None:
        dots = [
            dot
            for reader, grad_of in zip(readers, grads_of, strict=True)
            if (dot := _dot(reader, output, grad_of)) is not None
        ]
        return torch.stack(dots).sum() if dots else None

    return loss_of


def _dot(reader: Reader, output: MicroBatchOutput, grad_of: dict[str, Tensor | None]) -> Tensor | None:
    """A scalar whose gradients are those of the result, for one micro-batch: values times their gradients, summed."""
    grads = {name: grad for name, grad in grad_of.items() if grad is not None}
    if not grads:
        return None
    index: list[Tensor] = []

    def dot(values: Values, entries: np.ndarray, part: slice) -> Tensor:
        if not index:
            index.append(reader.where(entries, output.hidden.device))
        with_gradient = [name for name in grads if values[name].requires_grad]
        dots = [(values[name] * grads[name][index[0][part]].to(values[name].dtype)).sum() for name in with_gradient]
        return torch.stack(dots).sum() if dots else output.hidden.sum() * 0

    if isinstance(reader.read, EdgeScorer):
        found = reader.read.loss(output, dot)
        return None if found is None else found[0]
    read = reader.read(output)
    return None if read is None else dot(read[1], read[0], slice(None))


def _version(parameter: Tensor) -> int:
    """How often a parameter was changed in place; autograd checks the tensors that it saves by the same number."""
    return parameter._version


@torch.no_grad()
def _visited(walk: Walk, readers: Sequence[Reader]) -> list[Values]:
    entries: list[list[Entries | None]] = [[] for _ in readers]
    hidden = torch.empty(0)

    def use(output: MicroBatchOutput) -> None:
        nonlocal hidden
        for reader, collected in zip(readers, entries, strict=True):
            collected.append(reader.read(output))
        hidden = output.hidden

    walk.visit(use)
    results = [_joined(each, reader, hidden) for each, reader in zip(entries, readers, strict=True)]
    return [{name: walk.add_up(tensor) for name, tensor in values.items()} for values in results]


def _joined(entries: Sequence[Entries | None], reader: Reader, hidden: Float[Tensor, "T M"]) -> Values:
    """A reader's result from the entries of all micro-batches. hidden: [T, M] of any of them."""
    present = [entry for entry in entries if entry is not None]
    if not present:
        # Nothing to read; the result stays connected to the model, so that its backward is a zero and not an error.
        wide = torch.promote_types(hidden.dtype, torch.float32)
        zeros = torch.zeros(reader.num_entries, device=hidden.device, dtype=wide)
        return {name: hidden.sum().to(wide) * zeros for name in reader.names}
    index = reader.where(np.concatenate([index for index, _ in present]), hidden.device)
    result = {}
    for name in reader.names:
        values = torch.cat([values[name] for _, values in present])
        zeros = torch.zeros(reader.num_entries, *values.shape[1:], dtype=values.dtype, device=values.device)
        result[name] = zeros.index_copy(0, index, values)
    return result
