"""The demo: a real language model, fine-tuned on real trees of agent trajectories, flat and tree side by side.

Loads SmolLM2-135M-Instruct, looks at the data, proves on two small trees that loss and gradients are those of flat
training, fine-tunes on eight searches, checks the checkpoint, and measures the speed-up. For 2 cores, 6 minutes, 8 GiB.

    python examples/demo.py [--output runs/demo]
"""

import argparse
import json
import resource
import sys
import time
from contextlib import nullcontext, redirect_stderr
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from treewise.data import RenderOptions, load_trees
from treewise.engine import TreeEngine
from treewise.errors import TreewiseError
from treewise.nn.flops import FlopModel, flop_model
from treewise.nn.load_model import DEMO_MODEL, load_model
from treewise.report import inspect_forests, inspect_view, verification_view
from treewise.trainer import TreeTrainer, TreeTrainingArguments
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory
from treewise.verification import verify

DATA = Path(__file__).parent / "data"
# Small enough to be trained flat as well; never trained on, so their loss is a held-out one.
SMALL_TREES = ("crosswords-8-first-20", "game24-937-first-20")
NUM_VERIFIED = 8  # trajectories of each small tree
NUM_TRAINED = 30  # trajectories of each search
MAX_TOKENS = 1536  # SmolLM2 keeps 1.4 MB of activations a token
LEARNING_RATE = 1e-4
MAX_REPETITIONS = 3
SINGLES_PER_TREE_RUN = 5  # flat and tree alternate, so that a slow moment of the machine meets both
# A further repetition is measured only if it should end before this.
LAST_SECOND = 300.0

Trees = dict[str, list[Trajectory]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder of the checkpoint and report")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 118, highlight=False)
    try:
        run(args.output, console)
    except TreewiseError as error:
        console.print(f"[bold red]{type(error).__name__}:[/] ", end="")
        console.print(str(error), markup=False)
        return 1
    return 0


def run(output: Path, console: Console) -> None:
    started = time.perf_counter()
    console.rule("1. the model and the data")
    logging.disable_progress_bar()
    # One bar knows no switch; it is drawn on stderr, and is for terminals.
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(StringIO()):
        model, tokenizer = load_model(DEMO_MODEL)
    flops = flop_model(model)
    console.print(
        f"SmolLM2-135M-Instruct, {flops.num_parameters / 1e6:.1f} million parameters, float32, "
        f"{torch.get_num_threads()} threads"
    )
    trees = look_at_data(tokenizer, flops, console)

    console.rule("2. the proof: flat and tree give the same loss and gradients")
    prove(model, trees, console)

    console.rule("3. fine-tuning on trees")
    losses = fine_tune(model, tokenizer, trees, output, console)

    console.rule("4. the checkpoint")
    check_checkpoint(model, output, console)

    console.rule("5. flat against tree")
    console.print("measuring: each trajectory alone and each whole tree, same model, same head; a minute or two ...")
    deadline = started + LAST_SECOND
    timings = [measure(name, model, trees[name], flops, deadline) for name in SMALL_TREES]
    show_timings(timings, console)

    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
    report = {"seconds": seconds, "peak_gib": peak, "losses": losses, "timings": [asdict(each) for each in timings]}
    (output / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"{seconds:.0f} seconds in all, peak memory {peak:.1f} GiB; numbers in {output / 'report.json'}")


def look_at_data(tokenizer: Any, flops: FlopModel, console: Console) -> Trees:
    """Real tree searches by GPT-4 (Tree of Thoughts), one record per visited state."""
    data = load_trees(DATA / "searches.jsonl.gz", tokenizer, options=RenderOptions(thinking="keep"), num_workers=0)
    report = inspect_forests(((tree.name, tree.forest()) for tree in data), data.report, flops, "SmolLM2-135M")
    console.print(inspect_view(report))
    return {tree.name: tree.trajectories or [] for tree in data}


def prove(model: torch.nn.Module, trees: Trees, console: Console) -> None:
    for name in SMALL_TREES:
        console.print(f"[bold]{name}[/], its first {NUM_VERIFIED} trajectories")
        report = verify(model, trees[name][:NUM_VERIFIED])
        console.print(verification_view(report))
        report.raise_if_failed()


def fine_tune(model: Any, tokenizer: Any, trees: Trees, output: Path, console: Console) -> dict[str, Any]:
    """Two epochs of four steps; a step holds a crossword and a game of 24."""
    searches = [name for name in trees if name not in SMALL_TREES]
    crosswords = [name for name in searches if name.startswith("crosswords")]
    games = [name for name in searches if name.startswith("game24")]
    names = [name for pair in zip(crosswords, games, strict=False) for name in pair]
    show = ShowSteps(console)
    trainer = TreeTrainer(
        model,
        TreeTrainingArguments(
            output_dir=str(output),
            max_tokens=MAX_TOKENS,
            per_device_train_batch_size=2,
            num_train_epochs=2,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=[trees[name][:NUM_TRAINED] for name in names],
        eval_dataset=[trees[name] for name in SMALL_TREES],
        processing_class=tokenizer,
        callbacks=[show],
    )
    trainer.remove_callback(PrinterCallback)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(output / "model"))
    console.print(
        f"loss of a step: {show.losses[0]:.3f} at the first, [bold]{show.losses[-1]:.3f}[/] at the last; "
        f"held-out loss: {before:.3f} before, [bold]{after:.3f}[/] after"
    )
    model.zero_grad(set_to_none=True)
    return {"steps": show.losses, "held_out_before": before, "held_out_after": after}


class ShowSteps(TrainerCallback):
    """One line per step, as it comes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        self.losses.append(float(logs["loss"]))
        self.console.print(
            f"step {state.global_step}   loss [bold]{self.losses[-1]:.3f}[/]   {logs['tree_tokens']:,.0f} tree tokens, "
            f"{logs['tokens_per_second_tree']:,.0f} a second, worth {logs['tokens_per_second_flat']:,.0f} flat"
        )


@torch.no_grad()
def check_checkpoint(model: torch.nn.Module, output: Path, console: Console) -> None:
    """transformers alone loads it, and it gives the same logits, bit by bit."""
    loaded = AutoModelForCausalLM.from_pretrained(output / "model", dtype=torch.float32)
    weights = loaded.state_dict()
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, weights[name])]
    ids = torch.arange(1000, 1064)[None]
    model.eval()
    is_equal = torch.equal(model(input_ids=ids).logits, loaded(input_ids=ids).logits)
    if changed or not is_equal:
        raise TreewiseError(f"{output / 'model'}: loaded weights or logits differ from the trained ones: {changed[:3]}")
    size = sum(file.stat().st_size for file in (output / "model").iterdir()) / 2**20
    console.print(
        f"{output / 'model'} ({size:.0f} MiB): AutoModelForCausalLM.from_pretrained loads it; "
        f"all {len(weights)} tensors and the logits of 64 tokens are equal bit by bit"
    )


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timing:
    """Forward and backward of one tree, medians: every trajectory alone, only the leaves alone, and the tree."""

    name: str
    num_repetitions: int
    num_flat_tokens: int
    num_leaf_tokens: int
    num_tree_tokens: int
    seconds_flat: float
    seconds_leaf: float
    seconds_tree: float
    flops_flat: float
    flops_leaf: float
    flops_tree: float


def measure(
    name: str, model: torch.nn.Module, trajectories: list[Trajectory], flops: FlopModel, deadline: float
) -> Timing:
    """Flat is the same engine on one trajectory at a time. A warm-up comes first; flat and tree runs alternate."""
    engine = TreeEngine(model)
    tree = Forest.from_trajectories(trajectories)
    singles = [Forest.from_trajectories([item]) for item in trajectories]

    def seconds(forest: Forest) -> float:
        model.zero_grad(set_to_none=False)
        begun = time.perf_counter()
        engine.step(forest)
        return time.perf_counter() - begun

    for forest in (tree, max(singles, key=lambda each: each.num_tokens)):
        seconds(forest)
    of_tree: list[float] = []
    of_single: list[list[float]] = [[] for _ in singles]
    begun = time.perf_counter()
    for repetition in range(1, MAX_REPETITIONS + 1):
        for index, single in enumerate(singles):
            if index % SINGLES_PER_TREE_RUN == 0:
                of_tree.append(seconds(tree))
            of_single[index].append(seconds(single))
        now = time.perf_counter()
        # The other tree wants its share of what is left.
        share = 2 if name == SMALL_TREES[0] else 1
        if now + (now - begun) / repetition > begun + (deadline - begun) / share:
            break
    flat = [median(each) for each in of_single]
    return Timing(
        name=name,
        num_repetitions=repetition,
        num_flat_tokens=tree.num_flat_tokens,
        num_leaf_tokens=tree.num_leaf_tokens,
        num_tree_tokens=tree.num_tokens,
        seconds_flat=sum(flat),
        seconds_leaf=sum(flat[index] for index in tree.leaf_trajectories),
        seconds_tree=median(of_tree),
        flops_flat=flops.flat(tree),
        flops_leaf=flops.leaf(tree),
        flops_tree=flops.tree(tree),
    )


def show_timings(timings: list[Timing], console: Console) -> None:
    table = Table(title="seconds per step (forward and backward; the optimizer is the same)", box=box.SIMPLE_HEAD)
    for name in ("tree", "flat training of"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "flat s", "tree s", "speed-up", "FLOP bound", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, each in enumerate([*timings, total(timings)]):
        if index == len(timings):
            table.add_section()
        has_contained = each.num_leaf_tokens < each.num_flat_tokens
        label = "every trajectory" if has_contained else "every one, all leaves"
        rows = [(label, each.num_flat_tokens, each.seconds_flat, each.flops_flat)]
        if has_contained:
            rows.append(("leaves only", each.num_leaf_tokens, each.seconds_leaf, each.flops_leaf))
        for label, num_tokens, flat_seconds, flat_flops in rows:
            speed_up, bound = flat_seconds / each.seconds_tree, flat_flops / each.flops_tree
            times = (f"{num_tokens:,} : {each.num_tree_tokens:,}", f"{flat_seconds:.2f}", f"{each.seconds_tree:.2f}")
            table.add_row(each.name, label, *times, f"{speed_up:.2f} x", f"{bound:.2f} x", f"{speed_up / bound:.2f}")
    console.print(table)
    repetitions = " and ".join(str(each.num_repetitions) for each in timings)
    console.print(
        "Leaves only: without the trajectories contained in another, which cost nothing where append-only calls are\n"
        "merged; the honest baseline. Efficiency: speed-up / FLOP bound; above 1 where flat training pays, once for\n"
        "each short trajectory, what FLOPs do not count (reading all weights, adding all gradients).\n"
        f"Medians of {repetitions} repetitions, flat and tree alternating, after a warm-up."
    )


def total(timings: list[Timing]) -> Timing:
    """Both trees together."""
    sums = {
        name: sum(getattr(each, name) for each in timings)
        for name in Timing.__dataclass_fields__
        if name not in ("name", "num_repetitions")
    }
    return Timing("both", min(each.num_repetitions for each in timings), **sums)


if __name__ == "__main__":
    sys.exit(main())
