"""The process that an environment of the package `verifiers` (0.4) lives in: `python -m treewise...worker`.

Questions and answers are lines of JSON on standard input and output. Episodes run side by side on the event loop of the
main thread, as in the package's own workers: its time limits of answers are signals, which no other thread gets. The
process ends with its standard input.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from treewise.errors import TreewiseError
from treewise.rl.tasks.calls import described
from treewise.rl.tasks.of_others.verifiers_env.episode import PlayedEpisode
from treewise.rl.tasks.of_others.verifiers_env.loading import loaded, unsandboxed
from treewise.rl.tasks.of_others.verifiers_env.tools import in_this_process, without_servers


class EpisodeWorker:
    """Answers questions: each method without underscore is one."""

    def __init__(self) -> None:
        self._env: Any = None
        self._tasks: list[Any] = []
        self._shared: list[Any] = []
        self._episodes: dict[int, PlayedEpisode] = {}

    async def begin(self, runtime: Any, **given: Any) -> dict[str, Any]:
        """Loads an environment; how many tasks it has, and what of them runs on this machine without a sandbox."""
        self._env, self._tasks = loaded(runtime=runtime, **given)
        kinds = {type(task): without_servers(type(task)) for task in self._tasks}
        notes = [] if runtime else unsandboxed(self._env, self._tasks)
        for task in self._tasks:
            task.__class__ = kinds[type(task)]
        self._shared = [in_this_process(toolset) for toolset in self._env.taskset.toolsets(self._env.taskset.config)]
        for toolset in self._shared:
            await toolset.setup()
        await self._env.start()
        return {"num_tasks": len(self._tasks), "unsandboxed": notes}

    async def open(self, task: int, episode: int) -> dict[str, Any]:
        """Begins an episode: the messages and tools of its prompt."""
        self._episodes[episode] = PlayedEpisode(self._env, self._tasks[task], self._shared)
        return await self._episodes[episode].opening()

    async def turn(self, episode: int, message: dict[str, Any]) -> dict[str, Any]:
        """Takes a turn: the messages that follow it, and whether the episode is done."""
        return await self._episodes[episode].next(message)

    async def end(self, episode: int, message: dict[str, Any] | None) -> float:
        """The reward of an episode."""
        return await self._episodes.pop(episode).reward(message)

    async def close(self, episode: int) -> None:
        """Ends an episode that nobody plays any more."""
        if (found := self._episodes.pop(episode, None)) is not None:
            await found.close()

    async def finish(self) -> None:
        """Ends all episodes and the environment."""
        for episode in list(self._episodes):
            await self.close(episode)
        if self._env is not None:
            await self._env.stop()


async def _serve(answers: Any) -> None:
    loop, worker = asyncio.get_running_loop(), EpisodeWorker()
    loop.set_default_executor(ThreadPoolExecutor(64))  # tools that block
    questions: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    at_work: set[asyncio.Task[None]] = set()

    def read() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(questions.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(questions.put_nowait, None)

    async def reply(number: int, question: str, given: dict[str, Any]) -> None:
        try:
            answer = {"value": await getattr(worker, question)(**given)}
        except Exception as error:
            text = str(error) if isinstance(error, TreewiseError) else described(error)
            answer = {"error": " ".join(text.replace("\\n", " ").split())}
        answers.write(json.dumps({"number": number, **answer}).encode() + b"\n")
        answers.flush()

    threading.Thread(target=read, daemon=True).start()
    while (question := await questions.get()) is not None:
        task = asyncio.create_task(reply(**question))
        at_work.add(task)
        task.add_done_callback(at_work.discard)
    await worker.finish()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # the trainer's, which ends this process when it has saved
        signal.signal(number, lambda *_: None)
    given = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what environments print
    asyncio.run(_serve(given))
