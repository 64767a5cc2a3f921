"""What `verl.trainer.main_ppo` needs to run on a CPU, as an external module of verl (`VERL_USE_EXTERNAL_MODULES`): the
platform of `verl_runs`, and rollouts named `scripted`, whose server answers a prompt with tokens drawn from the prompt,
the step, and how often it was asked in this step. So two runs train on the same rows.

Each weight transfer to the server is written to `$SCRIPTED_FOLDER/weights-<step>.pt`, and what the engines of each
worker computed on trees until then to `counts-<step>-<rank>.json`.
"""

import dataclasses
import gc
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import ray
import torch
import torch.distributed as dist
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from tests.integrations import verl_runs

MAX_ANSWER = 8


class ScriptedServer:
    """Answers of up to eight tokens, the same in every run."""

    def __init__(self):
        self.step, self.asked = 0, Counter()

    async def generate(self, prompt_ids, **_):
        rng = np.random.default_rng([self.step, self.asked[tuple(prompt_ids)], *prompt_ids])
        self.asked[tuple(prompt_ids)] += 1
        turns = np.random.default_rng([self.step, *prompt_ids]).integers(3, verl_runs.VOCABULARY, (2, 4))
        tokens = [*rng.choice(turns), *rng.integers(3, verl_runs.VOCABULARY, rng.integers(1, MAX_ANSWER - 3))]
        return TokenOutput(
            token_ids=[int(each) for each in tokens], stop_reason="completed", extra_fields={"global_steps": self.step}
        )

    async def set_step(self, step):
        self.step, self.asked = step, Counter()

    async def nothing(self, *_, **__):
        pass

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing


class ScriptedReplica(RolloutReplica):
    """One for each rank, of one server, which counts."""

    async def launch_servers(self):
        server = ray.remote(ScriptedServer).options(name="scripted", get_if_exists=True, num_cpus=0)
        self._server_handle = server.remote()
        self._server_address, self.servers = f"scripted_{self.replica_rank}", [self._server_handle]


class ScriptedRollout(base.BaseRollout):
    """The training worker's end: hands weights over."""

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, global_steps=None, **_):
        from treewise.integrations.verl_engine import EngineSharing

        folder, rank = Path(os.environ["SCRIPTED_FOLDER"]), dist.get_rank()
        counts = [dataclasses.asdict(each.counts) for each in gc.get_objects() if isinstance(each, EngineSharing)]
        (folder / f"counts-{global_steps}-{rank}.json").write_text(json.dumps(counts))
        found = {name: tensor.detach().cpu().clone() for name, tensor in weights}
        if rank == 0:
            torch.save(found, folder / f"weights-{global_steps}.pt")
            await ray.get_actor("scripted").set_step.remote(global_steps)


def prepare():
    """Registers the rollouts, and fills the gaps that torch has on a CPU."""
    verl_runs.prepare()
    base._ROLLOUT_REGISTRY["scripted", "async"] = f"{__name__}.ScriptedRollout"
    RolloutReplicaRegistry.register("scripted", lambda: ScriptedReplica)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cpu, name, lambda *_: 0)
    torch.cpu.mem_get_info = lambda *_: (0, 0)
    torch.Tensor.pin_memory = lambda self, *_: self
    own = dist.init_process_group
    # verl asks for `cpu:gloo,cpu:gloo`, which torch refuses.
    dist.init_process_group = lambda backend=None, **more: own(backend="gloo", **more)


prepare()
