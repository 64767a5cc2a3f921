"""Routes of trajectories: which experts of a mixture a token went through, and where rollouts part for them.

A token that took other experts is another one, although its id is the same: its hidden row differs, and all below it.
So prefixes are merged by token and route. Between the trajectories of one `group`, which were sampled from one prompt,
what was not recorded (-1) merges with anything, and takes the experts of the token that it shares: a sampler that has
the prompt in its cache records it once. That is no equivalence, so a rule decides. Where trajectories that have all in
common so far go on with one token and several routes, those without a record go with the route that most of the others
take, of equals with the least. Trajectories in another order are the same forest. Elsewhere what was not recorded is
routed as the model does: no number of a trajectory depends on what else is in the forest.

`by_tokens` gives all trajectories through a token the experts of the first: fewer tokens to compute, and other
log-probs than those of the rollouts that took others.

Letters: F flat tokens, N trajectories, L layers, k experts of a token in a layer.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import repeat

import numpy as np
from numpy.typing import ArrayLike

from treewise.errors import DataError
from treewise.tree import prefix_merge
from treewise.tree.trajectory import Trajectory

UNKNOWN = -1
MAX_EXPERT = np.iinfo(np.int16).max


def checked_experts(values: ArrayLike, name: str, length: int, location: str) -> np.ndarray:
    """[length, L, k] int16, the experts of each token, ascending within a layer; -1 where they were not recorded.

    A row is recorded in all layers with a router, or in none. A layer of nothing but zeros, which is how servers fill
    layers without a router, counts as one that was not recorded, if a router there would choose several experts.

    values: of all tokens, or of all but the last, whose row is then -1.

    Raises:
        DataError: another shape or type, an expert below -1 or over 32,767, one that a layer names twice, or a row that
            is recorded in some layers only.
    """
    try:
        array = np.asarray(_as_lists(values) if np.asarray(values).dtype == object else values)
    except (ValueError, TypeError, OverflowError):
        raise DataError(
            f"{location}: {name} has tables of several sizes; give one [layers, experts] a token."
        ) from None
    if array.ndim != 3 or len(array) not in (length, length - 1) or not array.size:
        raise DataError(
            f"{location}: {name} has shape {array.shape}; give [{length}, layers, experts], one table per token (or "
            f"{length - 1}: the last token chose none while it was sampled)."
        )
    if array.dtype.kind not in "iu":
        raise DataError(f"{location}: {name} must be integers, not {array.dtype}.")
    outside = np.argwhere((array < -1) | (array > MAX_EXPERT))
    if len(outside):
        row, layer, at = outside[0]
        raise DataError(f"{location}: {name}[{row}] layer {layer}: expert {array[row, layer, at]} is none.")
    experts = np.full((length, *array.shape[1:]), -1, dtype=np.int16)
    experts[: len(array)] = np.sort(array, axis=-1)
    if experts.shape[2] > 1:
        experts[:, (experts <= 0).all((0, 2))] = -1
    _check_experts(experts, name, location)
    return experts


def _check_experts(experts: np.ndarray, name: str, location: str) -> None:
    """Raises `DataError` for [n, L, k] int16 experts, ascending, that no routers of one model can have chosen."""
    twice = np.argwhere((experts[..., 1:] == experts[..., :-1]) & (experts[..., 1:] >= 0))
    if len(twice):
        row, layer, at = twice[0]
        fill = " A row of zeros is how verl and prime-rl fill up; give -1." if not experts[row].any() else ""
        raise DataError(f"{location}: {name}[{row}] layer {layer}: expert {experts[row, layer, at]} twice.{fill}")
    is_known = experts >= 0
    has_router: np.ndarray = np.asarray(is_known.any((0, 2)))
    is_recorded: np.ndarray = np.asarray(is_known.any((1, 2)))
    differs: np.ndarray = is_known != has_router[:, None]
    partly = np.argwhere(differs & is_recorded[:, None, None])
    if len(partly):
        row, layer, _ = partly[0]
        raise DataError(
            f"{location}: {name}[{row}] layer {layer}: -1 beside recorded experts; a token's are recorded in all "
            "layers or in none."
        )


def _as_lists(values: object) -> object:
    return [_as_lists(value) for value in values] if isinstance(values, list | tuple | np.ndarray) else values


def has_routes(trajectories: Sequence[Trajectory]) -> bool:
    """Whether the experts of any token are recorded."""
    return any(item.routed_experts is not None for item in trajectories)


def merged(
    trajectories: Sequence[Trajectory], keys: np.ndarray, offsets: np.ndarray, tree_of: Sequence[int] | None = None
) -> tuple[list[Trajectory], np.ndarray]:
    """The trajectories with the experts that they take from one another, and keys that are equal where routes are, too.

    keys: [F] int32, equal where tokens are. offsets: [N + 1] where each trajectory begins. tree_of: [N] the tree that
    each is of; experts are taken within a group of one tree. None: all are of one.

    Raises:
        DataError: routes of several shapes.
    """
    routes, rows = _numbered(trajectories, offsets)
    known = routes.copy()
    together: dict[Hashable, list[int]] = {}
    for index, (item, tree) in enumerate(zip(trajectories, repeat(0) if tree_of is None else tree_of, strict=False)):
        if item.group is not None:
            together.setdefault((tree, item.group), []).append(index)
    for members in together.values():
        if len(members) > 1:
            _resolve(np.array(members), keys, offsets, routes, rows)
    filled = list(trajectories)
    for index in np.unique(np.searchsorted(offsets, np.flatnonzero(routes != known), side="right") - 1).tolist():
        own = slice(offsets[index], offsets[index + 1])
        filled[index] = replace(filled[index], routed_experts=rows[routes[own]])
    pairs = keys.astype(np.int64) * (len(rows) + 1) + routes + 1
    return filled, np.unique(pairs, return_inverse=True)[1].astype(np.int32)


def by_tokens(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories of a tree, where each token has the experts that the first of them recorded for it.

    Raises:
        DataError: routes of several shapes.
    """
    items = list(trajectories)
    if not has_routes(items):
        return items
    offsets = np.concatenate([[0], np.cumsum([len(item) for item in items])])
    routes, rows = _numbered(items, offsets)
    segments = prefix_merge.merge_sequences(np.concatenate([item.token_ids for item in items]), offsets)
    path_F = prefix_merge.path_index(segments)
    first_T = np.full(segments.num_tokens, UNKNOWN)
    is_known = np.flatnonzero(routes != UNKNOWN)[::-1]
    first_T[path_F[is_known]] = routes[is_known]  # the last assignment wins: that of the first trajectory
    parts = np.split(first_T[path_F], offsets[1:-1])
    return [replace(item, routed_experts=rows[own]) for item, own in zip(items, parts, strict=True)]


def one_shape(trajectories: Sequence[Trajectory]) -> tuple[int, ...]:
    """Layers and experts of all records. Raises `DataError` where they differ."""
    shapes = {item.routed_experts.shape[1:]: item.source for item in trajectories if item.routed_experts is not None}
    if len(shapes) > 1:
        (one, where), (other, there) = list(shapes.items())[:2]
        raise DataError(
            f"{there or 'a trajectory'}: routed_experts of {list(other)} layers and experts, and of {list(one)} in "
            f"{where or 'another one'}; the rows of a tree are of one model."
        )
    return next(iter(shapes))


def filled(first: np.ndarray | None, later: np.ndarray | None, length: int) -> np.ndarray | None:
    """[length, L, k], the records of one row's first tokens by two forwards: that of the first, and of the later one
    where the first has none. None: neither has any.

    Raises:
        DataError: records of several shapes.
    """
    known = [table for table in (first, later) if table is not None]
    if not known:
        return None
    if len({table.shape[1:] for table in known}) > 1:
        raise DataError(
            f"routed_experts of {list(known[0].shape[1:])} and {list(known[1].shape[1:])} layers and experts."
        )
    whole = np.full((length, *known[0].shape[1:]), UNKNOWN, dtype=np.int16)
    for table in known:
        own = whole[: len(table)]
        is_new = (own < 0).all((1, 2))
        own[is_new] = table[:length][is_new]
    return whole


def side_by_side(tables: Sequence[np.ndarray | int]) -> np.ndarray:
    """[T, L, k], the tables of several forests one after the other; a number stands for as many tokens without one.

    Raises:
        DataError: tables of several shapes.
    """
    shapes = {table.shape[1:] for table in tables if isinstance(table, np.ndarray)}
    if len(shapes) > 1:
        raise DataError(f"routed_experts of {' and '.join(str(list(shape)) for shape in shapes)} layers and experts.")
    shape = next(iter(shapes))
    return np.concatenate(
        [table if isinstance(table, np.ndarray) else np.full((table, *shape), UNKNOWN, np.int16) for table in tables]
    )


def _numbered(trajectories: Sequence[Trajectory], offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[F] int64 the number of each token's route, `UNKNOWN` where it was not recorded; and the routes, [R + 1, L, k]
    int16, of which the last is that of such tokens.
    """
    shape = one_shape(trajectories)
    nothing = np.full(shape, -1, dtype=np.int16).tobytes()
    number: dict[bytes, int] = {nothing: UNKNOWN}
    routes = np.full(int(offsets[-1]), UNKNOWN, dtype=np.int64)
    for item, offset in zip(trajectories, offsets.tolist(), strict=False):
        if item.routed_experts is not None:
            own = [number.setdefault(row.tobytes(), len(number) - 1) for row in item.routed_experts]
            routes[offset : offset + len(own)] = own
    del number[nothing]
    rows = np.frombuffer(b"".join([*number, nothing]), dtype=np.int16).reshape(-1, *shape)
    return routes, rows


def _resolve(members: np.ndarray, keys: np.ndarray, offsets: np.ndarray, routes: np.ndarray, rows: np.ndarray) -> None:
    """Writes into `routes` those that trajectories take from one another. members: of one tree, [n] int64.

    Trajectories that have all before a depth in common go on together up to where they part, a run at a time.
    """
    lengths = np.diff(offsets)
    stack = [(members, 0)]
    while stack:
        together, depth = stack.pop()
        together = together[lengths[together] > depth]
        for group in _groups(together, offsets[together] + depth, keys, routes, rows):
            if len(group) > 1:
                stack.append((group, _end_of_run(group, depth, keys, offsets, routes)))


def _groups(
    together: np.ndarray, at: np.ndarray, keys: np.ndarray, routes: np.ndarray, rows: np.ndarray
) -> list[np.ndarray]:
    """Trajectories ([n] int64) that go on with the same token and route. at: [n] int64, the flat token of each.

    Those without a record get the route that they go with.
    """
    groups = []
    for key in np.unique(keys[at]):
        of_token = keys[at] == key
        own = routes[at[of_token]]
        counts = Counter(own[own != UNKNOWN].tolist())
        if counts:
            chosen = min(counts, key=lambda route: (-counts[route], rows[route].tolist()))
            routes[at[of_token & (routes[at] == UNKNOWN)]] = chosen
        for route in counts or [UNKNOWN]:
            groups.append(together[of_token & (routes[at] == route)])
    return groups


def _end_of_run(group: np.ndarray, depth: int, keys: np.ndarray, offsets: np.ndarray, routes: np.ndarray) -> int:
    """The depth at which trajectories that have the token at `depth` in common part, or one of them ends; up to there
    each gets the routes that any of them has.
    """
    starts = offsets[group]
    length = int((offsets[group + 1] - starts).min()) - depth
    key, run = keys[starts[0] + depth :][:length], routes[starts[0] + depth :][:length].copy()
    for start in starts[1:].tolist():
        own_key, own = keys[start + depth :][:length], routes[start + depth :][:length]
        differs = (own_key != key) | ((own != run) & (own != UNKNOWN) & (run != UNKNOWN))
        if differs.any():
            length = int(differs.argmax())
            key, run, own = key[:length], run[:length], own[:length]
        run = np.where(run == UNKNOWN, own, run)
    for start in starts.tolist():
        routes[start + depth : start + depth + length] = run
    return depth + length
