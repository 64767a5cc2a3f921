"""Collective operations of ranks: recorded as data, and whether those of all ranks would come to their ends.

A rank enters its operations one after the other and waits in each until every rank of the group has entered it. So the
operations of all ranks are played against one another without any of them: an operation ends once it is the next one of
all its ranks. Ranks that are left when none can end wait forever, and `deadlock` says who waits where and for whom.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# Not operations between ranks of their own: the ends and the wrappings of others.
_NOT_BETWEEN_RANKS = ("wait_tensor", "wrap_tensor", "monitored")
_KINDS = {
    "all_reduce": ("allreduce", "all_reduce"),
    "reduce_scatter": ("reduce_scatter",),
    "all_gather": ("allgather", "all_gather"),
    "all_to_all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
}
_C10D: Any = distributed.distributed_c10d
_REDUCTIONS = ("sum", "avg", "max", "min", "product")


class Collective(NamedTuple):
    """One operation, as one of its ranks enters it.

    kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, or torch's name of another. group:
    its ranks. number: which group of these ranks it is, of several. num_bytes: of the whole operation: the result of an
    all-gather, the input of a reduce-scatter, what this rank sends to all in an all-to-all. is_data: of floating-point
    numbers, and not of plans and counts.
    """

    kind: str
    group: tuple[int, ...]
    number: int
    num_bytes: int
    is_data: bool

    @property
    def num_sent(self) -> float:
        """Bytes that one rank sends by the algorithm that sends least (rings, pairs)."""
        times = 2 if self.kind == "all_reduce" else 1
        return times * self.num_bytes * (len(self.group) - 1) / len(self.group)

    def fits(self, other: "Collective") -> bool:
        """Whether two ranks that enter these are in one operation. Of an exchange between all, and of Python's objects,
        ranks may send different numbers of bytes.
        """
        is_equal = self.num_bytes == other.num_bytes or self.kind == "all_to_all" or not self.is_data
        return is_equal and (self.kind, self.is_data) == (other.kind, other.is_data)

    def __str__(self) -> str:
        which = f", in another group of these ({self.number})" if self.number else ""
        content = "" if self.is_data else " of control data"
        return f"{self.kind}{content} ({self.num_bytes:,} bytes) of ranks {in_runs(self.group)}{which}"


class Recorder(TorchDispatchMode):
    """While the mode is on, `found` gets every operation that torch dispatches and that this rank shares with others.

    Operations of a backward are among them on a CPU, whose backwards run in the thread that called them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Collective] = []
        self._groups: dict[str, tuple[tuple[int, ...], int]] = {}  # name: ranks, and its number among groups of these

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES:
            name = func.name().split("::")[1].split(".")[0].strip("_")
            if not name.startswith(_NOT_BETWEEN_RANKS):
                self.record(name, [*args, *(kwargs or {}).values()])
                self.after(name, args, out)
        return out

    def after(self, name: str, arguments: Sequence[Any], out: Any) -> None:
        """Called after each operation."""

    def record(self, name: str, arguments: list[Any]) -> None:
        """Adds one operation."""
        group, number = self._group(arguments)
        if len(group) == 1:
            return
        # Lists of tensors, one for each rank, count together; of an input and an output the larger one.
        parts = [[each for each in _flat([argument]) if isinstance(each, torch.Tensor)] for argument in arguments]
        parts = [each for each in parts if each] or [[torch.empty(0)]]  # a barrier has none
        largest = max(parts, key=_num_bytes)
        kind = next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), name)
        num_bytes = _num_bytes(largest)
        if kind == "all_gather" and len(parts) == 1:  # the functional form has the input alone
            num_bytes *= len(group)
        if kind == "all_to_all":  # `alltoall_base_` has its output first; the functional form has its input alone
            num_bytes = _num_bytes(parts[-1] if "base" in name else parts[0])
        self.found.append(Collective(kind, group, number, num_bytes, largest[0].is_floating_point()))

    def _group(self, arguments: Sequence[Any]) -> tuple[tuple[int, ...], int]:
        found: Any = distributed.group.WORLD
        for each in _flat(arguments):
            if isinstance(each, torch.ScriptObject):
                try:
                    found = distributed.ProcessGroup.unbox(each)
                except RuntimeError:  # a ReduceOp
                    continue
            elif isinstance(each, str) and each not in _REDUCTIONS:
                found = _C10D._resolve_process_group(each)  # noqa: SLF001
        name: str = found.group_name
        if name not in self._groups:
            group = tuple(distributed.get_process_group_ranks(found))
            number = sum(group == other for other, _ in self._groups.values())
            self._groups[name] = (group, number)
        return self._groups[name]


def deadlock(of_ranks: Mapping[int, Sequence[Collective]]) -> str | None:
    """What keeps ranks from their ends, in sentences; None where all come to them.

    of_ranks: the operations of every rank, in the order in which it enters them. Each is entered when the one before it
    has ended, as on gloo. NCCL's are queued in this order, too, so an order that ends here ends there.
    """
    position = dict.fromkeys(of_ranks, 0)
    arrived: Counter[tuple[tuple[int, ...], int]] = Counter()
    moving = list(of_ranks)
    while moving:
        rank = moving.pop()
        if position[rank] == len(of_ranks[rank]):
            continue
        own = of_ranks[rank][position[rank]]
        key = (own.group, own.number)
        arrived[key] += 1
        if arrived[key] < len(own.group):
            continue
        for other in own.group:  # all of them stand at an operation of this group
            theirs = of_ranks[other][position[other]]
            if not own.fits(theirs):
                return f"Rank {rank} is in {own}, and rank {other} in {theirs}: their operations do not fit."
        arrived[key] = 0
        for other in own.group:
            position[other] += 1
        moving += own.group
    waiting = {rank: of_ranks[rank][index] for rank, index in position.items() if index < len(of_ranks[rank])}
    return None if not waiting else "\n".join(_sentences(of_ranks, position, waiting))


def _sentences(
    of_ranks: Mapping[int, Sequence[Collective]], position: Mapping[int, int], waiting: Mapping[int, Collective]
) -> Iterator[str]:
    """One for each operation that ranks wait in."""
    by_operation: dict[Collective, list[int]] = {}
    for rank, own in waiting.items():
        by_operation.setdefault(own, []).append(rank)
    for own, inside in sorted(by_operation.items(), key=lambda each: each[1]):
        missing = [rank for rank in own.group if rank not in inside]
        numbers = {position[rank] + 1 for rank in inside}
        yield (
            f"Rank{'s' * (len(inside) > 1)} {in_runs(inside)} wait{'s' * (len(inside) == 1)} in {own}, operation "
            f"{in_runs(sorted(numbers))}, for {in_runs(missing)}."
        )
    ended = [rank for rank in of_ranks if rank not in waiting]
    if ended:
        yield f"Rank{'s' * (len(ended) > 1)} {in_runs(ended)} came to the end."


def in_runs(numbers: Iterable[int]) -> str:
    """Numbers as `0, 3 to 7`; with equal steps as `0 to 56 by 8`."""
    runs: list[list[int]] = []  # first, last, step
    for number in sorted(numbers):
        if runs and (runs[-1][0] == runs[-1][1] or number - runs[-1][1] == runs[-1][2]):
            runs[-1] = [runs[-1][0], number, number - runs[-1][1]]
        else:
            runs.append([number, number, 1])
    return ", ".join(_run(*each) for each in runs) or "nobody"


def _run(first: int, last: int, step: int) -> str:
    if first == last:
        return str(first)
    if last == first + step:
        return f"{first}, {last}"
    return f"{first} to {last}" if step == 1 else f"{first} to {last} by {step}"


def _num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
