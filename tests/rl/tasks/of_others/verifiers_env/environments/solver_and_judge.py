"""Two agents."""

import twice
import verifiers.v1 as vf


class TwoConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class PairEnv(vf.Env[TwoConfig]):
    async def run(self, task, agents):
        await agents.solver.run(task)
        await agents.judge.run(task)


class Pairs(twice.Plain):
    pass


__all__ = ["PairEnv", "Pairs"]
