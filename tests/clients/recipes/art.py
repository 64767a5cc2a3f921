"""ART's own loop with its native Tinker backend: rollouts by its OpenAI client, groups, `backend.train`."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import art
from art.tinker_native import TinkerNativeBackend

from tests.clients.recipes.rewards import vowels

NAME, GROUP = "Qwen/Qwen3-8B", 6
PROMPTS = [json.loads(line)["prompt"] for line in Path("prompts.jsonl").read_text().splitlines()]


def chats(steps: int) -> None:
    """One request for a group of answers, as in ART's example `yes_no_maybe_pipeline`."""
    asyncio.run(train("chats", steps, answers))


def episodes(steps: int) -> None:
    """Two turns each, which ART records by itself."""
    asyncio.run(train("episodes", steps, turns))


async def train(name: str, steps: int, group: Any) -> None:
    """The last step is one of a new process: it goes on from the checkpoint before."""
    for step in range(steps):
        if step in (0, steps - 1):
            backend, model = await registered(name)
        asked = PROMPTS[step : step + 2]
        groups = await art.gather_trajectory_groups(
            [group(model, text, 100 * step + n) for n, text in enumerate(asked)]
        )
        found = await backend.train(model, groups, learning_rate=1e-3, save_checkpoint=True)
        await model.log(groups, split="train", metrics=found.metrics, step=found.step)
        if step >= steps - 2:
            await backend.close()


async def registered(name: str) -> tuple[TinkerNativeBackend, art.TrainableModel]:
    backend = TinkerNativeBackend(path="art")
    model = art.TrainableModel(
        name=name,
        run_name=name,
        project="treewise",
        base_model=NAME,
        _internal_config={"tinker_native_args": {"training_client_args": {"rank": 16}}},
    )
    await model.register(backend)
    return backend, model


async def asked(model: Any, messages: list[Any], seed: int, n: int = 1) -> list[Any]:
    """Choices. seed: requests come in any order, so each brings its own."""
    own = {"model": model.get_inference_name(), "messages": messages, "max_tokens": 24, "n": n, "seed": seed}
    return (await model.openai_client().chat.completions.create(**own)).choices


async def answers(model: Any, prompt: str, seed: int) -> Any:
    messages = [{"role": "user", "content": prompt}]
    return art.TrajectoryGroup(
        [
            art.Trajectory(messages_and_choices=[*messages, choice], reward=reward(choice))
            for choice in await asked(model, messages, seed, GROUP)
        ]
    )


async def turns(model: Any, prompt: str, seed: int) -> Any:
    return art.TrajectoryGroup([await episode(model, prompt, 1000 * seed + n) for n in range(GROUP)])


async def episode(model: Any, prompt: str, seed: int) -> Any:
    messages: list[Any] = [{"role": "user", "content": prompt}]
    kept = list(messages)
    for turn in itertools.count():
        (choice,) = await asked(model, messages, seed * 10 + turn)
        kept.append(choice)
        if turn == 1:
            return art.Trajectory(messages_and_choices=kept, reward=reward(choice))
        said = {"role": "assistant", "content": choice.message.content or ""}
        messages += [said, {"role": "user", "content": "Go on."}]
        kept.append(messages[-1])


def reward(choice: Any) -> float:
    return vowels([""], [choice.message.content or ""])[0]
