"""A graph of LangGraph on `langchain-openai`: tools side by side, history that is compacted, sub-agents, a stream."""

import json
import os
from typing import Annotated, TypedDict

from langchain_core.messages import HumanMessage, RemoveMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from langgraph.prebuilt import ToolNode


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


class State(TypedDict):
    messages: Annotated[list, add_messages]


model = ChatOpenAI(model="policy", temperature=1.0)


def think(state):
    return {"messages": [model.bind_tools([add]).invoke(state["messages"])]}


def next_of(state):
    return "tools" if state["messages"][-1].tool_calls else "compact"


def compact(state):
    summary = model.invoke([*state["messages"], HumanMessage("Summarise this.")])
    kept = HumanMessage(f"So far: {summary.content}")
    return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), kept]}


graph = StateGraph(State)
graph.add_node("think", think)
graph.add_node("tools", ToolNode([add]))
graph.add_node("compact", compact)
graph.add_edge(START, "think")
graph.add_conditional_edges("think", next_of, ["tools", "compact"])
graph.add_edge("tools", "think")
graph.add_edge("compact", END)
agent = graph.compile()

task = json.loads(os.environ["TREEWISE_TASK"])
end = agent.invoke({"messages": [("system", "You count."), ("user", task["question"])]})
helpers = model.batch([[("user", f"Helper {number}: {end['messages'][-1].content}")] for number in range(3)])
said = "".join(part.content for part in model.stream([*end["messages"], *helpers[:1], ("user", "Well?")]))
print(said)
print(1.0)
