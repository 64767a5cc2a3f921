"""Seconds of one update of TRL's trainers, with and without `share_prefixes`.

Contestants, in one process, taking turns, each with a model of its own: the trainer as it is; with the line; with the
line at half of the tree. A GRPO update is forward and backward of one group of samples; a DPO update of some pairs,
with reference log-probs given. Prompts and answers are random tokens, answers of several lengths, so that the trainer
as it is computes padding, as it does in use; padding is not in the FLOP bound. On CPU, TRL's head projects every row,
which the bound does not count either: efficiencies above 1 come from there. The last case shares nothing and is forced
through the tree: what the line could cost.

    python benchmarks/bench_trl.py [--prompt 512] [--answer 128] [--generations 8] [--pairs 4] [--repetitions 3]
"""

import argparse
import copy
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import paired_seconds, save, smollm2, spread
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

import treewise
from treewise.nn.model_flops import flop_model
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

Rows = list[tuple[np.ndarray, np.ndarray]]  # prompt and answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--answer", type=int, default=128, help="tokens of the longest answer; the shortest has half")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    cases: dict[str, tuple[Callable[[Any, Any, Rows], Callable[[], float]], Rows]] = {
        "grpo": (grpo, groups(1, args.generations, args.prompt, args.answer)),
        "dpo": (dpo, groups(args.pairs, 2, args.prompt, args.answer)),
        "grpo, nothing shared": (grpo, groups(args.generations, 1, args.prompt, args.answer)),
    }
    loaded = smollm2(torch.float32)
    rows = []
    for name, (trainer, batch) in cases.items():
        rows.append(measure(name, loaded, trainer, batch, args.repetitions))
        print_row(rows[-1])
    print("written to", save("trl-float32", rows))


def groups(num_prompts: int, num_answers: int, prompt: int, answer: int) -> Rows:
    """Answers to some prompts, ordered as DPO wants them: the first answers of all prompts, then the second ones."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(100, 40_000, prompt) for _ in range(num_prompts)]
    return [
        (each, rng.integers(100, 40_000, rng.integers(answer // 2, answer + 1)))
        for _ in range(num_answers)
        for each in prompts
    ]


def measure(
    name: str, loaded: tuple[Any, Any], trainer: Callable[..., Callable[[], float]], batch: Rows, repetitions: int
) -> dict[str, Any]:
    forest = Forest.from_trajectories(
        [
            Trajectory(np.concatenate([prompt, answer]), np.repeat([0.0, 1.0], [len(prompt), len(answer)]))
            for prompt, answer in batch
        ]
    )
    contestants: dict[str, Callable[[], float]] = {}
    sharings = {}
    for key, max_tokens in {"trl": None, "shared": None, "half": forest.num_tokens // 2}.items():
        model = copy.deepcopy(loaded[0])
        contestants[key] = trainer(model, loaded[1], batch)
        if key != "trl":
            sharings[key] = treewise.share_prefixes(model, max_tokens, min_ratio=0)
    losses = {key: step() for key, step in contestants.items()}
    worst = max(abs(loss - losses["trl"]) for loss in losses.values())
    assert worst <= 1e-4 * max(1.0, abs(losses["trl"])), losses
    seconds = {key: spread(value) for key, value in paired_seconds(contestants, repetitions).items()}
    flops = flop_model(model)
    bound = flops.flat(forest) / flops.tree(forest)
    speed_up = seconds["trl"]["median"] / seconds["shared"]["median"]
    counts = {key: each.counts for key, each in sharings.items()}
    return {
        "case": name,
        "num_rows": len(batch),
        "padded_tokens": len(batch) * max(len(prompt) + len(answer) for prompt, answer in batch),
        "flat_tokens": forest.num_flat_tokens,
        "tree_tokens": forest.num_tokens,
        "share_ratio": forest.share_ratio,
        "flop_bound": bound,
        "speed_up": speed_up,
        "efficiency": speed_up / bound,
        "computed_tokens": {key: each.num_computed_tokens // each.num_calls for key, each in counts.items()},
        "loss_difference": worst,
        "seconds": seconds,
    }


def grpo(model: Any, tokenizer: Any, batch: Rows) -> Callable[[], float]:
    """One update on rollouts that are there; generation and rewards are not timed."""
    config = GRPOConfig(**_settings(len(batch)), num_generations=len(batch), beta=0.0)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "none"}]),
        processing_class=tokenizer,
    )
    answers, mask = _padded([answer for _, answer in batch])
    prompts = torch.as_tensor(np.stack([prompt for prompt, _ in batch]))
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": answers,
        "completion_mask": mask,
        "advantages": torch.linspace(-1, 1, len(batch)),
        "num_items_in_batch": mask.sum(),
    }
    return _update(trainer, model, inputs)


def dpo(model: Any, tokenizer: Any, batch: Rows) -> Callable[[], float]:
    """One update with reference log-probs given; the first half of the rows is chosen, the second rejected."""
    trainer = DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=DPOConfig(**_settings(len(batch) // 2)),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": " b", "rejected": " c"}]),
        processing_class=tokenizer,
    )
    trainer.ref_model, trainer.precompute_ref_logps = None, True
    ids, mask = _padded([np.concatenate(row) for row in batch])
    scored, _ = _padded([np.repeat([0, 1], [len(prompt), len(answer)]) for prompt, answer in batch])
    ones = torch.full((len(batch) // 2,), -100.0)
    inputs = {"input_ids": ids, "attention_mask": mask, "completion_mask": scored}
    return _update(trainer, model, inputs | {"ref_chosen_logps": ones, "ref_rejected_logps": ones})


def _settings(batch_size: int) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": batch_size,
        "bf16": False,
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": False,
    }


def _update(trainer: Any, model: Any, inputs: dict[str, torch.Tensor]) -> Callable[[], float]:
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    on_device = {name: value.to(model.device) for name, value in inputs.items()}

    def step() -> float:
        loss = trainer.compute_loss(model, dict(on_device))
        loss.backward()
        model.zero_grad(set_to_none=False)
        return float(loss.detach())

    return step


def _padded(rows: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, L] tokens, zero-padded on the right, and their mask."""
    tensors = [torch.as_tensor(row) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(tensors, batch_first=True), pad([torch.ones_like(each) for each in tensors], batch_first=True)


def print_row(row: dict[str, Any]) -> None:
    seconds = ", ".join(f"{name} {value['median']:.2f} s" for name, value in row["seconds"].items())
    print(
        f"{row['case']}: {row['padded_tokens']} padded, {row['flat_tokens']} flat, {row['tree_tokens']} tree tokens, "
        f"speed-up {row['speed_up']:.2f} of {row['flop_bound']:.2f}, efficiency {row['efficiency']:.2f}; {seconds}",
        flush=True,
    )


if __name__ == "__main__":
    main()
