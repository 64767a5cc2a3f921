"""The policy as the package `verifiers` (0.4) sees it: an agent whose harness asks the trainer for each turn.

A harness of the package is a program that reaches a model by HTTP and tools by MCP, each a process. This one is a loop
in the process of its environment (`worker.py`): the trainer samples a turn, tools are called here, and what
belongs to a model call (limits, stops, the trace) is done by the package's own session and message graph.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import verifiers.v1 as vf
from verifiers.v1 import graph
from verifiers.v1.interception import Interception

from treewise.rl.tasks.of_others.verifiers_env.protocol import Message, ModelCalls, Task, Trace
from treewise.rl.tasks.of_others.verifiers_env.tools import EPISODE

if TYPE_CHECKING:
    from treewise.rl.tasks.of_others.verifiers_env.episode import PlayedEpisode


class NoFurtherTurnError(Exception):
    """The episode asks for no further turn; its trace has the condition."""


class Sessions(Interception):
    """In place of a server that model calls go through: gives an episode the session of its rollout."""

    async def start(self) -> None:
        """There is nothing to start."""

    @asynccontextmanager
    async def acquire(self, session: ModelCalls) -> AsyncIterator[tuple[str, str, str]]:
        """See `Interception`."""
        EPISODE.get().session = session
        yield "http://127.0.0.1", "", ""


class Seat(vf.Agent):
    """The agent of an environment: the policy, which plays one trajectory an episode."""

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(config, interception=Sessions())
        self.name, self.harness = name, TurnLoop(config.harness)

    async def run(self, task: Task, **given: object) -> object:
        """See `Agent`."""
        return await super().run(task, **{**given, "on_trace": self._begun})

    def interaction(self, task: Task, **given: object) -> object:
        """See `Agent`."""
        return super().interaction(task, **{**given, "on_trace": self._begun})

    def _begun(self, trace: Trace) -> None:
        episode = EPISODE.get()
        if episode.traces:
            episode.error = f"the environment runs its {self.name} more than once: an episode is one trajectory"
            raise vf.EnvError(episode.error)
        trace.agent.name, trace.agent.trainable = self.name, self.trainable
        episode.traces.append(trace)


class TurnLoop(vf.Harness[vf.HarnessConfig]):
    """The loop of the package's `null` harness: turns until one calls no tool."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: object,
        trace: Trace,
        runtime: object,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
    ) -> Any:
        """See `Harness`."""
        del ctx, runtime, endpoint, secret
        if mcp_urls:
            raise vf.ToolsetError(f"servers of tools ({', '.join(mcp_urls)}) of a task that the environment makes")
        episode = EPISODE.get()
        system, prompt = self.resolve_prompt(data)
        messages: list[Message] = [vf.SystemMessage(content=system)] if system else []
        messages += [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        try:
            await episode.tools.open(trace.task.data)
            while True:
                messages.append(await _turn(episode, messages))
                calls = messages[-1].tool_calls
                if not calls:
                    break
                messages += [await episode.answer(call) for call in calls]
        except NoFurtherTurnError:
            pass
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _turn(episode: "PlayedEpisode", messages: Sequence[Message]) -> Message:
    """A model call, as the package's interception server makes it of a session."""
    session = episode.session
    assert session is not None, "an episode begins with its session"
    trace = session.trace
    if session.stopped or await session.refused() is not None:
        raise NoFurtherTurnError
    request = vf.Request(
        messages=list(messages), tools=[vf.Tool(**schema["function"]) for schema in episode.tools.schemas]
    )
    _, _, stopped = await session.rewrite_request(request)  # stops; there are no interceptors
    turn = graph.prepare_turn(trace, request.messages, request.tools)
    if stopped is not None:
        turn.commit_prompt()
        trace.stop(stopped)
        raise NoFurtherTurnError
    if turn.tail_start != episode.num_known or not turn.tail:
        raise vf.HarnessError("the environment rewrites what stands before a turn; a trajectory only grows")
    if session.on_turn_input is not None:
        begun, session.on_turn_input = session.on_turn_input, None
        begun()
    started = time.time()
    message, finish, usage = await episode.sampled(turn.tail)
    episode.num_known = len(request.messages) + 1
    response = vf.Response(id=str(len(trace.calls)), created=0, model="policy", message=message, finish_reason=finish)
    _, _, stopped = await session.rewrite_response(response)
    span, node = vf.TimeSpan(start=started, end=time.time()), turn.commit(response)
    trace.calls.append(vf.ModelCall(node=node, model="policy", finish_reason=finish, usage=usage, time=span))
    if (stopped := stopped or await session.gate_tool_calls(node)) is not None:
        trace.stop(stopped)
        raise NoFurtherTurnError
    return message
