"""What of treewise a run loads, and what one of its steps passes: how much a reader has before them.

    python benchmarks/count_code.py [--online] [--max_tokens 16] [--list] [--json FILE]

Counted are the lines of modules that are imported by the end of a run of `TreeTrainer` on chats, in one process; and
of its third step, by a profiler in all threads: files and their lines, functions and their lines (comprehensions and
generator expressions belong to the function around them), and moves between rooms, pairs of a caller and a function of
another folder of `src/treewise`. `--max_tokens`: a budget that cuts the trees. `--online`: of a run of `OnlineTrainer`
on a file of rows with a reward function of the user's, sampled by the model itself, the third iteration: from the log
of the second to its own, so with rollouts, rewards, credit, optimizer step, figures and journal, without evaluation or
checkpoint.
"""

import argparse
import ast
import gzip
import json
import sys
import tempfile
import threading
from collections import Counter
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback

import treewise

PACKAGE = Path(treewise.__file__).parent
TOKENIZER = Path(__file__).parents[1] / "tests" / "data" / "fixtures" / "smollm2"
COUNTED_STEP = 3  # or iteration; budgets are measured and the model is probed in the first


class Passed(TrainerCallback):
    """The functions of treewise that the counted step calls, in all threads, and who calls them from another room."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, int, str]] = set()
        self.moves: set[tuple[str, str, str, str]] = set()
        self.is_counting = False

    def begin(self) -> None:
        self.is_counting = True
        sys.setprofile(self.count)

    def end(self) -> None:
        self.is_counting = False
        sys.setprofile(None)

    def count(self, frame: FrameType, event: str, _: object) -> None:
        file, code = frame.f_code.co_filename, frame.f_code
        if event != "call" or not self.is_counting or not file.startswith(str(PACKAGE)):
            return
        self.functions.add((file, code.co_firstlineno, code.co_qualname))
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(str(PACKAGE)):
            caller = caller.f_back
        if caller is not None and room(caller.f_code.co_filename) != room(file):
            self.moves.add((caller.f_code.co_filename, caller.f_code.co_qualname, file, code.co_qualname))


class PassedByStep(Passed):
    """Of a step of `TreeTrainer`."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if state.global_step == COUNTED_STEP - 1:
            self.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self.end()


class PassedByIteration(Passed):
    """Of an iteration of `OnlineTrainer`: from one log to the next."""

    def on_log(self, args: Any, state: Any, control: Any, **_: object) -> None:
        self.end()
        if state.global_step == COUNTED_STEP - 1:
            self.begin()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--online", action="store_true", help="an iteration of `OnlineTrainer`")
    parser.add_argument("--max_tokens", type=int, default=8192)
    parser.add_argument("--list", action="store_true", help="also every file")
    parser.add_argument("--json", type=Path, help="writes the figures to a file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        passed = (run_online if given.online else run)(Path(folder), given.max_tokens)
    files = Counter(file for file, _, name in passed.functions if not in_another(name))
    lengths = {file: lengths_of(file) for file in files}
    lines = Counter[str]()
    for file, first, name in passed.functions:
        if not in_another(name):
            lines[file] += lengths[file].get(first, 0)
    loaded = [
        Path(module.__file__)
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "treewise" and getattr(module, "__file__", None)
    ]
    if given.list:
        for file in sorted(files):
            print(f"{Path(file).relative_to(PACKAGE)!s:45} {num_lines(file):5} {files[file]:4} {lines[file]:5}")
        for path in sorted(loaded):
            print(f"loaded {path.relative_to(PACKAGE)!s:45} {num_lines(path):5}")
    found = {
        "modules_loaded": len(loaded),
        "lines_loaded": sum(map(num_lines, loaded)),
        "files": len(files),
        "lines_of_files": sum(map(num_lines, files)),
        "functions": sum(files.values()),
        "lines_of_functions": sum(lines.values()),
        "moves": len(passed.moves),
    }
    for name, value in found.items():
        print(f"{name.replace('_', ' '):20} {value:,}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def run(folder: Path, max_tokens: int) -> Passed:
    """Four steps on chats that share their beginnings."""
    data = folder / "chats.jsonl"
    with data.open("w") as file:
        for group in range(4):
            for answer in range(4):
                turns = [("user", f"Question {group}"), ("assistant", f"Answer {answer}")]
                messages = [{"role": role, "content": text} for role, text in turns]
                file.write(json.dumps({"messages": messages, "group": str(group)}) + "\n")
    passed, (model, tokenizer) = PassedByStep(), new_model(folder)
    args = arguments(folder, max_tokens, max_steps=4, per_device_train_batch_size=1, save_strategy="no")
    trainer = treewise.TreeTrainer(model, args, train_dataset=str(data), processing_class=tokenizer)
    trainer.add_callback(passed)
    return counted(passed, trainer)


def run_online(folder: Path, max_tokens: int) -> Passed:
    """Four iterations of rollout trees, as of `treewise rl --tasks rows.jsonl --reward_functions ...`."""
    from treewise.rl.online.tasks_by_name import task_named  # here, as the other run does not load it

    data = folder / "rows.jsonl"
    with data.open("w") as file:
        for number in range(16):
            messages = [{"role": "user", "content": f"Question {number}"}]
            file.write(json.dumps({"prompt": messages}) + "\n")
    passed, (model, tokenizer) = PassedByIteration(), new_model(folder)
    settings = treewise.OnlineSettings(
        iterations=4,
        trees_per_iteration=2,
        tokens_per_iteration=96,
        max_new_tokens=8,
        branching="random",
        branching_settings={"roots": 2, "per_round": 2, "variations": 4},
        eval_every=0,
        show_every=0,
    )
    task = task_named(str(data), reward_functions=[f"{__file__}:is_even"])
    args = arguments(folder, max_tokens)
    trainer = treewise.OnlineTrainer(model, task, tokenizer, settings, args, callbacks=[passed])
    return counted(passed, trainer)


def is_even(completion_ids: list[list[int]], **_: object) -> list[float]:
    """A reward that differs within a group."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


def new_model(folder: Path) -> tuple[Any, Any]:
    """A small model with a real tokenizer."""
    for path in TOKENIZER.iterdir():
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        Path(folder, path.name.removesuffix(".gz")).write_bytes(text)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config), tokenizer


def arguments(folder: Path, max_tokens: int, **more: Any) -> treewise.TreeTrainingArguments:
    shown = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return treewise.TreeTrainingArguments(output_dir=str(folder / "run"), max_tokens=max_tokens, **shown, **more)


def counted(passed: Passed, trainer: Any) -> Passed:
    """Trains, with the functions that the counted step passes."""
    threading.setprofile(passed.count)  # threads that begin from now on
    try:
        trainer.train()
    finally:
        threading.setprofile(None)
    return passed


def room(file: str) -> str:
    return Path(file).relative_to(PACKAGE).parts[0]


def in_another(name: str) -> bool:
    """Whether a function is a comprehension, a generator expression or a lambda: a part of the one around it."""
    return name.rpartition(".")[2].startswith("<")


@cache
def num_lines(file: str | Path) -> int:
    return len(Path(file).read_text(encoding="utf-8").splitlines())


def lengths_of(file: str) -> dict[int, int]:
    """Lines of each function of a file, by its first line, decorators included."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found[first] = (node.end_lineno or first) - first + 1
    return found


if __name__ == "__main__":
    main()
