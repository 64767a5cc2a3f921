"""The geometry of a tree of rollouts: pieces from left to right by tokens, values at forks, rewards at ends."""

from dataclasses import dataclass

from treewise.report.analysis.online_log import RewardTree

ROW, TOP, LEFT, RIGHT = 18, 14, 10, 70
WIDTH = 820
PROMPT = 40  # pixels of the prompt, whose length says nothing of the rollouts


@dataclass(frozen=True, slots=True)
class Mark:
    """A fork with its value, or an end with its reward."""

    x: float
    y: float
    text: str
    is_leaf: bool


@dataclass(frozen=True, slots=True)
class Drawing:
    """SVG paths and marks in a box of `width` by `height` pixels."""

    width: int
    height: int
    paths: tuple[str, ...]
    marks: tuple[Mark, ...]


def drawing(tree: RewardTree) -> Drawing:
    """Where everything of a tree is drawn."""
    longest = max(piece.end for piece in tree.pieces)
    rows = max(piece.row for piece in tree.pieces)
    per_token = (WIDTH - LEFT - RIGHT - PROMPT) / max(1, longest - tree.prompt_tokens)

    def x(depth: int) -> float:
        if depth <= tree.prompt_tokens:
            return LEFT + PROMPT * depth / max(1, tree.prompt_tokens)
        return LEFT + PROMPT + per_token * (depth - tree.prompt_tokens)

    def y(row: float) -> float:
        return TOP + ROW * row

    paths, marks = [], []
    for piece in tree.pieces:
        at = y(piece.row)
        above = at if piece.parent < 0 else y(tree.pieces[piece.parent].row)
        paths.append(f"M{x(piece.start):.1f} {above:.1f}V{at:.1f}H{x(piece.end):.1f}")
        marks.append(Mark(round(x(piece.end), 1), round(at, 1), f"{piece.value:.3g}", piece.is_leaf))
    return Drawing(WIDTH, int(2 * TOP + ROW * rows), tuple(paths), tuple(marks))
