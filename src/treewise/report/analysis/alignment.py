"""Tokens that two branches have in common after a fork: what they would share without the first difference.

The forest is laid out so that the heaviest child of every segment follows it at once. Its tokens therefore fall into
*chains*, contiguous runs from a chain's head to a leaf, and every token lies in exactly one. Each chain but the first
of a tree leaves another one at a fork. Comparing it with the rest of that chain below the fork compares every branch
once and visits every token a bounded number of times; pairs of trajectories are never compared.

Two token runs are aligned by the hashes of all their windows of `WINDOW` tokens: the nearest common window begins
a common run, which is extended token by token; then the search continues behind it, in both. Runs
never go backwards, and at most `MAX_RUNS` of them are followed.

Letters: T tree tokens, S segments, C chains.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from treewise.tree.prefix_merge import Segments

WINDOW = 16  # tokens; the shortest run that counts
LOOK_AHEAD = 8192  # tokens of a branch searched at a time
MAX_RUNS = 256
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so no information is lost modulo 2**64


@dataclass(frozen=True, slots=True)
class Fork:
    """A branch that leaves a heavier one and comes back to its tokens.

    first_light, first_heavy: tree positions of the first tokens that differ. runs: [R, 3] int64, common runs in order:
    position in the light branch, position in the heavy one, tokens. parent: segment above the fork, -1 for none.
    """

    first_light: int
    first_heavy: int
    runs: np.ndarray
    parent: int

    @property
    def num_common_tokens(self) -> int:
        """Tokens of the light branch that the heavy one holds too: computed twice."""
        return int(self.runs[:, 2].sum())


def chain_heads(segments: Segments) -> np.ndarray:
    """[C] int64, the segments that begin a chain: roots, and children that do not follow their parent at once."""
    bounds = np.append(segments.start, segments.num_tokens)
    follows = (segments.parent >= 0) & (bounds[segments.parent + 1] == segments.start)
    return np.flatnonzero(~follows)


def realigned_forks(segments: Segments, token_ids: np.ndarray, max_branches: int) -> tuple[list[Fork], int]:
    """Forks whose light branch returns to tokens of the heavy one, and the number of branches not compared.

    token_ids: [T] int32. The longest `max_branches` branches are compared. The roots of several
    trees are branches of the heaviest one, too.
    """
    heads = chain_heads(segments)
    begin = segments.start[heads]
    end = np.append(begin[1:], segments.num_tokens)
    chain_of_segment = np.searchsorted(heads, np.arange(len(segments.start)), side="right") - 1
    parent = segments.parent[heads]
    sizes = segments.subtree_end[heads] - begin
    roots = np.flatnonzero(parent < 0)
    main_root = int(roots[np.argmax(sizes[roots])])
    light = np.setdiff1d(np.arange(len(heads)), [main_root])
    light = light[(end - begin)[light] >= WINDOW]
    compared = light[np.argsort(begin[light] - end[light], kind="stable")][:max_branches]
    bounds = np.append(segments.start, segments.num_tokens)
    above = np.where(parent >= 0, chain_of_segment[parent], main_root)
    fork_at = np.where(parent >= 0, bounds[parent + 1], begin[main_root])
    hashes = window_hashes(token_ids)
    forks = []
    for heavy, branches in _by_heavy(compared, above):
        index = _Index(hashes, int(begin[heavy]), int(end[heavy]))
        for branch in branches:
            low, high, fork = int(begin[branch]), int(end[branch]), int(fork_at[branch])
            runs = _common_runs(token_ids, hashes, index, (low, high), (fork, int(end[heavy])))
            if len(runs):
                forks.append(Fork(low, fork, runs, int(parent[branch])))
    return forks, len(light) - len(compared)


def window_hashes(token_ids: np.ndarray) -> np.ndarray:
    """[T] uint64, a hash of the `WINDOW` tokens from each position on (of fewer at the end); by doubling the window."""
    hashes = token_ids.astype(np.uint64) + np.uint64(1)
    factor, width = np.uint64(_MULTIPLIER), 1
    with np.errstate(over="ignore"):
        while width < WINDOW:
            shifted = np.zeros_like(hashes)
            shifted[:-width] = hashes[width:]
            hashes = hashes * factor + shifted
            factor, width = factor * factor, 2 * width
    return hashes


class _Index:
    """The windows of one chain, by hash and then by position."""

    def __init__(self, hashes: np.ndarray, begin: int, end: int) -> None:
        self._end = end
        inside = hashes[begin : max(begin, end - WINDOW + 1)]
        self._unique, rank = np.unique(inside, return_inverse=True)
        # One key holds both, so that one search finds the next position of a hash.
        self._keys = np.sort(rank * (end + 1) + begin + np.arange(len(inside)))

    def next_positions(self, hashes: np.ndarray, at_least: int) -> np.ndarray:
        """[n] int64, for each hash ([n] uint64) its first position from `at_least` on, or -1."""
        if not len(self._keys):
            return np.full(len(hashes), -1)
        rank = np.minimum(np.searchsorted(self._unique, hashes), len(self._unique) - 1)
        first_key = rank * (self._end + 1) + at_least
        key = self._keys[np.minimum(np.searchsorted(self._keys, first_key), len(self._keys) - 1)]
        is_match = (self._unique[rank] == hashes) & (key >= first_key) & (key // (self._end + 1) == rank)
        return np.where(is_match, key % (self._end + 1), -1)


def _by_heavy(branches: np.ndarray, above: np.ndarray) -> Iterator[tuple[int, list[int]]]:
    """Branches grouped by the chain that they leave, so that each chain is indexed once."""
    order = branches[np.argsort(above[branches], kind="stable")]
    cuts = np.flatnonzero(np.diff(above[order])) + 1
    for group in np.split(order, cuts):
        if len(group):
            yield int(above[group[0]]), group.tolist()


def _common_runs(
    ids: np.ndarray, hashes: np.ndarray, index: _Index, light: tuple[int, int], heavy: tuple[int, int]
) -> np.ndarray:
    """[R, 3] int64: position in the light range, position in the heavy one, tokens."""
    (here, light_end), (there, heavy_end) = light, heavy
    runs: list[tuple[int, int, int]] = []
    searched = here
    while len(runs) < MAX_RUNS and searched + WINDOW <= light_end and there + WINDOW <= heavy_end:
        until = min(searched + LOOK_AHEAD, light_end - WINDOW + 1)
        next_match = index.next_positions(hashes[searched:until], there)
        candidates = np.flatnonzero(next_match >= 0)
        if not len(candidates):
            searched = until
            continue
        # The nearest in both: a far match of some boilerplate must not skip all that lies before it.
        best = candidates[np.argmin(candidates + next_match[candidates])]
        begin, match = searched + int(best), int(next_match[best])
        length = _common_length(ids, begin, match, min(light_end - begin, heavy_end - match))
        if length < WINDOW:  # two windows of equal hash and different tokens
            searched = begin + 1
            continue
        runs.append((begin, match, length))
        searched, there = begin + length, match + length
    return np.array(runs, dtype=np.int64).reshape(-1, 3)


def _common_length(ids: np.ndarray, left: int, right: int, limit: int) -> int:
    """Number of equal tokens from two positions on; compared in growing blocks, so a short run is cheap."""
    done, block = 0, 64
    while done < limit:
        size = min(block, limit - done)
        differs = ids[left + done : left + done + size] != ids[right + done : right + done + size]
        first = int(differs.argmax())
        if differs[first]:
            return done + first
        done, block = done + size, 2 * block
    return limit
