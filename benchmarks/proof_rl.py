"""RL with prompts of some 500 tokens and eight samples of each, one trainer at a time: held-out reward over time.

The tasks are those of proof_tasks.py, one of a turn and one of several; the policy is a Llama of 0.9 million parameters
that has imitated such texts until it half knew the task. TRL's trainer runs as it is, and with one line; `treewise rl`
samples and trains by itself. All take the same number of steps on as many prompts and samples, with the same optimizer
and rate. Runs draw their own samples: curves over steps agree but for that.

    python benchmarks/proof_rl.py start --part turns --start start.pt
    python benchmarks/proof_rl.py treewise --part turns --start start.pt --seed 0     # `make proof` runs all
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_branching import TEMPLATE
from common import spread
from datasets import Dataset
from proof_sft import Clock, Watch, peak_mib, settings, tell
from proof_tasks import TASKS, Task
from tiny_policy import imitate, new_model, new_tokenizer
from trl import GRPOConfig, GRPOTrainer

import treewise as tw
from treewise.rl.samplers import TransformersSampler

TRAINERS = {
    "trl": "TRL GRPOTrainer",
    "trl, shared": "TRL GRPOTrainer, share_prefixes",
    "treewise": "treewise rl",
}
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
PROMPTS, SAMPLES = 8, 8
RATE, EVERY = 1e-4, 5
HALF_KNOWN, IMITATION_RATE = 0.3, 1e-3  # of the policy's start


def tokenizer_of_letters() -> Any:
    """One token a character."""
    tokenizer = new_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def new_start(task: Task, path: Path, seed: int) -> None:
    """The weights from which all trainers go on: words alone first, then behind more and more examples."""
    tokenizer = tokenizer_of_letters()
    model = new_model(tokenizer, seed, **SIZES)
    imitate(model, tokenizer, task.first_texts, seed, 200, IMITATION_RATE)
    for examples in (1, 3, 8, 16, task.examples):
        texts = partial(task.texts, examples=examples)
        for chunk in range(40):  # until the policy half knows the task at this length
            found = task.success(model, tokenizer, examples, count=32)
            if found >= HALF_KNOWN:
                break
            imitate(model, tokenizer, texts, 1000 * seed + chunk, 5, IMITATION_RATE)
        print(f"  {examples} examples: {found:.3f} after {5 * chunk} steps", flush=True)
    torch.save(model.state_dict(), path)
    print(f"start: {sum(each.numel() for each in model.parameters()):,} parameters, success {found:.3f}")


# -- the trainers ------------------------------------------------------------------------------------------------------


def timed(owner: Any, name: str, parts: dict[str, list[float]], key: str) -> None:
    """Seconds of each call of a method, kept under a key."""
    method: Callable[..., Any] = getattr(owner, name)

    @wraps(method)
    def timed_call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            parts[key].append(time.perf_counter() - began)

    setattr(owner, name, timed_call)


def by_trl(
    model: Any, tokenizer: Any, task: Task, seed: int, steps: int, clock: Clock, folder: str
) -> tuple[GRPOTrainer, dict[str, list[float]]]:
    """TRL's trainer, and where its seconds go: generation by transformers' `generate`, an optimizer step each."""
    parts: dict[str, list[float]] = defaultdict(list)
    given = task.for_trl(PROMPTS * steps, tokenizer)
    config = GRPOConfig(
        **settings(folder, RATE, seed=seed),
        max_steps=steps,
        logging_steps=1,
        num_generations=SAMPLES,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        max_completion_length=2 * task.max_new_tokens,  # with what the environment says
        beta=0.0,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(given.pop("rows")),
        processing_class=tokenizer,
        callbacks=[Watch(clock, EVERY)],
        **given,
    )
    timed(trainer, "_generate", parts, "sampling")
    timed(trainer, "_generate_and_score_completions", parts, "sampling and scoring")
    timed(trainer, "training_step", parts, "all")
    return trainer, parts


def run(part: str, name: str, seed: int, steps: int, start: Path) -> dict[str, Any]:
    """One trainer in this process."""
    torch.set_num_threads(1)  # a second one gains nothing at this size
    task, tokenizer = TASKS[part], tokenizer_of_letters()
    model = new_model(tokenizer, seed, **SIZES)
    model.load_state_dict(torch.load(start, weights_only=True))
    clock = Clock(lambda: task.success(model, tokenizer, task.examples))
    with tempfile.TemporaryDirectory() as folder:
        if name == "treewise":
            log = by_treewise(model, tokenizer, task, seed, steps, clock, folder)
            seconds = {
                "sampling": spread([each["seconds_sampling"] for each in log]),
                "update": spread([each["seconds_update"] for each in log]),
            }
        else:
            trainer, parts = by_trl(model, tokenizer, task, seed, steps, clock, folder)
            if "shared" in name:
                tw.share_prefixes(trainer.model)
            trainer.train()
            both = np.array(parts["sampling and scoring"])
            seconds = {
                "sampling": spread(parts["sampling"]),
                "scoring": spread((both - parts["sampling"]).tolist()),
                "update": spread((np.array(parts["all"]) - both).tolist()),
            }
    return {
        "part": part,
        "trainer": name,
        "label": TRAINERS[name],
        "seed": seed,
        "steps": steps,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "threads": torch.get_num_threads(),
        "seconds": clock.ended,
        "cpu_seconds": time.process_time(),
        "seconds_of_a_step": seconds,
        "peak_mib": peak_mib(),
        "curve": clock.points,
    }


def by_treewise(
    model: Any, tokenizer: Any, task: Task, seed: int, steps: int, clock: Clock, folder: str
) -> list[dict[str, float]]:
    """The online loop, each prompt's samples as one tree; the log of its iterations."""
    trainer = tw.OnlineTrainer(
        model,
        task.for_treewise(PROMPTS * steps),
        tokenizer,
        tw.OnlineSettings(
            iterations=steps,
            trees_per_iteration=PROMPTS,
            tokens_per_iteration=PROMPTS * SAMPLES * task.tokens,
            max_new_tokens=task.max_new_tokens,
            branching_settings={"roots": SAMPLES},
            eval_every=0,
            show_every=0,
            save_every=steps,
            chat_template=TEMPLATE,
        ),
        tw.TreeTrainingArguments(**settings(folder, RATE, seed=seed)),
        objective=tw.GRPO(),
        sampler=TransformersSampler(model, max_rows=PROMPTS * SAMPLES),
        callbacks=[Watch(clock, EVERY, num_steps=steps)],
    )
    trainer.train()
    return [each for each in trainer.log_history if "seconds_update" in each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trainer", choices=["start", *TRAINERS])
    parser.add_argument("--part", choices=list(TASKS), default="rl", help="the task")
    parser.add_argument("--start", type=Path, required=True, help="the weights to go on from, which `start` makes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    args = parser.parse_args()
    if args.trainer == "start":
        new_start(TASKS[args.part], args.start, args.seed)
        return
    tell(run(args.part, args.trainer, args.seed, args.steps, args.start), args.output)


if __name__ == "__main__":
    main()
