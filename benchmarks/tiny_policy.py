"""What benchmarks of online runs share: a tiny policy that half knows a task, and curves compared over seeds.

The policy is a Llama of 2 layers and some 100,000 parameters with characters as tokens. From random weights it imitates
answers for a short while, so that an online run of seconds has something to improve.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treewise import testing

END, PAD = "<|end|>", "<|pad|>"
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*,=?"

# A text in parts, each with whether it is imitated.
Parts = Sequence[tuple[str, bool]]


def new_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    raw = Tokenizer(
        models.WordLevel({letter: number for number, letter in enumerate([*LETTERS, PAD, END])}, unk_token=PAD)
    )
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens([END, PAD])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, pad_token=PAD)


def new_model(tokenizer: Any, seed: int, **sizes: int) -> Any:
    """A tiny Llama with random weights. sizes: in place of the usual ones."""
    usual = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    return testing.tiny_model(
        seed=seed,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **{**usual, **sizes},
    )


def imitate(
    model: Any,
    tokenizer: Any,
    texts: Callable[[np.random.Generator], list[Parts]],
    seed: int,
    steps: int,
    rate: float = 3e-3,
) -> None:
    """So many steps of AdamW on a batch of texts each."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate, weight_decay=0.0)
    for _ in range(steps):
        rows, labels = [], []
        for parts in texts(rng):
            coded = [(tokenizer.encode(text, add_special_tokens=False), imitated) for text, imitated in parts]
            rows.append([token for ids, _ in coded for token in ids])
            labels.append([token if imitated else -100 for ids, imitated in coded for token in ids])
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[tokenizer.pad_token_id] * (width - len(row))] for row in rows])
        wanted = torch.tensor([[*row, *[-100] * (width - len(row))] for row in labels])
        model(input_ids=ids, labels=wanted).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def curve_of(log: list[dict[str, float]]) -> list[tuple[float, float]]:
    """Generated tokens so far and held-out reward, at each evaluation."""
    tokens, curve = 0.0, []
    for entry in log:
        tokens += entry.get("sampled_tokens", 0.0)
        if "eval_reward" in entry:
            curve.append((tokens, entry["eval_reward"]))
    return curve


def score(curve: list[tuple[float, float]], budget: float) -> tuple[float, float]:
    """Mean reward over the budget, and the reward at its end, both by linear interpolation."""
    tokens, rewards = np.array(curve).T
    grid = np.linspace(0, budget, 201)
    values = np.interp(grid, tokens, rewards)
    return float(values.mean()), float(values[-1])


def interval(values: Sequence[float] | np.ndarray, num_samples: int = 10_000) -> list[float]:
    """The mean over seeds and its bootstrap interval of 95 %."""
    values = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(0, len(values), (num_samples, len(values)))
    low, high = np.quantile(values[drawn].mean(1), [0.025, 0.975])
    return [round(float(value), 4) for value in (values.mean(), low, high)]
