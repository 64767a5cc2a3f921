"""Rollouts with environments that sleep against the same with environments that do not; and sampling ahead of training.

    python benchmarks/bench_waiting.py [--trees 48] [--rounds 2] [--turns 4] [--sleep 2.0] [--rows 16]

Tokens a second of `grow_trees` on one model and the same episodes, one in each round of a tree, by the seconds that
each call of the environment sleeps, `get_reward` included: `at once` as a run has it, `in turns` with one environment
at a time. Then iterations of an online run by `max_staleness`: the wall time of one against its sampling and its
update.

    python benchmarks/bench_waiting.py --save_policy /tmp/policy
    taskset -c 1 .venv-vllm/bin/python -m vllm.entrypoints.openai.api_server --model /tmp/policy ... (tests/engines)
    taskset -c 0 python benchmarks/bench_waiting.py --server http://127.0.0.1:8000

The iterations alone, sampled by a server on another core.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import save
from tiny_policy import LETTERS, new_model, new_tokenizer

import treewise as tw
from treewise.rl.branching import RolloutTree, branching_named
from treewise.rl.online.collector import GroupRequest, Moment
from treewise.rl.online.continuing import Rounds
from treewise.rl.online.growing import GrowingTree, grow_trees
from treewise.rl.online.journal import Journal, LoopState
from treewise.rl.online.rollout import Limits, start
from treewise.rl.recorder.chat_tokens import ChatTokens
from treewise.rl.samplers import SampleRequest, ServerSampler, TransformersSampler
from treewise.rl.success_book import SuccessBook
from treewise.rl.tasks import Calls, EnvironmentTask, RewardRunner


class Sleeping:
    """Answers each turn after so many seconds."""

    seconds = 0.0

    def reset(self, seed: int) -> str:
        """Begins."""
        self.seed = seed
        return str(seed)

    def say(self, text: str) -> str:
        """Takes a turn.

        Args:
            text: What to say.
        """
        time.sleep(self.seconds)
        return str(len(text))

    def get_reward(self) -> float:
        """Of half of the episodes."""
        time.sleep(self.seconds)
        return float(self.seed % 4 == 0)

    def fork(self) -> "Sleeping":
        """A copy."""
        copy = Sleeping()
        copy.seed = self.seed
        return copy


class Turns(TransformersSampler):
    """Turns of a fixed number of tokens: the last is the end of the turn, whatever was drawn."""

    def __init__(self, model: Any, length: int, end: int, rows: int) -> None:
        super().__init__(model, max_rows=rows)
        self.length, self.end = length, end

    def sample_in_parts(self, requests: Any, done: Any) -> None:
        """The same requests, of so many tokens and without a stop."""

        def ended(number: int, completions: Any) -> None:
            (one,) = completions
            letters = np.where(one.token_ids[:-1] < len(LETTERS), one.token_ids[:-1], 0)  # no special token
            ids = np.append(letters, np.int32(self.end)).astype(np.int32)
            done(number, (type(one)(ids, one.logprobs, "stop"),))

        changes = {"max_new_tokens": self.length, "stop_ids": ()}
        super().sample_in_parts([replace(each, **changes) for each in requests], ended)


def measured(options: argparse.Namespace, model: Any, tokenizer: Any, seconds: float, at_once: int) -> dict[str, Any]:
    """Trees from the first request to the last reward."""
    Sleeping.seconds = seconds
    task = EnvironmentTask(Sleeping, prompt="go", text_tool="say", max_turns=options.turns, name="sleeping")
    chat, end = ChatTokens(tokenizer, template(tokenizer)), tokenizer.eos_token_id
    calls, limits = Calls(60.0, at_once=at_once), Limits(10_000, 100_000, (end,))
    items = [task.item("train", index) for index in range(options.trees)]
    budget = (options.rounds - 1) * options.turns * options.length + 1  # the last round passes it
    trees = [
        GrowingTree(
            GroupRequest(number, item, item.key, budget, (number,)),
            RolloutTree(first.token_ids, item.key),
            first,
            np.random.default_rng(number),
        )
        for number, (item, first) in enumerate(zip(items, start(task, items, chat, calls), strict=True))
    ]
    sampler = Turns(model, options.length, end, options.rows)
    rounds = Rounds(
        moment=Moment("here", LoopState(SuccessBook()), Journal(None), sampler, 0),
        branching=branching_named("none", roots=1),
        rewards=RewardRunner(calls),
        limits=limits,
        request=SampleRequest((0,), stop_ids=(end,)),
        episodes_at_once=at_once,
    )
    began = time.perf_counter()
    grow_trees(trees, rounds)
    wall = time.perf_counter() - began
    tokens = sum(each.num_sampled for each in trees)
    assert all(each.num_started == options.rounds for each in trees)
    row = {"sleep": seconds, "at_once": at_once, "tokens": tokens, "seconds": wall, "tokens_per_second": tokens / wall}
    return {**row, "seconds_idle": rounds.seconds["environments"] + rounds.seconds["reward"]}


def template(tokenizer: Any) -> str:
    """Messages with the end of a turn behind each."""
    message = "{% if m.role == 'assistant' %}a{% endif %}{{ m.content }}" + tokenizer.eos_token
    return "{% for m in messages %}" + message + "{% endfor %}{% if add_generation_prompt %}a{% endif %}"


def iterations(options: argparse.Namespace, tokenizer: Any, staleness: int) -> dict[str, Any]:
    """Medians of the iterations of a run after the first two."""
    Sleeping.seconds = 0.0
    task = EnvironmentTask(Sleeping, prompt="go", text_tool="say", max_turns=options.turns, name="sleeping")
    model = policy(tokenizer)
    settings = tw.OnlineSettings(
        iterations=options.iterations,
        trees_per_iteration=8,
        tokens_per_iteration=options.tokens,
        max_new_tokens=options.turns * options.length,
        branching_settings={"roots": 4},
        eval_every=0,
        save_every=options.iterations,
        show_every=0,
        chat_template=template(tokenizer),
        max_staleness=staleness,
    )
    sampler: Any
    if options.server:
        sampler = ServerSampler(options.server, weights="reload")
    else:
        sampler = Turns(policy(tokenizer), options.length, tokenizer.eos_token_id, options.rows)
        sampler.update = copying(sampler)
    with tempfile.TemporaryDirectory() as folder:
        arguments = tw.TreeTrainingArguments(
            output_dir=str(Path(folder) / "run"), use_cpu=True, disable_tqdm=True, report_to="none", max_tokens=4096
        )
        trainer = tw.OnlineTrainer(model, task, tokenizer, settings, arguments, sampler=sampler)
        trainer.train()
    logs = [each for each in trainer.log_history if "seconds_iteration" in each][2:]
    names = ("seconds_iteration", "seconds_sampling", "seconds_update")
    row = {name: statistics.median(each[name] for each in logs) for name in names}
    longest = max(row["seconds_sampling"], row["seconds_update"])
    return {
        "max_staleness": staleness,
        "server": bool(options.server),
        **row,
        "iteration_over_longest": row["seconds_iteration"] / longest,
    }


def copying(sampler: Turns) -> Any:
    """`update` of a sampler with weights of its own."""

    def update(model: Any) -> None:
        sampler.model.load_state_dict(model.state_dict())

    return update


def policy(tokenizer: Any) -> Any:
    """A Llama whose steps take longer than Python's part of them."""
    return new_model(
        tokenizer,
        seed=0,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=1024,
    )


def main() -> None:
    """Measures and saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("trees", 48), ("rounds", 2), ("turns", 4), ("length", 24), ("rows", 16), ("repetitions", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--sleep", type=float, default=2.0)
    parser.add_argument("--server", help="its address")
    parser.add_argument("--save_policy", help="a folder for the model that a server is to serve; nothing is measured")
    options = parser.parse_args()
    tokenizer = new_tokenizer()
    model = policy(tokenizer)
    if options.save_policy:
        model.save_pretrained(options.save_policy)
        return
    rows: list[dict[str, Any]] = []
    for _ in range(0 if options.server else options.repetitions):
        for seconds, at_once in ((0.0, 64), (options.sleep, 64)):
            rows.append(measured(options, model, tokenizer, seconds, at_once))
            print(rows[-1], flush=True)
    if not options.server:
        few = argparse.Namespace(**{**vars(options), "trees": 2, "turns": 2})
        rows.append(measured(few, model, tokenizer, options.sleep, 1) | {"trees": 2, "turns": 2})
        print(rows[-1], flush=True)
    for staleness in (0, 1):
        rows.append(iterations(options, tokenizer, staleness))
        print(rows[-1], flush=True)
    print(save("waiting-server" if options.server else "waiting", rows))


if __name__ == "__main__":
    main()
