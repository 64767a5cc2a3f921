"""Declared trees: nodes that name their parents. Checked here, with both places named, and laid out by the forest.

Works on flat lists from parents to children, so a chain of 100,000 nodes needs no recursion.
"""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treewise.base import features
from treewise.data.io import field_checks
from treewise.data.io.field_checks import shown
from treewise.data.io.files import Placed
from treewise.data.io.rows import ROUTED, RecordResult, Row
from treewise.data.other_names import check_names
from treewise.data.records import Label, RecordReader, rollout_of
from treewise.data.render.chat import render_calls
from treewise.data.render.messages import IMAGES, Message, Tools, clean_message, find_tools
from treewise.data.render.turns import Call
from treewise.errors import DataError
from treewise.tree import checks
from treewise.tree.trajectory import STREAMS

if TYPE_CHECKING:
    from treewise.data.images import ImageReader


def read(reader: RecordReader, result: RecordResult, form: str, item: Placed, group: Label) -> None:
    """Reads the nodes of a tree, or keeps one node until all of its tree are there (`rows_of`)."""
    record, location, rollout = item.value, item.location, rollout_of(item)
    if form == "tree_node":
        result.node = (json.dumps(field_checks.label(record["tree"], "tree", location)), record)
        return
    result.key = None
    is_forest = record.get("forest") is True
    result.is_declared, result.rows = rows_of(reader, nodes_of_record(item), find_tools(item), is_forest=is_forest)
    reward = field_checks.number(record.get("reward"), "reward", location)
    if not result.is_declared:
        reader.label(result.rows, record, group, rollout, location)
        return
    named = None if record.get("rollout") is None else rollout
    for row in result.rows:  # ends that have no labels of their own get these
        row.group = group
        row.reward = reward if row.is_end and row.reward is None else row.reward
        row.rollout = named if row.is_end and row.rollout is None else row.rollout


def rows_of(reader: RecordReader, placed: Sequence[Placed], tools: Tools, *, is_forest: bool) -> tuple[bool, list[Row]]:
    """Rows of a declared tree: its nodes where they hold tokens (true), rendered calls where they hold messages.

    is_forest: it may have several roots.
    """
    location, options = placed[0].location, reader.options
    parents = parents_of(placed, one_root=not is_forest)
    if "message" not in placed[0].value:
        return True, token_rows(placed, parents, options.max_length, reader.images)
    reader.check_tokenizer(location, "node")
    if options.thinking == "keep":
        raise DataError(f"{location}: thinking='keep' needs one conversation; trees are rendered as_inference.")
    calls = message_calls(placed, parents, options.train_on, reader.images, reader.template.prepared)
    rows = render_calls(reader.template, calls, tools, location, reader.left_out)
    without = {where for where, _ in reader.left_out}
    for row, call in zip(rows, (call for call in calls if call.location not in without), strict=True):
        row.source = row.rollout = call.location
    return False, rows


def nodes_of_record(item: Placed) -> list[Placed]:
    """The nodes that a record lists, each with its place for errors."""
    value, location = item.value["nodes"], item.location
    if not isinstance(value, list) or not value:
        raise DataError(f"{location}: nodes must be a non-empty list of {{id, parent, token_ids or message}}.")
    for number, node in enumerate(value):
        if not isinstance(node, dict):
            raise DataError(f"{location}: nodes[{number}] must be an object, found {type(node).__name__}.")
    return [Placed(f"{location}: nodes[{number}]", node, item.file) for number, node in enumerate(value)]


def parents_of(nodes: Sequence[Placed], one_root: bool = True) -> list[int]:
    """Index of each node's parent, -1 for the root.

    Raises:
        DataError: duplicate ids, a missing parent, a cycle, a child before its parent, several roots; both nodes named.
    """
    index: dict[Any, int] = {}
    for number, node in enumerate(nodes):
        first = index.setdefault(_node_id(node, number), number)
        if first != number:
            name = shown(_node_id(node, number))
            raise DataError(
                f"{node.location}: node id {name} was already given at {nodes[first].location}; ids must differ."
            )
    parents = []
    for number, node in enumerate(nodes):
        parent = node.value.get("parent")
        if parent is None:
            parents.append(-1)
        elif not isinstance(parent, str | int) or parent not in index:
            raise DataError(
                f"{node.location}: node {shown(_node_id(node, number))} names parent {shown(parent)}, which does not "
                f"exist among its {len(nodes)} nodes; add the parent, or use null for the root."
            )
        else:
            parents.append(index[parent])
    _check_order(nodes, parents)
    roots = [number for number, parent in enumerate(parents) if parent < 0]
    if one_root and len(roots) > 1:
        raise DataError(
            f"{nodes[roots[1]].location}: a second root (the first is at {nodes[roots[0]].location}); "
            'split the trees, or set "forest": true on the record.'
        )
    return parents


def token_rows(
    nodes: Sequence[Placed], parents: Sequence[int], max_length: int | None, reader: "ImageReader | None"
) -> list[Row]:
    """One row per node with its own tokens and streams; a stream may be one number for all tokens of a node.

    reader: reads images.

    Raises:
        DataError: no tokens, bad ids, streams that do not align, a path that trains nothing or is too long; bad images.
    """
    names = [name for name in STREAMS if any(node.value.get(name) is not None for node in nodes)]
    rows = []
    for node, parent in zip(nodes, parents, strict=True):
        check_names(node.value, node.location)
        value, mark = node.value.get("token_ids"), node.value.get("end")
        if value is None:
            raise DataError(f"{node.location}: no token_ids; all nodes of a tree need token_ids, or all a message.")
        if mark is not None and not isinstance(mark, bool):
            raise DataError(f"{node.location}: end must be true or false, found {shown(mark)}.")
        ids = checks.checked_ids(value, node.location, "merge the node into its parent")
        weights = _weights(node, len(ids), is_root=parent < 0)
        images = () if node.value.get("images") is None else features.image_records.row_images(node, ids, reader)
        for image in images if node.value.get("loss_weights") is None else ():
            weights[image.start : image.end] = 0
        streams = {name: _stream(node, name, weights) for name in names if name not in ("loss_weights", *ROUTED)}
        routes = {name: _routes(node, name, len(ids)) for name in ROUTED if node.value.get(name) is not None}
        streams |= {name: route.reshape(-1) for name, route in routes.items()}
        rows.append(
            Row(
                token_ids=ids,
                streams={"loss_weights": weights, **streams},
                num_routers=next((route.shape[1] for route in routes.values()), None),
                reward=field_checks.number(node.value.get("reward"), "reward", node.location),
                rollout=field_checks.label(node.value.get("rollout"), "rollout", node.location),
                source=node.location,
                parent=parent,
                is_end=mark,
                images=images,
            )
        )
    _check_paths(nodes, parents, rows, max_length)
    return rows


def message_calls(
    nodes: Sequence[Placed],
    parents: Sequence[int],
    train_on: str,
    reader: "ImageReader | None",
    prepared: Callable[[Message, str], Message],
) -> list[Call]:
    """A call for every sampled assistant node: its path is the context. Each node is trained once.

    `train_on="last_assistant"` trains assistant leaves only. reader: reads images. prepared: a message as the template
    takes it.
    """
    cleaned = []
    for node in nodes:
        location = f"{node.location}: message"
        message, weight = clean_message(node.value.get("message"), location)
        if message.get(IMAGES) or node.value.get("images") is not None:
            message = features.image_records.with_node_images(message, node, reader, location)
        cleaned.append((prepared(message, location), weight))
    inner = set(parents)
    calls = []
    for number, (message, weight) in enumerate(cleaned):
        if message["role"] != "assistant" or weight == 0 or (train_on == "last_assistant" and number in inner):
            continue
        path = []
        above = parents[number]
        while above >= 0:
            path.append(cleaned[above][0])
            above = parents[above]
        if not path:
            raise DataError(
                f"{nodes[number].location}: a trained assistant message has nothing before it; give it weight 0."
            )
        calls.append(Call(path[::-1], message, weight, nodes[number].location))
    if not calls:
        raise DataError(f"{nodes[0].location}: no node of the tree is a trained assistant message; nothing to train.")
    return calls


def _node_id(node: Placed, number: int) -> object:
    name = node.value.get("id")
    if name is None:
        return number
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise DataError(f"{node.location}: node id {shown(name)} must be a string or an integer.")
    return name


def _check_order(nodes: Sequence[Placed], parents: Sequence[int]) -> None:
    for number, parent in enumerate(parents):
        if parent < number:
            continue
        name = shown(_node_id(nodes[number], number))
        if parent == number:
            raise DataError(f"{nodes[number].location}: node {name} is its own parent; use null for the root.")
        path, at = [number], parent
        while at >= 0 and at != number and len(path) <= len(nodes):
            path.append(at)
            at = parents[at]
        if at == number:
            names = " -> ".join(shown(_node_id(nodes[i], i)) for i in [*path[:6], number])
            raise DataError(f"{nodes[number].location}: a cycle of parents with {nodes[path[1]].location}: {names}.")
        raise DataError(
            f"{nodes[number].location}: node {name} comes before its parent {shown(_node_id(nodes[parent], parent))} "
            f"at {nodes[parent].location}; write parents first."
        )


def _weights(node: Placed, length: int, *, is_root: bool) -> np.ndarray:
    value = node.value.get("loss_weights")
    given = 1.0 if value is None else value
    weights = checks.numbers(given, "loss_weights", length, node.location, is_scalar_allowed=True)
    if is_root and not isinstance(value, list | np.ndarray):
        weights[0] = 0
    checks.loss_weights(weights, node.location, begins=is_root)
    return weights


def _stream(node: Placed, name: str, weights: np.ndarray) -> np.ndarray:
    if STREAMS[name].has_candidates:
        raise DataError(f"{node.location}: nodes of a tree take no {name}; give one row of token_ids per trajectory.")
    value = node.value.get(name)
    if value is None:
        if weights.any():
            raise DataError(
                f"{node.location}: {name} is missing, but other nodes have it and this one has trained tokens."
            )
        return np.zeros(len(weights), dtype=np.float32)
    return checks.numbers(value, name, len(weights), node.location, is_scalar_allowed=True)


def _routes(node: Placed, name: str, num_tokens: int) -> np.ndarray:
    values: Any = features.encoded_arrays.decoded(node.value[name], name, node.location, num_tokens)
    experts: np.ndarray = features.routes.checked_experts(values, name, num_tokens, node.location)
    return experts


def _check_paths(nodes: Sequence[Placed], parents: Sequence[int], rows: Sequence[Row], max_length: int | None) -> None:
    trains = [False] * len(rows)
    length = [0] * len(rows)
    is_leaf = [True] * len(rows)
    for number, (row, parent) in enumerate(zip(rows, parents, strict=True)):
        trains[number] = bool(row.streams["loss_weights"].any()) or (parent >= 0 and trains[parent])
        length[number] = len(row.token_ids) + (length[parent] if parent >= 0 else 0)
        if parent >= 0:
            is_leaf[parent] = False
    for number, row in enumerate(rows):
        row.is_end = is_leaf[number] or bool(row.is_end)
        if row.is_end and length[number] < 2:
            raise DataError(
                f"{nodes[number].location}: the path to this node is one token long, so nothing is predicted."
            )
        if max_length is not None and length[number] > max_length:
            raise DataError(
                f"{nodes[number].location}: the path to this node has {length[number]} tokens, more than max_length "
                f"{max_length}; raise it or shorten the tree. Nothing is cut."
            )
        if row.is_end and not trains[number]:
            raise DataError(
                f"{nodes[number].location}: no trained token on the path to this node (all loss weights are 0); "
                "drop the branch or weight its answer."
            )
