"""An environment with a `run` of its own: a user who asks three times, and a reward of the whole conversation."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    words: list[str]


class EchoTask(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.stop
    async def refused(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "no"

    @vf.reward
    async def first(self, trace) -> float:
        return float(trace.assistant_messages[0].content == self.data.words[0])


class UserConfig(vf.EnvConfig):
    echo: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    bonus: float = 10.0


class UserEnv(vf.Env[UserConfig]):
    async def run(self, task, agents):
        told = []
        async with agents.echo.interaction(task.with_data(prompt=None)) as talk:
            for word in task.data.words:
                segment = await talk.turn(f"Say {word}.")
                if segment.terminated:
                    break
                told.append(segment.last_reply)
        right = sum(a == b for a, b in zip(told, task.data.words, strict=False))
        talk.trace.record_reward("right", right, 1.0)

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        if trace.agent.name == "echo" and trace.num_turns == len(task.data.words):
            trace.record_reward("patient", self.config.bonus)


class Echoes(vf.Taskset[EchoTask, vf.TasksetConfig]):
    def load(self):
        for n in range(10):
            yield EchoTask(Data(words=[str(n), "a", "b"], system_prompt="Repeat."), self.config.task)


__all__ = ["Echoes", "UserEnv"]
