"""The base model, what computes and samples with it, and the weights of each client on it.

Every client has parameters, gradients and an optimizer of its own, which stand in the model while its requests run.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from tinker import types
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from treewise.base import features
from treewise.data.render.piece_tokenizer import Encoder
from treewise.data.render.template import Template
from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError, DataError, NonFiniteError, UnsupportedModelError
from treewise.models.load_model import load_processor, load_weights
from treewise.nn.adapters import adapter_folder
from treewise.nn.device import chosen_device, on_device
from treewise.nn.gradients import gradients_set_aside
from treewise.nn.model import split_model
from treewise.nn.model_checks import num_positions
from treewise.nn.vision import image_token_of
from treewise.nn.wrapped import num_embeddings
from treewise.rl.recorder.ends import end_ids
from treewise.rl.samplers import Sampler, sampler_named
from treewise.rl.samplers.by_name import entry_of
from treewise.serve.adapter_slots import OwnedWeights, Shape, Slots
from treewise.serve.rows_loss import LossRow, RowsLoss
from treewise.serve.settings import ServeSettings
from treewise.serve.step_window import GradientsLostError, StepWindow
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

COUNTS = ("flat_tokens", "tree_tokens", "computed_tokens")  # of a computed forest


class WeightsError(NonFiniteError):
    """Weights with which the model computes what is not a number, whatever the data are."""


class ServedModel:
    """The base model; one thread calls it.

    model, tokenizer: in place of those that the settings name; the processor of a model that takes images.
    """

    def __init__(
        self,
        settings: ServeSettings,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    ) -> None:
        self._read_base: Callable[[], PreTrainedModel] | None = None
        if model is None:
            if adapter_folder(settings.model) is not None:
                raise ConfigError(
                    f"{settings.model} holds adapters; serve its base model, or merge them into it (peft's "
                    "merge_and_unload, then save_pretrained)."
                )
            self._read_base = partial(load_weights, settings.model, None, settings.dtype)
            model = self._read_base()
            tokenizer = load_processor(settings.model, None, required=False)
        device = chosen_device(None if settings.device == "auto" else settings.device)
        self.settings, self.processor, self.tokenizer = settings, tokenizer, getattr(tokenizer, "tokenizer", tokenizer)
        self.base = on_device(model, device).eval()
        self.slots = Slots(self.base, trains_all=settings.train == "full")
        self.new_weights, self.using = self.slots.new_weights, self.slots.using
        self.vocabulary = num_embeddings(self.base)
        self.image_token = image_token_of(self.base.config)
        self.max_length = num_positions(self.base.config)
        self._routers = self._new_routers()
        self._windows: weakref.WeakSet[StepWindow] = weakref.WeakSet()
        self._engine: TreeEngine | None = None
        self._handed: tuple[Any, ...] = ()  # the model and the weights that the sampler holds
        given = settings.sampler_settings or {}
        ways = {"weights": "adapter" if settings.train == "lora" else "reload"} | given
        is_on_servers = entry_of(settings.sampler).is_on_servers
        if is_on_servers and ways["weights"] == "fixed":
            raise ConfigError("sampler_settings.weights=fixed: clients sample from weights of their own.")
        ways["weights_folder"] = str(Path(settings.folder) / "server_weights")
        self._sampler: Sampler = sampler_named(
            settings.sampler, given, self.base, of_servers=ways, processor=self.processor
        )
        self._gives_adapters = is_on_servers and ways["weights"] == "adapter"

    @property
    def model(self) -> nn.Module:
        """The base model, from the first adapter on within PEFT's."""
        return self.slots.model

    @property
    def engine(self) -> TreeEngine:
        """A new one once the first adapter changed what the model is."""
        if self._engine is None or self._engine.model is not self.model:
            settings = self.settings
            self._engine = TreeEngine(self.model, settings.budget, settings.attention, processor=self.processor)
        return self._engine

    @cached_property
    def blank(self) -> OwnedWeights | None:
        """What is sampled from as the base model. For servers that are given adapters, one that changes nothing: a vLLM
        on a CPU lets an adapter of the head act on requests without one (seen with 0.32).
        """
        return self.new_weights(Shape(1, unembed=False), 0) if self._gives_adapters else None

    def _new_routers(self) -> Sequence[Any] | UnsupportedModelError:
        """Sizes of the routers (`nn.routing.RouterSizes`), or why no experts can be replayed."""
        try:
            found: Sequence[Any] = features.routing.router_sizes(self.base, split_model(self.base).decoder)
        except UnsupportedModelError as error:
            return error
        return found

    def check_experts(self, experts: np.ndarray) -> None:
        """Raises `DataError` for experts of a row ([n, L, k]) that this model's routers cannot have chosen."""
        if isinstance(self._routers, UnsupportedModelError):
            raise DataError(f"routed_experts: {self._routers}")
        if not self._routers:
            raise DataError("routed_experts are given, but the model is no mixture of experts; leave them out.")
        features.routing.check_record(experts, self._routers, "loss_fn_inputs")

    def sampler_of(self, weights: OwnedWeights | None) -> Sampler:
        """What continues prompts with the weights that the model is `using`: this process, or servers, which are given
        them where they hold others.

        Raises:
            ConfigError: weights that cannot be handed over in the way that was chosen. SamplerError: a server is away.
        """
        if self._handed != (self.model, weights):
            self._handed = ()  # also if what follows fails
            self._sampler.update(self.model)
            self._handed = (self.model, weights)
        return self._sampler

    def verify_saved(self, folder: Path, name: str) -> str:
        """Holds a folder against the weights that the model is `using`; returns a line for the log. name: of it.

        Raises:
            CheckpointError: what was saved is not what the model computes with.
        """
        saves, settings = features.verified_saves, self.settings
        read_saved = getattr(self._sampler, "read_saved", None)
        saved = saves.SavedFolder(
            folder,
            name,
            self._read_base,
            [] if read_saved is None else [read_saved],
            "Nothing was saved; --verify_saves false skips this.",
        )
        rows = saves.drawn_rows(self.model, self.vocabulary, self.max_length)
        # An engine of its own: a budget that was measured on these rows would stay.
        engine = TreeEngine(self.model, None, settings.attention, check=False)
        return saves.verify_saved(saved, self.model, rows, engine)

    def close(self) -> None:
        """Gives servers' connections back, and removes what was written for them."""
        self._sampler.close()

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a continuation where a client names none."""
        template = None if self.tokenizer is None else Template(Encoder(self.tokenizer), None, {})
        return end_ids(template, getattr(self.base, "generation_config", None))

    def compute(
        self, weights: OwnedWeights, rows: Sequence[LossRow], window: StepWindow | None = None, *, gradients: bool
    ) -> tuple[RowsLoss, dict[str, float]]:
        """The losses of rows as one forest, and its counts; gradients are added to those that the weights have, or come
        when their window ends. A call that raises adds none.

        Raises:
            WeightsError: the model's log-probs are not numbers. NonFiniteError: a loss alone is not; names the first
                datum.
        """
        items = [Trajectory(row.token_ids, images=row.images, routed_experts=row.routed_experts) for row in rows]
        groups = [items] if self.settings.share == "all" else [[item] for item in items]
        forests = [Forest.from_trajectories(group) for group in groups]
        loss = RowsLoss(rows)
        with ExitStack() as around:
            around.enter_context(self.using(weights))
            used = None
            if window is not None and len(forests) == 1:
                if gradients:
                    self._make_room(window, forests[0].num_tokens)
                used = around.enter_context(window.around(self.engine, forests[0], gradients=gradients))
            if gradients:
                around.enter_context(gradients_set_aside([*weights.parameters.values()]))  # no other has any
            try:
                out = self.engine.step(forests, loss) if gradients else self.engine.evaluate(forests, loss)
            except UnsupportedModelError as error:  # of the probe, if they are the first weights of this process
                raise error if error.is_finite else WeightsError(str(error)) from None
            if not math.isfinite(out.loss):
                if np.isnan(loss.logprobs).any():
                    raise WeightsError("log-probs are not numbers.")
                is_wrong = ~np.isfinite(np.add.reduceat(loss.losses, loss.bounds[:-1]))
                raise NonFiniteError(f"the loss is not a number, first at datum {is_wrong.argmax()} of the forest.")
            if out.replay is not None and out.replay.num_recorded:
                loss.replay["routed_otherwise"] = out.replay.num_otherwise / out.replay.num_recorded
                loss.replay |= self._gaps(loss, items) if gradients else {}
            counts: dict[str, float] = {name: getattr(out, f"num_{name}") for name in COUNTS}
            counts["share_ratio"] = out.num_flat_tokens / out.num_tree_tokens
            if used is not None and used.is_new is not None:  # tokens of earlier calls count where they were new
                loss.count_new(used.is_new)
                counts["tree_tokens"], counts["share_ratio"] = int(used.is_new.sum()), used.share_ratio
        return loss, counts

    def new_window(self) -> StepWindow:
        """Of a run, whose calls between two steps share."""
        window = StepWindow("none" if self.settings.share == "none" else self.settings.window)
        self._windows.add(window)
        return window

    def _make_room(self, window: StepWindow, num_tokens: int) -> None:
        """Graphs of all runs' windows hold at most the budget, with a call that comes; the others' go first."""
        others = [each for each in self._windows if each is not window]
        held = sum(each.num_held for each in self._windows) + num_tokens
        if self.engine.max_tokens is not None and held > self.engine.max_tokens:
            for each in others:
                each.let_go()

    def end_window(self, weights: OwnedWeights, window: StepWindow) -> int:
        """The weights get the gradients of their calls; returns how many tokens were computed again for it.

        Raises:
            GradientsLostError: see `StepWindow.end`; the weights then have none at all.
        """
        try:
            with self.using(weights):
                return window.end()
        except GradientsLostError:
            weights.forget(with_moments=False)
            raise

    def _gaps(self, loss: RowsLoss, items: Sequence[Trajectory]) -> dict[str, float]:
        """The gap to the sampler of one row, with the experts that it recorded and with those that routers choose now;
        the latter takes a forward of this row more."""
        for index, (row, item) in enumerate(zip(loss.rows, items, strict=True)):
            gap = None if row.routed_experts is None else loss.sampler_gap(index)
            if gap is not None:
                live = RowsLoss([row])
                self.engine.evaluate([replace(item, routed_experts=None)], live)
                live_gap = live.sampler_gap(0)
                assert live_gap is not None
                return {"replayed_gap": gap, "live_gap": live_gap}
        return {}

    def optimize(self, weights: OwnedWeights, adam: types.AdamParams) -> float:
        """One step of AdamW by the gradients that were added up; returns their norm before clipping (0: there are
        none, and nothing changes).

        Raises:
            NonFiniteError: gradients that are not numbers. They are dropped, and the weights stay as they were.
        """
        assert weights.optimizer is not None
        owned = [parameter for parameter in weights.parameters.values() if parameter.grad is not None]
        if not owned:
            return 0.0
        norm = float(nn.utils.clip_grad_norm_(owned, adam.grad_clip_norm or math.inf))
        try:
            if not math.isfinite(norm):
                raise NonFiniteError("the gradients are not numbers; they were dropped, the weights are as before.")
            for group in weights.optimizer.param_groups:
                group |= {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps}
                group["weight_decay"] = adam.weight_decay
            weights.optimizer.step()
        finally:
            weights.optimizer.zero_grad(set_to_none=True)
        return norm
