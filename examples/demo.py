"""The demo: a real language model, fine-tuned on real trees of agent trajectories, flat and tree side by side.

Loads SmolLM2-135M-Instruct, looks at the data, proves on two small trees that loss and gradients are those of flat
training, fine-tunes on eight searches, shows what the model writes before and after, checks the checkpoint, measures a
step beside packed flat training, merged flat training and TRL's tree rows, and draws a page. Five minutes on two cores.

On a slower machine the second proof is smaller, the fine-tuning is one epoch, and what is measured is smaller and
measured once; nothing is left out. With less memory than 5 GiB fewer tokens are computed at a time.
`--pretend_slower 3` tries that out.

    python examples/demo.py [--output runs/demo]
"""

import argparse
import gc
import json
import resource
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from treewise.cli.main import explained, loading

with loading("demo"):
    import torch
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
    from transformers import AutoModelForCausalLM, TrainerCallback
    from transformers.trainer_callback import PrinterCallback
    from transformers.utils import logging

    import treewise
    from treewise.base.progress import busy_with
    from treewise.bench import Settings, measure_workload
    from treewise.bench.fitting import fitted, flops_per_second
    from treewise.bench.results import efficiency
    from treewise.bench.workloads import Workload
    from treewise.data import RenderOptions, load_trees
    from treewise.errors import TreewiseError
    from treewise.models.load_model import DEMO_MODEL, load_model
    from treewise.nn.flops import FlopModel
    from treewise.nn.model_flops import flop_model
    from treewise.nn.platform.memory import free_bytes
    from treewise.report import inspect_forests, inspect_view, read_run, verification_view
    from treewise.report.html.build import build_data_report
    from treewise.report.html.page import Section, write_page
    from treewise.trainer import TreeTrainer, TreeTrainingArguments
    from treewise.tree.trajectory import Trajectory
    from treewise.verification import verify

DATA = Path(__file__).parent / "data"
# Small enough to be trained flat as well; never trained on, so their loss is a held-out one.
SMALL_TREES = ("crosswords-8-first-20", "game24-937-first-20")
NUM_VERIFIED = 4  # trajectories of each small tree
NUM_TRAINED = 30  # trajectories of each search
MAX_TOKENS, LEAST_TOKENS = 1536, 256  # computed at a time
BYTES_PER_TOKEN, SPARE_BYTES = 1_400_000, 400_000_000  # activations that SmolLM2 keeps; of everything else
LEARNING_RATE = 1e-4
NUM_TIMED, LEAST_TIMED = 14, 4  # trajectories of the tree that is timed
MAX_REPETITIONS = 3
LAST_SECOND = 210.0  # no further repetition begins after this
LEAST_SECONDS = 60.0  # for measuring, whatever the time
LATE_PROOF, LATE_TRAINING = 75.0, 120.0  # after which a proof is smaller, and the fine-tuning one epoch
NUM_WRITTEN = 40  # tokens that the model writes before and after
CONTESTANTS = {
    "flat": "packed flat training",
    "merged": "merged flat training",
    "trl": "TRL's tree rows",
    "tree": "treewise",
}
SHORT = {"flat": "packed flat training", "merged": "merged", "trl": "TRL's tree rows"}

Trees = dict[str, list[Trajectory]]


@dataclass(frozen=True)
class Clock:
    """Seconds since the demo began. slower: than this machine is, by so many times, for those who ask."""

    slower: float = 1.0
    started: float = field(default_factory=time.perf_counter)

    @property
    def elapsed(self) -> float:
        return (time.perf_counter() - self.started) * self.slower

    @property
    def seconds_to_measure(self) -> float:
        """Of this machine."""
        return max(LEAST_SECONDS, LAST_SECOND - self.elapsed) / self.slower


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder of the checkpoint and report")
    parser.add_argument(
        "--pretend_slower", type=float, default=1.0, help="decides as on a machine that is so many times slower (1)"
    )
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 118, highlight=False)
    return explained("demo", partial(run, args.output, console, Clock(args.pretend_slower)))


def run(output: Path, console: Console, clock: Clock) -> int:
    console.rule("1. the model and the data")
    logging.disable_progress_bar()
    model, tokenizer = load_model(DEMO_MODEL)
    flops = flop_model(model)
    console.print(
        f"SmolLM2-135M-Instruct, {flops.num_parameters / 1e6:.1f} million parameters, float32, "
        f"{torch.get_num_threads()} threads"
    )
    data = look_at_data(tokenizer, flops, console)
    trees: Trees = {tree.name: tree.trajectories or [] for tree in data}

    console.rule("2. the proof: flat and tree give the same loss and gradients")
    prove(model, trees, console, clock)

    console.rule("3. fine-tuning on trees")
    held_out = trees[SMALL_TREES[1]][0]
    before = written(model, tokenizer, held_out)
    losses = fine_tune(model, tokenizer, trees, output, console, clock)
    show_written(before, written(model, tokenizer, held_out), tokenizer, held_out, console)

    console.rule("4. the checkpoint")
    loaded = check_checkpoint(model, output, console)
    del model
    gc.collect()

    console.rule("5. the same step, four ways")
    row = measure(loaded, trees, console, clock)
    show_times(row, console)

    console.rule("6. the page")
    page = write_report(data, loaded, tokenizer, output, result_section(row, losses))
    seconds = time.perf_counter() - clock.started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
    figures = {"seconds": seconds, "cpu_seconds": time.process_time(), "peak_gib": peak, "losses": losses, "step": row}
    figures |= {} if clock.slower == 1 else {"pretended_slower": clock.slower}
    (output / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    console.print(
        f"Trees, sharing and this run, in a browser: [bold]{page}[/]\n"
        f"{seconds:.0f} seconds in all, {time.process_time():.0f} of CPU, peak memory {peak:.1f} GiB; "
        f"numbers in {output / 'figures.json'}\n\n"
        "[bold]now yours:[/]\n"
        f"  treewise inspect rollouts.jsonl --model {DEMO_MODEL} --html report.html\n"
        f"  treewise train --data rollouts.jsonl --model {DEMO_MODEL} --output_dir runs/mine"
    )
    return 0


def look_at_data(tokenizer: Any, flops: FlopModel, console: Console) -> Any:
    """Real tree searches by GPT-4 (Tree of Thoughts), one record per visited state."""
    console.print(
        "Read with thinking=keep: one trajectory for each record, its thinking trained. The default (as_inference)\n"
        "renders each call of an agent as its template writes it, earlier thinking dropped: on this file more\n"
        "trajectories and a larger share ratio."
    )
    data = load_trees(DATA / "searches.jsonl.gz", tokenizer, options=RenderOptions(thinking="keep"), num_workers=0)
    report = inspect_forests(((tree.name, tree.forest()) for tree in data), data.report, flops, "SmolLM2-135M")
    # Its findings are keys that nothing reads (source, licence): where the bundled records are from.
    console.print(inspect_view(replace(report, findings=())))
    return data


def prove(model: torch.nn.Module, trees: Trees, console: Console, clock: Clock) -> None:
    for name in SMALL_TREES:
        is_late = clock.elapsed > LATE_PROOF
        count = 2 if is_late else NUM_VERIFIED
        more = ", whole alone, as this machine is slow or busy" if is_late else ""
        console.print(f"[bold]{name}[/], its first {count} trajectories{more}")
        report = verify(model, trees[name][:count], [None] if is_late else None)
        console.print(verification_view(report))
        report.raise_if_failed()


def max_tokens(model: Any) -> int:
    """How many tokens the memory has room for, beside a gradient and AdamW's two moments."""
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    room = free_bytes(model.device) - 3 * weights - SPARE_BYTES
    return max(LEAST_TOKENS, min(MAX_TOKENS, room // BYTES_PER_TOKEN))


def fine_tune(model: Any, tokenizer: Any, trees: Trees, output: Path, console: Console, clock: Clock) -> dict[str, Any]:
    """Two epochs of four steps, or one; a step holds a crossword and a game of 24."""
    searches = [name for name in trees if name not in SMALL_TREES]
    crosswords = [name for name in searches if name.startswith("crosswords")]
    games = [name for name in searches if name.startswith("game24")]
    names = [name for pair in zip(crosswords, games, strict=False) for name in pair]
    show, is_late, budget = ShowSteps(console), clock.elapsed > LATE_TRAINING, max_tokens(model)
    if is_late:
        console.print("one epoch in place of two, as this machine is slow or busy")
    if budget < MAX_TOKENS:
        console.print(f"{budget:,} tokens at a time in place of {MAX_TOKENS:,}, as memory is short: the same gradients")
    trainer = TreeTrainer(
        model,
        TreeTrainingArguments(
            output_dir=str(output),
            max_tokens=budget,
            per_device_train_batch_size=2,
            num_train_epochs=1 if is_late else 2,
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
    trainer.save_state()  # the log, which the page draws
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


@busy_with("loading the checkpoint")
@torch.no_grad()
def check_checkpoint(model: torch.nn.Module, output: Path, console: Console) -> torch.nn.Module:
    """transformers alone loads it, and it gives the same logits, bit by bit; returns what it loaded."""
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
    return loaded


# -- what the model writes ---------------------------------------------------------------------------------------------


@busy_with("writing a few tokens")
@torch.no_grad()
def written(model: Any, tokenizer: Any, item: Trajectory) -> str:
    """What the model writes, greedily, after the prompt of a held-out trajectory."""
    model.eval()
    prompt = torch.tensor(item.token_ids[: prompt_length(item)].tolist())[None]
    ids = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_WRITTEN, do_sample=False, pad_token_id=0
    )
    return str(tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True))


def prompt_length(item: Trajectory) -> int:
    return int((item.loss_weights > 0).argmax())


def show_written(before: str, after: str, tokenizer: Any, item: Trajectory, console: Console) -> None:
    first = prompt_length(item)
    question = tokenizer.decode(item.token_ids[:first]).partition("<|im_start|>user")[2]
    logged = tokenizer.decode(item.token_ids[first:], skip_special_tokens=True)
    table = Table(title="a held-out prompt", box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    for name, text in (
        ("prompt", question.partition("<|im_end|>")[0]),
        ("the model before", before),
        ("after", after),
        ("in the log", logged),
    ):
        table.add_row(name, Text(text.strip()))
    console.print(table)


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(model: Any, trees: Trees, console: Console, clock: Clock) -> dict[str, Any]:
    """One step (forward and backward) of a tree by each contestant, in turns, after one to warm up."""
    model.requires_grad_(True).train()
    whole = Workload(SMALL_TREES[0], trees[SMALL_TREES[0]][:NUM_TIMED])
    settings = Settings(
        against=("flat", "merged", "trl"),
        max_tokens=(),
        repetitions=MAX_REPETITIONS,
        max_seconds=clock.seconds_to_measure,
        leaves_out=False,
    )
    rate = flops_per_second(model, whole)
    workload, _ = fitted(whole, flop_model(model), rate, settings, settings.max_seconds, LEAST_TIMED)
    return measure_workload(model, workload, settings, partial(console.print, markup=False), rate=rate)


Cells = list[tuple[str, ...]]


def times_of(row: dict[str, Any]) -> tuple[Cells, list[str]]:
    """A line for each way: its name, tokens computed, seconds, how many times as fast treewise is, loss, error of the
    gradient; and for each without figures why it has none.
    """
    lines, missing = Cells(), list[str]()
    for name, label in CONTESTANTS.items():
        found = row["contestants"].get(name, {"skipped": "no trajectory begins with another one"})
        if "skipped" in found:
            lines.append((label, "no figure", *[""] * 4))
            missing.append(f"{label} has no figure: {found['skipped']}")
            continue
        speed_up, error = row["speed_up"].get(name, {}).get("tree"), found["gradient_error"]
        lines.append(
            (
                label,
                f"{found['computed_tokens']:,}",
                f"{found['seconds']['median']:.2f}",
                "" if speed_up is None else f"{speed_up:.1f} x as fast",
                f"{found['loss']:.6f}",
                "" if error is None else f"{error:.0e}",
            )
        )
    return lines, missing


def show_times(row: dict[str, Any], console: Console) -> None:
    what = f"one step on {row['workload']}, {row['num_trajectories']} trajectories: forward and backward"
    table = Table(title=f"{what} (the optimizer's is the same for all)", box=box.SIMPLE_HEAD)
    table.add_column("way", overflow="fold")
    for name in ("tokens computed", "seconds", "treewise is", "loss"):
        table.add_column(name, justify="right", overflow="fold")
    lines, missing = times_of(row)
    for label, *cells, _ in lines:
        table.add_row(label, *cells)
    console.print(table)
    for line in (*missing, ratios_line(row), error_line(row)):
        console.print(line, markup=False)


def result_section(row: dict[str, Any], losses: dict[str, Any]) -> Section:
    """What the demo measured, for the top of the page."""
    head = ("way", "tokens computed", "seconds", "treewise is", "loss", "gradient error")
    lines, missing = times_of(row)
    measured = {name: each["tree"] for name, each in row["speed_up"].items() if name in SHORT and "tree" in each}
    times = ", ".join(f"{times:.1f} times as fast as {SHORT[name]}" for name, times in measured.items())
    text = (
        f"A step on trees was {times or 'not timed beside another way'}; {error_line(row)}\n"
        f"One step, forward and backward, of {row['num_trajectories']} trajectories of {row['workload']}, "
        "the four ways in turns on this machine; merged is without trajectories that another one begins with. "
        f"{ratios_line(row)}\nFine-tuning on eight searches took the held-out loss from "
        f"{losses['held_out_before']:.3f} to {losses['held_out_after']:.3f}."
    )
    return Section("The demo's result", "\n".join([text, *missing]), (), (head, *lines))


def error_line(row: dict[str, Any]) -> str:
    """How far treewise's gradient is from the packed one."""
    error = row["contestants"]["tree"].get("gradient_error")
    if error is None or "skipped" in row["contestants"]["flat"]:
        return "treewise's gradient was not compared with the packed one here (it was in part 2)."
    return f"treewise's gradient differs from the packed one by {error:.0e} of its norm."


def ratios_line(row: dict[str, Any]) -> str:
    """The ratios of the tree that was timed, and how much of its FLOP bound was reached."""
    reached = efficiency(row, "tree")
    return (
        f"Share ratio {row['share_ratio']:.1f} (tokens of all trajectories / of the tree), leaf ratio "
        f"{row['leaf_ratio']:.1f} (without those that another begins with), FLOP bound {row['flop_bound']:.1f}: "
        f"efficiency, which is speed-up / FLOP bound, {'unknown' if reached is None else f'{reached:.2f}'}."
    )


def write_report(data: Any, model: torch.nn.Module, tokenizer: Any, output: Path, result: Section) -> Path:
    """The HTML page: the result, the data with its trees, and the run."""
    report = build_data_report(
        data,
        data.report,
        sources=["searches.jsonl.gz"],
        tokenizer=tokenizer,
        tokenizer_name="SmolLM2-135M",
        model=model,
        model_name="SmolLM2-135M",
        max_tokens=MAX_TOKENS,
        num_drawn=6,
    )
    return write_page(output / "report.html", report, read_run(output), treewise.__version__, [result])[0]


if __name__ == "__main__":
    sys.exit(main())
