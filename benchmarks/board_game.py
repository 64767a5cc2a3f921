"""A board game for two that is solved exactly: stones dropped into columns, and whoever has a line of them has won.

It is a `Game` of tabular_policy.py, so the value of every position under a stochastic policy of both players follows by
dynamic programming, and so does the result of one policy against another. A token is a column. The outcome is 1 where
the first player has a line, and 0 where the second has, or where the board is full: no draws, as in Go. States are
numbered ply by ply; 0 and 1 stand for what is over.

Letters: T cells of the board, Z states of a ply, V columns.
"""

from dataclasses import dataclass

import numpy as np
import torch
from tabular_policy import Game

LOST, WON, FIRST = 0, 1, 2  # for the first player; the first position of a ply
ILLEGAL = -1e3  # a logit


@dataclass(frozen=True)
class Board:
    """next_state: [T, Z, V] int64. is_legal: [T, Z, V] bool. planes: [T, Z, 2 T + 1] float32, the stones of who moves,
    those of the other, and whether the first player moves. sizes: [T], positions of each ply and the two that are over.
    """

    next_state: np.ndarray
    is_legal: np.ndarray
    planes: np.ndarray
    sizes: list[int]

    def game(self, logits: np.ndarray) -> Game:
        """The game under a policy. logits: [T, Z, V]."""
        is_over = np.arange(logits.shape[1]) <= WON
        rewards = (np.arange(logits.shape[1]) == WON).astype(float)
        return Game(np.where(self.is_legal, logits, ILLEGAL), self.next_state, rewards, FIRST, 1, is_over)

    def played(self, values: np.ndarray, sharpness: float) -> np.ndarray:
        """[T, Z, V] logits of players who look one move ahead: the value for who moves, times `sharpness`.

        values: [T + 1, Z] of the first player.
        """
        side = np.where(np.arange(len(self.sizes)) % 2, -1.0, 1.0)[:, None, None]
        after = np.stack([value[states] for value, states in zip(values[1:], self.next_state, strict=True)])
        return sharpness * side * after

    def result(self, first: np.ndarray, second: np.ndarray) -> float:
        """The probability that the first player wins, each with logits [T, Z, V] of its own."""
        is_second = (np.arange(len(self.sizes)) % 2).astype(bool)[:, None, None]
        return self.game(np.where(is_second, second, first)).success

    def against(self, one: np.ndarray, other: np.ndarray) -> float:
        """The share of games that a policy wins against another, half of them as the first player."""
        return (self.result(one, other) + 1 - self.result(other, one)) / 2


def new_board(columns: int, rows: int, line: int) -> Board:
    """All positions that can be reached, ply by ply. Stones are bits, a column is `rows` of them and an empty one."""
    total, height = columns * rows, rows + 1
    own, other = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    plies, moves, legals = [], [], []
    for _ in range(total):
        plies.append((own, other))
        move, legal = np.zeros((len(own), columns), dtype=np.int64), np.zeros((len(own), columns), dtype=bool)
        codes, found = np.full((len(own), columns), -1), []
        for column in range(columns):
            cells = ((1 << rows) - 1) << (height * column)
            free = cells & ~(own | other)
            legal[:, column] = free != 0
            after = own | (free & -free)  # the lowest free cell
            is_line = has_line(after, height, line)
            move[is_line, column] = WON if len(plies) % 2 else LOST
            goes_on = legal[:, column] & ~is_line
            codes[goes_on, column] = (other << 32 | after)[goes_on]
        found = np.unique(codes[codes >= 0])
        places = np.searchsorted(found, codes) + FIRST
        moves.append(np.where(codes >= 0, places, move))
        legals.append(legal)
        own, other = found >> 32, found & ((1 << 32) - 1)
    moves[-1] = np.where(moves[-1] >= FIRST, LOST, moves[-1])  # a full board
    width = max(len(ply[0]) for ply in plies) + FIRST
    shape = (total, width, columns)
    next_state = np.zeros(shape, dtype=np.int64)
    next_state[:, WON] = WON
    is_legal, planes = np.ones(shape, dtype=bool), np.zeros((total, width, 2 * total + 1), dtype=np.float32)
    bits = np.array([row + height * column for column in range(columns) for row in range(rows)])
    for place, ((own, other), move, legal) in enumerate(zip(plies, moves, legals, strict=True)):
        rows_of = slice(FIRST, FIRST + len(own))
        next_state[place, rows_of], is_legal[place, rows_of] = move, legal
        planes[place, rows_of, :-1] = np.concatenate([own[:, None] >> bits & 1, other[:, None] >> bits & 1], axis=1)
        planes[place, rows_of, -1] = 1 - place % 2
    return Board(next_state, is_legal, planes, [len(ply[0]) + FIRST for ply in plies])


def has_line(stones: np.ndarray, height: int, line: int) -> np.ndarray:
    """[N] bool, of sets of stones as bits."""
    found = np.zeros(len(stones), dtype=bool)
    for step in (1, height - 1, height, height + 1):
        run = stones.copy()
        for number in range(1, line):
            run &= stones >> (step * number)
        found |= run != 0
    return found


class ValueNet:
    """A perceptron of one hidden layer: the first player's probability to win, from the planes of a position."""

    def __init__(self, board: Board, seed: int, hidden: int = 64) -> None:
        generator = torch.Generator().manual_seed(seed)
        inputs = board.planes.shape[-1]
        self.board, self.rng = board, np.random.default_rng([seed, 5])
        shapes = ((inputs, hidden), (hidden,), (hidden, hidden), (hidden,), (hidden, 1), (1,))
        scales = (inputs**-0.5, 0.0, hidden**-0.5, 0.0, 0.0, 0.0)
        self.weights = [
            (torch.randn(shape, generator=generator) * scale).requires_grad_()
            for shape, scale in zip(shapes, scales, strict=True)
        ]
        self.optimizer = torch.optim.AdamW(self.weights, lr=3e-3, weight_decay=1e-2)

    def __call__(self, planes: torch.Tensor) -> torch.Tensor:
        w1, b1, w2, b2, w3, b3 = self.weights
        hidden = torch.tanh(torch.tanh(planes @ w1 + b1) @ w2 + b2)
        return (hidden @ w3 + b3).squeeze(-1)

    def fit(self, places: np.ndarray, states: np.ndarray, labels: np.ndarray, steps: int, batch: int = 256) -> None:
        """Steps on the cross entropy with labels in 0..1. places, states, labels: [N] each."""
        planes = torch.from_numpy(self.board.planes[places, states])
        wanted = torch.from_numpy(labels.astype(np.float32))
        for _ in range(steps):
            chosen = torch.from_numpy(self.rng.integers(0, len(labels), batch))
            logits = self(planes[chosen])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted[chosen])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def values(self) -> np.ndarray:
        """[T + 1, Z] float64, of all positions; what is over has its outcome."""
        with torch.no_grad():
            found = torch.sigmoid(self(torch.from_numpy(self.board.planes))).double().numpy()
        found = np.concatenate([found, np.zeros_like(found[:1])])
        found[:, LOST], found[:, WON] = 0.0, 1.0
        return found
