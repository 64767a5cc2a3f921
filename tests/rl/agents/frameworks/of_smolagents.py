"""`smolagents`: an agent that calls tools and manages another one, and one that writes code."""

import json
import os

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: a number.
        b: another.
    """
    return a + b


task = json.loads(os.environ["TREEWISE_TASK"])
model = OpenAIModel(model_id="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
helper = ToolCallingAgent(tools=[add], model=model, name="helper", description="Helps.", max_steps=3)
agent = ToolCallingAgent(tools=[add], model=model, managed_agents=[helper], max_steps=4, stream_outputs=True)
print(agent.run(task["question"]))
coder = CodeAgent(tools=[add], model=model, max_steps=3)
print(coder.run(task["question"]))
print(1.0)
