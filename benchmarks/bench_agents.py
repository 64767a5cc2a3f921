"""Does an agent as it is learn what the same agent learns that was rewritten as an environment, and in the same time?

Runs of examples/agent_demo.py from the same weights on the same tasks: the agent of the OpenAI Agents SDK through the
endpoint, and the environment, side by side on a thread each, so that both share whatever else the machine does. CPU
seconds are those of all processes, agents included.

    python benchmarks/bench_agents.py [--python .venv-agents/bin/python]     # `make agents` makes that environment
    python benchmarks/bench_agents.py --model smollm2                        # the times, with a policy of some size

The tiny policy is a Llama of 0.2 million parameters that has imitated the recorded tries until it half knows the task;
with it an iteration is mostly the agents' own time. Runs that the result holds are not repeated.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, ROOT, hardware, save
from tiny_policy import Parts, imitate, new_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(ROOT / "examples"))
from agent_demo import SLIP, WRONG, tasks_of, turn_of

DEMO = ROOT / "examples" / "agent_demo.py"
KINDS = ("agent", "environment")
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}
HALF_KNOWN, IMITATED = 0.21, 16  # the probability of a right try at which imitation ends; tries of a step


@dataclass(frozen=True)
class Setting:
    """seeds: of as many runs of each kind. words: of the demo."""

    seeds: int
    words: tuple[str, ...]


SETTINGS = {
    "tiny": Setting(3, ("--iterations", "12", "--eval_every", "3", "--learning_rate", "1e-3")),
    "smollm2": Setting(3, ("--iterations", "2", "--eval_every", "0")),
}


# -- the tiny policy ---------------------------------------------------------------------------------------------------


def recorded(row: dict[str, Any], draw: random.Random, slip: float) -> Parts:
    """A try as text, each part with whether it is imitated: what the script of the demo does."""
    end, header = "<|im_end|>", "<|im_start|>assistant\n"
    tools = "box_of(person): The number of a person's box.\nlook_in(box): What lies in a box."
    asked = f"<|im_start|>system\nUse the tools, then answer with one word.\n{tools}{end}\n<|im_start|>user\n"
    person, looked, answer = (wrong if draw.random() < slip else None for wrong in WRONG)
    person = person or row["question"].split()[3].removesuffix("'s")
    box = row["boxes"].get(person, "nobody")
    looked = looked or box
    thing = row["things"].get(looked, "nothing")
    answer = answer or thing
    return [
        (f"{asked}{row['question']}{end}\n{header}", False),
        (turn_of(0, person) + end, True),
        (f"\n<|im_start|>tool\n{box}{end}\n{header}", False),
        (turn_of(1, looked) + end, True),
        (f"\n<|im_start|>tool\n{thing}{end}\n{header}", False),
        (answer + end, True),
    ]


def tries(name: str, count: int, slip: float) -> list[Parts]:
    draw = random.Random(name)
    return [recorded(row, draw, slip) for row in tasks_of(name, count)]


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Of the words of the tries."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special, alphabet = ["<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = ["".join(text for text, _ in each) for each in tries("words", 2000, SLIP)]
    raw.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|im_end|>")


def known(model: Any, tokenizer: Any) -> float:
    """The mean probability of a right try."""
    found = []
    with torch.no_grad():
        for parts in tries("held out", 24, 0.0):
            coded = [(tokenizer.encode(text), is_imitated) for text, is_imitated in parts]
            ids = torch.tensor([token for own, _ in coded for token in own])
            mask = torch.tensor([is_imitated for own, is_imitated in coded for _ in own])
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            found.append(logprobs[mask[1:]].sum().exp().item())
    return float(np.mean(found))


def tiny_start(folder: Path) -> None:
    """The weights from which all runs go on."""
    tokenizer = new_tokenizer()
    model = new_model(tokenizer, 0, **SIZES, max_position_embeddings=512)
    for chunk in range(100):
        rate = 4e-3 if chunk < 16 else 2e-3
        imitate(model, tokenizer, lambda rng: tries(str(rng.integers(1 << 40)), IMITATED, SLIP), chunk, 25, rate)
        if (found := known(model, tokenizer)) >= HALF_KNOWN:
            break
    print(f"start: {sum(each.numel() for each in model.parameters()):,} parameters, right with probability {found:.3f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# -- runs --------------------------------------------------------------------------------------------------------------


def side_by_side(model: str, seed: int, start: Path, folder: Path, python: str) -> list[dict[str, Any]]:
    """A run of each kind."""
    running = []
    for kind in KINDS:
        output = folder / f"{model}-{kind}-{seed}"
        shutil.rmtree(output, ignore_errors=True)
        words = [sys.executable, str(DEMO), *SETTINGS[model].words, "--kind", kind, "--seed", str(seed)]
        words += ["--start", str(start), "--python", python, "--output", str(output), "--record", f"{output}.json"]
        with Path(f"{output}.log").open("w") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            running.append((output, subprocess.Popen(words, stdout=log, stderr=log, env=environment)))
    for output, process in running:
        if process.wait():
            raise RuntimeError(f"{output}.log: the run ended with {process.returncode}")
        shutil.rmtree(output)  # a checkpoint of SmolLM2 is 2 GB
    return [{"model": model, **json.loads(Path(f"{output}.json").read_text())} for output, _ in running]


def compared(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each pair: what the agent took for a sampled token, over what the environment took; the success of both."""
    rows = []
    for model, seed in sorted({(run["model"], run["seed"]) for run in runs}):
        own = {run["kind"]: run for run in runs if (run["model"], run["seed"]) == (model, seed)}
        per_token = {
            (name, kind): np.sum(run[name]) / sum(run["sampled_tokens"])
            for kind, run in own.items()
            for name in ("cpu_seconds", "seconds_iteration", "seconds_sampling", "seconds_update")
        }
        ratios = {f"{name}_ratio": per_token[name, "agent"] / per_token[name, "environment"] for name, _ in per_token}
        curves = {kind: list(run["held_out_success"].values()) for kind, run in own.items()}
        rows.append({"pair": f"{model} {seed}", **ratios, **curves})
    return rows


def saved_runs() -> list[dict[str, Any]]:
    path = RESULTS / f"agents-{hardware()}.json"
    return [row for row in json.loads(path.read_text())["rows"] if "seed" in row] if path.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SETTINGS), default="tiny")
    parser.add_argument("--seed", type=int, help="of one pair; without it of all")
    parser.add_argument("--python", default=str(ROOT / ".venv-agents" / "bin" / "python"), help="with openai-agents")
    parser.add_argument("--folder", type=Path, default=Path("build/agents"), help="for the runs while they last")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    runs, start = saved_runs(), args.folder / f"{args.model}-start"
    if not start.is_dir():
        if args.model == "tiny":
            tiny_start(start)
        else:
            words = [
                sys.executable,
                str(DEMO),
                "--python",
                args.python,
                "--output",
                str(args.folder),
                "--warm_up_alone",
            ]
            subprocess.run(words, check=True)
            (args.folder / "warm-up").rename(start)
    for seed in range(SETTINGS[args.model].seeds) if args.seed is None else [args.seed]:
        if all((run["model"], run["seed"]) != (args.model, seed) for run in runs):
            found = side_by_side(args.model, seed, start, args.folder, args.python)
            runs = sorted([*saved_runs(), *found], key=lambda run: (run["model"], run["seed"], run["kind"]))
            print(compared(found)[0], flush=True)
            save("agents", [*compared(runs), *runs])  # lest an interruption lose it


if __name__ == "__main__":
    main()
