"""An episode of the package `verifiers` (0.4): the environment's own `run`, with the trainer as its agent."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import verifiers.v1 as vf

from treewise.errors import TaskError
from treewise.rl.tasks.calls import described
from treewise.rl.tasks.of_others.verifiers_env.policy import NoFurtherTurnError, Seat
from treewise.rl.tasks.of_others.verifiers_env.protocol import (
    AskedTool,
    Environment,
    Message,
    ModelCalls,
    Task,
    Toolset,
    Trace,
)
from treewise.rl.tasks.of_others.verifiers_env.tools import EPISODE, Tools


class PlayedEpisode:
    """One episode. Its environment and the trainer take turns: `news` is what the one says, `turns` are the other's.

    session: of the rollout, from `Sessions`. num_known: messages that the trainer has. problems: why calls cannot be
    carried out, by id. over: why no turn follows. error: why there is no reward.
    """

    def __init__(self, env: Environment, task: Task, shared: list[Toolset]) -> None:
        self.traces: list[Trace] = []
        self.session: ModelCalls | None = None
        self.tools, self.num_known, self.over = Tools(shared), 0, ""
        self.news: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.turns: asyncio.Queue[Any] = asyncio.Queue()
        self.problems: dict[str, str | None] = {}
        self.error = ""
        self._played = asyncio.create_task(self._play(env, task))

    async def _play(self, env: Environment, task: Task) -> None:
        EPISODE.set(self)
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode, agents = vf.Episode(env=vf.EnvInfo(id=env.config.env_id), task=about), vf.Agents(env.config, Seat)
        try:
            await env.setup(agents)
            await env.run(task, agents)
            episode.traces = self.traces
            await env.finalize(task, episode)
        except Exception as error:  # of the user's
            self.error = self.error or described(error)
        self.news.put_nowait({"messages": [], "done": True})

    async def sampled(self, messages: Sequence[Message]) -> tuple[Message, str, object]:
        """The turn that follows further messages: message, why it ended, and its tokens."""
        if not self.over:
            told = [_plain(message) for message in messages]
            self.news.put_nowait({"messages": told, "done": False, "tools": self.tools.schemas})
        turn = None if self.over else await self.turns.get()
        if turn is None:
            if self.session is not None:
                self.session.trace.stop(self.over)
            raise NoFurtherTurnError
        given = {call["id"]: call for call in turn["tool_calls"]}
        self.problems |= {key: call["problem"] for key, call in given.items()}
        calls: list[AskedTool] = [
            vf.ToolCall(id=k, name=v["name"], arguments=json.dumps(v["arguments"])) for k, v in given.items()
        ]
        thought = turn.get("reasoning_content") or turn.get("thinking")
        message: Message = vf.AssistantMessage(
            content=turn["content"], reasoning_content=thought, tool_calls=calls or None
        )
        before, sampled = turn["num_tokens"]
        finish = "length" if self.over else "tool_calls" if calls else "stop"
        return message, finish, vf.Usage(prompt_tokens=before, completion_tokens=sampled)

    async def opening(self) -> dict[str, Any]:
        """The messages of the prompt, and the tools.

        Raises:
            TaskError: the environment asks for no turn.
        """
        said = await self.news.get()
        if said["done"]:
            raise TaskError(self._why() or "the environment asks for no turn")
        return said

    async def next(self, message: dict[str, Any]) -> dict[str, Any]:
        """Takes a turn: the messages that follow it, and whether the episode is done."""
        self.turns.put_nowait(message)
        return await self.news.get()

    async def answer(self, call: AskedTool) -> Message:
        """The message that answers a call."""
        return await self.tools.answer(call, self.problems[call.id])

    async def reward(self, cut_off: Mapping[str, Any] | None) -> float:
        """Ends the episode. cut_off: a turn that reached a limit and was not taken yet.

        Raises:
            TaskError: the environment failed, or did not score it.
        """
        self.over = "max_output_tokens" if cut_off else "max_turns"
        self.turns.put_nowait(cut_off)
        await self._played
        if why := self._why():
            raise TaskError(why)
        return float(self.traces[0].reward)

    def _why(self) -> str:
        """Why there is no reward; empty where there is."""
        if self.error or not self.traces:
            return self.error or "the environment runs no agent"
        (trace,) = self.traces
        unknown = [name for name, reward in trace.rewards.items() if reward is None]
        if not trace.ok and trace.last_error is not None:
            return f"{trace.last_error.type}: {trace.last_error.message}"
        return f"rewards without a value: {', '.join(unknown)} ({trace.stop_condition})" if unknown else ""

    async def close(self) -> None:
        """Ends it without a reward."""
        self._played.cancel()
        await asyncio.gather(self._played, return_exceptions=True)


def _plain(message: Message) -> dict[str, Any]:
    """A message as chat templates take it."""
    told = message.model_dump(include={"role", "content", "name", "reasoning_content"}, exclude_none=True)
    if isinstance(message.content, list):
        if any(part.type != "text" for part in message.content):
            raise vf.EnvError("its messages hold images")
        told["content"] = "\n".join(part.text for part in message.content)
    return dict(told)
