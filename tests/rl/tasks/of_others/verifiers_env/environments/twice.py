"""An environment that runs its agent twice, and fails where it is told to."""

import verifiers.v1 as vf


class TwiceConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    form: str = "twice"


class TwiceEnv(vf.Env[TwiceConfig]):
    async def run(self, task, agents):
        if self.config.form == "raise first":
            raise ValueError("no game today")
        trace = await agents.solver.run(task)
        if self.config.form == "twice":
            await agents.solver.run(task)
        if self.config.form == "raise last":
            raise ValueError("lost the board")
        if self.config.form == "no score":
            trace.rewards["one"] = None


class PlainTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def one(self) -> float:
        return 1.0


class Plain(vf.Taskset[PlainTask, vf.TasksetConfig]):
    def load(self):
        for n in range(4):
            yield PlainTask(vf.TaskData(prompt=f"Go {n}."), self.config.task)


__all__ = ["Plain", "TwiceEnv"]
