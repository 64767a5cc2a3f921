"""Flat training with recorded experts, written without treewise's replay: what trees with a replay are compared with.

The oracle knows nothing of how experts are chosen: on the output of a router it finds the formula that turns logits and
chosen experts into weights, and applies it to the recorded experts.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import softplus

from treewise.nn import routing
from treewise.nn.model import split_model
from treewise.nn.routing import routers_of
from treewise.nn.support_table import SUPPORTED, CapabilityTable
from treewise.tree.trajectory import Trajectory

MIXTURES = tuple(
    row.family for row in CapabilityTable.load().rows if row.status == SUPPORTED and "experts" in ", ".join(row.layers)
)
# These choose outside of the router, one expert after the other, or among experts of text and of images.
ELSEWHERE = ("dbrx", "phimoe", "ernie4_5_vl_moe")

Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Of the class of a router: formula and scale, as they were found last; rounding to half precision hides them.
_found: dict[type, tuple[Formula, torch.Tensor]] = {}


# -- records ----------------------------------------------------------------------------------------------------------


def router_sizes(model: nn.Module) -> list[tuple[int, int]]:
    """Experts, and how many are chosen, of each router."""
    return [(each.num_experts, each.num_chosen) for each in routing.router_sizes(model, split_model(model).decoder)]


def random_routes(
    sizes: Sequence[tuple[int, int]],
    trajectories: Sequence[Trajectory],
    rng: np.random.Generator,
    *,
    parting: float = 0.1,
    unknown: float = 0.2,
) -> list[Trajectory]:
    """The trajectories with experts drawn for their tokens. parting: the share of tokens at which a trajectory takes
    other experts than those with the same tokens before; unknown: of drawn tables that hold none."""
    table: dict[tuple[int, ...], np.ndarray] = {}

    def drawn(prefix: tuple[int, ...]) -> np.ndarray:
        if prefix not in table or rng.random() < parting:
            table[prefix] = np.stack([rng.permutation(experts)[:chosen] for experts, chosen in sizes])
            if rng.random() < unknown:
                table[prefix] = np.full_like(table[prefix], -1)
        return table[prefix]

    return [
        replace(item, routed_experts=np.stack([drawn(tuple(item.token_ids[: at + 1])) for at in range(len(item))]))
        for item in trajectories
    ]


def filled(tree: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories of a tree with the experts that those without a record take from the others of their group.

    Of trajectories that have all in common so far and go on with one token, those without a record take the experts
    that most of the others have there, of equals the least.
    """
    if all(item.routed_experts is None for item in tree):
        return list(tree)
    shape = next(item.routed_experts.shape[1:] for item in tree if item.routed_experts is not None)
    tables = [
        np.full((len(item), *shape), -1, np.int16) if item.routed_experts is None else item.routed_experts.copy()
        for item in tree
    ]
    groups = dict.fromkeys(item.group for item in tree if item.group is not None)
    stack = [([row for row, item in enumerate(tree) if item.group == group], 0) for group in groups]
    while stack:
        together, at = stack.pop()
        of_token = defaultdict(list)
        for row in together:
            if at < len(tree[row]):
                of_token[int(tree[row].token_ids[at])].append(row)
        for rows in of_token.values():
            known = Counter(key(tables[row][at]) for row in rows if tables[row][at].min() >= 0)
            if known:
                chosen = min(known, key=lambda each: (-known[each], each))
                for row in rows:
                    if tables[row][at].min() < 0:
                        tables[row][at] = np.array(chosen).reshape(shape)
            of_route = defaultdict(list)
            for row in rows:
                of_route[key(tables[row][at])].append(row)
            stack += [(each, at + 1) for each in of_route.values()]
    return [replace(item, routed_experts=table) for item, table in zip(tree, tables, strict=True)]


def first_by_tokens(tree: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories of a tree with, for each token, the experts of the first that recorded them behind the same."""
    shape = next(item.routed_experts.shape[1:] for item in tree if item.routed_experts is not None)
    first: dict[tuple[int, ...], np.ndarray] = {}
    for item in tree:
        for at, experts in enumerate(item.routed_experts if item.routed_experts is not None else ()):
            if experts.min() >= 0:
                first.setdefault(tuple(item.token_ids[: at + 1]), experts)
    nothing = np.full(shape, -1)
    return [
        replace(
            item,
            routed_experts=np.stack([first.get(tuple(item.token_ids[: at + 1]), nothing) for at in range(len(item))]),
        )
        for item in tree
    ]


def key(experts: np.ndarray) -> tuple[int, ...]:
    """The experts of a token in all layers, to compare."""
    return tuple(experts.reshape(-1).tolist())


# -- a forward --------------------------------------------------------------------------------------------------------


class Replayer:
    """Replaces the outputs of a model's routers by those of recorded experts, in forwards of one row each.

    Layers that are computed again in a backward get the record by their input, of equal ones the last first.
    """

    def __init__(self) -> None:
        self._tables: list[torch.Tensor] | None = None  # [L, k] of each router, of the row that runs
        self._of_input: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)

    @contextmanager
    def row(self, item: Trajectory) -> Iterator[None]:
        """Within, forwards are of this row."""
        if item.routed_experts is not None:
            whole = torch.from_numpy(item.routed_experts.astype(np.int64))
            self._tables, self._is_kept = list(whole.unbind(1)), torch.is_grad_enabled()
        try:
            yield
        finally:
            self._tables = None

    def hook(self, number: int) -> Callable[..., Any]:
        """What hangs on a router."""

        def swap(module: nn.Module, args: tuple[torch.Tensor, ...], output: Any) -> Any:
            own = number, hash(args[0].detach().reshape(-1).view(torch.uint8).numpy().tobytes())
            if self._tables is not None:
                table = self._tables[number]
                if self._is_kept:
                    self._of_input[own].append(table)
            elif self._of_input[own]:
                table = self._of_input[own].pop()
            else:
                return output
            return replaced(module, table, output)

        return swap


@contextmanager
def replayed(model: nn.Module) -> Iterator[Replayer]:
    """Within, rows and their backward take recorded experts."""
    replayer = Replayer()
    routers = routers_of(split_model(model).decoder)
    hooks = [router.module.register_forward_hook(replayer.hook(number)) for number, router in enumerate(routers)]
    try:
        yield replayer
    finally:
        for hook in hooks:
            hook.remove()


def replaced(module: nn.Module, table: torch.Tensor, output: Any) -> Any:
    """The output of a router where it had chosen the experts of a table, -1 for its own."""
    if type(module).__name__ == "Llama4Router":
        return llama4(output, table)
    if type(module).__name__ == "JetMoeTopKGating":
        return jetmoe(output, table, int(module.num_experts))  # type: ignore[arg-type]
    if type(module).__name__ == "Gemma4TextRouter":
        return gemma4(module, output, table)
    logits, weights, chosen, *rest = output
    experts = torch.where(table >= 0, table, chosen.reshape(table.shape))
    flat = logits.reshape(len(table), -1)
    found = with_experts(type(module), flat, weights.reshape(table.shape), chosen.reshape(table.shape).long(), experts)
    return logits, found.reshape(weights.shape), experts.reshape(chosen.shape).to(chosen.dtype), *rest


def formulas() -> Iterator[Formula]:
    """Weights [T, k] from logits [T, E] and experts [T, k]."""
    for act in (
        lambda z: z.softmax(-1),
        lambda z: z.sigmoid(),
        lambda z: softplus(z).sqrt(),
        lambda z: (z - z.detach().max(-1, keepdim=True).values).exp(),
        lambda z: z,
    ):
        yield lambda z, i, act=act: act(z).gather(-1, i)
        yield lambda z, i, act=act: (w := act(z).gather(-1, i)) / w.sum(-1, keepdim=True)


def with_experts(
    kind: type, logits: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """The weights of a router of a class where it had chosen other experts."""
    is_rounded = torch.is_autocast_enabled("cpu") or torch.bfloat16 in (logits.dtype, weights.dtype)
    logits, given = wide(logits), wide(weights)
    for formula in () if is_rounded else formulas():
        scale = (given / formula(logits, chosen)).detach()
        if torch.allclose(scale, scale.mean(), rtol=1e-5):
            _found[kind] = formula, scale.mean()
            return (formula(logits, experts) * scale.mean()).to(weights.dtype)
    if is_rounded and kind in _found:
        formula, mean = _found[kind]
        return (formula(logits, experts) * mean.to(logits)).to(weights.dtype)
    raise AssertionError(f"no formula gives the weights of the router: {weights} of {logits}")


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float32, or wider where it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def llama4(output: Any, table: torch.Tensor) -> Any:
    """Scores of all experts, 0 where they are not chosen."""
    scores, logits = output
    experts = table.clamp(min=0)
    kept = torch.full_like(logits, float("-inf")).scatter(1, experts, logits.gather(1, experts))
    return torch.where(table[:, :1] >= 0, wide(kept).sigmoid().to(scores.dtype), scores), logits


def gemma4(module: nn.Module, output: Any, table: torch.Tensor) -> Any:
    """Shares of the chosen probabilities, each times a scale of its expert."""
    probabilities, _, own = output
    experts = torch.where(table >= 0, table, own)
    kept = probabilities.gather(1, experts)
    scales: torch.Tensor = module.per_expert_scale  # type: ignore[assignment]
    return probabilities, kept / kept.sum(1, keepdim=True) * scales[experts], experts


def jetmoe(output: Any, table: torch.Tensor, num_experts: int) -> Any:
    """Tokens sorted by expert, with the softmax of their chosen logits."""
    logits = output[-1]
    own = logits.topk(table.shape[1], dim=1).indices
    experts = torch.where(table >= 0, table, own)
    gates = logits.gather(1, experts).softmax(-1).to(output[2].dtype).flatten()
    order = experts.flatten().sort(stable=True).indices
    sizes = torch.bincount(experts.flatten(), minlength=num_experts).tolist()
    return order, order.div(table.shape[1], rounding_mode="trunc"), gates[order], sizes, logits
