"""Tokens a second of `TransformersSampler`, `generate` and `generate_batch` on the same requests, with SmolLM2-135M.

    python benchmarks/bench_sampling.py [--new_tokens 64] [--repetitions 3]

Two kinds of requests: 16 prompts of different length, each continued 4 times, and one prefix of 1,000 tokens, continued
16 times. Every continuation has the same number of tokens, at temperature 1. `generate` gets all rows as one batch,
padded on the left; `generate_batch` is transformers' continuous batching with log-probs and block-wise prefix sharing.
"""

import argparse
import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import paired_seconds, save, smollm2, spread
from transformers import ContinuousBatchingConfig, GenerationConfig

from treewise.rl.samplers import SampleRequest, TransformersSampler

PAGE = 32


def requests_of(vocab_size: int, new_tokens: int) -> dict[str, list[SampleRequest]]:
    """Random token ids: what is computed does not depend on them."""
    rng = np.random.default_rng(0)

    def request(length: int, count: int, seed: int) -> SampleRequest:
        ids = tuple(rng.integers(10, vocab_size, length).tolist())
        return SampleRequest(ids, num_continuations=count, max_new_tokens=new_tokens, seed=seed)

    return {
        "16 prompts of 40 to 200 tokens, 4 continuations each": [
            request(int(length), 4, seed) for seed, length in enumerate(rng.integers(40, 201, 16))
        ],
        "1 prefix of 1,000 tokens, 16 continuations": [request(1000, 16, 0)],
    }


def plain(model: Any, requests: list[SampleRequest]) -> None:
    """One padded batch of all rows."""
    rows = [request.prefix_ids for request in requests for _ in range(request.num_continuations)]
    width, new = max(map(len, rows)), requests[0].max_new_tokens
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    with torch.no_grad():
        model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            max_new_tokens=new,
            min_new_tokens=new,
            return_dict_in_generate=True,
            output_logits=True,
            pad_token_id=0,
        )


def continuous(model: Any, requests: list[SampleRequest]) -> None:
    """transformers' continuous batching, with pages of 32 tokens for all rows."""
    rows = [list(request.prefix_ids) for request in requests for _ in range(request.num_continuations)]
    new = requests[0].max_new_tokens
    found = model.generate_batch(
        rows,
        generation_config=GenerationConfig(do_sample=True, max_new_tokens=new, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=sum(-(-(len(row) + new) // PAGE) for row in rows) + 8,
            max_batch_tokens=4096,
            max_requests_per_batch=len(rows),
            return_logprobs=True,
            seed=0,
        ),
    )
    lengths = {len(each.generated_tokens) for each in found.values()}
    if len(found) != len(rows) or lengths != {new}:
        raise RuntimeError(f"generate_batch answered {len(found)} of {len(rows)} requests, of {lengths} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new_tokens", type=int, default=64, help="of each continuation")
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    model, tokenizer = smollm2(torch.float32)
    model.eval()
    rows = []
    for kind, requests in requests_of(len(tokenizer), args.new_tokens).items():
        num_tokens = sum(request.num_continuations for request in requests) * args.new_tokens
        contestants: dict[str, Callable[[], Any]] = {
            "TransformersSampler": lambda requests=requests: TransformersSampler(model).sample(requests),
            "generate": lambda requests=requests: plain(model, requests),
            "generate_batch": lambda requests=requests: continuous(model, requests),
        }
        with contextlib.redirect_stdout(io.StringIO()):
            seconds = paired_seconds(contestants, args.repetitions)
        for name, found in seconds.items():
            rows.append({"requests": kind, "contestant": name, "tokens": num_tokens, "seconds": spread(found)})
            rows[-1]["tokens_per_second"] = round(num_tokens / float(np.median(found)), 1)
            print(rows[-1], flush=True)
    path: Path = save("sampling", rows)
    print("written to", path)


if __name__ == "__main__":
    main()
