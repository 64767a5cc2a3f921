"""A step of up to thousands of ranks in one process after the other: what each rank of a run enters, without the run.

    step = PlacedStep.place(forests, settings, num_ranks=64, max_tokens=4096, costs=costs)
    walked = walk(step, folder, representatives(step))  # steps of some ranks, on torch's fake process groups
    assert deadlock(derived(step, walked)) is None      # of all ranks

Trees are placed on all ranks, and each rank's part is planned, as in a run. Then a rank takes the step that a trainer
takes (`StepRunner`: begun, its batch trained, ended), with the model sharded and its meshes made as in a run,
in a process of its own that is forked from this one. Groups are torch's fake ones, which send nothing.

What is real: placements, plans, the common sequence of passes, FSDP2, transformers' tensor- and expert-parallel layers,
the exchange of keys and values, and the order and sizes of what they send. What is not: numbers. A rank receives what
it sent itself, so losses and gradients mean nothing, the model is a tiny one, and attention is a sum of rows. What
others would say of their plans and denominators follows from their plans. So these ranks prove an order, and no result.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from treewise.distributed import groups, ranks
from treewise.distributed.lockstep import training_passes as passes_of
from treewise.distributed.lockstep import turns_of
from treewise.distributed.lockstep.guest import DONE, Lockstep
from treewise.distributed.mesh import load_on_mesh
from treewise.distributed.placement import CostModel, assign_ranks, rank_part
from treewise.engine.engine import TreeEngine
from treewise.nn.attention.gateway import GatewayRead, LayerCall, extend
from treewise.nn.attention.implementations import IMPLEMENTATIONS, Implementation
from treewise.nn.attention.mask import LayerRule, TreeMask
from treewise.nn.guest import Guest
from treewise.objectives.rollouts import step_forest
from treewise.objectives.sft import SFT
from treewise.planning.planner import plan
from treewise.planning.plans import Pass, Plan
from treewise.testing.collectives import Collective, Recorder
from treewise.testing.families import tiny_model
from treewise.trainer.arguments import TreeTrainingArguments
from treewise.trainer.step import StepRunner
from treewise.tree.forest import Forest

_ATTENTION = "sum of rows"  # the name of the stand-in
_OTHER_PLAN = "this rank has another plan than it was placed with"
_SECONDS = timedelta(seconds=60)  # of groups that never wait


# Of a pass: its turn, its action, whether it is empty, whether its micro-batch is open, and whether it reads another.
# Which layers FSDP2 gathers ahead of a backward depends on the forwards before it, which in lockstep are those of all.
Kind = tuple[int, str, bool, bool, bool]


@dataclass(frozen=True, eq=False)
class PlacedStep:
    """One optimizer step of a run of many ranks, placed and planned.

    settings: of `TreeTrainingArguments` (`sharded`, `tp_size`, ...). parts: of each batch that is computed at a time,
    its forest, and None for one without a tree. seconds_placing: CPU seconds of what every rank computes beside the
    step before it.
    """

    settings: dict[str, Any]
    num_ranks: int
    max_tokens: int
    parts: tuple[Forest | None, ...]
    plans: tuple[Plan | None, ...]
    seconds_placing: float

    @classmethod
    def place(
        cls,
        forests: Sequence[Forest],
        settings: dict[str, Any],
        *,
        num_ranks: int,
        max_tokens: int,
        costs: CostModel,
    ) -> "PlacedStep":
        """Places forests on the ranks as a run does, and plans the part of each."""
        together = settings.get("tp_size", 1) * settings.get("context_size", 1)
        in_lockstep = _are_in_lockstep(settings)
        began = time.process_time()
        placed = assign_ranks(forests, num_ranks // together, costs, max_tokens=max_tokens, in_lockstep=in_lockstep)
        seconds = time.process_time() - began
        found = (rank_part(forests, placed, index) for index in range(num_ranks // together))
        parts = tuple(step_forest(own, SFT()) if own else None for own in found)
        hold = "never" if settings.get("ep_size", 1) > settings.get("tp_size", 1) else "auto"  # as `TreeEngine` has it
        plans = tuple(None if part is None else plan(part, max_tokens, hold=hold) for part in parts)
        return cls(settings, num_ranks, max_tokens, parts, plans, seconds)

    @property
    def ranks_per_batch(self) -> int:
        """Neighbouring ranks that compute one part together."""
        return self.num_ranks // len(self.parts)

    @property
    def in_lockstep(self) -> bool:
        """Whether all ranks run the same sequence of passes."""
        return _are_in_lockstep(self.settings)

    def texts(self) -> list[str]:
        """What each rank tells the others of its passes, in lockstep."""
        texts = [DONE if each is None else passes_of(each).text for each in self.plans]
        return [texts[rank // self.ranks_per_batch] for rank in range(self.num_ranks)]

    @cached_property
    def turns(self) -> list[list[tuple[str, int | None]]]:
        """What each part runs, in order: actions, and steps of its plan's schedule, None for an empty pass."""
        if not self.in_lockstep:
            schedules = [() if made is None else made.schedule for made in self.plans]
            return [[(entry.action, number) for number, entry in enumerate(each)] for each in schedules]
        everybody = [passes_of(made) for made in self.plans]
        return [[(turn.action, turn.own_step) for turn in turns_of(own, everybody)] for own in everybody]

    def kinds(self, index: int) -> list[Kind]:
        """What the operations of each pass of a part depend on."""
        made, found = self.plans[index], []
        for turn, (action, number) in enumerate(self.turns[index]):
            place = turn if self.in_lockstep else 0
            if number is None or made is None:
                found.append((place, action, True, False, False))
                continue
            entry = made.schedule[number]
            batch = made.micro_batches[entry.micro_batch]
            found.append((place, entry.action, False, batch.is_open, bool(batch.parents)))
        return found


def _are_in_lockstep(settings: dict[str, Any]) -> bool:
    return bool(settings.get("sharded")) or settings.get("ep_size", 1) > settings.get("tp_size", 1)


@dataclass(frozen=True, slots=True)
class WalkedRank:
    """What one rank did in a step. collectives: that it entered, in order. starts: how many it had entered when each of
    its passes began, and when the last had ended. num_computed_tokens: by its forwards.
    """

    collectives: tuple[Collective, ...]
    starts: tuple[int, ...]
    num_computed_tokens: int = 0

    @property
    def pieces(self) -> list[tuple[Collective, ...]]:
        """The operations before the passes, of each pass, and after them."""
        bounds = [0, *self.starts, len(self.collectives)]
        return [self.collectives[first:end] for first, end in pairwise(bounds)]


def save_model(folder: Path, settings: dict[str, Any]) -> Path:
    """Writes the model that the ranks of such a run divide: two layers of eight columns, with heads and experts enough.
    Returns the folder.
    """
    tp, ep = settings.get("tp_size", 1), settings.get("ep_size", 1)
    sizes = {"hidden_size": 8, "intermediate_size": 8 * tp, "vocab_size": 16, "head_dim": 2, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2 * tp, "num_key_value_heads": tp}
    experts = {"num_experts": 2 * ep, "num_experts_per_tok": 2, "moe_intermediate_size": 8} if ep > 1 else {}
    tiny_model("qwen3_moe" if ep > 1 else "qwen3", **sizes, **heads, **experts).save_pretrained(folder)
    return folder


def walk(
    step: PlacedStep,
    folder: Path,
    chosen: Sequence[int] | None = None,
    *,
    around: Callable[[int], AbstractContextManager[Any]] = lambda _: nullcontext(),
    num_workers: int = 1,
) -> dict[int, WalkedRank]:
    """Every rank's step, each in a process forked from this one.

    folder: of `save_model`. chosen: ranks; None: all. around: what a rank's step is taken in; a fault, for a test.

    Raises:
        AssertionError: a rank has another plan than the one it was placed with.
    """
    numbers = list(chosen or range(step.num_ranks))
    fork, others = multiprocessing.get_context("fork"), _Others.of(step)
    transformers_logging.disable_progress_bar()  # in every child
    # A child a rank: torch keeps names of groups, and transformers its meshes, for the life of a process.
    with fork.Pool(num_workers, _begin, ((step, folder, others, around),), maxtasksperchild=1) as pool:
        return dict(zip(numbers, pool.imap(_walk_one, numbers, chunksize=1), strict=True))


def derived(step: PlacedStep, walked: Mapping[int, WalkedRank]) -> dict[int, Sequence[Collective]]:
    """The operations of every rank, from those of walked ones: a pass enters what a pass of its kind enters on a rank
    with the same place in its batch, in groups of its own. Bytes are those of that pass: its tokens are others.

    Raises:
        KeyError: a kind of passes that no walked rank had.
    """
    places = step.ranks_per_batch
    known: dict[Any, tuple[int, tuple[Collective, ...]]] = {}  # who entered what
    for rank, own in walked.items():
        names = ["before", *step.kinds(rank // places), "after"]
        for name, piece in zip(names, own.pieces, strict=True):
            known.setdefault((rank % places, name), (rank, piece))
    in_place: dict[tuple[int, int], Collective] = {}  # by the walked one, and the first rank of its group
    found: dict[int, Sequence[Collective]] = {}
    for rank in range(step.num_ranks):
        all_of: list[Collective] = []
        for name in ("before", *step.kinds(rank // places), "after"):
            like, piece = known[rank % places, name]
            for each in piece:
                key = id(each), _first(rank, each.group[1] - each.group[0], len(each.group))
                if key not in in_place:
                    in_place[key] = each._replace(group=group_like(each.group, like, rank))
                all_of.append(in_place[key])
        found[rank] = all_of
    return found


def representatives(step: PlacedStep) -> list[int]:
    """Ranks that have passes of every kind: all that compute a part together, of few parts."""
    of_parts = [set(step.kinds(index)) for index in range(len(step.parts))]
    missing, chosen = set[Kind]().union(*of_parts), []
    while missing:
        chosen.append(max(range(len(of_parts)), key=lambda index: len(of_parts[index] & missing)))
        missing -= of_parts[chosen[-1]]
    return [index * step.ranks_per_batch + place for index in chosen for place in range(step.ranks_per_batch)]


def group_like(group: tuple[int, ...], own: int, other: int) -> tuple[int, ...]:
    """The group that `other` has where `own` has `group`: meshes number their ranks row by row, so each axis has
    groups of equal steps.
    """
    step = group[1] - group[0]
    found = tuple(range(_first(other, step, len(group)), other + step * len(group), step)[: len(group)])
    assert group == tuple(range(_first(own, step, len(group)), own + step * len(group), step)[: len(group)])
    return found


def _first(rank: int, step: int, size: int) -> int:
    return rank // (step * size) * (step * size) + rank % step


# -- in the child -----------------------------------------------------------------------------------------------------

Given = tuple[PlacedStep, Path, "_Others", Callable[[int], AbstractContextManager[Any]]]
_given: Given | None = None


def _begin(given: Given) -> None:
    global _given
    _given = given


def _walk_one(rank: int) -> WalkedRank:
    assert _given is not None, "set before the fork"
    step, folder, others, around = _given
    torch.set_num_threads(1)
    with _as_rank(rank, step.num_ranks), others.answering(rank), _without_numbers(), around(rank):
        args = TreeTrainingArguments(
            output_dir=str(folder / "run"),
            use_cpu=True,
            report_to="none",
            max_tokens=step.max_tokens,
            attention=_ATTENTION,
            **step.settings,
        )
        if args.tp_size * args.ep_size > 1:
            model = load_on_mesh(str(folder), tp_size=args.tp_size, ep_size=args.ep_size, dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        part = step.parts[rank // step.ranks_per_batch]
        first = next(each for each in step.parts if each is not None)
        runner = StepRunner(model, SFT(), args, lambda: first)
        runner.spread(args.shard_settings())
        batch = runner.prepare([] if part is None else [part])
        others.has_begun = True
        recorder = _FakeRecorder()
        with recorder, _marked(recorder) as starts:
            runner.begin_step([batch], 1)
            out = runner.train_batch(batch)
            starts.append(len(recorder.found))
            runner.end_step()
        made = step.plans[rank // step.ranks_per_batch]
        num_tokens = 0 if out is None else out.num_computed_tokens
        assert num_tokens == (0 if made is None else made.num_computed_tokens), _OTHER_PLAN
        return WalkedRank(tuple(recorder.found), tuple(starts), num_tokens)


@contextmanager
def _marked(recorder: Recorder) -> Iterator[list[int]]:
    """Inside, gets how many operations were recorded when each pass began, own ones and empty ones."""
    starts: list[int] = []

    class Marks(Guest):
        def passes(self, _plan: Plan, passes: Iterable[Pass]) -> Iterator[Pass]:
            for each in passes:
                starts.append(len(recorder.found))
                yield each

    def run_empty(self: Lockstep, action: str) -> None:
        starts.append(len(recorder.found))
        empty_of(self, action)

    def guests_and_marks(self: TreeEngine, *args: Any, **kwargs: Any) -> list[Guest]:
        return [*guests_of(self, *args, **kwargs), Marks()]

    guests_of, empty_of = TreeEngine._guests, Lockstep._run_empty
    with (
        mock.patch.object(TreeEngine, "_guests", guests_and_marks),
        mock.patch.object(Lockstep, "_run_empty", run_empty),
    ):
        yield starts


@contextmanager
def _as_rank(rank: int, num_ranks: int) -> Iterator[None]:
    """Inside, this process is one rank of a run, whose groups send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    launched = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in launched.items()} | {"MASTER_ADDR": "127.0.0.1"})
    with ExitStack() as around:
        # The fake backend has no options of which a timeout could be read.
        around.enter_context(mock.patch.object(groups, "_timeout", return_value=_SECONDS))
        around.enter_context(mock.patch.object(groups, "follow_timeout"))
        distributed.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
        yield


@dataclass
class _Others:
    """What the other ranks say before and during a step, from their plans.

    texts: the passes of each. denominator: of the whole step. has_begun: whether this rank's step has.
    """

    texts: list[str]
    denominator: float
    has_begun: bool = False
    said: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, step: PlacedStep) -> "_Others":
        return cls(step.texts(), sum(SFT().denominator(part) for part in step.parts if part is not None))

    @contextmanager
    def answering(self, rank: int) -> Iterator[None]:
        sum_over, has_divisor = ranks.sum_over, False

        def gather_texts(own: str) -> list[str]:
            ranks_alike = [own] * len(self.texts)
            if not self.has_begun:  # ranks agree on whether the model can be sharded, each with the same first tree
                return ranks_alike
            self.said.append(own)
            if len(self.said) > 1:  # all are done with their one walk
                return ranks_alike
            assert own == self.texts[rank], _OTHER_PLAN
            return self.texts

        def sum_of(device: torch.device, *values: float) -> list[float]:
            nonlocal has_divisor
            total = sum_over(device, *values)
            if self.has_begun and not has_divisor:
                has_divisor = True
                return [self.denominator]
            return total

        with mock.patch.object(ranks, "gather_texts", gather_texts), mock.patch.object(ranks, "sum_over", sum_of):
            yield


@contextmanager
def _without_numbers() -> Iterator[None]:
    """Inside, attention is a sum of rows, and models are not probed: what a fake group gives back is wrong."""
    stand_in = mock.patch.dict(IMPLEMENTATIONS, {_ATTENTION: Implementation(_sum_of_rows)})
    with stand_in, mock.patch.object(TreeEngine, "check"):
        yield


def _sum_of_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: TreeMask,
    rule: LayerRule,
    sinks: Tensor | None = None,
    reads: tuple[GatewayRead, ...] = (),
    call: LayerCall = 0,
) -> Tensor:
    """Reads every key and value, those of gateways, too, so that gradients go the ways that they go in attention."""
    del mask, rule, sinks
    key, value = extend(key, value, reads, call)
    return (query + 0 * (key.sum() + value.sum()))[..., : value.shape[-1]]


class _FakeRecorder(Recorder):
    """Makes what a fake group gives back usable: counts of tokens are this rank's own, and numbers are finite."""

    def after(self, name: str, arguments: Sequence[Any], out: Any) -> None:
        if "alltoall_base" in name and arguments[0].shape == arguments[1].shape:
            arguments[0].copy_(arguments[1])
        received = out if isinstance(out, Tensor) else arguments[0]
        for each in received if isinstance(received, list | tuple) else [received]:
            if isinstance(each, Tensor) and each.is_floating_point():
                each.nan_to_num_(0.0, 0.0, 0.0).clamp_(-1.0, 1.0)
