"""Every kind of stop: of a trace, a request and a response, in the task or plugged by its configuration."""

import verifiers.v1 as vf


async def long_talk(trace: vf.Trace) -> bool:
    return trace.num_turns >= 2


class Bell(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def ring(self) -> str:
        """Rings."""
        return "ding"

    @vf.tool
    async def alarm(self) -> str:
        """Rings too loud."""
        raise RuntimeError("too loud")


class BellTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Bell(vf.ToolsetConfig())]

    @vf.stop
    async def wants_alarm(self, request: vf.Request) -> bool:
        last = request.messages[-1]
        return isinstance(last, vf.ToolMessage) and last.name == "bell_alarm" and not last.content

    @vf.stop
    async def says_stop(self, response: vf.Response) -> bool:
        return "STOP" in (response.message.content or "")

    @vf.reward
    async def condition(self, trace) -> float:
        known = ["agent_completed", "wants_alarm", "says_stop", "long_talk", "max_turns", "max_output_tokens"]
        return float(known.index(trace.stop_condition))


class Bells(vf.Taskset[BellTask, vf.TasksetConfig]):
    def load(self):
        for _ in range(10):
            yield BellTask(vf.TaskData(prompt="Ring."), self.config.task)


__all__ = ["Bells"]
