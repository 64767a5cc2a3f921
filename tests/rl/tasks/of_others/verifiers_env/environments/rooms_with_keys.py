"""Tools and state: two toolsets with a tool of one name, one of them the taskset's; the state stops a task."""

from pathlib import Path

import verifiers.v1 as vf
from pydantic import Field


class RoomState(vf.State):
    room: int = 0
    seen: list[str] = Field(default_factory=list)


class Data(vf.TaskData):
    goal: int


class Rooms(vf.Toolset[vf.ToolsetConfig, RoomState]):
    async def setup_task(self, task):
        self.last = task.goal + 1

    @vf.tool
    async def look(self) -> str:
        """Says where you are."""
        self.state.seen.append("room")
        return f"room {self.state.room} of {self.last}"

    @vf.tool
    def walk(self, steps: int) -> str:
        """Walks on."""
        self.state.room += steps
        return f"now {self.state.room}"

    @vf.tool
    def wait(self, path: str) -> str:
        """Waits for a bell."""
        return f"heard {Path(path).read_text()}"


class Map(vf.Toolset[vf.SharedToolsetConfig, RoomState]):
    num_setups = 0

    async def setup(self):
        Map.num_setups += 1

    @vf.tool
    async def look(self) -> str:
        """Looks at the map."""
        self.state.seen.append("map")
        return f"map {Map.num_setups}"


class WalkTask(vf.Task[Data, RoomState, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Rooms(vf.ToolsetConfig())]

    @vf.stop
    async def arrived(self, trace: vf.Trace) -> bool:
        return trace.state.room >= self.data.goal

    @vf.reward
    async def near(self, trace) -> float:
        return float(trace.state.room == self.data.goal)

    @vf.reward(weight=0.5)
    async def looked(self, trace) -> dict[str, float]:
        return {f"looked at {each}": 1.0 for each in sorted(set(trace.state.seen))}


class Walks(vf.Taskset[WalkTask, vf.TasksetConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Map(vf.SharedToolsetConfig())]

    def load(self):
        for goal in range(1, 11):
            yield WalkTask(Data(prompt=f"Walk to room {goal}.", goal=goal, system_prompt="Walk."), self.config.task)


__all__ = ["Walks"]
