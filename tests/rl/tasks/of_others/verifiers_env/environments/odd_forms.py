"""What the loop does not serve: `form` says which."""

import verifiers.v1 as vf


class OddConfig(vf.TasksetConfig):
    form: str = ""


class OtherState(vf.State):
    number: int = 0


class Same(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def look(self) -> str:
        """Looks."""
        return "here"


class Stateful(vf.Toolset[vf.ToolsetConfig, OtherState]):
    @vf.tool
    async def look(self) -> str:
        """Looks."""
        return "here"


class OddTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return cls.given

    given = ()

    @vf.reward
    async def one(self) -> float:
        return 1.0


class Boxed(OddTask):
    NEEDS_CONTAINER = True


class Rewritten(OddTask):
    @vf.intercept
    async def shorten(self, response: vf.Response) -> vf.Response | None:
        return None


class TwoOfOneName(OddTask):
    given = (Same(vf.ToolsetConfig()), Same(vf.ToolsetConfig()))


class Remote(OddTask):
    given = (Same(vf.ToolsetConfig(url="http://localhost:1")),)


class Mixed(OddTask):
    given = (Stateful(vf.ToolsetConfig()),)


class Unpaid(OddTask):
    one = None


KINDS = {kind.__name__: kind for kind in (Boxed, Rewritten, TwoOfOneName, Remote, Mixed, Unpaid)}


class Odd(vf.Taskset[OddTask, OddConfig]):
    def load(self):
        if self.config.form == "empty":
            return
        for n in range(4):
            kind = KINDS.get(self.config.form, OddTask) if n == 2 else OddTask
            image = "python:3.13" if self.config.form == "image" and n == 3 else None
            yield kind(vf.TaskData(prompt="Go.", image=image), self.config.task)


__all__ = ["Odd"]
