"""The seam below any trainer: the decoder of a causal language model computes a tree in place of rows.

A trainer calls its model on rows; the model calls its decoder, and makes logits and losses of what that returns. Only
the forward of this one decoder is replaced: the rows become a forest, each shared token is computed once, and the
hidden rows go back to where they stood. Head, loss and everything above are the trainer's own code, so this seam needs
no trainer that is known here. Rows that reach the model's head as they were returned are projected once for each token
of the tree, too.

Letters: B rows of the batch, L tokens of a row, T tokens of the tree, M model width, E experts of a layer.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from treewise.distributed import ranks
from treewise.engine.edge_scorer import Entries
from treewise.engine.step import with_less_memory
from treewise.engine.values import Reader, hidden_reader
from treewise.errors import UnsupportedModelError
from treewise.integrations.batches.batch_forest import NotShareable, WholeRows
from treewise.integrations.batches.tree_batches import Computed, TreeBatches, as_numpy
from treewise.integrations.decoder.call import CACHES, arguments_of, rows_of_call
from treewise.integrations.decoder.head import GivenRows, TreeHead
from treewise.integrations.decoder.loss import TreeLoss, scored_cells
from treewise.integrations.decoder.outputs import (
    GatheredRows,
    NotComputed,
    decoder_output,
    output_class,
    rows_and_padding,
)
from treewise.nn.guest import MicroBatchOutput
from treewise.nn.platform.tensors import to_device
from treewise.tree.forest import Forest

_COPIED = "a copy of the decoder was called, as regional compilation makes one"
_NO_CACHE = "the call gave back the cache of an earlier call that was made without use_cache=True"


class DecoderSeam:
    """The forward of one model's decoder, which computes batches as trees where it can.

    model: a transformers model, without wrappers and PEFT. batches: of its engine. before_call: called before each.
    """

    def __init__(
        self, model: PreTrainedModel, batches: TreeBatches, before_call: Callable[[], None] = lambda: None
    ) -> None:
        self.model, self._batches, self._before_call = model, batches, before_call
        self.decoder: nn.Module = model.base_model
        if self.decoder is model:
            raise UnsupportedModelError(f"{type(model).__name__} has no decoder below it that takes rows.")
        own: Any = self.decoder.forward  # of a module's class
        self._own: MethodType = own
        self._had = vars(self.decoder).get("forward")
        self._kind = output_class(self._own)
        self._is_paused = False
        self.head, self._loss = TreeHead(model.get_output_embeddings()), TreeLoss(model)
        self._asked: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

        def note(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            """Of a call of the model, whose labels do not reach its decoder. No method: a deep copy has it, too."""
            if called is self.model:
                self._asked = args, kwargs

        self._hook = model.register_forward_pre_hook(note, with_kwargs=True)
        batches.engine.stand_in_for(self.decoder)
        self.decoder.forward = self._installed = self._tree_forward()

    def __str__(self) -> str:
        shared, num_calls = self.head.num_shared, self.head.num_shared + self.head.num_whole
        head = f"; its head projected them once for each tree token in {shared:,} of {num_calls:,} calls"
        return f"the decoder's hidden rows{head if num_calls else ''}"

    def _tree_forward(self) -> MethodType:
        own = self._own

        # `generate` and trainers read the signature of a model's forward.
        @functools.wraps(own.__func__)
        def tree_forward(decoder: nn.Module, *args: Any, **kwargs: Any) -> object:
            if decoder is not self.decoder:
                # A deep copy, with parameters of its own, or a copy that shares them.
                if next(decoder.parameters(), None) is next(self.decoder.parameters()):
                    self._batches.counts.leave(_COPIED)
                return own.__func__(decoder, *args, **kwargs)
            if self._is_paused or "treewise" in kwargs:
                output = own(*args, **kwargs)
                if isinstance(output, ModelOutput):  # of the probe; some families declare another
                    self._kind = type(output)
                if "treewise" not in kwargs:
                    self._look_before_backward(output)
                return output
            return self._serve(args, kwargs)

        return MethodType(tree_forward, self.decoder)

    def _refuse_scored_padding(self, rows: WholeRows, asked: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        if rows.num_real == rows.place.size:
            return
        scored = scored_cells(arguments_of(self.model.forward, *asked))
        if len(scored) == len(rows.place) and (as_numpy(scored) & (rows.place == rows.forest.num_tokens)).any():
            raise NotShareable("a label is predicted by a padding token")

    def remove(self) -> None:
        """Puts the decoder's own forward back; a forward that was put around this one since calls the own."""
        self._hook.remove()
        self._is_paused = True
        self.head.give(None)
        self._loss.remove()
        if vars(self.decoder).get("forward") is self._installed:
            del self.decoder.forward
            if self._had is not None:
                self.decoder.forward = self._had

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the forwards of decoder and head are their own."""
        before, self._is_paused = self._is_paused, True
        self.head.give(None)
        try:
            yield
        finally:
            self._is_paused = before

    @torch.compiler.disable  # inside a model that a trainer compiled; layers that are compiled in place stay compiled
    def _serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        self._before_call()
        self.head.give(None)
        if self._batches.together is not None:
            with self.paused():
                self._batches.together.ask_once(self._batches.rules)
        asked, self._asked = self._asked, ((), {})
        arguments: dict[str, Any] = {}

        def make() -> tuple[WholeRows, int]:
            arguments.update(arguments_of(self._own, args, kwargs))
            _refuse_adapters_by_row(self.decoder)
            self._refuse_router_logits(arguments)
            self._refuse_hooks_of_what_is_frozen()
            with self.paused():  # whether it cuts packed rows is seen by calling it
                rows = rows_of_call(arguments, self.model.config, self._batches.rules)
            self._refuse_scored_padding(rows, asked)
            return rows, arguments["input_ids"].numel()

        rows = self._batches.rows(make)
        if rows is None:
            output = self._own(*args, **kwargs)
            self._look_before_backward(output)
            return output

        def compute() -> Computed:
            with self.paused(), self._gradients_if_any():  # the probe calls the model
                readers = [hidden_reader(rows.forest)]
                if self._wants_routers(arguments):
                    readers.append(_router_reader(rows.forest))
                return self._batches.values(rows.forest, readers, rows.images)

        # The forward adds to no gradient, so it may run again with a smaller budget.
        computed = with_less_memory(compute, self._batches.engine.budget, rows.forest.num_tokens)
        self._batches.count(rows, len(arguments["input_ids"]), computed)
        return self._output(rows, arguments, *(next(iter(values.values())) for values in computed.values))

    @torch.compiler.disable
    def _look_before_backward(self, output: Any) -> None:
        """Of a call that is left to the model's own forward."""
        if (window := self._batches.open_window) is not None:
            window.look_before_backward(output[:1])

    def _gradients_if_any(self) -> AbstractContextManager[Any]:
        """No gradients where nothing of the decoder is trained, as with adapters switched off or of the head alone;
        each row has none then, either."""
        return nullcontext() if _is_trained(self.decoder) else torch.no_grad()

    def _output(
        self, rows: WholeRows, arguments: dict[str, Any], tree: torch.Tensor, routers: torch.Tensor | None = None
    ) -> object:
        """What the decoder's own forward returns. tree: [T, M] hidden rows. routers: [T, layers, E]."""
        place, is_together = to_device(rows.place, tree.device), self._batches.together is not None
        # Ranks that run their backwards together all look at it, whether or not they have some.
        has_padding = rows.num_real < rows.place.size or is_together
        is_trained = _is_trained(self.model)
        if has_padding:
            tree = rows_and_padding(tree, is_trained=is_trained, is_together=is_together)
        hidden = GatheredRows.apply(tree, place.view(arguments["input_ids"].shape))
        # Where several processes add gradients up, DDP looks for tensors among what a model returns.
        # A sharded head is whole while it is called.
        self.head.is_lazy = self._loss.takes_rows_alone and ranks.count() == 1 and not is_together
        self.head.give(GivenRows.of(hidden, tree, rows.place))
        more: dict[str, Any] = {}
        if routers is not None:
            if has_padding:
                routers = rows_and_padding(routers, is_trained=is_trained, is_together=is_together)
            logits = GatheredRows.apply(routers, place).unbind(1)
            more["router_logits"] = tuple(each.clone() for each in logits) if is_together else logits  # no views
        config: Any = self.model.config.get_text_config()
        if not torch.is_grad_enabled() and getattr(config, "use_cache", False) and "use_cache" not in arguments:
            more |= {name: NotComputed(_NO_CACHE) for name in CACHES}
        return decoder_output(self._kind, hidden, arguments, config.num_hidden_layers, more)

    def _wants_routers(self, arguments: dict[str, Any]) -> bool:
        configured = getattr(self.model.config.get_text_config(), "output_router_logits", False)
        return bool(arguments.get("output_router_logits", configured))

    def _refuse_router_logits(self, arguments: dict[str, Any]) -> None:
        if self._wants_routers(arguments) and "router_logits" not in self._kind.__dataclass_fields__:
            raise NotShareable(f"{type(self.decoder).__name__} is asked for router logits, which it does not return")

    def _refuse_hooks_of_what_is_frozen(self) -> None:
        """Raises `NotShareable` where a hook may add what is trained to layers that are not, as a steering vector."""
        if not torch.is_grad_enabled() or self._batches.together is not None or _is_trained(self.decoder):
            return
        if any(vars(each)["_forward_hooks"] or vars(each)["_forward_pre_hooks"] for each in self.decoder.modules()):
            raise NotShareable("nothing of its decoder is trained, and hooks on forwards may add something that is")


def _is_trained(module: nn.Module) -> bool:
    return any(each.requires_grad for each in module.parameters())


def _refuse_adapters_by_row(decoder: nn.Module) -> None:
    """Raises `NotShareable` within a call with PEFT's `adapter_names`, which hooks on each adapter hand on."""
    for module in decoder.modules():
        for hook in vars(module)["_forward_pre_hooks"].values():
            if isinstance(hook, functools.partial) and hook.keywords.get("adapter_names") is not None:
                raise NotShareable("adapter_names gives rows adapters of their own (PEFT)")


def _router_reader(forest: Forest) -> Reader:
    """Reads the [T, layers, E] router logits by tree position."""

    def read(output: MicroBatchOutput) -> Entries:
        return output.positions, {"router_logits": torch.stack(output.router_logits, 1)}

    return Reader(read, ("router_logits",), forest.num_tokens, reads_routers=True)
