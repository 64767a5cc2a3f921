"""A window: calls between two optimizer steps share what they have in common, whatever batches they came in.

Weights do not change between two steps, so what one call computed stays valid in the next. A call's forward computes
the tokens that no earlier call has computed: keys and values of the others are there, as in a gateway. What it hands
out are hidden rows, which heads and losses read; what comes back are their gradients, which are recorded. At the end
of the window the decoder is walked once for all calls, and takes these gradients.

    cost of a tree token = forward, and at the end backward (2): 3, where the graphs of all forwards are held
                         = forward, and at the end forward and backward (3): 4, where they are not

Graphs are held as long as a window has at most `hold_tokens`; beyond these they are let go, and the end is a walk over
the union of all rows under the engine's budget. Beyond `max_tokens` a call is computed by itself.

A window answers for one function of the model at a time: other adapters, another mode or another autocast are another
function, with keys and values of their own. One of them at a time has gradients.
"""

import logging
import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from treewise.base.shapes import Context
from treewise.engine.step import Walk, with_less_memory
from treewise.engine.window.chunks import Function, FunctionMark
from treewise.engine.window.guards import Marker, Weights
from treewise.engine.window.known_rows import merged
from treewise.engine.window.scores import Scores
from treewise.errors import ConfigError, UnsupportedModelError, bytes_as_text, num
from treewise.nn.decoder import DecoderAndHead, all_modules, all_parameters
from treewise.nn.flops import window_bytes
from treewise.nn.gradients import clear_gradients, gradients_set_aside, hooks_run_once
from treewise.nn.guest import MicroBatchOutput
from treewise.nn.model_flops import gateway_values
from treewise.nn.platform.memory import free_bytes
from treewise.nn.platform.tensors import Autocast, is_out_of_memory, to_device
from treewise.planning.plans import Plan
from treewise.tree.forest import Forest

if TYPE_CHECKING:
    from treewise.engine.engine import TreeEngine


logger = logging.getLogger("treewise")


def new_window(
    engine: "TreeEngine",
    hold_tokens: int | None = None,
    max_tokens: int | None = None,
    max_bytes: int | None = None,
) -> "Window":
    """A window of an engine; None: what the free memory takes, see `TreeEngine.window`. Logs what it may keep.

    Raises:
        ConfigError, UnsupportedModelError: see `TreeEngine.window`.
    """
    for name, value in (("hold_tokens", hold_tokens), ("max_tokens", max_tokens), ("max_bytes", max_bytes)):
        if value is not None and (not isinstance(value, int) or value < 0):
            unit = name.partition("_")[2]
            raise ConfigError(f"{name}={value!r} of a window; give a number of {unit}, or None.")
    if engine.lm.is_recurrent:
        raise UnsupportedModelError(
            f"{type(engine.lm.base).__name__} has recurrent layers, whose states within a call a window does not keep; "
            "give the calls of a step to one engine.step."
        )
    if not engine.computes_alone:
        raise ConfigError(
            "a window belongs to one process: with sharded parameters, tp_size, ep_size and context_size all processes "
            "run the same passes. Give the calls of a step to one engine.step."
        )
    if max_bytes is None and max_tokens is None:
        max_bytes = free_bytes(engine.lm.device) // 4
    if max_bytes is not None:
        fitting = max_bytes // kept_token_bytes(engine.lm)
        max_tokens = fitting if max_tokens is None else min(fitting, max_tokens)
    assert max_tokens is not None
    window = Window(engine, engine.max_tokens if hold_tokens is None else hold_tokens, max_tokens)
    logger.info("%s", window)
    return window


def kept_token_bytes(lm: DecoderAndHead) -> int:
    """Bytes that a window keeps for one token, beside its graph: keys and values, a hidden row, gradients of all."""
    config, itemsize = lm.decoder.config.get_text_config(), next(lm.decoder.parameters()).dtype.itemsize
    return window_bytes(gateway_values(config), config.hidden_size, itemsize)


class Window:
    """The calls of one engine between two optimizer steps; it can be used again after its end.

    Parameters:
        hold_tokens: the most tokens whose graphs are held; None: as many as half of the memory takes that is free when
            the first one was computed, whose activations are measured.
        max_tokens: the most tokens that are kept, with their keys, values and hidden rows.

    is_new: [T] bool, which tokens of the last call's tree it computed. num_again: tokens that the last end computed
    again.
    """

    def __init__(self, engine: "TreeEngine", hold_tokens: int | None, max_tokens: int) -> None:
        self.engine, self.hold_tokens, self.max_tokens = engine, hold_tokens, max_tokens
        self._lm = engine.lm
        self._functions: dict[Hashable, Function] = {}
        self._weights: Weights | None = None
        self._marker: Marker | None = None
        self._step_hook: Any = None
        self._thread = threading.get_ident()
        self._round = 0  # which of its uses this is
        self._lost = ""  # why gradients that came back are not there any more
        self._waiting: list[_Came] | None = None  # gradients that count once what gives them ends well
        self._asked: tuple[Function, np.ndarray] | None = None
        self.is_new: np.ndarray | None = None
        self.num_calls = self.num_flat_tokens = self.num_again = 0

    def __str__(self) -> str:
        kept = kept_token_bytes(self._lm)
        held_bytes = [function.most_held_bytes for function in self._functions.values()]
        held = "graphs of as many as half of the free memory takes when the first is there"
        if self.hold_tokens is not None:
            held = f"graphs of at most {num(self.hold_tokens, 'token')}"
        found = max((each for each in held_bytes if each is not None), default=None)
        held += f", {bytes_as_text(found)} each" if found is not None else ""
        most = f"{num(self.max_tokens, 'token')}, {bytes_as_text(kept)} each ({bytes_as_text(kept * self.max_tokens)})"
        return f"window: at most {most}; {held}"

    @property
    def num_bytes(self) -> int:
        """What it keeps at present, graphs too where their size was measured."""
        held = sum(function.held_bytes for function in self._functions.values())
        return self.num_tokens * kept_token_bytes(self._lm) + held

    @property
    def num_tokens(self) -> int:
        """Tokens that it keeps."""
        return sum(function.num_tokens for function in self._functions.values())

    @property
    def num_held(self) -> int:
        """Tokens whose graphs it holds."""
        return sum(function.num_held for function in self._functions.values())

    @property
    def has_gradients(self) -> bool:
        """Whether gradients came back that no parameter has yet."""
        self._forget_what_was_zeroed()
        return any(function.has_gradients for function in self._functions.values())

    # -- calls --------------------------------------------------------------------------------------------------------

    def found(self, forest: Forest, *, with_routers: bool) -> "KnownTree | None":
        """What is here of the tree of a call, which is answered here; None: it is computed by itself."""
        if forest.has_images or forest.has_routes or threading.get_ident() != self._thread:
            self._forget_what_was_zeroed()  # before what a step by itself adds hides it
            return None
        self._check_weights()
        self._forget_what_was_zeroed()
        if torch.is_grad_enabled():
            self._refuse_a_part()
        key = self._key(with_routers)
        if torch.is_grad_enabled() and any(
            each.has_gradients for other, each in self._functions.items() if other != key
        ):
            return None
        found = self._look(forest, key)
        return found if self.num_tokens + found.num_new <= self.max_tokens else None

    def look_before_backward(self, values: Iterable[Tensor]) -> None:
        """Of a call by itself: once its backward has added to gradients, nobody sees that they were zeroed before."""

        def look(_: Tensor, round_: int = self._round) -> None:
            if round_ == self._round:
                self._forget_what_was_zeroed()

        for each in values:
            if each.requires_grad:
                each.register_hook(look)

    def num_new(self, forest: Forest) -> int:
        """Tokens of a tree that no earlier call has computed."""
        self._check_weights()
        return self._look(forest, self._key(self.engine.router_loss_rule is not None)).num_new

    def _look(self, forest: Forest, key: Hashable) -> "KnownTree":
        whole, places = merged(forest)
        function = self._functions.get(key)
        numbers = np.full(whole.num_tokens, -1) if function is None else function.known.number(whole)
        return KnownTree(key, whole, places, numbers)

    def answer(
        self, forest: Forest, found: "KnownTree | None", *, with_routers: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[T, M] hidden rows of a tree that it takes, and [T, E] router logits of each layer if they are asked for.

        Where gradients are enabled, those that come back are recorded. found: what there is of the tree; None: it is
        looked up.
        """
        before = self._mark()
        found = self._look(forest, self._key(with_routers)) if found is None else found
        function, whole, places, known = self._function(found.key), found.whole, found.places, found.numbers
        _, first = np.unique(places, return_index=True)
        self.is_new = np.zeros(forest.num_tokens, dtype=bool)
        self.is_new[first] = known < 0
        self._weights = self._weights or Weights(self._lm.model)
        try:
            self._compute(function, whole, known, with_routers=with_routers)
        except BaseException:
            self._go_back(before)
            raise
        function.known.add(whole, known)
        numbers = known[places]
        self.num_calls += 1
        self.num_flat_tokens += forest.num_flat_tokens
        numbers_T = to_device(numbers, self._lm.device)
        values = function.results(numbers_T, with_routers=with_routers)
        if torch.is_grad_enabled():
            anchor = torch.zeros((), device=values[0].device, requires_grad=True)
            values = list(_Answer.apply(anchor, (self, self._round, function, numbers), numbers_T, *values))
        self._asked = function, numbers
        return values[0], values[1].unbind(1) if with_routers else ()

    def scores(self, source: np.ndarray, tokens: np.ndarray, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        """[E] values by name of edges from rows of the last call's tree ([E] int64) to tokens ([E] int64).

        Where gradients are enabled, those that come back are recorded.
        """
        assert self._asked is not None
        function, numbers = self._asked
        own, places, places_E = function.scored(numbers[source], tokens, outputs, self.engine.temperature)
        values = own.values(places_E)
        if torch.is_grad_enabled():
            anchor = torch.zeros((), device=values[0].device, requires_grad=True)
            values = list(_Answer.apply(anchor, (self, self._round, own, places), places_E, *values))
        return dict(zip(outputs, values, strict=True))

    @contextmanager
    def only_reading(self) -> Iterator[None]:
        """Inside, calls without gradients read what the window has, and leave nothing in it: as for an evaluation."""
        before = self._mark()
        try:
            with torch.no_grad():
                yield
        finally:
            if before.round == self._round:
                self._go_back(before)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """An error inside leaves the window as it was: without the tokens of the calls inside, and their gradients."""
        before = self._mark()
        is_outer, self._waiting = self._waiting is None, self._waiting or []
        count = len(self._waiting)
        try:
            yield
        except BaseException:
            if before.round == self._round and self._waiting is not None:
                self._go_back(before)
                del self._waiting[count:]
            if is_outer:
                self._waiting = None
            raise
        if is_outer:
            came, self._waiting = self._waiting, None
            for each in came or ():
                each.function.record(each.numbers, each.numbers_T, each.grads)

    def _mark(self) -> "_Before":
        marks = {key: function.mark() for key, function in self._functions.items()}
        return _Before(self._round, marks, self._weights, self.num_calls, self.num_flat_tokens)

    def _go_back(self, before: "_Before") -> None:
        for key in [key for key in self._functions if key not in before.marks]:
            del self._functions[key]
        for key, mark in before.marks.items():
            self._functions[key].go_back(mark)
        self._weights, self.num_calls, self.num_flat_tokens = before.weights, before.num_calls, before.num_flat_tokens

    def _function(self, key: Hashable) -> Function:
        if key not in self._functions:
            on_host = self.engine.offload
            self._functions[key] = Function(key, self._lm, self.engine.implementation, on_host=on_host)
        return self._functions[key]

    def _compute(self, function: Function, forest: Forest, numbers: np.ndarray, *, with_routers: bool) -> None:
        new = int((numbers < 0).sum())
        if function.holds and self.hold_tokens is not None and function.num_tokens + new > self.hold_tokens:
            function.let_go()
        before, mark = numbers.copy(), function.mark()
        while True:
            try:
                function.compute(forest, numbers, self.engine.max_tokens, with_routers=with_routers)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not (function.holds and function.num_tokens):
                    raise
                function.go_back(mark)
                function.let_go()
                numbers[:] = before
            else:
                break
        if self.hold_tokens is None and function.most_held_bytes is not None:
            self.hold_tokens = free_bytes(self._lm.device) // 2 // function.most_held_bytes

    def _key(self, with_routers: bool) -> Hashable:
        """What the model's function depends on beside its weights."""
        autocast = Autocast.now(self._lm.device.type)
        layers: list[Any] = [each for each in all_modules(self._lm.base) if hasattr(type(each), "adapter_layer_names")]
        adapters = tuple(
            (each._disable_adapters, tuple(each.active_adapters), bool(getattr(each, "merged", False)))
            for each in layers
        )
        return autocast if autocast.is_enabled else None, adapters, self._lm.decoder.training, with_routers

    # -- what came back -----------------------------------------------------------------------------------------------

    def record(
        self, round_: int, function: Function | Scores, numbers: np.ndarray, numbers_T: Tensor, grads: Any
    ) -> None:
        """Adds gradients of a call's values.

        Raises:
            ConfigError: of a window that has ended, or that was dropped.
        """
        if round_ != self._round:
            raise ConfigError(
                "a backward came for values of a window that has ended or was dropped, whose keys and values are no "
                "longer there. Call backward on what a window gave before it ends."
            )
        self._check_weights(gradients_come=True)
        self._forget_what_was_zeroed()
        self._refuse_a_part()
        if self._marker is None:
            self._marker = Marker(self._lm.decoder, self._lm.model)
        if self._step_hook is None:
            self._step_hook = register_optimizer_step_pre_hook(self._refuse_step)
        if self._waiting is None:
            function.record(numbers, numbers_T, grads)
        else:
            own = tuple(None if grad is None else grad.clone() for grad in grads)
            self._waiting.append(_Came(function, numbers, numbers_T, own))

    def end(self) -> None:
        """Adds the gradients of all calls to those of the parameters, on which hooks run once; and begins anew.

        All of them or, with an error, none.

        Raises:
            ConfigError: weights changed within the window, or gradients were lost before. OutOfMemoryError: even with
                one token at a time.
        """
        self.num_again = 0
        try:
            self._check_weights()
            self._forget_what_was_zeroed()
            self._refuse_a_part()
            functions = [each for each in self._functions.values() if each.has_gradients]
            if functions:
                if self._weights is not None:
                    self._weights.compare_values()
                self._look_away()
                self._train(functions)
        finally:
            self._clear()

    def _train(self, functions: "list[Function]") -> None:
        parameters = all_parameters(all_modules(self._lm.model))

        def attempt() -> None:
            for function in functions:
                function.backward(self._walk_of_all, self.engine.temperature)

        def attempt_again() -> None:
            try:
                attempt()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not any(function.holds for function in functions):
                    raise
                for function in functions:
                    function.let_go()
                clear_gradients(parameters)
                attempt()

        with hooks_run_once(self._lm.model, parameters), gradients_set_aside(parameters):
            with_less_memory(attempt_again, self.engine.budget, self.num_tokens, parameters)

    def let_go(self) -> None:
        """Frees its graphs, for which others have use; the end computes them again."""
        for function in self._functions.values():
            function.let_go()

    def drop(self) -> None:
        """Forgets everything; a backward on what it gave is an error from now on."""
        self._clear()

    def _walk_of_all(self, forest: Forest, *, reads_routers: bool) -> Walk:
        plan = self.engine.plan(forest)
        self.num_again += plan.num_computed_tokens
        return self.engine.new_walk(plan, reads_routers=reads_routers)

    def _clear(self) -> None:
        self._functions.clear()
        self._asked = None
        self._weights, self._waiting, self._lost = None, None, ""
        self._round += 1
        self.num_calls = self.num_flat_tokens = 0
        self._look_away()

    def _look_away(self) -> None:
        if self._marker is not None:
            self._marker.remove()
            self._marker = None
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None

    # -- what may not happen within a window --------------------------------------------------------------------------

    def _check_weights(self, *, gradients_come: bool = False) -> None:
        """Forgets what was computed with other weights.

        Raises:
            ConfigError: gradients of it came back, which no parameter has yet; or do so now.
        """
        if self._weights is None or not self._weights.have_changed():
            return
        self._lose(
            "weights were changed within a window, before its gradients were there. End it before the optimizer's "
            "step: `with engine.window():` (`with sharing.window():`) around the calls of one step.",
            gradients_come=gradients_come,
        )

    def _lose(self, why: str, *, gradients_come: bool = False) -> None:
        """Forgets all; raises `ConfigError` where gradients came back, and again until they are zeroed."""
        is_lost = gradients_come or any(function.has_gradients for function in self._functions.values())
        marker = self._marker
        self._marker = None
        self._clear()
        if is_lost:
            self._lost, self._marker = why, marker or Marker(self._lm.decoder, self._lm.model)
            raise ConfigError(why)

    def _refuse_a_part(self) -> None:
        if self._lost:
            raise ConfigError(
                f"gradients of this window are lost, so that what comes now would be a part of them: {self._lost} Then "
                "zero gradients, and compute the calls of the step again."
            )

    def _forget_what_was_zeroed(self) -> None:
        if self._marker is not None and self._marker.was_zeroed():
            self._marker, self._lost = None, ""
            for function in self._functions.values():
                function.forget_gradients()

    def _refuse_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        own = {id(each) for each in self._lm.model.parameters() if each.requires_grad}
        steps = any(id(each) in own for group in optimizer.param_groups for each in group["params"])
        if steps and self.has_gradients:
            self._lose(
                f"{type(optimizer).__name__} was to step while a window holds gradients that no parameter has yet. End "
                "the window before clipping and stepping: leave `with engine.window():`, or `with sharing.window():`."
            )


@dataclass(frozen=True, slots=True, eq=False)
class KnownTree:
    """What a window has of the tree of a call.

    key: of the function that the model is. whole: the tree in which equal prefixes are one. places: [T] int64, where
    the call's tokens are in it. numbers: of its tokens, -1 where they are new.
    """

    key: Hashable
    whole: Forest
    places: np.ndarray
    numbers: np.ndarray

    @property
    def num_new(self) -> int:
        """Tokens that no earlier call has computed."""
        return int((self.numbers < 0).sum())


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """A window as it was, to which an error brings it back."""

    round: int
    marks: dict[Hashable, FunctionMark]
    weights: Weights | None
    num_calls: int
    num_flat_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class _Came:
    """Gradients that came back for a call's values."""

    function: Function | Scores
    numbers: np.ndarray
    numbers_T: Tensor
    grads: tuple[Tensor | None, ...]


class WindowWalk(Walk):
    """A walk over a tree whose values a window gives; its backward records. found: what the window has of it."""

    def __init__(self, window: Window, found: KnownTree, forest: Forest, *arguments: Any, **settings: Any) -> None:
        lm, impl, guests = arguments
        super().__init__(lm, Plan.whole(forest, None), impl, guests, **settings)
        self._window, self._num_computed = window, 0
        self._found: KnownTree | None = found  # until the first forward, which may add to it

    @property
    def num_computed_tokens(self) -> int:
        """Those that no earlier call had computed."""
        return self._num_computed

    def all_or_nothing(self) -> AbstractContextManager[None]:
        """An error inside leaves the window as it was."""
        return self._window.all_or_nothing()

    def forward(self, index: int, *, leaves_gateway: bool = False) -> MicroBatchOutput:
        """The whole tree, of which the window computes what is new."""
        del leaves_gateway
        forest = self.plan.forest
        self._running[index] = None  # type: ignore[assignment]
        found, self._found = self._found, None
        hidden, routers = self._window.answer(forest, found, with_routers=self.reads_routers)
        assert self._window.is_new is not None
        self._num_computed += int(self._window.is_new.sum())
        return MicroBatchOutput(index, np.arange(forest.num_tokens), hidden, routers, self.head, self._window.scores)


class _Answer(torch.autograd.Function):
    """Values of a window, whose gradients it records."""

    @staticmethod
    def forward(ctx: Context, _: Tensor, of: Any, numbers_T: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.of = of
        ctx.save_for_backward(numbers_T)  # a second backward is torch's own error, as without a window
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[None, ...]:
        (numbers_T,) = ctx.saved_tensors
        answered: tuple[Window, int, Function | Scores, np.ndarray] = ctx.of
        window, round_, function, numbers = answered
        window.record(round_, function, numbers, numbers_T, grads)
        return (None,) * (3 + len(grads))
