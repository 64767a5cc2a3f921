"""The contestants: flat training, TRL's tree rows, path rescans, and treewise whole and at budgets.

Names: `flat` (every trajectory, packed), `merged` (contained ones folded into the longer ones), `trl`, `trl-liger`
(TRL's rows through layers of Liger's), `tree-recurrence` (TRL's rows with its recurrent layers), `tree` (treewise, one
micro-batch), `tree@N` (under a budget of N tokens, held or recomputed as the planner chooses), `held@N` and
`recomputed@N` where that choice differs, `trl@N` (rows of at most N tokens). `-ckpt`: with gradient checkpointing.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from treewise.base import features
from treewise.bench.flat import FlatRows, can_pack, checkpointing, merged_trajectories
from treewise.bench.pace import OnPart
from treewise.bench.settings import AGAINST, LAYERS, Settings
from treewise.bench.trl_rows import TrlRows, packing_module
from treewise.bench.varlen import ChosenKernel
from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError, TreewiseError
from treewise.nn.attention import IMPLEMENTATIONS, TreeMask
from treewise.nn.decoder import DecoderAndHead
from treewise.nn.model import split_model
from treewise.nn.model_flops import flop_model
from treewise.nn.platform.memory import free_bytes
from treewise.nn.recurrent import kinds_of
from treewise.nn.wrapped import base_model, named_modules
from treewise.planning.plans import Plan, lay_out
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

# Tokens of a packed row of flat training, where memory allows: more at a time is no faster.
ROW_TOKENS = {"cpu": 2_048, "cuda": 16_384}
ACTIVATION_FRACTION = 0.8  # of the free memory, that the activations of a packed row may take by an estimate


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to make a training step.

    step: forward and backward into `.grad`; returns the loss. One that is made of rows calls what it is given after
    each (`OnPart`). note: what else it costs, in words. host_seconds: what it prepares once per step on the host,
    outside of `step` or in it. key_rows_per_token: key rows that the attention of a layer reads, per computed token.
    bound: tree FLOPs / FLOPs of the plan under a budget, the part of the speed of `tree` that recomputation leaves.
    flops: of the model on what is computed, each token once; None where they are not known. kernel: of attention in
    packed rows.
    """

    step: Callable[..., float]
    num_computed_tokens: int
    host_seconds: float
    key_rows_per_token: float | None = None
    num_micro_batches: int = 1
    num_held_tokens: int = 0
    num_recomputed_tokens: int = 0
    bound: float | None = None
    flops: float | None = None
    note: str | None = None
    kernel: ChosenKernel | None = None


Builders = dict[str, Callable[[], Contestant]]


def builders(
    model: PreTrainedModel,
    items: Sequence[Trajectory],
    settings: Settings,
    budgets: Sequence[int] = (),
    processor: object = None,
) -> Builders:
    """The contestants by name, each built when called. Those without treewise run on a twin of the model, which
    shares its parameters and nothing else.

    A builder raises a `TreewiseError` if its contestant cannot run here. processor: of the items' images, which TRL's
    tree rows take none of.

    Raises:
        ConfigError: an unknown name in `against`.
    """
    unknown = [name for name in settings.against if name not in AGAINST]
    if unknown:
        raise ConfigError(f"--against {unknown[0]!r} is unknown; choose one of {', '.join(AGAINST)}.")
    plain = plain_parts(model)
    for lm in (split_model(model), plain):
        fuse(lm, layers_of(settings.layers, model.device))
    makers = _Makers(model, plain, items, settings, processor)
    return makers.all(budgets, (False, True) if settings.with_checkpointing else (False,))


@dataclass(frozen=True, slots=True)
class _Makers:
    """Makes contestants. model: of treewise's. plain: of the others'."""

    model: PreTrainedModel
    plain: DecoderAndHead
    items: Sequence[Trajectory]
    settings: Settings
    processor: object

    def all(self, budgets: Sequence[int], checkpointings: Sequence[bool]) -> Builders:
        """How each contestant is made, by its name in the results."""
        forest, against = Forest.from_trajectories(self.items), self.settings.against
        merged = merged_trajectories(forest)
        is_recurrent, sees = bool(kinds_of(self.model)), bool(len(forest.images))
        has_trl = "trl" in against and not is_recurrent and not sees
        made: Builders = {}
        for is_checkpointed in checkpointings:
            suffix = "-ckpt" if is_checkpointed else ""
            if "flat" in against:
                made["flat" + suffix] = partial(self.flat, self.items, is_checkpointed)
            if "merged" in against and len(merged) < len(self.items):
                made["merged" + suffix] = partial(self.flat, merged, is_checkpointed)
            if has_trl:
                made["trl" + suffix] = partial(self.trl, is_checkpointed=is_checkpointed)
            if "trl-liger" in against and not is_recurrent and not sees:
                made["trl-liger" + suffix] = partial(self.trl_liger, is_checkpointed)
            if "tree-recurrence" in against and is_recurrent:
                made["tree-recurrence" + suffix] = partial(
                    self.trl, is_checkpointed=is_checkpointed, follows_states=True
                )
            made["tree" + suffix] = partial(self.tree, None, "auto", is_checkpointed)
        for budget in budgets:
            made[f"tree@{budget}"] = partial(self.tree, budget, "auto")
            if budget >= forest.num_tokens:
                continue
            held = {
                hold: TreeEngine(self.model, budget, self.settings.attention, hold=hold, check=False)
                .plan(forest)
                .num_held_tokens
                for hold in ("always", "auto")
            }
            if held["always"] != held["auto"]:
                made[f"held@{budget}"] = partial(self.tree, budget, "always")
            if held["auto"]:
                made[f"recomputed@{budget}"] = partial(self.tree, budget, "never")
            if has_trl and budget >= forest.path_lengths.max():
                made[f"trl@{budget}"] = partial(self.trl, budget)
        return made

    def flat(self, items: Sequence[Trajectory], is_checkpointed: bool) -> Contestant:
        """Packed rows, of at most the tokens whose activations fit in the free memory."""
        lm, limit = self.plain, self.settings.row_tokens
        if limit is None:
            token = max(1, _values_per_token(lm.model, is_checkpointed) * next(lm.model.parameters()).element_size())
            room = int(ACTIVATION_FRACTION * free_bytes(lm.device) / token)
            usual = ROW_TOKENS.get(lm.device.type, ROW_TOKENS["cpu"])
            limit = max(*map(len, items), min(usual, room))
        started = time.perf_counter()
        rows = FlatRows(
            lm,
            items,
            max_row_tokens=limit,
            packs=can_pack(lm.model),
            is_checkpointed=is_checkpointed,
            processor=self.processor,
        )
        seconds, flops = time.perf_counter() - started, flop_model(lm.model)
        return Contestant(
            rows.step,
            rows.num_computed_tokens,
            seconds,
            1.0,
            len(rows.rows),
            flops=flops.flat(Forest.from_trajectories(items)),
            kernel=rows.kernel,
        )

    def trl(
        self, max_tokens: int | None = None, *, is_checkpointed: bool = False, follows_states: bool = False
    ) -> Contestant:
        """TRL's rows, with its recurrent layers if `follows_states`."""
        packing_module()  # the import is not timed
        started = time.perf_counter()
        rows = TrlRows(
            self.plain, self.items, max_tokens, is_checkpointed=is_checkpointed, follows_states=follows_states
        )
        seconds, num_tokens = time.perf_counter() - started, rows.num_computed_tokens
        key_rows = rows.num_key_rows / num_tokens
        return Contestant(
            rows.step, num_tokens, seconds, key_rows, len(rows.rows), note=rows.copies, kernel=rows.kernel
        )

    def trl_liger(self, is_checkpointed: bool) -> Contestant:
        """TRL's rows on a model of its own, whose layers are those of `use_liger_kernel`, whatever the others have.

        Its loss, which TRL leaves out too, would take hidden states out of reach. The rotary function, which the
        package replaces for the whole process, is in place in steps of this contestant alone.
        """
        plain = plain_parts(self.model)
        with _names_restored(plain.model) as (names, before):
            fuse(plain, "liger")
            mine = {name: each for name, each in names.items() if each is not before.get(name)}
        made = replace(self, plain=plain).trl(is_checkpointed=is_checkpointed)

        def step(on_part: OnPart | None = None) -> float:
            with _names_restored(plain.model) as (names, _):
                names.update(mine)
                return made.step(on_part)

        return replace(made, step=step, note=f"layers of Liger's; {made.note}")

    def tree(self, max_tokens: int | None, hold: str, is_checkpointed: bool = False) -> Contestant:
        """treewise, under a budget or whole."""
        attention = self.settings.attention
        engine = TreeEngine(
            self.model, max_tokens, attention, hold=hold, router_aux_loss=False, processor=self.processor
        )
        engine.budget.recovers = False  # a smaller budget would be another contestant
        started = time.perf_counter()
        forest = Forest.from_trajectories(self.items)
        if max_tokens is not None and max_tokens >= forest.num_tokens:
            raise ConfigError(f"as tree: {forest.num_tokens:,} tokens fit the budget")
        plan = engine.plan(forest)
        key_rows = _key_rows(plan, engine)
        seconds = time.perf_counter() - started
        flops = flop_model(engine.lm.model)

        def step(_: OnPart | None = None) -> float:
            if not is_checkpointed:
                return engine.step(forest).loss
            with checkpointing(engine.lm.model):
                return engine.step(forest).loss

        return Contestant(
            step,
            plan.num_computed_tokens,
            seconds,
            key_rows / plan.num_computed_tokens,
            plan.num_micro_batches,
            plan.num_held_tokens,
            plan.num_recomputed_tokens,
            None if max_tokens is None else flops.tree(forest) / flops.planned(plan),
            flops.tree(forest),
        )


def layers_of(setting: str, device: torch.device) -> str:
    """How layers of all contestants run: `auto` resolved."""
    if setting not in LAYERS:
        raise ConfigError(f"--layers {setting!r} is unknown; choose one of {', '.join(LAYERS)}.")
    if setting == "auto":
        return "compiled" if device.type == "cuda" else "plain"
    return setting


def fuse(lm: DecoderAndHead, layers: str) -> None:
    """Has the layers of a model run as `layers_of` says.

    Raises:
        ConfigError: liger-kernel is not installed, or the model is not on a GPU.
    """
    if layers == "compiled":
        features.compilation.compile_layers(lm)
    elif layers == "whole":  # with attention inside
        features.compilation.compile_layers(lm, attention_inside=True)
    elif layers == "liger":
        features.liger.use_liger(lm.model, lm.device)


@contextmanager
def _names_restored(model: nn.Module) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The names of the module of a model's class, and what they are before; what is changed inside is undone."""
    names = vars(sys.modules[type(base_model(model)).__module__])
    before = dict(names)
    try:
        yield names, before
    finally:
        names.update(before)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model with the same parameters and buffers, so that gradients accumulate in one place."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, memo={id(each): each for each in shared})


def plain_parts(model: PreTrainedModel) -> DecoderAndHead:
    """Decoder and head of a twin on which nothing of treewise is installed."""
    touched, plain = twin(model), twin(model)
    lm = split_model(touched)
    path_of = {id(module): path for path, module in named_modules(touched)}
    decoder, output = (plain.get_submodule(path_of[id(module)]) for module in (lm.decoder, lm.output))
    assert isinstance(decoder, PreTrainedModel)
    return replace(lm, model=plain, base=base_model(plain), decoder=decoder, output=output)


def prepare(build: Callable[[], Contestant]) -> Contestant | str:
    """The contestant, or why it cannot run here."""
    try:
        return build()
    except TreewiseError as error:
        return str(error)


def _key_rows(plan: Plan, engine: TreeEngine) -> int:
    """Key rows that one layer's attention reads in a step; recomputed micro-batches read twice."""
    implementation, total = IMPLEMENTATIONS[engine.implementation], 0
    for index, batch in enumerate(plan.micro_batches):
        mask = TreeMask.from_layout(lay_out(plan, index))
        rows = implementation.num_key_rows(mask, engine.lm.device)
        total += rows * (2 if batch.is_open and not batch.is_held else 1)
    return total


def _values_per_token(model: nn.Module, is_checkpointed: bool) -> int:
    """Values that a token keeps for the backward, by an estimate; with checkpointing the inputs of all layers, and one
    layer's own."""
    values, config = flop_model(model).activation_values, base_model(model).config.get_text_config()
    num_layers = config.num_hidden_layers
    return values // num_layers + num_layers * config.hidden_size if is_checkpointed else values
