"""Declared trees: nodes that name their parents, each with its own tokens.

Nothing has to be discovered, so a tree of any depth is laid out without touching a token twice. Each end (a leaf, or
a node marked as one) is a trajectory. Streams belong to nodes and are shared by all trajectories through them. A tree
with too many flat tokens to hold keeps one copy of every stream value, and makes a trajectory when it is read.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treewise.base import features
from treewise.base.arrays import Bools, Ints
from treewise.base.lazy_sequence import LazySequence
from treewise.errors import ConfigError, DataError
from treewise.tree import checks, forest
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan, check_spans
from treewise.tree.prefix_merge import Segments, heavy_first, path_to
from treewise.tree.trajectory import STREAMS, Trajectory


@dataclass(frozen=True, slots=True)
class DeclaredTree:
    """Declared nodes in depth-first order.

    token_ids: [T] int32. streams: [T] float32 each; `routed_experts` [T, L, k] int16. end_nodes: [N] int64, the node,
    counted as declared, that each trajectory ends at. images: with tree positions as their tokens, ascending.
    """

    segments: Segments
    token_ids: np.ndarray
    streams: dict[str, np.ndarray]
    end_nodes: np.ndarray
    images: tuple[ImageSpan, ...]


@dataclass(frozen=True, eq=False)
class DeclaredTrajectories(LazySequence[Trajectory]):
    """The trajectories of a declared tree, each made when it is read.

    values: `token_ids` ([T] int32) and streams ([T] float32), by name. end_nodes: [N] int64, the node that each ends
    at, for its `source`; None where that is not known. images: see `DeclaredTree`.
    """

    segments: Segments
    values: dict[str, np.ndarray]
    group: Hashable = None
    location: str = ""
    end_nodes: np.ndarray | None = None
    images: tuple[ImageSpan, ...] = ()

    def __len__(self) -> int:
        return len(self.segments.end_segment)

    def item(self, index: int) -> Trajectory:
        """The trajectory; raises `DataError` where none of its tokens is trained."""
        path = path_to(self.segments, int(self.segments.end_segment[index]))
        source = "" if self.end_nodes is None else f"{self.location}, node {self.end_nodes[index]}"
        values: dict[str, Any] = {name: value[path] for name, value in self.values.items()}
        return Trajectory(**values, group=self.group, source=source, images=self._images_on(path))

    def _images_on(self, path: np.ndarray) -> tuple[ImageSpan, ...]:
        """The images whose tokens are on a path ([its length] int64, ascending), counted along it."""
        starts = np.searchsorted(path, [image.start for image in self.images]) if self.images else ()
        on_path = [(image, int(at)) for image, at in zip(self.images, starts, strict=True) if at < len(path)]
        return tuple(
            replace(image, start=at, end=at + image.end - image.start)
            for image, at in on_path
            if path[at] == image.start
        )


def forest_of_nodes(
    parents: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    streams: Mapping[str, Any],
    ends: Sequence[bool] | None,
    images: Sequence[Sequence[ImageSpan]] | None,
    *,
    merge_siblings: bool,
    group: Any,
    source: str,
) -> Forest:
    """See `Forest.from_nodes`."""
    location = source or "declared tree"
    node_streams = {}
    for name, values in streams.items():
        if name not in STREAMS or STREAMS[name].has_candidates:
            known = ", ".join(each for each, stream in STREAMS.items() if not stream.has_candidates)
            raise ConfigError(f"{location}: {name!r} is not a stream of nodes; known: {known}.")
        if values is not None and any(value is not None for value in values):
            is_spread = STREAMS[name].is_scalar_allowed
            node_streams[name] = _spread_over_nodes(values, token_ids) if is_spread else values
    tree = lay_out_nodes(parents, token_ids, node_streams, ends, merge_siblings, location, images)
    values_of = {"token_ids": tree.token_ids, **tree.streams}
    trajectories = DeclaredTrajectories(tree.segments, values_of, group, location, tree.end_nodes, tree.images)
    if tree.segments.path_lengths.sum() <= forest.MAX_FLAT_TOKENS:
        return Forest(tree.segments, tree.token_ids, tuple(trajectories))
    if tree.images:
        raise DataError(
            f"{location}: images in a declared tree of more than {forest.MAX_FLAT_TOKENS:,} flat tokens; split the "
            "tree."
        )
    return Forest(tree.segments, tree.token_ids, trajectories, tree.streams)


def streams_side_by_side(forests: Sequence[Forest]) -> dict[str, np.ndarray]:
    """The streams that all forests have, by name, of trees too large to hold flat beside other ones: [T] each.

    Raises:
        DataError: trajectories disagree in a token that they share.
    """
    streams = {
        name: np.concatenate([_shared_stream(each, name) for each in forests])
        for name, stream in STREAMS.items()
        if not stream.is_routes and all(each.has_stream(name) for each in forests)
    }
    if any(each.has_routes for each in forests):
        streams["routed_experts"] = features.routes.side_by_side(
            [each.routed_experts if each.has_routes else each.num_tokens for each in forests]
        )
    return streams


def lay_out_nodes(
    parents: Sequence[int],
    token_ids: Sequence[Sequence[int]],
    streams: Mapping[str, Sequence[Any]],
    ends: Sequence[bool] | None,
    merge_siblings: bool,
    location: str,
    images: Sequence[Sequence[ImageSpan]] | None = None,
) -> DeclaredTree:
    """Lays declared nodes out in depth-first order, one segment for each.

    Parameters:
        parents: index of each node's parent, -1 for a root; parents come first.
        token_ids: tokens that each node adds, at least one.
        streams: per name, one value per token of each node; of routes a table, and None for a node without.
        ends: whether a trajectory ends at the node; leaves where not given.
        merge_siblings: merge siblings with equal tokens and routes; otherwise keep them apart as declared.
        location: where the tree came from, for error messages.
        images: of each node, with spans that count from its first token; None: no node has any.

    Raises:
        DataError: a parent that is missing, comes later or is the node itself; an empty node; bad tokens or streams.
    """
    parent = _checked_parents(parents, location)
    flat_ids, lengths = _joined(token_ids, len(parent), "token_ids", location)
    is_bad = (lengths == 0).any() or flat_ids.dtype.kind not in "iu" or flat_ids.min() < 0
    if is_bad or flat_ids.max() > checks.MAX_TOKEN_ID:
        for node, ids in enumerate(token_ids):  # one of these raises
            checks.checked_ids(ids, f"{location}: node {node}", "merge it into its parent")
    values = {name: _stream(items, name, lengths, location) for name, items in streams.items()}
    spans = _checked_images(images, lengths, location)
    end_nodes = declared_ends = _end_nodes(parent, ends, location)
    first_tokens = (np.cumsum(lengths) - lengths)[parent < 0]
    if "loss_weights" not in values:
        values["loss_weights"] = np.ones(len(flat_ids), dtype=np.float32)
        values["loss_weights"][first_tokens] = 0
        for start, own in zip(np.cumsum(lengths) - lengths, spans, strict=True):
            for image in own:
                values["loss_weights"][start + image.start : start + image.end] = 0
    _check_weights(values["loss_weights"], first_tokens, lengths, location)
    if merge_siblings:
        parent, end_nodes, is_kept = _merge_equal_siblings(
            parent, flat_ids, lengths, end_nodes, values, spans, location
        )
        tokens = np.repeat(is_kept, lengths)
        flat_ids, lengths = flat_ids[tokens], lengths[is_kept]
        values = {name: value[tokens] for name, value in values.items()}
        spans = [each for each, is_its in zip(spans, is_kept, strict=True) if is_its]
    offsets = np.cumsum(lengths) - lengths
    segments = chain_nodes(parent, lengths, end_nodes, offsets)
    tree_ids = flat_ids.astype(np.int32)[segments.token_source]
    tree_streams = {name: value[segments.token_source] for name, value in values.items()}
    on_tree = _on_tree(spans, offsets, segments.token_source)
    return DeclaredTree(segments, tree_ids, tree_streams, declared_ends, on_tree)


def _spread_over_nodes(
    values: Sequence[Sequence[float] | float], token_ids: Sequence[Sequence[int]]
) -> list[Sequence[float]]:
    """A stream of nodes in which a node may hold one number: it becomes one value for each token of the node."""
    numbers = (int, float, np.integer, np.floating)
    return [
        [float(value)] * (len(token_ids[node]) if node < len(token_ids) else 1) if isinstance(value, numbers) else value
        for node, value in enumerate(values)
    ]


def chain_nodes(parents: np.ndarray, lengths: np.ndarray, ends: np.ndarray, offsets: np.ndarray) -> Segments:
    """Lays declared nodes (parents first) out in depth-first order; every node becomes one segment.

    parents: [n] index of the parent node or -1. lengths: [n] tokens per node, at least 1. ends: [N] the nodes at which
    trajectories end. offsets: [n] where each node's tokens begin in the flat ids.
    """
    above: list[int] = parents.tolist()
    own: list[int] = lengths.tolist()
    size = list(own)  # of whole subtrees
    for node in range(len(above) - 1, -1, -1):
        if above[node] >= 0:
            size[above[node]] += size[node]
    # Depth-first positions, siblings in their order, and depths. cursor: where the next child of a node begins.
    position, depth, cursor, next_root = [0] * len(above), [0] * len(above), [0] * len(above), 0
    for node, up in enumerate(above):
        if up < 0:
            position[node] = next_root
            next_root += size[node]
        else:
            position[node], depth[node] = cursor[up], depth[up] + own[up]
            cursor[up] += size[node]
        cursor[node] = position[node] + own[node]
    by_position = np.argsort(np.array(position, dtype=np.int64), kind="stable")
    segment_of_node = np.empty(len(parents), dtype=np.int64)
    segment_of_node[by_position] = np.arange(len(parents))
    parent = np.where(parents >= 0, segment_of_node[parents], -1)[by_position]
    order_lengths = lengths[by_position]
    start = np.cumsum(order_lengths) - order_lengths
    depths, ends = np.array(depth, dtype=np.int64)[by_position], segment_of_node[ends]
    return heavy_first(start, parent, depths, ends, offsets[by_position], int(order_lengths.sum()))


def _checked_parents(parents: Sequence[int], location: str) -> np.ndarray:
    parent = checks.as_array(parents, "parents", location)
    if parent.ndim != 1 or len(parent) == 0 or not np.issubdtype(parent.dtype, np.integer):
        raise DataError(f"{location}: parents must be a flat, non-empty list of integers (-1 for a root).")
    parent = parent.astype(np.int64)
    node = np.arange(len(parent))
    bad = np.flatnonzero((parent < -1) | (parent >= node))
    if len(bad):
        first = int(bad[0])
        above = int(parent[first])
        if above == first:
            why = "is its own parent"
        elif above >= len(parent) or above < -1:
            why = f"has parent {above}, which does not exist ({len(parent)} nodes; -1 for a root)"
        else:
            why = f"has parent {above}, which comes after it; list parents first"
        raise DataError(f"{location}: node {first} {why}.")
    return parent


def _joined(
    items: Sequence[Sequence[float]], num_nodes: int, name: str, location: str
) -> tuple[np.ndarray, np.ndarray]:
    """The values of all nodes, one after the other, and how many each has ([num_nodes] int64)."""
    if len(items) != num_nodes:
        raise DataError(f"{location}: {len(items)} {name} lists for {num_nodes} nodes.")
    arrays = [checks.as_array(item, name, f"{location}: node {node}") for node, item in enumerate(items)]
    for node, array in enumerate(arrays):
        kinds, what = ("iu", "integers") if name == "token_ids" else ("iufb", "numbers")
        if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
            raise DataError(f"{location}: node {node}: {name} must be a flat list of {what}, found {array.dtype}.")
    return np.concatenate(arrays), np.array([array.size for array in arrays], dtype=np.int64)


def _stream(items: Sequence[Any], name: str, lengths: np.ndarray, location: str) -> np.ndarray:
    if name in STREAMS and STREAMS[name].is_routes:
        return _routes(items, name, lengths, location)
    values, sizes = _joined(items, len(lengths), name, location)
    if not np.array_equal(sizes, lengths) or not (np.abs(values) <= checks.MAX_FLOAT).all():
        for node, (item, length) in enumerate(zip(items, lengths, strict=True)):  # one of these raises
            checks.numbers(item, name, int(length), f"{location}: node {node}")
    return values.astype(np.float32)


def _routes(items: Sequence[Any], name: str, lengths: np.ndarray, location: str) -> np.ndarray:
    if len(items) != len(lengths):
        raise DataError(f"{location}: {len(items)} {name} for {len(lengths)} nodes.")
    parts = [
        None if item is None else features.routes.checked_experts(item, name, int(length), f"{location}: node {node}")
        for node, (item, length) in enumerate(zip(items, lengths, strict=True))
    ]
    shapes = {part.shape[1:]: node for node, part in enumerate(parts) if part is not None}
    if len(shapes) > 1:
        (one, first), (other, second) = list(shapes.items())[:2]
        raise DataError(
            f"{location}: node {second} has {name} of {list(other)} layers and experts, node {first} of {list(one)}."
        )
    shape = next(iter(shapes), (1, 1))
    return np.concatenate(
        [
            np.full((length, *shape), -1, dtype=np.int16) if part is None else part
            for part, length in zip(parts, lengths.tolist(), strict=True)
        ]
    )


def _check_weights(weights: np.ndarray, first_tokens: np.ndarray, lengths: np.ndarray, location: str) -> None:
    if not weights[first_tokens].any() and (weights >= 0).all():
        return
    begins = np.isin(np.cumsum(lengths) - lengths, first_tokens)
    for node, part in enumerate(np.split(weights, np.cumsum(lengths)[:-1])):  # one of these raises
        checks.loss_weights(part, f"{location}: node {node}", begins=bool(begins[node]))


def _end_nodes(parent: np.ndarray, ends: Sequence[bool] | None, location: str) -> np.ndarray:
    is_leaf = np.ones(len(parent), dtype=bool)
    is_leaf[parent[parent >= 0]] = False
    if ends is None:
        return np.flatnonzero(is_leaf)
    marked = np.asarray(ends, dtype=bool)
    if len(marked) != len(parent):
        raise DataError(f"{location}: {len(marked)} end marks for {len(parent)} nodes.")
    lost = np.flatnonzero(is_leaf & ~marked)
    if len(lost):
        raise DataError(f"{location}: node {lost[0]} is a leaf but not an end, so its tokens belong to no trajectory.")
    return np.flatnonzero(marked)


def _merge_equal_siblings(
    parent: Ints,
    flat_ids: np.ndarray,
    lengths: Ints,
    end_nodes: Ints,
    values: dict[str, np.ndarray],
    images: Sequence[Sequence[ImageSpan]],
    location: str,
) -> tuple[Ints, Ints, Bools]:
    """New parents of the kept nodes, new end nodes, and which nodes are kept; merged nodes must agree in streams."""
    bounds: list[int] = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    seen: dict[Hashable, int] = {}
    canonical = np.empty(len(parent), dtype=np.int64)
    above: list[int] = parent.tolist()
    for node in range(len(parent)):
        low, high = bounds[node], bounds[node + 1]
        up = int(canonical[above[node]]) if above[node] >= 0 else -1
        shown = tuple((image.start, image.digest) for image in images[node])
        took = values["routed_experts"][low:high].tobytes() if "routed_experts" in values else b""
        first = seen.setdefault((up, flat_ids[low:high].tobytes(), shown, took), node)
        canonical[node] = first
        if first != node:
            for name, value in values.items():
                if not np.array_equal(value[low:high], value[bounds[first] : bounds[first + 1]]):
                    raise DataError(
                        f"{location}: nodes {first} and {node} are siblings with equal tokens but different {name}; "
                        "keep them apart (merge_siblings=False) or make them agree."
                    )
    is_kept = canonical == np.arange(len(parent))
    renumbered = np.cumsum(is_kept) - 1
    new_parent = np.where(parent >= 0, renumbered[canonical[parent]], -1)[is_kept]
    return new_parent, renumbered[canonical[end_nodes]], is_kept


def _checked_images(
    images: Sequence[Sequence[ImageSpan]] | None, lengths: np.ndarray, location: str
) -> list[tuple[ImageSpan, ...]]:
    """The images of each node."""
    if images is None:
        return [()] * len(lengths)
    if len(images) != len(lengths):
        raise DataError(f"{location}: {len(images)} lists of images for {len(lengths)} nodes.")
    return [
        check_spans(each, int(length), f"{location}: node {node}")
        for node, (each, length) in enumerate(zip(images, lengths, strict=True))
    ]


def _on_tree(
    images: Sequence[Sequence[ImageSpan]], offsets: np.ndarray, token_source: np.ndarray
) -> tuple[ImageSpan, ...]:
    """The images of nodes with tree positions as their tokens, ascending.

    offsets: [nodes] int64, the first token of each. token_source: [T] int64, the token at each tree position.
    """
    if not any(images):
        return ()
    position = np.empty(len(token_source), dtype=np.int64)
    position[token_source] = np.arange(len(token_source))
    first: list[int] = position[offsets].tolist()
    spans = [
        replace(image, start=start + image.start, end=start + image.end)
        for start, each in zip(first, images, strict=True)
        for image in each
    ]
    return tuple(sorted(spans, key=lambda image: image.start))


def _shared_stream(own: Forest, name: str) -> np.ndarray:
    """[T] float32, the value that all trajectories through a token agree on."""
    if name in own.tree_streams:
        return own.tree_streams[name]
    flat = own.flat_stream(name)
    values = np.empty(own.num_tokens, dtype=np.float32)
    values[own.path_index] = flat
    if not np.array_equal(values[own.path_index], flat):
        raise DataError(
            f"trajectories disagree in the {name} of a token that they share, so they cannot stand beside a declared "
            f"tree of more than {forest.MAX_FLAT_TOKENS:,} flat tokens; use several forests."
        )
    return values
