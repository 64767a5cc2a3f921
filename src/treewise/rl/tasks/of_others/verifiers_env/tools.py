"""Toolsets of the package `verifiers` (0.4) in the process of their environment, where the package starts servers.

A toolset registers its tools as it does with its server, so names, schemas and results are those of the package's
harnesses. Its state is that of the trace in whose episode it is called.
"""

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content
from verifiers.v1.utils.decorators import discover_decorated

from treewise.rl.tasks.of_others.verifiers_env.protocol import AskedTool, Message, Toolset

if TYPE_CHECKING:
    from treewise.rl.tasks.of_others.verifiers_env.episode import PlayedEpisode

EPISODE: ContextVar["PlayedEpisode"] = ContextVar("treewise_episode")


class Tools:
    """The tools of an episode.

    Parameters:
        shared: toolsets of the taskset, which are set up.

    Attributes:
        own: toolsets of the task, set up with the first turn. schemas: for the chat template.
    """

    def __init__(self, shared: Sequence[Toolset]) -> None:
        self.own: list[Toolset] = []
        self.schemas: list[dict[str, Any]] = []
        self._shared, self._found = shared, dict[str, tuple[MCPServer, str]]()
        self._is_open = False

    async def open(self, data: object) -> None:
        """Sets the task's toolsets up and lists all tools; once.

        Raises:
            ToolsetError: two tools have one name.
        """
        if self._is_open:
            return
        self._is_open = True
        for toolset in [in_this_process(toolset) for toolset in self.own]:
            await toolset.setup()
            await toolset.setup_task(data)
        for toolset in [*self._shared, *self.own]:
            server = MCPServer(toolset.server_name or type(toolset).__name__, log_level="WARNING")
            toolset.register(server)
            for tool in await server.list_tools():
                name = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
                if name in self._found:
                    raise vf.ToolsetError(f"two tools are called {name}; give one toolset another TOOL_PREFIX")
                self._found[name] = server, tool.name
                function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
                self.schemas.append({"type": "function", "function": function})

    async def answer(self, call: AskedTool, problem: str | None) -> Message:
        """The message that answers a call. problem: why it cannot be carried out."""
        if problem is not None:
            content: object = str({"error": problem})
        elif call.name not in self._found:
            content = f"error: unknown tool {call.name!r}"
        else:
            server, name = self._found[call.name]
            try:
                result: Any = await server.call_tool(name, json.loads(call.arguments))
                content = mcp_content_to_chat_content(result.content)
            except Exception as error:  # a tool may raise anything, and the model reads it
                content = str(error)
        told = {"role": "tool", "tool_call_id": call.id, "content": content, "name": call.name}
        message: Message = vf.ToolMessage(**bound_tool_message(told))
        return message


def _state() -> object:
    session = EPISODE.get().session
    assert session is not None, "an episode begins with its session"
    return session.trace.state


def in_this_process(toolset: Toolset) -> Toolset:
    """A toolset whose state is that of the episode. Its blocking tools run in a thread, one at a time, as its server
    would run them.
    """
    kind, lock = type(toolset), asyncio.Lock()

    def offloaded(tool: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(tool)
        async def called(*args: Any, **arguments: Any) -> Any:
            async with lock:
                return await asyncio.to_thread(tool, *args, **arguments)

        return called

    tools = [tool.__func__ for tool in discover_decorated(toolset, "tool")]
    blocking = {tool.__name__: offloaded(tool) for tool in tools if not inspect.iscoroutinefunction(tool)}
    state = {"state": property(lambda _: _state())}
    toolset.__class__ = type(kind.__name__, (kind,), {**blocking, **state, "__module__": kind.__module__})
    return toolset


def without_servers(kind: type[Any]) -> type[Any]:
    """A class of tasks whose toolsets go to the episode that asks for them, not to servers."""

    def toolsets(config: object) -> list[Toolset]:
        episode = EPISODE.get(None)
        if episode is not None and not episode.tools.own:
            episode.tools.own = list(kind.toolsets(config))
        return []

    return type(kind.__name__, (kind,), {"toolsets": staticmethod(toolsets), "__module__": kind.__module__})
