"""Seconds of one update of TRL's trainers, with and without `share_prefixes`.

Contestants, in one process, taking turns, each with a model of its own: the trainer as it is; with the line; with the
line at half of the tree. A GRPO update is forward and backward of one group of samples; a DPO update of some pairs,
with reference log-probs given. Prompts and answers are random tokens, answers of several lengths, so that the trainer
as it is computes padding, as it does in use; padding is not in the FLOP bound. On CPU, TRL's head projects every row,
which the bound does not count either: efficiencies above 1 come from there. One case shares nothing and is forced
through the tree: what the line could cost.

`decoder` is the seam that needs no TRL: transformers.Trainer on a random Qwen3 of 8 layers, 8 answers to one prompt,
and a step with the optimizer.

    python benchmarks/bench_trl.py [--cases decoder ...] [--prompt 512] [--answer 128] [--generations 8] [--pairs 4] \
        [--repetitions 3]
"""

import argparse
import copy
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import paired_seconds, save, smollm2, speed_up_of, spread
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

import treewise
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

Rows = list[tuple[np.ndarray, np.ndarray]]  # prompt and answer
FILES = {"trl-float32": ("grpo", "dpo", "grpo, nothing shared"), "decoder-float32": ("decoder",)}  # and their cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--answer", type=int, default=128, help="tokens of the longest answer; the shortest has half")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=[case for cases in FILES.values() for case in cases])
    args = parser.parse_args()
    cases: dict[str, tuple[Callable[[Any, Any, Rows], Callable[[], float]], Rows]] = {
        "grpo": (grpo, groups(1, args.generations, args.prompt, args.answer)),
        "dpo": (dpo, groups(args.pairs, 2, args.prompt, args.answer)),
        "grpo, nothing shared": (grpo, groups(args.generations, 1, args.prompt, args.answer)),
        "decoder": (decoder, trial()),
    }
    for file, names in FILES.items():
        chosen = [name for name in names if name in (args.cases or cases)]
        rows = []
        for name in chosen:
            loaded = (qwen3(), None) if name == "decoder" else smollm2(torch.float32)
            rows.append(measure(name, loaded, *cases[name], args.repetitions))
            print_row(rows[-1])
        if len(chosen) == len(names):
            print("written to", save(file, rows))


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
    counts = {key: each.counts for key, each in sharings.items()}
    return {
        "case": name,
        "num_rows": len(batch),
        "padded_tokens": len(batch) * max(len(prompt) + len(answer) for prompt, answer in batch),
        **speed_up_of(model, forest, seconds["trl"]["median"], seconds["shared"]["median"]),
        "computed_tokens": {key: each.num_computed_tokens // each.num_calls for key, each in counts.items()},
        "loss_difference": worst,
        "seconds": seconds,
    }


def grpo(model: Any, tokenizer: Any, batch: Rows) -> Callable[[], float]:
    """One update on rollouts that are there; generation and rewards are not timed."""
    return _update(grpo_trainer(model, tokenizer, len(batch)), model, grpo_inputs(batch))


def grpo_trainer(model: Any, tokenizer: Any, group_size: int, **own: Any) -> GRPOTrainer:
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**settings(group_size) | own, num_generations=group_size, beta=0.0),
        train_dataset=Dataset.from_list([{"prompt": "none"}]),
        processing_class=tokenizer,
    )


def grpo_inputs(batch: Rows) -> dict[str, torch.Tensor]:
    """A group whose prompts have one length, as the trainer's loss takes it."""
    answers, mask = padded([answer for _, answer in batch])
    prompts = torch.as_tensor(np.stack([prompt for prompt, _ in batch]))
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": answers,
        "completion_mask": mask,
        "advantages": torch.linspace(-1, 1, len(batch)),
        "num_items_in_batch": mask.sum(),
    }


def dpo(model: Any, tokenizer: Any, batch: Rows) -> Callable[[], float]:
    """One update with reference log-probs given; the first half of the rows is chosen, the second rejected."""
    return _update(dpo_trainer(model, tokenizer, len(batch) // 2), model, dpo_inputs(batch))


def dpo_trainer(model: Any, tokenizer: Any, num_pairs: int, **own: Any) -> DPOTrainer:
    trainer = DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),
        args=DPOConfig(**settings(num_pairs) | own),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": " b", "rejected": " c"}]),
        processing_class=tokenizer,
    )
    trainer.ref_model, trainer.precompute_ref_logps = None, True
    return trainer


def dpo_inputs(batch: Rows) -> dict[str, torch.Tensor]:
    """Pairs, the chosen rows first, with reference log-probs."""
    ids, mask = padded([np.concatenate(row) for row in batch])
    scored, _ = padded([np.repeat([0, 1], [len(prompt), len(answer)]) for prompt, answer in batch])
    ones = torch.full((len(batch) // 2,), -100.0)
    inputs = {"input_ids": ids, "attention_mask": mask, "completion_mask": scored}
    return inputs | {"ref_chosen_logps": ones, "ref_rejected_logps": ones}


def trial() -> Rows:
    """8 answers of 40 to 75 tokens to a prompt of 400."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 4096, 400)
    return [(prompt, rng.integers(0, 4096, 40 + 5 * index)) for index in range(8)]


def qwen3() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "head_dim": 64}
    return Qwen3ForCausalLM(Qwen3Config(**shape, vocab_size=4096, num_attention_heads=4, num_key_value_heads=2))


def decoder(model: Any, _: Any, batch: Rows) -> Callable[[], float]:
    """One step of transformers.Trainer with its AdamW, in which answers are scored."""
    ids, mask = padded([np.concatenate(row) for row in batch])
    scored, _ = padded([np.repeat([0, 1], [len(prompt), len(answer)]) for prompt, answer in batch])
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(scored == 0, -100)}
    trainer = Trainer(model, TrainingArguments(**settings(len(batch)), learning_rate=1e-5))
    trainer.current_gradient_accumulation_steps = 1
    optimizer = trainer.create_optimizer()

    def step() -> float:
        loss = trainer.training_step(model, dict(inputs), num_items_in_batch=scored.sum())
        optimizer.step()
        model.zero_grad()
        return float(loss)

    return step


def settings(batch_size: int) -> dict[str, Any]:
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


def padded(rows: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
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
