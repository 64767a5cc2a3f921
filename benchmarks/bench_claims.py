"""Claims of neighbours on their own yardsticks, as far as two cores reach: LCR on a board game, GAIN-RL's angles.

    python benchmarks/bench_claims.py values [--trees 1000]        # LCR: labels and estimates against the exact values
    python benchmarks/bench_claims.py training [--seeds 16]       # LCR: players that learn from such labels
    python benchmarks/bench_claims.py angles [--model smollm2]    # GAIN-RL: models before and after training

The third neighbour's, Mango's, is `bench_grow.py --name grow-wide`. reports/claims.md has all of them side by side.

`values`: connect-3 and connect-4 on 4 x 4 cells (board_game.py). Trees of self-play grow by the policies of
`rl.branching`, with the same number of generated moves, under a policy whose exact values are known. Labels are means
over draws (`rl.node_values`) and the paper's, means over leaves; `lcr` draws moves from the stored policy, as in the
paper, and its v is a small network's, the exact value, or the package's own book. `training`, connect-3: the same
network learns from the labels of the last iterations, and its players look one move ahead; arms play each other
exactly.

`angles`: rank correlation of each angle signal with the norm of a task's own gradient, of imitation and of the policy.

Intervals of 95 % are bootstrap over trees, seeds, or tasks.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")

import bench_curriculum
import torch
from board_game import FIRST, WON, Board, ValueNet, new_board
from common import save, smollm2
from tabular_policy import ExactBook, Game, grown
from tiny_policy import interval, new_model, new_tokenizer

import treewise as tw
from treewise.experimental.gain.self_check import correlation
from treewise.experimental.gain.signals import angles_of, gradient_norms
from treewise.experimental.lcr import LcrBranching, change_rates
from treewise.rl.branching import RolloutTree, Signals, branching_named
from treewise.rl.branching.protocol import points_of
from treewise.rl.node_values import node_values
from treewise.rl.online.tasks_by_name import task_named
from treewise.rl.tasks import TaskItem
from treewise.rl.tasks.protocol import Split

# Columns, rows, stones in a line; and the first late ply, about two thirds of a game.
BOARDS = {"connect-3": ((4, 4, 3), 6), "connect-4": ((4, 4, 4), 9)}
VARIED = {"roots": 1, "variations": 10, "per_round": 1}  # the paper's V; lcr's other defaults are the paper's
# Branching, its settings, and whose values lcr knows: a network's, the exact ones, or those of a book that met nothing.
ARMS: dict[str, tuple[str, dict[str, Any], str]] = {
    "none": ("none", {"roots": 4}, "book"),
    "random": ("random", VARIED, "book"),
    "lcr": ("lcr", VARIED, "network"),
    "lcr, exact values": ("lcr", VARIED, "exact"),
    "lcr, book": ("lcr", VARIED, "book"),
}
LABELS = ("draws", "leaves")
MOVES = 160  # generated, of a tree
CHUNK = 50  # trees that grow side by side
SHARPNESS = 4.0  # of players that make trees
OPEN = 0.4  # positions whose exact label change rate is above
BINS = 20
DRAWS = 1000  # of the bootstrap

# -- labels and estimates against the exact values --------------------------------------------------------------------


def stochastic_policy(board: Board) -> np.ndarray:
    """Logits of a policy between chance and skill: two rounds of looking one move ahead at the exact values."""
    logits = np.zeros(board.next_state.shape)
    for _ in range(2):
        logits = board.played(board.game(logits).values(), SHARPNESS)
    return logits


def grown_by(
    arm: str, game: Game, values: np.ndarray, num_trees: int, budget: int, seed: int
) -> tuple[list[RolloutTree], Any]:
    """Trees of an arm, and its book."""
    name, settings, source = ARMS[arm]
    known = {"network": values, "exact": game.values()}.get(source)
    book = None if known is None else ExactBook(game, of_states=True, values=known)
    branching = branching_named(name, **settings)
    trees = grown(game, branching, num_trees, budget, seed, candidates=name == "lcr", book=book)
    return trees, book


def labels_of(game: Game, tree: RolloutTree) -> np.ndarray:
    """[positions, 6] of all positions of a tree but those that are over, the start first: ply, state, mean over draws,
    mean over leaves, rollouts below, and whether it is a fork (or the start).
    """
    ids = np.zeros((len(tree), game.num_tokens), dtype=np.int64)
    for node in range(len(tree)):
        path = tree.path(node, "token_ids")
        ids[node, : len(path)] = path
    states = game.states(ids)
    below = np.array([np.array([tree[node].reward, 1.0]) for node in range(len(tree))])  # sum of rewards, rollouts
    for node in range(len(tree) - 1, -1, -1):
        for child in tree.children(node):
            below[node] += below[child]
    rows = []
    for value in node_values(tree):
        if value.node < 0:
            mean = below[list(tree.roots)].sum(0)
            rows.append((0, game.start, value.value, mean[0] / mean[1], value.num_leaves, 1.0))
            continue
        node, later = value.node, [child for child in tree.children(value.node) if tree[child].cut < value.end]
        total = below[node] - below[later].sum(0)
        before = tree.num_sampled_before(node, 0)
        for position in range(value.start + 1, value.end + 1):
            state = states[node, before + position]
            if state > WON:
                is_fork = float(position == value.end and value.num_draws > 1)
                facts = (before + position, state, value.value, total[0] / total[1], value.num_leaves, is_fork)
                rows.append(facts)
    return np.array(rows)


def rates_of(game: Game, tree: RolloutTree, book: Any, settings: LcrBranching) -> np.ndarray:
    """[points, 3] of a tree's branch points: posterior estimate of the label change rate, prior estimate, exact."""
    signals = book.signals("", tree) if book is not None else Signals()
    exact = ExactBook(game, of_states=True).signals("", tree).node_success
    found = []
    for root in tree.roots:
        points = points_of(tree, root, "tokens")
        priors = [signals.node_success.get(point[:2], signals.success) for point in points]
        values = [exact[point[:2]] for point in points]
        rates = change_rates(tree, points, signals, settings)
        found += list(zip(rates, map(rate, priors), map(rate, values), strict=True))
    return np.array(found)


def rate(value: Any) -> Any:
    """The exact label change rate."""
    return 2 * value * (1 - value)


def ratios(sums: np.ndarray) -> np.ndarray:
    """[1 + DRAWS, ...] sums [trees, ..., 2] over counts of all trees, and of drawn ones."""
    total = len(sums)
    rng = np.random.default_rng(0)
    weights = np.concatenate([np.ones((1, total)), rng.multinomial(total, np.full(total, 1 / total), DRAWS)])
    added = np.tensordot(weights, sums, axes=1)
    return added[..., 0] / np.maximum(added[..., 1], 1)


def spread_of(values: np.ndarray) -> list[float]:
    """The figure, which stands first, and the bootstrap interval of the others."""
    return [round(float(each), 4) for each in (values[0], *np.quantile(values[1:], [0.025, 0.975]))]


def value_errors(game: Game, trees: list[RolloutTree], late: int) -> dict[str, Any]:
    """Root mean square and mean of labels minus exact values, by which positions; and mean label change rates."""
    exact, row = game.values(), {}
    found = [labels_of(game, tree) for tree in trees]
    truths = [exact[each[:, 0].astype(int), each[:, 1].astype(int)] for each in found]
    kinds = {
        "start": [each[:, 0] == 0 for each in found],
        "forks": [(each[:, 5] > 0) & (each[:, 0] > 0) for each in found],
        "open": [rate(truth) > OPEN for truth in truths],
        "all": [each[:, 0] > 0 for each in found],
    }
    for kind, which in kinds.items():
        for column, label in enumerate(LABELS, 2):
            gaps = [each[own, column] - truth[own] for each, truth, own in zip(found, truths, which, strict=True)]
            squared = np.array([[(gap**2).sum(), len(gap)] for gap in gaps])
            plain = np.array([[gap.sum(), len(gap)] for gap in gaps])
            row[f"error, {kind}, {label}"] = spread_of(np.sqrt(ratios(squared)))
            row[f"bias, {kind}, {label}"] = spread_of(ratios(plain))
        row[f"positions, {kind}"] = int(sum(own.sum() for own in which))
    for name, first in (("rate, late", late), ("rate, all", 0)):
        chosen = [rate(truth[each[:, 0] >= first]) for each, truth in zip(found, truths, strict=True)]
        row[name] = spread_of(ratios(np.array([[each.sum(), len(each)] for each in chosen])))
    return row


def rate_errors(game: Game, trees: list[RolloutTree], book: Any, settings: LcrBranching) -> dict[str, Any]:
    """Errors of the estimated label change rate: by position, and of means over bins of equal count, by estimate."""
    found = [rates_of(game, tree, book, settings) for tree in trees]
    squared = [[[((each[:, k] - each[:, 2]) ** 2).sum(), len(each)] for k in (0, 1)] for each in found]
    by_position = np.sqrt(ratios(np.array(squared)))
    row: dict[str, Any] = {"positions": sum(map(len, found))}
    for k, name in enumerate(("posterior", "prior")):
        edges = np.unique(np.quantile(np.concatenate(found)[:, k], np.linspace(0, 1, BINS + 1)[1:-1]))
        bins = [np.searchsorted(edges, each[:, k], side="right") for each in found]
        sums = np.zeros((len(found), len(edges) + 1, 2))
        for number, (each, own) in enumerate(zip(found, bins, strict=True)):
            np.add.at(sums[number, :, 0], own, each[:, k] - each[:, 2])
            np.add.at(sums[number, :, 1], own, 1)
        row[f"{name}, by position"] = spread_of(by_position[:, k])
        row[f"{name}, bin means"] = spread_of(np.sqrt((ratios(sums) ** 2).mean(1)))
    return row


def values_part(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of each board, and one of each arm on it."""
    for name in args.boards:
        sizes, late = BOARDS[name]
        yield from ({"board": name, **row} for row in values_on(new_board(*sizes), late, args))


def values_on(board: Board, late: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of the board, and one of each arm."""
    game = board.game(stochastic_policy(board))
    net = ValueNet(board, 0)
    games, _ = grown_by("none", game, game.values(), CHUNK, args.net_moves // CHUNK, 1)
    net.fit(*labelled(game, games, "leaves"), args.net_steps)
    values = net.values()
    positions = np.concatenate([labels_of(game, tree) for tree in games])[:, :2].astype(int)
    off = (values - game.values())[positions[:, 0], positions[:, 1]]
    lengths = [tree.num_sampled_before(leaf, len(tree[leaf])) for tree in games for leaf in tree.leaves]
    yield {
        "positions": sum(board.sizes) - FIRST * len(board.sizes),
        "success": round(game.success, 4),
        "moves of a game": round(float(np.mean(lengths)), 2),
        "error of the network": round(float(np.sqrt((off**2).mean())), 4),
        "settings": vars(args) | {"arms": ARMS, "moves": MOVES, "sharpness": SHARPNESS, "late": late, "bins": BINS},
    }
    for arm, (name, settings, _) in ARMS.items():
        tried, _ = grown_by(arm, game, values, CHUNK, MOVES, 2)
        budget = round(MOVES**2 / np.mean([tree.num_sampled_tokens for tree in tried]))  # drawn candidates are free
        trees: list[RolloutTree] = []
        for start in range(0, args.trees, CHUNK):
            found, book = grown_by(arm, game, values, CHUNK, budget, 1000 + start)
            trees += found
        row: dict[str, Any] = {"arm": arm, "trees": len(trees)}
        row["moves"] = round(float(np.mean([tree.num_sampled_tokens for tree in trees])), 1)
        row["games"] = round(float(np.mean([len(tree.leaves) for tree in trees])), 2)
        row |= value_errors(game, trees, late)
        if name == "lcr":
            row["rates"] = rate_errors(game, trees, book, branching_named(name, **settings).settings)
        yield row


def labelled(game: Game, trees: list[RolloutTree], label: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ply, state, and label of every position."""
    found = np.concatenate([labels_of(game, tree) for tree in trees])
    return found[:, 0].astype(int), found[:, 1].astype(int), found[:, 2 + LABELS.index(label)]


# -- players that learn from labels -----------------------------------------------------------------------------------

# Branching, and labels.
PLAYERS = {
    "none": ("none", "leaves"),
    "random": ("random", "leaves"),
    "lcr": ("lcr", "leaves"),
    "lcr, means over draws": ("lcr", "draws"),
}
PAIRS = (("lcr", "none"), ("lcr", "random"), ("random", "none"), ("lcr, means over draws", "lcr"))
MATCH_SHARPNESS = 10.0
WINDOW = 4  # iterations whose labels are learned from


def learned(
    board: Board, late: int, player: str, seed: int, args: argparse.Namespace
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Logits for matches after each iteration, and facts."""
    arm, label = PLAYERS[player]
    net, logits, parts, moves, games, rates = ValueNet(board, seed), [], [], 0, 0, []
    for iteration in range(args.iterations):
        values = net.values()
        game = board.game(board.played(values, SHARPNESS))
        # What earlier iterations had too much or too little of is made up for: drawn candidates are free.
        budget = round(MOVES + (iteration * args.grown * MOVES - moves) / args.grown)
        trees, _ = grown_by(arm, game, values, args.grown, max(budget, 1), 1000 * seed + iteration)
        moves += sum(tree.num_sampled_tokens for tree in trees)
        games += sum(len(tree.leaves) for tree in trees)
        parts = [*parts, labelled(game, trees, label)][-WINDOW:]
        places, states, _ = parts[-1]
        rates.append(float(rate(game.values()[places, states][places >= late]).mean()))
        net.fit(*map(np.concatenate, zip(*parts, strict=True)), args.fit_steps)  # type: ignore[call-arg]
        logits.append(board.played(net.values(), MATCH_SHARPNESS))
    return logits, {"moves": moves, "games": games, "rate, late": round(float(np.mean(rates)), 4)}


def training_part(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each seed: of every iteration, the share of games that each of a pair wins, and each against a fixed
    player.
    """
    sizes, late = BOARDS["connect-3"]
    board = new_board(*sizes)
    fixed = stochastic_policy(board)
    yield {"settings": vars(args) | {"players": PLAYERS, "window": WINDOW, "match_sharpness": MATCH_SHARPNESS}}
    for seed in range(args.seeds):
        began = time.process_time()
        found = {player: learned(board, late, player, seed, args) for player in PLAYERS}
        row: dict[str, Any] = {"seed": seed, "facts": {player: facts for player, (_, facts) in found.items()}}
        row["against fixed"] = {
            player: [round(board.against(each, fixed), 4) for each in logits] for player, (logits, _) in found.items()
        }
        row["pairs"] = {
            f"{one} against {other}": [
                round(board.against(a, b), 4) for a, b in zip(found[one][0], found[other][0], strict=True)
            ]
            for one, other in PAIRS
        }
        yield row | {"cpu_seconds": round(time.process_time() - began, 1)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over iterations, and of the last, with intervals over seeds."""
    runs = [row for row in rows if "seed" in row]
    table: dict[str, Any] = {"seeds": len(runs)}
    for kind in ("pairs", "against fixed"):
        for name in runs[0][kind]:
            curves = np.array([run[kind][name] for run in runs])
            table[name] = {"mean": interval(curves.mean(1)), "last": interval(curves[:, -1])}
    for player in PLAYERS:
        facts = [run["facts"][player] for run in runs]
        table[player] |= {key: interval([each[key] for each in facts]) for key in facts[0]}
    return {"table": table}


# -- angles and gradients ---------------------------------------------------------------------------------------------

SUMS = {"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 3, "solved_examples": 2}
FIRST_TAUGHT = 10_000  # sums from here on are trained on, those before are measured
TINY = argparse.Namespace(iterations=1, trees=1, eval_every=1)  # what bench_curriculum's trainer asks for


class Practised(bench_curriculum.Mixture):
    """The kinds of bench_curriculum.py that its model imitates, and no others."""

    def item(self, split: Split, index: int) -> TaskItem:
        kinds = [number for number, kind in enumerate(bench_curriculum.KINDS) if kind.is_taught]
        round_, place = divmod(index, len(kinds))
        return super().item(split, round_ * len(bench_curriculum.KINDS) + kinds[place])


def imitated(tokenizer: Any, prompt_ids: Any, item: TaskItem) -> tw.Trajectory:
    """A prompt and its answer, which is trained."""
    answer = str(item.extra["entry"]["answer"]).lower()
    ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
    return tw.Trajectory([*prompt_ids, *ids], [0] * len(prompt_ids) + [1] * len(ids))


def measured(trainer: tw.OnlineTrainer, args: argparse.Namespace) -> dict[str, Any]:
    """The self-check of `gain`, and the angles against the gradient of imitation of each answer."""
    report, groups = trainer.check_items(args.items, args.rollouts)
    prompts = [each.prompt_ids for each in groups]
    rows = [imitated(trainer.processing_class, each.prompt_ids, each.request.item) for each in groups]
    angles = angles_of(trainer.engine, prompts)
    norms = np.array(gradient_norms(trainer.engine, [[row] for row in rows], None))
    signals = {"angle": angles.total, "intra": angles.intra, "inter": angles.inter}
    signals["length"] = np.array([float(len(prompt)) for prompt in prompts])
    found = {f"{each.signal}, gradient_norm": each.correlation for each in report.checks}
    found |= {f"{name}, imitation": correlation(values, norms) for name, values in signals.items()}
    rewards = [np.mean(each.known_rewards) for each in groups]
    return {
        "tasks": report.num_tasks,
        "rollouts": report.num_rollouts,
        "varied": report.num_varied,
        "success": round(float(np.mean(rewards)), 4),
        "median norm of imitation": round(float(np.median(norms)), 4),
        "mean angle": round(float(angles.total.mean()), 4),
        "shared tokens": angles.num_shared,
        "correlations": {
            key: [round(value, 3) for value in (each.value, each.low, each.high)] for key, each in found.items()
        },
    }


def tiny_stages(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The model of bench_curriculum.py, of each seed: random, and after each number of steps of imitation."""
    tokenizer = new_tokenizer()
    for seed in range(1, args.models + 1):
        model, done = new_model(tokenizer, seed), 0
        for steps in (0, *args.stages):
            bench_curriculum.pretrain(model, tokenizer, seed + 100 * done, steps - done)
            done = steps
            with tempfile.TemporaryDirectory() as folder:
                trainer = bench_curriculum.new_trainer(
                    model, tokenizer, Path(folder), "uniform", TINY, seed, 1e-3, task=Practised()
                )
                yield {"model": "tiny", "seed": seed, "steps": steps, **measured(trainer, args)}


def smollm2_stages(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """SmolLM2-135M on sums of reasoning_gym, before and after imitation of some hundred others."""
    model, tokenizer = smollm2(torch.float32)
    task = task_named("reasoning_gym:chain_sum", SUMS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.0)
    settings = tw.OnlineSettings(num_items=args.pool, max_new_tokens=8)
    for steps in (0, args.steps):
        with tempfile.TemporaryDirectory() as folder:
            arguments = tw.TreeTrainingArguments(
                folder, max_tokens=None, report_to="none", disable_tqdm=True, use_cpu=True
            )
            trainer = tw.OnlineTrainer(model, task, tokenizer, settings, arguments)
            for step in range(steps):
                optimizer.param_groups[0]["lr"] = args.rate * min(1.0, (step + 1) / 5)
                indices = range(FIRST_TAUGHT + step * args.batch, FIRST_TAUGHT + (step + 1) * args.batch)
                rows = [
                    imitated(
                        tokenizer, trainer.collector.prompt_ids(task.item("train", index)), task.item("train", index)
                    )
                    for index in indices
                ]
                trainer.engine.step(tw.Forest.from_trajectories(rows), tw.SFT())
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            yield {"model": "SmolLM2-135M", "seed": 0, "steps": steps, **measured(trainer, args)}


def angles_part(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of each model at each stage of its training."""
    yield {"settings": vars(args) | {"sums": SUMS}}
    yield from tiny_stages(args) if args.model == "tiny" else smollm2_stages(args)


PARTS = {"values": values_part, "training": training_part, "angles": angles_part}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    parser.add_argument("--boards", nargs="+", default=list(BOARDS), choices=list(BOARDS), help="values")
    parser.add_argument("--trees", type=int, default=1000, help="values: of each arm")
    parser.add_argument("--net_moves", type=int, default=20000, help="values: that the network learns from")
    parser.add_argument("--net_steps", type=int, default=600, help="values: of the network")
    parser.add_argument("--seeds", type=int, default=16, help="training")
    parser.add_argument("--iterations", type=int, default=10, help="training")
    parser.add_argument("--grown", type=int, default=6, help="training: trees of an iteration, of 160 moves")
    parser.add_argument("--fit_steps", type=int, default=100, help="training: of the network, in an iteration")
    parser.add_argument("--model", default="tiny", choices=("tiny", "smollm2"), help="angles")
    parser.add_argument("--models", type=int, default=3, help="angles: tiny ones")
    parser.add_argument("--stages", type=int, nargs="+", default=[200, 800], help="angles: steps of imitation, tiny")
    parser.add_argument("--items", type=int, default=64, help="angles: tasks that are measured")
    parser.add_argument("--rollouts", type=int, default=8, help="angles: of a task")
    parser.add_argument("--pool", type=int, default=512, help="angles, smollm2: of items")
    parser.add_argument("--steps", type=int, default=30, help="angles, smollm2: of imitation")
    parser.add_argument("--batch", type=int, default=12, help="angles, smollm2: items of a step")
    parser.add_argument("--rate", type=float, default=1e-4, help="angles, smollm2: of AdamW")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for part in args.parts:
        rows: list[dict[str, Any]] = []
        name = f"claims-{part}-smollm2" if part == "angles" and args.model == "smollm2" else f"claims-{part}"
        for row in PARTS[part](args):
            print(row, flush=True)
            rows.append(row)
            done = [summary(rows)] if part == "training" and len(rows) > 1 else []
            path = save(name, [*done, *rows])  # after every row, lest an interruption lose them
        print("written to", path)


if __name__ == "__main__":
    main()
