"""From the padded or packed rows of a batch to a forest, and from values on its edges back to the rows.

A scored label is an edge that leaves the token before it, whether or not the label is the next token of its row. Two
rows whose tokens agree up to that token, and whose labels agree, share the edge. Padding, tokens after a sequence's
last scored label and sequences without one are not computed: no result depends on them.

Letters: B rows of the batch, L tokens of a row, F real tokens, P scored labels, E edges.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from treewise.nn.vision import PixelInputs
from treewise.tree.forest import Forest
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

IGNORED = -100


class NotShareable(Exception):
    """A batch that has to be computed by the model's own forward; the message is the reason."""


class OwnCall(NotShareable):
    """A call that is meant for the model's own forward, as in generation: nothing to warn of."""


@dataclass(frozen=True, slots=True)
class RowRules:
    """How a model's own forward reads the positions of a row.

    is_relative: whether it depends on differences of positions only; otherwise a sequence has to begin at position 0.
    max_length: rows with larger positions, padding included, have other rotary frequencies; None: none has.
    cuts_rows: whether sequences of one row are computed as if each stood alone; asked where a row has several.
    """

    is_relative: Callable[[], bool] = lambda: True
    max_length: int | None = None
    cuts_rows: Callable[[], bool] = lambda: True


@dataclass(frozen=True, slots=True)
class BatchImages:
    """The images of a batch of I images.

    row, start, end: [I] int64, the tokens [start, end) of each in its row. digests: of each. pixels: the tensors of
    each distinct image, by digest.
    """

    row: np.ndarray
    start: np.ndarray
    end: np.ndarray
    digests: tuple[str, ...]
    pixels: Mapping[str, PixelInputs]

    def pixels_of(self, image: ImageSpan) -> PixelInputs:
        """The tensors of an image of the batch's forest."""
        return self.pixels[image.digest]


@dataclass(frozen=True, eq=False)
class Rows:
    """A batch as a forest with edges.

    source: [E] int64 tree position of the token that predicts, ascending. label: [E] int64 token ids. cell: [P] int64,
    index of each scored label in the flattened labels. edge: [P] int64, index of the edge that scores it. num_real:
    tokens of the batch without padding. images: of the forest.
    """

    forest: Forest
    source: np.ndarray
    label: np.ndarray
    cell: np.ndarray
    edge: np.ndarray
    num_real: int
    images: BatchImages | None = None


def rows_to_forest(
    token_ids: np.ndarray,
    labels: np.ndarray,
    attention_mask: np.ndarray | None = None,
    position_ids: np.ndarray | None = None,
    rules: RowRules = RowRules(),
    *,
    keeps_all: bool = False,
    images: BatchImages | None = None,
    routed_experts: np.ndarray | None = None,
) -> Rows | None:
    """Merges the rows' shared prefixes. None where no label is scored.

    token_ids: [B, L] integers. labels: [B, L - 1] or [B, L], `labels[b, j]` is what the token at (b, j) predicts, -100
    where nothing is. attention_mask: [B, L], zero for padding, on either side. position_ids: [B, L]; without an
    attention mask a row in which they start anew holds several sequences that do not attend to one another, as in
    transformers. keeps_all: whether every real token is computed, scored or not. routed_experts: [F, layers, k], of the
    real tokens, -1 where none were recorded.

    Raises:
        NotShareable: padding inside a sequence, positions that jump or that the model reads otherwise, or a label
            predicted by padding.
    """
    is_real, is_first = _sequences(token_ids, attention_mask, position_ids, rules)
    row, column = np.nonzero(labels != IGNORED)
    if not len(row):
        return None
    if not is_real[row, column].all():
        raise NotShareable("a label is predicted by a padding token")
    flat_of = np.cumsum(is_real).reshape(is_real.shape) - 1
    source_F = flat_of[row, column]
    flat_ids, starts = token_ids[is_real], flat_of[is_first]
    last_F = np.append(starts[1:], len(flat_ids)) - 1 if keeps_all else source_F
    kept, lengths = _used_lengths(starts, last_F, len(flat_ids))
    first = starts[kept]
    spans, lengths = _spans_of_sequences(images, flat_of, first, lengths)
    forest = Forest.from_trajectories(
        [
            Trajectory(
                flat_ids[start : start + length],
                loss_weights=np.arange(length) > 0,
                images=own,
                routed_experts=None if routed_experts is None else routed_experts[start : start + length],
                source="the micro-batch",
            )
            for start, length, own in zip(first, lengths, spans, strict=True)
        ]
    )
    sequence = np.searchsorted(first, source_F, side="right") - 1
    tree_source = forest.path_index[forest.path_offsets[sequence] + source_F - first[sequence]]
    label = labels[row, column].astype(np.int64)
    if label.min() < 0:
        raise NotShareable(f"a label is {label.min()}, which is neither a token nor {IGNORED}")
    width = int(label.max()) + 1
    key, edge = np.unique(tree_source * width + label, return_inverse=True)
    return Rows(
        forest=forest,
        source=key // width,
        label=key % width,
        cell=row * labels.shape[1] + column,
        edge=edge.reshape(-1),
        num_real=int(is_real.sum()),
        images=images,
    )


@dataclass(frozen=True, eq=False)
class WholeRows:
    """A batch as a forest of all its real tokens.

    place: [cells] int64, the tree position of each token of the flattened rows; of padding the number of tree tokens.
    num_real: tokens of the batch without padding. images: of the forest.
    """

    forest: Forest
    place: np.ndarray
    num_real: int
    images: BatchImages | None = None


def whole_rows_to_forest(
    token_ids: np.ndarray,
    attention_mask: np.ndarray | None = None,
    position_ids: np.ndarray | None = None,
    rules: RowRules = RowRules(),
    *,
    images: BatchImages | None = None,
) -> WholeRows:
    """Merges the rows' shared prefixes, whichever tokens are scored; arguments as in `rows_to_forest`.

    Raises:
        NotShareable: as in `rows_to_forest`, and a batch of padding alone.
    """
    is_real, is_first = _sequences(token_ids, attention_mask, position_ids, rules)
    flat_of = np.cumsum(is_real).reshape(is_real.shape) - 1
    flat_ids, starts = token_ids[is_real], flat_of[is_first]
    if not len(starts):
        raise NotShareable("it holds no token but padding")
    lengths = np.diff(starts, append=len(flat_ids))
    spans, _ = _spans_of_sequences(images, flat_of, starts, lengths)
    forest = Forest.from_trajectories(
        [
            # A trajectory has at least two tokens: one that stands alone gets a second that nothing reads.
            Trajectory(
                flat_ids[start : start + length] if length > 1 else flat_ids[[start, start]],
                images=own,
                source="the batch",
            )
            for start, length, own in zip(starts, lengths, spans, strict=True)
        ]
    )
    within = np.arange(len(flat_ids)) - np.repeat(starts, lengths)
    place = np.full(token_ids.size, forest.num_tokens)
    place[is_real.reshape(-1)] = forest.path_index[np.repeat(forest.path_offsets[:-1], lengths) + within]
    return WholeRows(forest, place, len(flat_ids), images)


def _sequences(
    token_ids: np.ndarray, attention_mask: np.ndarray | None, position_ids: np.ndarray | None, rules: RowRules
) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are none of padding, and which are the first of a sequence, [B, L] bool each."""
    is_real = np.ones(token_ids.shape, dtype=bool) if attention_mask is None else attention_mask != 0
    is_first = _first_tokens(is_real, position_ids, may_restart=attention_mask is None)
    begins_later = (np.nonzero(is_first)[1] if position_ids is None else position_ids[is_first]).any()
    if begins_later and not rules.is_relative():
        raise NotShareable("the model has absolute positions, and a row does not begin at position 0 (left padding)")
    if is_first.sum(axis=1).max(initial=0) > 1 and not rules.cuts_rows():
        raise NotShareable("the model does not cut rows where positions start anew: sequences see those before them")
    longest = token_ids.shape[1] if position_ids is None else int(position_ids.max(initial=-1)) + 1
    if rules.max_length is not None and longest > rules.max_length:
        raise NotShareable(f"positions reach {longest}, and beyond {rules.max_length} all rows get other frequencies")
    return is_real, is_first


def _spans_of_sequences(
    images: BatchImages | None, flat_of: np.ndarray, first: np.ndarray, lengths: np.ndarray
) -> tuple[list[tuple[ImageSpan, ...]], np.ndarray]:
    """The images of each sequence, and its length ([sequences] int64), so that none ends inside an image.

    flat_of: [B, L] int64, the index of each real token without padding. first: [sequences] int64, ascending.
    """
    if images is None:
        return [()] * len(first), lengths
    start, last = flat_of[images.row, images.start], flat_of[images.row, images.end - 1]
    sequence = np.searchsorted(first, start, side="right") - 1
    spans: list[list[ImageSpan]] = [[] for _ in first]
    lengths = lengths.copy()
    for low, high, digest, index in zip(start, last + 1, images.digests, sequence, strict=True):
        if index < 0 or low >= first[index] + lengths[index]:
            continue  # of a sequence, or a part of one, that no label depends on
        lengths[index] = max(lengths[index], high - first[index])
        source = f"an image of the batch ({digest[:8]})"
        spans[index].append(ImageSpan(source, int(low - first[index]), int(high - first[index]), digest))
    return [tuple(span) for span in spans], lengths


def _first_tokens(is_real: np.ndarray, position_ids: np.ndarray | None, may_restart: bool) -> np.ndarray:
    """[B, L] bool, the first token of each sequence."""
    before = np.zeros_like(is_real)
    before[:, 1:] = is_real[:, :-1]
    is_first = is_real & ~before
    if is_first.sum(axis=1).max(initial=0) > 1:
        raise NotShareable("padding stands between the tokens of a row")
    if position_ids is None:
        return is_first
    jumps = np.zeros_like(is_real)
    jumps[:, 1:] = is_real[:, 1:] & is_real[:, :-1] & (np.diff(position_ids, axis=1) != 1)
    if not may_restart and jumps.any():
        raise NotShareable("positions start anew or jump inside a row that has an attention mask")
    return is_first | jumps


def _used_lengths(starts: np.ndarray, needed_F: np.ndarray, num_flat: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences with a needed token, and how many of their tokens are computed: up to the last needed one.

    starts: [sequences] int64, needed_F: int64, ascending; both count the batch's tokens without padding. Returns two
    int64 arrays of one length.
    """
    sequence = np.searchsorted(starts, needed_F, side="right") - 1
    last = np.full(len(starts), -1)
    last[sequence] = needed_F  # ascending, so the last one stays
    used = np.flatnonzero(last >= 0)
    ends = np.append(starts[1:], num_flat)[used]
    lengths = np.maximum(last[used] - starts[used] + 1, 2)  # a trajectory has at least two tokens
    if (starts[used] + lengths > ends).any():
        raise NotShareable("a sequence has one token only")
    return used, lengths
