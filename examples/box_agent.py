"""An agent of the OpenAI Agents SDK, as somebody has it: two tools, a loop that is the SDK's, nothing of treewise.

    treewise rl --agent examples/box_agent.py:run --tasks tasks.jsonl --model ./my-model --output_dir runs/mine

A task is a row: `question`, `boxes` (a number for each person), `things` (what lies in each box), `answer`.
"""

from typing import Any

from agents import Agent, AgentsException, RunContextWrapper, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
MAX_TURNS = 4
INSTRUCTIONS = "Use the tools, then answer with one word."


@function_tool
def box_of(context: RunContextWrapper[dict[str, Any]], person: str) -> str:
    """The number of a person's box."""
    return context.context["boxes"].get(person, "nobody")


@function_tool
def look_in(context: RunContextWrapper[dict[str, Any]], box: str) -> str:
    """What lies in a box."""
    return context.context["things"].get(box, "nothing")


AGENT = Agent(name="finder", instructions=INSTRUCTIONS, tools=[box_of, look_in], model="policy")


async def run(task: dict[str, Any]) -> float:
    """Answers a question; 1 for the right word."""
    try:
        found = await Runner.run(AGENT, task["question"], context=task, max_turns=MAX_TURNS)
    except AgentsException:  # a tool that there is not, or too many turns
        return 0.0
    return float(found.final_output.strip() == task["answer"])
