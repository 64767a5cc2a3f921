"""A taskset of one turn."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class LetterTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return float(task.answer in (trace.last_reply or ""))

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class Letters(vf.Taskset[LetterTask, vf.TasksetConfig]):
    def load(self):
        for n in range(20):
            yield LetterTask(Data(prompt=f"Say {n}", answer=str(n % 10)), self.config.task)


__all__ = ["Letters"]
