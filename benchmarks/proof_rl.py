"""RL with prompts of some 500 tokens and eight samples of each, one trainer at a time: held-out success over time.

A prompt holds solved examples and a word to spell backward; the policy is a Llama of 0.9 million parameters that has
imitated such texts until it half knew the task. TRL's trainer runs as it is, and with the one line; `treewise rl`
samples and trains by itself. All take the same number of steps on as many prompts and samples, with the same optimizer
and rate. Runs draw their own samples: curves over steps agree but for that.

    python benchmarks/proof_rl.py treewise --start build/proof/start.pt --seed 0     # `make proof` runs all
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
from bench_branching import TEMPLATE, texts_of_words, words
from common import spread
from datasets import Dataset
from proof_sft import Clock, Watch, peak_mib, settings, tell
from tiny_policy import END, Parts, imitate, new_model, new_tokenizer
from trl import GRPOConfig, GRPOTrainer

import treewise as tw
from treewise.rl.samplers import SampleRequest, TransformersSampler
from treewise.rl.tasks.protocol import RewardRequest, Split, TaskItem

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
EXAMPLES, PROMPTS, SAMPLES, MAX_NEW, HELD_OUT = 34, 8, 8, 9, 96
RATE, EVERY = 1e-4, 5
STAGES, HALF_KNOWN, IMITATION_RATE = (1, 3, 8, 16, EXAMPLES), 0.3, 1e-3  # of the policy's start


class BackwardWithExamples:
    """Words of 5 to 7 letters, spelled backward after `EXAMPLES` solved ones; the reward is 1 for all letters right."""

    name = "backward"

    def __init__(self, examples: int = EXAMPLES) -> None:
        self.examples = examples

    def num_items(self, split: Split) -> int | None:
        return None

    def item(self, split: Split, index: int) -> TaskItem:
        rng = np.random.default_rng([index, split == "held_out"])
        word = words(split)[int(rng.integers(len(words(split))))]
        prompt = "".join(text + answer for text, answer in solved(rng, self.examples)) + f"w{word}="
        return TaskItem(f"{self.name}/{split}/{index}", ({"role": "user", "content": prompt},), {"answer": word[::-1]})

    def rewards(self, requests: list[RewardRequest]) -> list[float]:
        return [float(request.text == request.item.extra["answer"]) for request in requests]


def solved(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """Questions and answers on words that are trained."""
    chosen = [words("train")[int(number)] for number in rng.integers(0, len(words("train")), count)]
    return [(f"w{word}=", word[::-1] + ",") for word in chosen]


def texts(rng: np.random.Generator, examples: int) -> list[Parts]:
    """What is imitated before: every answer of a prompt, and the end after the last."""
    rows: list[Parts] = []
    for _ in range(272 // examples):
        pairs = solved(rng, examples)
        parts = [(text, is_answer) for pair in pairs for text, is_answer in zip(pair, (False, True), strict=True)]
        (last,) = solved(rng, 1)
        rows.append([*parts, (last[0], False), (last[1][:-1] + END, True)])
    return rows


def tokenizer_of_letters() -> Any:
    """One token a character."""
    tokenizer = new_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def new_start(path: Path, seed: int) -> None:
    """The weights from which all trainers go on: words alone first, then behind more and more examples."""
    tokenizer = tokenizer_of_letters()
    model = new_model(tokenizer, seed, **SIZES)
    imitate(model, tokenizer, texts_of_words, seed, 200, IMITATION_RATE)
    for examples in STAGES:
        for chunk in range(10):  # until the policy half knows the task at this length
            imitate(model, tokenizer, partial(texts, examples=examples), 1000 * seed + chunk, 10, IMITATION_RATE)
            found = success(model, tokenizer, examples)
            if found >= HALF_KNOWN:
                break
    torch.save(model.state_dict(), path)
    print(f"start: {sum(each.numel() for each in model.parameters()):,} parameters, success {found:.3f}")


def success(model: Any, tokenizer: Any, examples: int = EXAMPLES) -> float:
    """Share of held-out questions that one sample at temperature 1 answers."""
    task, requests, answers = BackwardWithExamples(examples), [], []
    for index in range(HELD_OUT):
        item = task.item("held_out", index)
        ids = tokenizer.encode(item.prompt[0]["content"], add_special_tokens=False)
        stop = (tokenizer.eos_token_id,)
        requests.append(SampleRequest(tuple(ids), max_new_tokens=MAX_NEW, seed=index, stop_ids=stop))
        answers.append(item.extra["answer"])
    was_training = model.training
    found = TransformersSampler(model, max_rows=32).sample(requests)
    model.train(was_training)
    given = [tokenizer.decode(one.token_ids.tolist(), skip_special_tokens=True) for (one,) in found]
    return sum(text == answer for text, answer in zip(given, answers, strict=True)) / HELD_OUT


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
    model: Any, tokenizer: Any, seed: int, steps: int, clock: Clock, folder: str, parts: dict[str, list[float]]
) -> GRPOTrainer:
    """TRL's trainer: generation by transformers' `generate`, one optimizer step a generation."""
    task, rewards = BackwardWithExamples(), []
    items = [task.item("train", index) for index in range(PROMPTS * steps)]

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        rewards.append([float(text == wanted) for text, wanted in zip(completions, answer, strict=True)])
        return rewards[-1]

    config = GRPOConfig(
        **settings(folder, RATE, seed=seed),
        max_steps=steps,
        logging_steps=1,
        num_generations=SAMPLES,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        max_completion_length=MAX_NEW,
        beta=0.0,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": each.prompt[0]["content"], **each.extra} for each in items]),
        processing_class=tokenizer,
        callbacks=[Watch(clock, EVERY)],
    )
    timed(trainer, "_generate", parts, "sampling")
    timed(trainer, "_generate_and_score_completions", parts, "sampling and scoring")
    timed(trainer, "training_step", parts, "all")
    return trainer


def run(name: str, seed: int, steps: int, start: Path) -> dict[str, Any]:
    """One trainer in this process."""
    tokenizer = tokenizer_of_letters()
    model = new_model(tokenizer, seed, **SIZES)
    model.load_state_dict(torch.load(start, weights_only=True))
    clock = Clock(lambda: success(model, tokenizer))
    parts: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        if name == "treewise":
            log = by_treewise(model, tokenizer, seed, steps, clock, folder)
            seconds = {
                "sampling": spread([each["seconds_sampling"] for each in log]),
                "update": spread([each["seconds_update"] for each in log]),
            }
        else:
            trainer = by_trl(model, tokenizer, seed, steps, clock, folder, parts)
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
        "part": "rl",
        "trainer": name,
        "label": TRAINERS[name],
        "seed": seed,
        "steps": steps,
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "seconds": clock.ended,
        "cpu_seconds": time.process_time(),
        "seconds_of_a_step": seconds,
        "peak_mib": peak_mib(),
        "curve": clock.points,
    }


def by_treewise(model: Any, tokenizer: Any, seed: int, steps: int, clock: Clock, folder: str) -> list[dict[str, float]]:
    """The online loop, each prompt's samples as one tree; the log of its iterations."""
    trainer = tw.OnlineTrainer(
        model,
        BackwardWithExamples(),
        tokenizer,
        tw.OnlineSettings(
            iterations=steps,
            trees_per_iteration=PROMPTS,
            tokens_per_iteration=PROMPTS * SAMPLES * 7,  # a word has 5 to 7 letters, and an end
            max_new_tokens=MAX_NEW,
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
    parser.add_argument("--start", type=Path, required=True, help="the weights to go on from, which `start` makes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, help="a JSON file for the result")
    args = parser.parse_args()
    if args.trainer == "start":
        new_start(args.start, args.seed)
        return
    tell(run(args.trainer, args.seed, args.steps, args.start), args.output)


if __name__ == "__main__":
    main()
