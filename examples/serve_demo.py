"""`make serve-demo`: a server, a client of the official SDK that learns by GRPO, the curve, and what sharing is worth.

SmolLM2 learns to end its answers with an exclamation mark: 8 prompts with 8 samples each, all of one long beginning.
The same calls then go to the same server with `--share none`; the ratio of the time of forward and backward is printed.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from tinker import types
from transformers import AutoTokenizer

MODEL, STEPS, SAMPLES = "smollm2-demo", 6, 8
PREFIX = "You answer in a few words. " * 24
QUESTIONS = [f"What comes after {number}?" for number in ("one", "two", "three", "four", "five", "six", "seven", "ten")]


@contextmanager
def server(folder: str, port: int, *flags: str) -> Iterator[tinker.ServiceClient]:
    """A server of its own process, and a client of it."""
    command = [sys.executable, "-m", "treewise.cli.main", "serve", "--model", MODEL, "--max_tokens", "4096"]
    process = subprocess.Popen([*command, "--folder", folder, "--port", str(port), *flags])
    try:
        yield tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key="tml-local")
    finally:
        process.terminate()
        process.wait()


def reward(text: str) -> float:
    """1 for an exclamation mark at the end."""
    return float(text.strip().endswith("!"))


def collect(sampler: tinker.SamplingClient, tokenizer: object) -> tuple[list[types.Datum], float]:
    """A datum for each sample of a group whose rewards differ, and the mean reward."""
    params, data, rewards = types.SamplingParams(max_tokens=24, temperature=1.0), [], []
    prompts = []
    for question in QUESTIONS:
        messages = [{"role": "system", "content": PREFIX}, {"role": "user", "content": question}]
        prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    futures = [sampler.sample(types.ModelInput.from_ints(ids), SAMPLES, params) for ids in prompts]
    for ids, future in zip(prompts, futures, strict=True):
        drawn = future.result().sequences
        scores = np.array([reward(tokenizer.decode(each.tokens, skip_special_tokens=True)) for each in drawn])
        rewards += scores.tolist()
        for each, advantage in zip(drawn, scores - scores.mean(), strict=True):
            row, start = [*ids, *each.tokens], len(ids) - 1
            inputs = {
                "target_tokens": np.array(row[1:]),
                "logprobs": np.array([0.0] * start + each.logprobs, dtype=np.float32),
                "advantages": np.array([0.0] * start + [advantage] * len(each.tokens), dtype=np.float32),
            }
            data.append(types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs))
    return data, float(np.mean(rewards))


def timed(run: tinker.TrainingClient, batches: list[list[types.Datum]]) -> float:
    """Seconds of all forward_backward calls but the first, which checks the model."""
    seconds = []
    for data in batches:
        begun = time.perf_counter()
        run.forward_backward(data, "importance_sampling").result()
        seconds.append(time.perf_counter() - begun)
    return sum(seconds[1:])


def main() -> None:
    batches = []
    with tempfile.TemporaryDirectory() as folder, server(f"{folder}/shared", 8101) as client:
        run = client.create_lora_training_client(base_model=MODEL, rank=16, seed=0).result()
        tokenizer = AutoTokenizer.from_pretrained(Path(folder) / "shared" / "tokenizer")
        for step in range(STEPS):
            data, mean = collect(run.save_weights_and_get_sampling_client().result(), tokenizer)
            print(f"step {step}: mean reward {mean:.2f} {'#' * round(40 * mean)}", flush=True)
            batches.append(data)
            call = run.forward_backward(data, "importance_sampling")
            run.optim_step(types.AdamParams(learning_rate=3e-4)).result()
            found = call.result().metrics
        print(
            f"{found['flat_tokens:sum']:.0f} flat tokens, {found['computed_tokens:sum']:.0f} computed in the last step"
        )
        shared = timed(run, batches[:4])
    with tempfile.TemporaryDirectory() as folder, server(f"{folder}/alone", 8102, "--share", "none") as client:
        run = client.create_lora_training_client(base_model=MODEL, rank=16, seed=0).result()
        alone = timed(run, batches[:4])
    print(f"forward and backward of the same rows: {alone / shared:.1f} times as long without sharing")


if __name__ == "__main__":
    main()
