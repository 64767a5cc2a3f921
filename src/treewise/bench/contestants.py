"""The contestants: flat training, TRL's tree rows, path rescans, and treewise whole and at budgets.

Names: `flat` (every trajectory, packed), `merged` (contained ones folded into the longer ones), `trl`,
`tree-recurrence` (TRL's rows with its recurrent layers), `tree` (treewise, one micro-batch), `tree@N` (under a budget
of N tokens, held or recomputed as the planner chooses), `held@N` and `recomputed@N` where that choice differs,
`trl@N` (rows of at most N tokens). `-ckpt`: with gradient checkpointing. `-compiled`: with compiled decoder layers.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from treewise.bench.flat import FlatRows, can_pack, checkpointing, merged_trajectories
from treewise.bench.results import COMPILED
from treewise.bench.trl_rows import TrlRows, packing_module
from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError, OutOfMemoryError, TreewiseError
from treewise.nn.attention import IMPLEMENTATIONS, TreeMask
from treewise.nn.compilation import check_compilation, compile_layers, is_compiled
from treewise.nn.device import free_bytes
from treewise.nn.flops import flop_model
from treewise.nn.model import DecoderAndHead, split_model
from treewise.nn.recurrent import kinds_of
from treewise.planning.layout import lay_out
from treewise.planning.planner import Plan
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

AGAINST = ("flat", "merged", "trl", "tree-recurrence")
# Tokens of a packed row of flat training, where memory allows: more at a time is no faster.
ROW_TOKENS = {"cpu": 2_048, "cuda": 16_384}
# A contestant is left out on a CPU, where running out of memory ends the process, if the estimate of its activations is
# beyond this fraction of the free memory.
ACTIVATION_FRACTION = 0.8


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to make a training step.

    step: forward and backward into `.grad`; returns the loss. host_seconds: what it prepares once per step on the host,
    outside of `step` or in it. key_rows_per_token: key rows that the attention of a layer reads, per computed token.
    bound: tree FLOPs / FLOPs of the plan under a budget, the part of the speed of `tree` that recomputation leaves.
    """

    step: Callable[[], float]
    num_computed_tokens: int
    host_seconds: float
    key_rows_per_token: float | None = None
    num_micro_batches: int = 1
    num_held_tokens: int = 0
    num_recomputed_tokens: int = 0
    bound: float | None = None


Builders = dict[str, Callable[[], Contestant]]


def builders(
    model: nn.Module,
    items: Sequence[Trajectory],
    *,
    against: Sequence[str] = AGAINST,
    max_tokens: Sequence[int] = (),
    attention: str = "auto",
    with_checkpointing: bool = False,
    row_tokens: int | None = None,
    processor: Any = None,
    compile_backend: str | None = None,
) -> Builders:
    """The contestants by name, each built when called. Those without treewise run on a twin of the model, which
    shares its parameters and nothing else.

    A builder raises a `TreewiseError` if its contestant cannot run here. processor: of the items' images, which TRL's
    tree rows take none of. compile_backend: of torch.compile; each contestant without checkpointing is then there a
    second time, on twins whose layers it compiles.

    Raises:
        ConfigError: an unknown name in `against`, or an unknown backend.
    """
    unknown = [name for name in against if name not in AGAINST]
    if unknown:
        raise ConfigError(f"--against {unknown[0]!r} is unknown; choose one of {', '.join(AGAINST)}.")
    options = _Options(items, against, max_tokens, attention, row_tokens, processor)
    twins = twin(model), plain_parts(model)  # of the model before treewise is installed on it
    contestants = _builders(model, plain_parts(model), options, with_checkpointing=with_checkpointing)
    if compile_backend is not None:
        check_compilation(compile_backend, None)
        for name, build in _builders(*twins, options, with_checkpointing=False).items():
            contestants[name + COMPILED] = partial(_compiled, build, *twins, compile_backend)
    return contestants


@dataclass(frozen=True, slots=True)
class _Options:
    """See `builders`."""

    items: Sequence[Trajectory]
    against: Sequence[str]
    max_tokens: Sequence[int]
    attention: str
    row_tokens: int | None
    processor: Any


def _builders(model: nn.Module, plain: DecoderAndHead, options: _Options, *, with_checkpointing: bool) -> Builders:
    """model: of treewise's contestants. plain: of the others."""
    items, against, processor = options.items, options.against, options.processor
    attention, row_tokens = options.attention, options.row_tokens
    forest = Forest.from_trajectories(items)
    merged = merged_trajectories(forest)
    is_recurrent, sees = bool(kinds_of(model)), bool(len(forest.images))
    contestants: Builders = {}
    for suffix, is_checkpointed in (("", False), ("-ckpt", True)) if with_checkpointing else (("", False),):
        if "flat" in against:
            contestants["flat" + suffix] = partial(_flat, plain, items, row_tokens, is_checkpointed, processor)
        if "merged" in against and len(merged) < len(items):
            contestants["merged" + suffix] = partial(_flat, plain, merged, row_tokens, is_checkpointed, processor)
        if "trl" in against and not is_recurrent and not sees:
            contestants["trl" + suffix] = partial(_trl, plain, items, is_checkpointed=is_checkpointed)
        if "tree-recurrence" in against and is_recurrent:
            contestants["tree-recurrence" + suffix] = partial(
                _trl, plain, items, is_checkpointed=is_checkpointed, follows_states=True
            )
        contestants["tree" + suffix] = partial(
            _tree, model, items, None, attention, is_checkpointed=is_checkpointed, processor=processor
        )
    for budget in options.max_tokens:
        if budget >= forest.num_tokens:
            contestants[f"tree@{budget}"] = partial(_as_whole, forest.num_tokens)
        else:
            contestants |= _at_budget(model, items, forest, budget, attention, processor)
            if "trl" in against and not is_recurrent and not sees and budget >= forest.path_lengths.max():
                contestants[f"trl@{budget}"] = partial(_trl, plain, items, budget)
    return contestants


def _compiled(build: Callable[[], Contestant], model: nn.Module, plain: DecoderAndHead, backend: str) -> Contestant:
    """A contestant whose layers are compiled, in its first step."""
    for lm in (split_model(model), plain):
        if not is_compiled(lm.model):
            compile_layers(lm, backend)
    return build()


def twin(model: nn.Module) -> Any:
    """A copy of a model with the same parameters and buffers, so that gradients accumulate in one place."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, memo={id(each): each for each in shared})


def plain_parts(model: nn.Module) -> DecoderAndHead:
    """Decoder and head of a twin on which nothing of treewise is installed."""
    touched, plain = twin(model), twin(model)
    lm = split_model(touched)
    path_of = {id(module): path for path, module in touched.named_modules()}
    decoder, output = (plain.get_submodule(path_of[id(module)]) for module in (lm.decoder, lm.output))
    return DecoderAndHead(plain, decoder, output, lm.scale, lm.softcap)


def prepare(build: Callable[[], Contestant]) -> Contestant | str:
    """The contestant, or why it cannot run here."""
    try:
        return build()
    except TreewiseError as error:
        return str(error)


# -- one function for each --------------------------------------------------------------------------------------------


def _flat(
    lm: DecoderAndHead,
    items: Sequence[Trajectory],
    row_tokens: int | None,
    is_checkpointed: bool,
    processor: Any = None,
) -> Contestant:
    longest = max(len(item) for item in items)
    room = _room(lm, is_checkpointed)
    limit = row_tokens or max(longest, min(ROW_TOKENS.get(lm.device.type, ROW_TOKENS["cpu"]), room))
    _refuse_beyond(room, longest, lm)
    started = time.perf_counter()
    packs = can_pack(lm.model)
    rows = FlatRows(lm, items, max_row_tokens=limit, packs=packs, is_checkpointed=is_checkpointed, processor=processor)
    seconds = time.perf_counter() - started
    return Contestant(rows.step, rows.num_computed_tokens, seconds, 1.0, len(rows.rows))


def _trl(
    lm: DecoderAndHead,
    items: Sequence[Trajectory],
    max_tokens: int | None = None,
    *,
    is_checkpointed: bool = False,
    follows_states: bool = False,
) -> Contestant:
    packing_module()  # the import is not timed
    started = time.perf_counter()
    rows = TrlRows(lm, items, max_tokens, is_checkpointed=is_checkpointed, follows_states=follows_states)
    seconds = time.perf_counter() - started
    largest = max(len(row["input_ids"]) for row in rows.rows)
    _refuse_beyond(_room(lm, is_checkpointed), largest, lm)
    key_rows = rows.num_key_rows / rows.num_computed_tokens
    return Contestant(rows.step, rows.num_computed_tokens, seconds, key_rows, len(rows.rows))


def _tree(
    model: nn.Module,
    items: Sequence[Trajectory],
    max_tokens: int | None,
    attention: str,
    hold: str = "auto",
    is_checkpointed: bool = False,
    processor: Any = None,
) -> Contestant:
    engine = TreeEngine(model, max_tokens, attention, hold=hold, router_aux_loss=False, processor=processor)
    engine.budget.recovers = False  # a smaller budget would be another contestant
    started = time.perf_counter()
    forest = Forest.from_trajectories(items)
    plan = engine.plan(forest)
    key_rows = _key_rows(plan, engine)
    seconds = time.perf_counter() - started
    live = max(tokens for _, tokens in plan.timeline)
    flops = flop_model(engine.lm.model)
    _refuse_beyond(_room(engine.lm, is_checkpointed), live, engine.lm)

    def step() -> float:
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
    )


def _as_whole(num_tokens: int) -> Contestant:
    raise ConfigError(f"as tree: {num_tokens:,} tokens fit the budget")


def _at_budget(
    model: nn.Module, items: Sequence[Trajectory], forest: Forest, budget: int, attention: str, processor: Any
) -> Builders:
    def held(hold: str) -> int:
        return TreeEngine(model, budget, attention, hold=hold, check=False).plan(forest).num_held_tokens

    def build(hold: str) -> Callable[[], Contestant]:
        return partial(_tree, model, items, budget, attention, hold, processor=processor)

    contestants = {f"tree@{budget}": build("auto")}
    if held("always") != held("auto"):
        contestants[f"held@{budget}"] = build("always")
    if held("auto"):
        contestants[f"recomputed@{budget}"] = build("never")
    return contestants


def _key_rows(plan: Plan, engine: TreeEngine) -> int:
    """Key rows that one layer's attention reads in a step; recomputed micro-batches read twice."""
    implementation, total = IMPLEMENTATIONS[engine.implementation], 0
    for index, batch in enumerate(plan.micro_batches):
        mask = TreeMask.from_layout(lay_out(plan, index))
        rows = implementation.num_key_rows(mask, engine.lm.device)
        total += rows * (2 if batch.is_open and not batch.is_held else 1)
    return total


# -- memory -----------------------------------------------------------------------------------------------------------


def values_per_token(model: nn.Module, is_checkpointed: bool) -> int:
    """Values that a token keeps for the backward, by an estimate; with checkpointing the inputs of all layers, and one
    layer's own."""
    values = flop_model(model).activation_values
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    num_layers = config.num_hidden_layers
    return values // num_layers + num_layers * config.hidden_size if is_checkpointed else values


def _room(lm: DecoderAndHead, is_checkpointed: bool) -> int:
    """Tokens whose activations fit in the free memory."""
    size = next(lm.model.parameters()).element_size()
    token = max(1, values_per_token(lm.model, is_checkpointed) * size)
    return int(ACTIVATION_FRACTION * free_bytes(lm.device) / token)


def _refuse_beyond(room: int, num_tokens: int, lm: DecoderAndHead) -> None:
    """Raises on a CPU; on a GPU the error of the allocator can be caught."""
    if lm.device.type == "cpu" and num_tokens > room:
        raise OutOfMemoryError(f"does not fit: activations of {num_tokens:,} tokens, room for about {room:,}")
