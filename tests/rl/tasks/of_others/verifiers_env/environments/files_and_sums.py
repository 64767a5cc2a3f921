"""A task that prepares files, is scored by a program that runs beside them, and one that is scored with a time limit of
a signal."""

import sys

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class FileTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    async def setup(self, trace, runtime) -> None:
        await runtime.write("answer.txt", self.data.answer.encode())

    async def finalize(self, trace, runtime) -> None:
        await runtime.write("reply.txt", trace.last_reply.encode())

    @vf.reward
    async def same_file(self, trace, runtime) -> float:
        code = "print(open('answer.txt').read() in open('reply.txt').read())"
        result = await runtime.run([sys.executable, "-c", code], {})
        return float(result.stdout.strip() == "True")

    @vf.reward(weight=2.0)
    async def same_number(self, trace) -> float:
        return vf.verify_boxed_math_answer(trace.last_reply, self.data.answer)


class Files(vf.Taskset[FileTask, vf.TasksetConfig]):
    def load(self):
        for n in range(10):
            yield FileTask(Data(prompt=f"{n}/2?", answer=f"{n}/2"), self.config.task)


__all__ = ["Files"]
