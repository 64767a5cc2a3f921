"""`autogen-agentchat`: an assistant with a tool that goes on, and a team of two."""

import asyncio
import json
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient

CANNOT = dict.fromkeys(("vision", "json_output", "structured_output"), False)


async def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def run(task):
    client = OpenAIChatCompletionClient(
        model="policy", model_info={**CANNOT, "function_calling": True, "family": "unknown"}
    )
    counter = AssistantAgent("counter", client, tools=[add], system_message="You count.", reflect_on_tool_use=True)
    for text in (task["question"], "And again?"):
        print((await counter.run(task=text)).messages[-1].content)
    team = [AssistantAgent(name, client, system_message=f"You are {name}.") for name in ("one", "two")]
    print(await RoundRobinGroupChat(team, termination_condition=MaxMessageTermination(4)).run(task="Talk."))


asyncio.run(run(json.loads(os.environ["TREEWISE_TASK"])))
print(1.0)
