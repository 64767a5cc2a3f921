"""Draws the figures of README.md, DESIGN.md and docs/concepts.md, most from a real forest and a real plan.

python docs/figures/draw.py      writes docs/figures/*.svg
"""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
from canvas import Canvas

import treewise as tw
from treewise.report.analysis.bill import Rates, headline
from treewise.report.analysis.facts import TreeFacts
from treewise.report.html.charts import BAR_ROW, BAR_WIDTH, bars_of

FOLDER = Path(__file__).parent
CELL = 15  # width of a token
ROW = 34  # distance of branches

# The example of all figures: tokens of a prompt and a question, two answers, a tool call with two more.
PARTS = {"prompt": 6, "question": 4, "answer 1": 5, "answer 2": 4, "tool": 4, "answer 3": 5, "answer 4": 3}
ROLLOUTS = [
    ["prompt", "question", "answer 1"],
    ["prompt", "question", "answer 2"],
    ["prompt", "question", "tool", "answer 3"],
    ["prompt", "question", "tool", "answer 4"],
]
BUDGET = 9


def example() -> tw.Forest:
    """The four rollouts; every part has tokens of its own."""
    first = dict(zip(PARTS, np.cumsum([0, *PARTS.values()]).tolist(), strict=False))
    rows = [np.concatenate([first[p] + np.arange(PARTS[p]) for p in parts]) for parts in ROLLOUTS]
    return tw.Forest.from_trajectories([tw.Trajectory(row) for row in rows])


def part_of(forest: tw.Forest) -> list[str]:
    """The name of the part that each tree token belongs to."""
    names = [name for name, size in PARTS.items() for _ in range(size)]
    return [names[token] for token in forest.token_ids]


def segment_bounds(forest: tw.Forest) -> list[tuple[int, int]]:
    """Tree positions `[start, end)` of each segment."""
    starts = [*forest.segments.start.tolist(), forest.num_tokens]
    return list(pairwise(starts))


def rows_of(forest: tw.Forest) -> list[int]:
    """A row for each segment: a first child goes on in its parent's row, every other one begins a new row."""
    rows: list[int] = []
    for number, parent in enumerate(forest.segments.parent.tolist()):
        is_first = parent >= 0 and forest.segments.start[number] == segment_bounds(forest)[parent][1]
        rows.append(rows[parent] if is_first else max(rows, default=-1) + 1)
    return rows


def draw_tree(canvas: Canvas, forest: tw.Forest, x: float, y: float, colour: Callable[[int], str]) -> None:
    """Tokens to scale, depth from left to right; `colour` gives a token's."""
    rows, bounds = rows_of(forest), segment_bounds(forest)
    for number, (start, end) in enumerate(bounds):
        parent = int(forest.segments.parent[number])
        top = y + rows[number] * ROW
        left = x + int(forest.depth[start]) * CELL
        if parent >= 0 and rows[parent] != rows[number]:
            canvas.line([(left - 3, y + rows[parent] * ROW + 18), (left - 3, top + 9), (left, top + 9)])
        for token in range(start, end):
            canvas.box(x + int(forest.depth[token]) * CELL, top, CELL - 2, 18, colour(token))


def place_of(forest: tw.Forest, token: int, x: float, y: float) -> tuple[float, float]:
    """The upper left corner of a token that `draw_tree` drew."""
    segment = int(forest.segment_of_token[token])
    return x + int(forest.depth[token]) * CELL, y + rows_of(forest)[segment] * ROW


def label_tree(canvas: Canvas, forest: tw.Forest, x: float, y: float, skip: tuple[str, ...] = ()) -> None:
    """The names of parts, above their first tokens."""
    seen: set[str] = set(skip)
    for token, name in enumerate(part_of(forest)):
        if name not in seen:
            seen.add(name)
            left, top = place_of(forest, token, x, y)
            canvas.text(left, top - 4, name, "quiet", size=11)


def overview() -> Canvas:
    """Flat training beside the tree."""
    forest = example()
    canvas = Canvas(
        760,
        206,
        "Flat training and treewise on the same four rollouts",
        f"Flat training computes {forest.num_flat_tokens} tokens, because every rollout repeats the prompt; the tree "
        f"computes {forest.num_tokens}.",
    )
    canvas.text(10, 20, "flat training: every rollout alone")
    canvas.text(410, 20, "treewise: one tree")
    seen: set[str] = set()
    for row, parts in enumerate(ROLLOUTS):
        x = 10.0
        for name in parts:
            for _ in range(PARTS[name]):
                canvas.box(x, 46 + row * ROW, CELL - 2, 18, "repeated" if name in seen else "own")
                x += CELL
            seen.add(name)
    draw_tree(canvas, forest, 410, 46, lambda token: "shared" if forest.multiplicity[token] > 1 else "own")
    label_tree(canvas, forest, 410, 46)
    canvas.text(10, 196, f"{forest.num_flat_tokens} tokens; orange: computed again", "quiet")
    canvas.text(410, 196, f"{forest.num_tokens} tokens, each once; the same loss and gradients", "quiet")
    return canvas


def prefix_tree() -> Canvas:
    """The words: segment, depth, multiplicity."""
    forest = example()
    canvas = Canvas(
        620,
        230,
        "A prefix tree",
        "Four trajectories merged token by token into segments; each token has a depth and a multiplicity.",
    )
    x, y = 20, 60
    draw_tree(canvas, forest, x, y, lambda token: "shared" if forest.multiplicity[token] > 1 else "own")
    label_tree(canvas, forest, x, y)
    for start, end in segment_bounds(forest):
        left, top = place_of(forest, start, x, y)
        for token in range(start, end):
            number = int(forest.multiplicity[token])
            canvas.text(left + (token - start) * CELL + 6.5, top + 13, str(number), "white", anchor="middle", size=10)
    canvas.text(20, 24, "depth: position in a trajectory, from left to right", "quiet")
    canvas.line([(330, 20), (420, 20)], "quiet", arrow=True)
    right = x + 24 * CELL
    canvas.text(right, y + 13, "numbers: multiplicity, the")
    canvas.text(right, y + 30, "trajectories through a token")
    canvas.text(right, y + 64, "a row without a fork or an")
    canvas.text(right, y + 81, "end inside is a segment")
    ratio = f"share ratio {forest.num_flat_tokens} / {forest.num_tokens} = {forest.share_ratio:.2f}"
    canvas.text(20, 216, f"{len(forest.segments.start)} segments, {ratio}", "quiet")
    return canvas


def intervals() -> Canvas:
    """The depth-first layout, one interval per key, and the mask that follows."""
    forest = example()
    cell, x, y = 12, 20, 44
    size = forest.num_tokens * cell
    canvas = Canvas(
        x + size + 60 + size // 2 + 40,
        y + size + 30,
        "One interval per key",
        "The tokens in depth-first order; the bar of each key spans the queries that see it; the mask on the right.",
    )
    canvas.text(x, 18, "one bar per key: the queries that see it")
    half = cell / 2
    right = x + size + 60
    canvas.text(right, 18, "the mask that these intervals are")
    for key in range(forest.num_tokens):
        end = int(forest.subtree_end[key])
        colour = "shared" if forest.multiplicity[key] > 1 else "own"
        canvas.box(x + key * cell, y + key * cell, (end - key) * cell, cell - 3, colour)
        canvas.box(right + key * half, y + key * half, half - 0.5, (end - key) * half, colour)
    canvas.text(x, y + size + 18, "queries, in depth-first order", "quiet")
    canvas.line([(x + 190, y + size + 14), (x + 300, y + size + 14)], "quiet", arrow=True)
    canvas.text(right, y + size / 2 + 18, "columns keys, rows queries", "quiet")
    lines = ("query q sees key k exactly when", "lo[k] = k <= q < hi[k] = end of", "k's subtree: two int32 vectors")
    for number, words in enumerate(lines):
        canvas.text(right, y + size / 2 + 50 + 18 * number, words)
    return canvas


def partition() -> Canvas:
    """Open and closed tokens, and the micro-batches of a plan."""
    forest = example()
    plan = tw.plan(forest, max_tokens=BUDGET, hold="never")
    batch_of = np.zeros(forest.num_tokens, dtype=int)
    for number, batch in enumerate(plan.micro_batches):
        batch_of[batch.positions()] = number
    is_open = np.array([batch.is_open for batch in plan.micro_batches])[batch_of]
    canvas = Canvas(
        620,
        250,
        f"The tree at a budget of {BUDGET} tokens",
        f"{plan.num_open_tokens} open tokens, whose subtrees exceed the budget, and closed subtrees packed into "
        f"{plan.num_closed_micro_batches} micro-batches.",
    )
    x, y = 20, 60
    draw_tree(canvas, forest, x, y, lambda token: "open" if is_open[token] else "closed")
    for token in range(forest.num_tokens):
        left, top = place_of(forest, token, x, y)
        canvas.text(left + 6.5, top + 13, str(batch_of[token] + 1), "white", anchor="middle", size=10)
    canvas.text(20, 24, f"budget: {BUDGET} tokens; the number is the token's micro-batch", "quiet")
    right = x + 24 * CELL
    canvas.box(right, y + 1, 13, 13, "open")
    canvas.text(right + 20, y + 13, f"open: more than {BUDGET} tokens in")
    canvas.text(right + 20, y + 30, "its subtree. Computed twice")
    canvas.box(right, y + 52, 13, 13, "closed")
    canvas.text(right + 20, y + 64, "closed: computed once")
    canvas.text(
        20,
        234,
        f"{forest.num_tokens} tree tokens + {plan.num_recomputed_tokens} open ones a second time = "
        f"{plan.num_computed_tokens} computed; flat training: {forest.num_flat_tokens}",
        "quiet",
    )
    return canvas


def gateway() -> Canvas:
    """The schedule of that plan: what runs when, and what is alive."""
    forest = example()
    plan = tw.plan(forest, max_tokens=BUDGET, hold="never")
    width, x, y = 104, 20, 56
    canvas = Canvas(
        x * 2 + width * len(plan.schedule),
        282,
        "The walk over a plan",
        "Open micro-batches run without a graph and leave gateways; closed ones run forward and backward and add "
        "gradients to the gateways above; then the open ones run again with a graph.",
    )
    words = {"forward": ("forward,", "no graph"), "train": ("forward and", "backward")}
    canvas.text(x, 22, "the walk, from left to right; gateways hold keys and values, and collect gradients")
    first: dict[int, int] = {}
    for number, step in enumerate(plan.schedule):
        batch = plan.micro_batches[step.micro_batch]
        left = x + number * width
        canvas.box(left, y, width - 14, 62, "open" if batch.is_open else "closed", faint=step.action == "forward")
        canvas.text(left + 8, y + 18, f"micro-batch {step.micro_batch + 1}", size=11)
        for line, each in enumerate(words[step.action]):
            canvas.text(left + 8, y + 36 + 16 * line, each, size=11)
        if step.action == "forward":
            first[step.micro_batch] = number
        elif batch.is_open:  # its gateway lived from its first run until now
            level = y + 84 + 26 * len(batch.parents)
            start, end = x + first[step.micro_batch] * width + 45, left + 45
            canvas.line([(start, y + 62), (start, level), (end, level), (end, y + 64)], "gradient", arrow=True)
            canvas.text(start + 6, level - 5, f"gateway {step.micro_batch + 1}", "quiet", size=11)
            canvas.text(end - 6, level - 5, "gradients, float32", "gradient", anchor="end", size=11)
    rows = (
        ("gateway tokens alive", "open", 176),
        (f"tokens that hold activations at a time, at most {BUDGET}", "closed", 216),
    )
    for row, (label, colour, top) in enumerate(rows):
        canvas.text(x, y + top - 20, label, "quiet", size=11)
        for number, point in enumerate(plan.timeline):
            left = x + number * width
            canvas.box(left, y + top - 15, max(point[row] * 5, 1), 10, colour)
            canvas.text(left + point[row] * 5 + 5, y + top - 6, f"{point[row]}", "quiet", size=11)
    return canvas


# Rooms of src/treewise in the order in which a record passes them: what the room makes, and what it hands on.
WAY = (
    ("data", ("records, templates,", "dumps of other stacks"), "trajectories"),
    ("advantages", ("rewards of groups,", "siblings, turns"), "trajectories"),
    ("tree", ("shared prefixes merged,", "depth-first order"), "forest"),
    ("distributed", ("which rank trains", "which trajectories"), "forests"),
    ("planning", ("budget: trunks, pieces,", "intervals, edges"), "plan"),
    ("engine", ("the walk: gateways,", "gradients injected"), "micro-batch"),
    ("nn", ("the model on a tree:", "attention, log-probs"), "log-probs"),
    ("objectives", ("the loss on restored", "trajectories"), "gradients"),
    ("trainer", ("optimizer, schedule,", "checkpoints"), "weights"),
)
BESIDE = (
    ("start it", ("cli", "serve", "rl", "integrations")),
    ("check it", ("verification", "testing")),
    ("measure and show it", ("bench", "report")),
    ("give it a model", ("models",)),
    ("on the shelf", ("experimental",)),
    ("serve every room", ("base",)),
)


def way() -> Canvas:
    """The way of a record through the rooms, each named once."""
    per_row, width, height, step, x, y = 5, 150, 72, 184, 20, 66
    canvas = Canvas(
        x + per_row * step,
        y + 2 * 132 + 16,
        "The way of a record, from file to gradient",
        "A record passes " + ", ".join(f"{room}/" for room, _, _ in WAY) + ".",
    )
    canvas.text(x, 24, "the way of a record, from file to gradient; folders of src/treewise", "quiet")
    canvas.text(x, y - 10, "rollouts.jsonl", "quiet", size=11)
    for index, (room, lines, product) in enumerate(WAY):
        row, column = divmod(index, per_row)
        left, top = x + column * step, y + row * 132
        canvas.box(left, top, width, height, "shared", faint=True)
        canvas.text(left + 10, top + 22, f"{room}/")
        for number, words in enumerate(lines):
            canvas.text(left + 10, top + 42 + 16 * number, words, "quiet", size=11)
        middle = top + height / 2
        colour = "gradient" if product == "gradients" else "line"
        if column < per_row - 1:
            if index < len(WAY) - 1:
                canvas.line([(left + width + 2, middle), (left + step - 4, middle)], colour, arrow=True)
            canvas.text(left + width, top + height + 16, product, "quiet", anchor="end", size=11)
        else:
            below = top + 132 - 34
            points = [(left + 75, top + height), (left + 75, below), (x + 75, below), (x + 75, top + 130)]
            canvas.line([*points], colour, arrow=True)
            canvas.text(left + 69, top + height + 16, product, "quiet", anchor="end", size=11)
    left, top = x + 4 * step, y + 132
    for index, (purpose, rooms) in enumerate(BESIDE):
        canvas.text(left, top + 8 + 27 * index, f"{purpose}:", "quiet", size=11)
        canvas.text(left, top + 21 + 27 * index, "  ".join(f"{room}/" for room in rooms), size=11)
    return canvas


def restoration() -> Canvas:
    """Restoring by a gather, and its transpose."""
    forest = example()
    canvas = Canvas(
        760,
        250,
        "Gradient restoration",
        "Log-probs of tree tokens are gathered into trajectories; the transpose of the gather adds the gradients of "
        "all trajectories through a token.",
    )
    x, y, right = 20, 60, 430
    token = int(np.flatnonzero(forest.multiplicity == forest.multiplicity.max())[-1])
    draw_tree(canvas, forest, x, y, lambda each: "gradient" if each == token else "blank")
    canvas.text(x, 24, "log-probs on the tree: one per token")
    canvas.text(right, 24, "log-probs of trajectories: what a loss sees")
    left, top = place_of(forest, token, x, y)
    for row, path in enumerate(forest.paths[:]):
        for depth, each in enumerate(path.tolist()):
            canvas.box(right + depth * CELL, y + row * ROW, CELL - 2, 18, "gradient" if each == token else "blank")
            if each == token:
                end = (right + depth * CELL, y + row * ROW + 9)
                canvas.line([(left + CELL, top + 9), (right - 30, y + row * ROW + 9), end], "gradient")
    count = int(forest.multiplicity[token])
    canvas.text(x, 214, f"forward: this token's log-prob is copied to the {count} trajectories through it", "quiet")
    canvas.text(x, 234, f"backward: the {count} gradients, each with its own advantage, are added up", "gradient")
    return canvas


def bill() -> Canvas:
    """What an episode of tau2's shape costs on the H100 that was measured, by the bars of the report."""
    file = FOLDER.parents[1] / "benchmarks" / "results" / "bench-nvidia-h100-80gb-hbm3.json"
    (row,) = (each for each in json.loads(file.read_text())["rows"] if each["workload"] == "tau2")
    flat, leaf = (row["tree_flops"] * row[name] for name in ("flop_bound", "leaf_flop_bound"))
    sizes = dict.fromkeys(("num_leaves", "num_trained_tokens", "num_flat_pairs", "num_tree_pairs", "max_depth"), 0)
    tokens = {"num_flat_tokens": row["flat_tokens"], "num_tree_tokens": row["tree_tokens"]}
    tokens |= {"num_call_tokens": row["flat_tokens"], "num_leaf_tokens": round(row["leaf_ratio"] * row["tree_tokens"])}
    flops = {"flat_flops": flat, "call_flops": flat, "leaf_flops": leaf, "tree_flops": row["tree_flops"]}
    counts = {"num_trajectories": row["num_trajectories"], "num_rollouts": 1, "num_forks": 0}
    total = TreeFacts(name="tau2", **sizes, **tokens, **flops, **counts)
    made = Rates(str(file), dollars_per_hour=2.50).bill_of(total, row["model"])
    canvas = Canvas(
        BAR_WIDTH + 40,
        3 * BAR_ROW + 74,
        "The bill of an agent's episodes",
        f"{headline(made)}, Qwen3-1.7B on one H100 at $2.50 an hour",
    )
    canvas.text(20, 26, "1,000 episodes of 20 calls, Qwen3-1.7B on an H100 at $2.50 an hour", size=13)
    for bar, colour in zip(bars_of(made), ("repeated", "own", "closed"), strict=True):
        canvas.text(20, bar.y + 58, bar.label)
        canvas.text(20 + BAR_WIDTH, bar.y + 58, bar.text, anchor="end")
        canvas.box(20, bar.y + 65, bar.width, 15, colour)
    return canvas


FIGURES = {
    "bill": bill,
    "overview": overview,
    "prefix-tree": prefix_tree,
    "intervals": intervals,
    "partition": partition,
    "gateway": gateway,
    "restoration": restoration,
    "way": way,
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        draw().save(FOLDER / f"{name}.svg")
