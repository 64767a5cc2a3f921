"""What joins a walk beside the text of one rank: images, recurrent states, router losses, other ranks, host memory.

Each is a `Guest`, made where a model, a setting or a record asks for it; a plain step has none. A walk asks its guests
which passes come when, what a micro-batch is before it runs, what a forward is given, what is added to the loss, and
what happens around the forward of a held micro-batch and around a whole training.

Letters: T tokens of a micro-batch, M model width, E experts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treewise.base.shapes import Float, Int
from treewise.nn.attention import Gateway, TreeMask
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.lm_head import AnyHead
from treewise.planning.plans import Layout, Pass, Plan


@dataclass(slots=True, eq=False)
class RunningMicroBatch:
    """A micro-batch as a walk runs it, kept from its first forward to its last.

    gateway: what it leaves, if it is open. root: what its backward starts from, if it is held. part: of it,
    where other ranks compute the rest (`distributed.context.ContextPart`); `layout` and `mask` are then those of the
    part. sees_trained_image: whether it holds features of a tower that is trained. rows: segments of recurrent
    layers. routes: recorded experts of its tokens. Of each forward: inside, the part of the model that runs and its
    arguments, in place of the decoder; exchange, what its attention layers exchange with other ranks.
    """

    index: int
    layout: Layout
    mask: TreeMask
    gateway: Gateway | None = None
    root: torch.Tensor | None = None
    part: Any = None
    sees_trained_image: bool = False
    rows: Any = None
    routes: Any = None
    inside: tuple[nn.Module, dict[str, Any]] | None = None
    exchange: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchOutput:
    """What one micro-batch computed.

    index: of the micro-batch in the plan. positions: [T] int64 tree positions of its tokens, ascending. hidden: [T, M]
    hidden rows in the model's dtype. router_logits: [T, E] of each layer with a router; empty unless they were asked
    for. head: returns the model's head. scores: gives values of edges, [E] each by name, from own rows ([E] int64,
    ascending), tokens ([E] int64) and names of outputs; None: the head does.
    """

    index: int
    positions: Int[np.ndarray, " T"]
    hidden: Float[Tensor, "T M"]
    router_logits: tuple[Float[Tensor, "T _"], ...]
    head: Callable[[], AnyHead]
    scores: Callable[[np.ndarray, np.ndarray, tuple[str, ...]], dict[str, Tensor]] | None = None


class Guest:
    """What joins a walk. Every default leaves the walk as it is.

    in_lockstep: ranks with other batches run the same passes. splits_tokens: other ranks compute the rest of every
    micro-batch. brings_images: it is the images of the walk's forest. may_meet_images: trees of other walks that this
    one stands for may have images. is_in_graph: nothing of it lies outside of the graph of the micro-batches.
    keeps_on_host: gateways wait in host memory. reads_routers: outputs hold router logits. needs_visit: before a
    training of several micro-batches it has to see all outputs once. within_backward: a context for trainings inside of
    a backward that is not the walk's, whose hooks add gradients up; None: they are handed on as those of parameters.
    """

    in_lockstep = splits_tokens = brings_images = may_meet_images = keeps_on_host = reads_routers = False
    is_in_graph = True
    needs_visit = False
    within_backward: Callable[[], AbstractContextManager[None]] | None = None

    def passes(self, _plan: Plan, passes: Iterable[Pass]) -> Iterable[Pass]:
        """The passes of a training in their order."""
        return passes

    def turns(self, _plan: Plan, turns: Iterator[None]) -> Iterator[None]:
        """A turn for each forward of a visit, and one more step after the last."""
        return turns

    def join(self, run: RunningMicroBatch) -> None:
        """Changes a micro-batch before its first forward."""

    def enter(self, run: RunningMicroBatch) -> None:
        """Adds what a forward is given."""

    def loss(self, _output: MicroBatchOutput) -> torch.Tensor | None:
        """A scalar that is added to the loss of a micro-batch; also called, without a graph, on what a visit shows."""
        return None

    def end_visit(self) -> None:
        """After a visit of all micro-batches."""

    def added_loss(self) -> float:
        """What it added to the loss of a step, after its walks."""
        return 0.0

    def report(self) -> object | None:
        """Statistics of a step, after its walks (`StepOutput.routing`)."""
        return None

    def replayed(self, _add_up: Callable[[Tensor], Tensor]) -> object | None:
        """What became of recorded experts, after a walk (`StepOutput.replay`). add_up: see the function below."""
        return None

    def holding(self, _lm: DecoderAndHead) -> AbstractContextManager[object]:
        """Around the forward of a held micro-batch."""
        return nullcontext()

    def training(self) -> AbstractContextManager[object]:
        """Around all passes of a training that has several roots."""
        return nullcontext()

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that compute parts of one micro-batch."""
        return tensor

    def add_up_by_name(self, values: dict[str, float]) -> dict[str, float]:
        """The same of numbers by name, of which a rank may lack some."""
        return values


class MeetsImages(Guest):
    """A walk without images that stands for one with some: gradients go as far as there."""

    may_meet_images = True


def add_up(guests: Sequence[Guest], tensor: Tensor) -> Tensor:
    """The sum over the ranks that compute parts of one micro-batch; all of them call this."""
    for guest in guests:
        tensor = guest.add_up(tensor)
    return tensor


def replay_of(guests: Sequence[Guest]) -> Any:
    """What became of recorded experts in a walk with these guests (`StepOutput.replay`); None without any."""
    return next((found for guest in guests if (found := guest.replayed(partial(add_up, guests))) is not None), None)
