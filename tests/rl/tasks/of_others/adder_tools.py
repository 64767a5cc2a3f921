"""A taskset with a tool."""

import verifiers.v1 as vf


class AdderConfig(vf.ToolsetConfig):
    offset: int = 0


class Adder(vf.Toolset[AdderConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b + self.config.offset)


class Data(vf.TaskData):
    answer: str


class SumTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(AdderConfig())]

    @vf.reward
    async def right(self, task, trace) -> float:
        return float(task.answer in (trace.last_reply or ""))

    @vf.reward(weight=0.5)
    async def used(self, trace) -> float:
        return float(any(n.message.role == "tool" for n in trace.nodes))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for n in range(20):
            yield SumTask(
                Data(prompt=f"What is {n}+1?", answer=str(n + 1), system_prompt="Use the tool."), self.config.task
            )


__all__ = ["Sums"]
