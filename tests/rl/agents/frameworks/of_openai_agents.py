"""An agent of `openai-agents`: two tools side by side, a handoff to another agent, a session, a stream."""

import asyncio
import json
import os

from agents import Agent, Runner, SQLiteSession, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api(os.environ.get("OPENAI_AGENTS_API", "responses"))


@function_tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def run(task):
    writer = Agent(name="writer", instructions="You write the answer.", model="policy")
    counter = Agent(name="counter", instructions="You count.", model="policy", tools=[add], handoffs=[writer])
    session = SQLiteSession("one")
    found = await Runner.run(counter, task["question"], session=session)
    streamed = Runner.run_streamed(counter, "And again?", session=session)
    async for _ in streamed.stream_events():
        pass
    return found.final_output, streamed.final_output


task = json.loads(os.environ["TREEWISE_TASK"])
print(*asyncio.run(run(task)))
print(1.0)
