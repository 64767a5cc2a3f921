"""Transcripts in the form of `verifiers`, for the rewards of its tasks."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from treewise.rl.tasks.protocol import RewardRequest


def prompt_of(task: Any) -> list[dict[str, Any]]:
    """The messages that open a task."""
    data = task.data
    given = (
        [each.model_dump(exclude_none=True) for each in data.prompt or []]
        if not isinstance(data.prompt, str)
        else [{"role": "user", "content": data.prompt}]
    )
    return [*([{"role": "system", "content": data.system_prompt}] if data.system_prompt else []), *given]


def answer_of(request: RewardRequest) -> dict[str, Any]:
    """A completion as a message."""
    return {"role": "assistant", "content": request.text, **{k: v for k, v in (request.message or {}).items() if v}}


def score_of(task: Any, messages: Sequence[Mapping[str, Any]], state: Any = None) -> float:
    """The rewards that a task gives a transcript, weighted and added up. state: of its tools."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    nodes = [
        MessageNode(parent=n - 1 if n else None, message=_typed(each, n), sampled=each["role"] == "assistant")
        for n, each in enumerate(messages)
    ]
    about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    more: dict[str, Any] = {} if state is None else {"state": state}
    trace: Any = Trace(task=about, agent=AgentInfo(config=AgentConfig()), nodes=nodes, **more)
    asyncio.run(task.score(trace))
    return float(trace.reward)


def _function(call: Mapping[str, Any]) -> dict[str, str]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    return {"name": function["name"], "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}


def _typed(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message in the package's form: calls with their number and arguments as JSON."""
    calls = [
        {"id": f"{number}.{i}", "type": "function", **_function(each)}
        for i, each in enumerate(message.get("tool_calls") or ())
    ]
    rest = {key: message[key] for key in ("role", "content", "name", "reasoning_content") if key in message}
    answers = {"tool_call_id": str(message.get("tool_call_id", ""))} if message["role"] == "tool" else {}
    return {**rest, **answers, **({"tool_calls": calls} if calls else {})}
