"""`pydantic-ai`: tools side by side, a history that goes on, a stream; OpenAI's protocol, then Anthropic's."""

import asyncio
import json
import os

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def run(task):
    for model in (OpenAIChatModel("policy"), AnthropicModel("policy")):
        agent = Agent(model, instructions="You count.", tools=[add])
        found = await agent.run(task["question"])
        async with agent.run_stream("And again?", message_history=found.all_messages()) as stream:
            print(found.output, await stream.get_output())


asyncio.run(run(json.loads(os.environ["TREEWISE_TASK"])))
print(1.0)
