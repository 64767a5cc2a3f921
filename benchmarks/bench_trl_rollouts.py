"""`tw.tree_rollouts` in TRL's GRPOTrainer against TRL's own sampling, at equal generated tokens.

The policy and the task are those of bench_branching.py: a tiny model that half knows how to spell words backward. Each
arm trains from the same weights with the same settings of TRL; arms that share tokens take more steps within the same
budget. Held-out reward over generated tokens, paired by seed; intervals are bootstrap over seeds.

    python benchmarks/bench_trl_rollouts.py [--seeds 5] [--tokens 8000]
"""

import argparse
import tempfile
import time
from typing import Any

import numpy as np
import torch
from bench_branching import HELD_OUT, TEMPLATE, texts_of_words, words
from common import save
from datasets import Dataset
from tiny_policy import imitate, interval, new_model, new_tokenizer, score
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import treewise as tw
from treewise.rl.samplers import SampleRequest, TransformersSampler

ARMS: dict[str, dict[str, Any] | None] = {
    "TRL": None,
    "none": {"branching": "none", "branching_settings": {"roots": 8}},
    "random": {"branching": "random", "branching_settings": {"roots": 2, "variations": 4, "per_round": 3}},
    "lcr": {"branching": "lcr", "branching_settings": {"roots": 2, "variations": 4, "per_round": 3}},
}
GENERATIONS, PROMPTS, MAX_NEW_TOKENS = 8, 8, 9


class Curve(TrainerCallback):
    """Held-out reward each few steps, and the end of the run once its tokens are spent."""

    def __init__(self, model: Any, tokenizer: Any, budget: int) -> None:
        self.model, self.tokenizer, self.budget = model, tokenizer, budget
        self.num_tokens = 0  # of completions, as the reward function sees them
        self.rollouts: Any = None
        self.points: list[tuple[float, float]] = []

    @property
    def num_sampled(self) -> int:
        """Generated tokens so far; a token that completions share counts once."""
        return self.num_tokens if self.rollouts is None else self.rollouts.counts.num_sampled_tokens

    def measure(self) -> None:
        """One rollout of each held-out word at temperature 1."""
        requests, answers = [], []
        for number, word in enumerate(words("held_out")[:HELD_OUT]):
            ids = self.tokenizer.encode(f"w{word}=", add_special_tokens=False)
            stop = (self.tokenizer.eos_token_id,)
            requests.append(SampleRequest(tuple(ids), max_new_tokens=MAX_NEW_TOKENS, seed=number, stop_ids=stop))
            answers.append(word[::-1])
        found = TransformersSampler(self.model, max_rows=256).sample(requests)
        texts = [self.tokenizer.decode(one.token_ids.tolist(), skip_special_tokens=True) for (one,) in found]
        num_right = sum(text == answer for text, answer in zip(texts, answers, strict=True))
        self.points.append((float(self.num_sampled), num_right / len(answers)))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        is_over = self.num_sampled >= self.budget
        if is_over or state.global_step % 4 == 0:
            self.measure()
        control.should_training_stop = is_over


def run(start: Any, tokenizer: Any, arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One arm of one seed."""
    model = new_model(tokenizer, seed)
    model.load_state_dict(start)
    curve = Curve(model, tokenizer, args.tokens)

    def reward(completion_ids: list[list[int]], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        curve.num_tokens += sum(map(len, completion_ids))
        return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            seed=seed,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            num_generations=GENERATIONS,
            per_device_train_batch_size=GENERATIONS * PROMPTS,
            max_completion_length=MAX_NEW_TOKENS,
            max_steps=10_000,
            beta=0.0,
            save_strategy="no",
            logging_steps=10_000,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        )
        rows = [{"prompt": f"w{word}=", "answer": word[::-1]} for word in words("train")]
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[curve],
        )
        chosen = ARMS[arm]
        if chosen is not None:
            curve.rollouts = tw.tree_rollouts(trainer, advantages=None, **chosen)
        curve.measure()
        trainer.train()
    ratio = 1.0 if curve.rollouts is None else curve.rollouts.counts.share_ratio
    return {
        "arm": arm,
        "seed": seed,
        "steps": trainer.state.global_step,
        "share_ratio": ratio,
        "curve": curve.points,
        "cpu_seconds": time.process_time() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8_000, help="generated, of a run")
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--pretraining_steps", type=int, default=150)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = new_tokenizer()
    tokenizer.chat_template = TEMPLATE
    runs: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        model = new_model(tokenizer, seed)
        imitate(model, tokenizer, texts_of_words, seed, args.pretraining_steps)
        start = {name: value.clone() for name, value in model.state_dict().items()}
        for arm in ARMS:
            runs.append(run(start, tokenizer, arm, seed, args))
            rewards = [round(reward, 3) for _, reward in runs[-1]["curve"]]
            print(arm, seed, rewards, round(runs[-1]["cpu_seconds"], 1), flush=True)
        scores = {(each["arm"], each["seed"]): score(each["curve"], args.tokens) for each in runs}
        table = []
        for arm in ARMS:
            own = np.array([scores[arm, number] for number in range(seed + 1)])
            base = np.array([scores["TRL", number] for number in range(seed + 1)])
            mine = [each for each in runs if each["arm"] == arm]
            table.append(
                {
                    "arm": arm,
                    "steps": float(np.mean([each["steps"] for each in mine])),
                    "share_ratio": round(float(np.mean([each["share_ratio"] for each in mine])), 3),
                    "start": interval([each["curve"][0][1] for each in mine]),
                    "mean": interval(own[:, 0]),
                    "last": interval(own[:, 1]),
                    "mean_minus_TRL": interval(own[:, 0] - base[:, 0]),
                    "last_minus_TRL": interval(own[:, 1] - base[:, 1]),
                }
            )
            print(table[-1], flush=True)
        path = save("trl-rollouts", [{"setting": vars(args) | {"arms": ARMS}, "table": table}, *runs])
    print("written to", path)


if __name__ == "__main__":
    main()
