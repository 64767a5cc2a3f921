"""Online runs of a policy that no process has whole, against one process: the same rollouts and weights; killed, and
resumed on the same mesh, on another one and in one process. Processes are forked from this one, which has imported all.
"""

import os
import shutil
import signal
import traceback
import warnings

import pytest
import torch
from accelerate.state import AcceleratorState

from tests import needs
from tests.distributed.test_mesh import with_adapters
from tests.rl.online.helpers import TOKENIZER, EvenBytes, arguments, assert_same_rollouts, settings, tiny_policy
from tests.rl.samplers.stand_in import StandIn, asked_of, running
from tests.trainer.forked_ranks import free_port, join
from tests.trainer.helpers import in_child
from treewise.distributed import ranks
from treewise.distributed.mesh import load_on_mesh
from treewise.rl.online import OnlineTrainer
from treewise.rl.samplers import ServerSampler, TransformersSampler
from treewise.trainer.checkpoint import store

pytestmark = [
    needs.MESHES,
    pytest.mark.xdist_group("rl/online/test_meshes"),
    pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning"),  # peft asks by the old name
]

SECONDS = 400
HYBRID = {"sharded": True, "shard_config": {"dp_replicate_size": 2}}
# Family and settings of a run, by the number of its processes.
MESHES = {
    2: {
        "tensor": ("qwen3", {"tp_size": 2}),
        "experts": ("qwen3_moe", {"ep_size": 2}),
        "context": ("qwen3", {"context_size": 2}),
        "shards": ("qwen3", {"sharded": True}),
        "adapters": ("qwen3 with adapters", {"tp_size": 2}),
    },
    4: {
        "tensor": ("qwen3", {"tp_size": 2, "sharded": True}),
        "experts": ("qwen3_moe", {"tp_size": 2, "ep_size": 4, "sharded": True}),
        "copies": ("qwen3", HYBRID),
        "all": ("qwen3_moe", {"tp_size": 2, "ep_size": 2, **HYBRID}),
        "context": ("qwen3", {"context_size": 2, "sharded": True}),
    },
}
RUNS = [
    pytest.param(number, name, id=f"{name}-{number}", marks=[pytest.mark.exhaustive][: (name, number) != ("tensor", 2)])
    for number, cases in MESHES.items()
    for name in cases
]
MOVES = [
    ((2, "shards"), (2, "tensor")),
    ((2, "tensor"), (4, "tensor")),
    ((2, "experts"), (4, "all")),
    ((4, "copies"), (2, "shards")),
]


class OnAServer(TransformersSampler):
    """A sampler on weights of its own, which the first process gives it, as a server has them."""

    def update(self, model):
        assert (model is None) == (ranks.own() != 0)
        held = self.model.state_dict()
        given = ranks.on_first_rank(lambda: {name: model.state_dict()[name] for name in held})
        assert all(type(each) is torch.Tensor and each.device.type == "cpu" for each in given.values())
        self.model.load_state_dict(given)


def trainer_of(folder, name, family, mesh, sampler=TransformersSampler, **changes):
    """One process's part of a run. The other processes of a run without a mesh begin with other weights."""
    family, _, adapters = family.partition(" with ")
    optimizer = {"learning_rate": 1e-2, "adam_epsilon": 1e-2, "max_grad_norm": 1.0}
    args = arguments(folder / name, **optimizer, **mesh)
    if {"tp_size", "ep_size"} & mesh.keys():
        sizes = {"tp_size": args.tp_size, "ep_size": args.ep_size}
        model = load_on_mesh(str(folder / family), **sizes, dtype=torch.float32)
    else:
        model = tiny_policy(seed=ranks.own() if not adapters else 0, family=family)
    model = with_adapters(model) if adapters else model
    sampled = tiny_policy(seed=7, family=family) if sampler is OnAServer else model
    loop = settings(trees_per_iteration=3, tokens_per_iteration=72, mini_batches=2, **changes)
    return OnlineTrainer(
        model, EvenBytes(), TOKENIZER, loop, args, sampler=sampler(sampled, isolate_requests=True)
    )  # fmt: skip


def kill_in_second_iteration(trainer):
    """The second process dies at once while its rollouts wait for their rewards."""
    judge = trainer.task.rewards

    def killed(requests):
        if store.checkpoints(trainer.folder) and ranks.own() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return judge(requests)

    trainer.task.rewards = killed


def attempt(folder, name, number, family, mesh, sampler, *, is_killed, **changes):
    """A run of several processes, from its newest checkpoint if there is one: how each of them ended."""
    port = free_port()

    def work(rank):
        join(rank, port, number)
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"
        try:
            warnings.simplefilter("default")  # of transformers about torch
            AcceleratorState._reset_state(reset_partial_state=True)
            trainer = trainer_of(folder, name, family, mesh, sampler, **changes)
            if is_killed:
                kill_in_second_iteration(trainer)
            trainer.train(resume_from_checkpoint=bool(store.checkpoints(folder / name)) or None)
            if not isinstance(trainer.sampler, ServerSampler):
                model = trainer.eval_sampler.model  # of the last evaluation
                assert is_whole(model)
                torch.save(dict(model.named_parameters()), folder / f"{name}-{rank}.pt")
            torch.distributed.barrier()
        except BaseException:
            (folder / f"{name}-error{rank}").write_text(traceback.format_exc())
            raise

    children = [in_child(lambda rank=rank: work(rank), SECONDS) for rank in range(number)]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def is_whole(model):
    return all(type(each.data) is torch.Tensor for each in model.parameters())


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    """A folder with the models and the runs of one process."""
    folder = tmp_path_factory.mktemp("meshes")
    runs = {}
    for family in ("qwen3", "qwen3_moe", "qwen3 with adapters"):
        if " " not in family:
            tiny_policy(family=family).save_pretrained(folder / family)
        runs[family] = trainer_of(folder, f"one-{family}", family, {})
        runs[family].train()
    return folder, runs


def said(folder, run):
    return "\n".join(each.read_text() for each in sorted(folder.glob(f"{run}-error*")))


def assert_close(found, trainer):
    for name, value in trainer.model.named_parameters():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("number", "name"), RUNS)
def test_a_run_on_a_mesh_is_that_of_one_process_killed_and_resumed_anywhere(number, name, of_one):
    (folder, runs), (family, mesh) = of_one, MESHES[number][name]
    one, run = runs[family], f"{name}-{number}"
    sampler = OnAServer if name == "tensor" else TransformersSampler
    work = (number, family, mesh, sampler)
    codes = attempt(folder, run, *work, is_killed=True)
    assert codes[1] == -signal.SIGKILL
    assert 0 not in codes
    assert [path.name for path in store.checkpoints(folder / run)] == ["checkpoint-1"]
    shutil.copytree(folder / run, folder / f"{run}-alone")
    codes = attempt(folder, run, *work, is_killed=False)
    assert codes == [0] * number, said(folder, run)
    assert_same_rollouts(one.folder, folder / run)
    for rank in range(number):
        assert_close(torch.load(folder / f"{run}-{rank}.pt", weights_only=False), one)
    alone = trainer_of(folder, f"{run}-alone", family, {})
    alone.train(resume_from_checkpoint=True)
    assert_close(dict(alone.model.named_parameters()), one)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("first", "second"), MOVES)
def test_a_run_is_resumed_on_another_mesh(first, second, of_one):
    """Of as many processes or of others; Adam's state included, which the steps after it show."""
    (folder, runs), run = of_one, "-".join(map(str, (*first, *second)))
    for (number, name), is_killed in ((first, True), (second, False)):
        family, mesh = MESHES[number][name]
        codes = attempt(folder, run, number, family, mesh, TransformersSampler, is_killed=is_killed)
        assert is_killed or codes == [0] * number, said(folder, run)
        assert [path.name for path in store.checkpoints(folder / run)] == ["checkpoint-1", "checkpoint-2"][
            : 2 - is_killed
        ]
    assert_same_rollouts(runs[family].folder, folder / run)
    for rank in range(number):
        assert_close(torch.load(folder / f"{run}-{rank}.pt", weights_only=False), runs[family])


# -- a server; sampling ahead -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "name"),
    [
        pytest.param(2, "experts"),
        *(pytest.param(4, name, marks=pytest.mark.exhaustive) for name in ("experts", "copies", "all")),
    ],
)
def test_a_server_gets_the_weights_of_a_mesh(number, name, of_one):
    """From the host memory of the first process, which outlives neither its run nor that of the killed one."""
    (folder, _), (family, mesh) = of_one, MESHES[number][name]
    run = f"{name}-{number}-server"

    def on_server(*_, **__):
        return ServerSampler(server.url, weights="reload", patience_seconds=60)

    with running(StandIn(model=tiny_policy(seed=7, family=family))) as server:
        one = trainer_of(folder, f"one-{run}", family, {}, on_server)
        one.train()
        assert_close(dict(server.model.named_parameters()), one)
        server.start_anew()
        work = (number, family, mesh, on_server)
        assert attempt(folder, run, *work, is_killed=True)[1] == -signal.SIGKILL
        server.seen.clear()
        codes = attempt(folder, run, *work, is_killed=False)
        assert codes == [0] * number, said(folder, run)
        # Of the checkpoint, after the second iteration, and what was saved, which it reads and has taken out again.
        assert len(asked_of(server, "/collective_rpc")) == 4
        assert_same_rollouts(one.folder, folder / run)
        assert_close(dict(server.model.named_parameters()), one)


AHEAD = {"max_staleness": 1, "iterations": 3}


@pytest.mark.parametrize(
    ("number", "mesh"),
    [
        pytest.param(2, {}, id="whole", marks=pytest.mark.exhaustive),
        pytest.param(2, {"sharded": True}, id="shards"),
        *(
            pytest.param(number, mesh, id=f"{number}-{mesh}", marks=pytest.mark.exhaustive)
            for number, mesh in ((2, {"tp_size": 2}), (2, {"context_size": 2}), (4, HYBRID))
        ),
    ],
)
def test_processes_sample_ahead_as_one_does(number, mesh, of_one):
    folder, run = of_one[0], f"ahead-{number}-{'-'.join(mesh)}"
    one = trainer_of(folder, f"one-{run}", "qwen3", {}, **AHEAD)
    one.train()
    assert [each["staleness"] for each in one.log_history if "staleness" in each] == [0, 1, 1]
    work = (number, "qwen3", mesh, TransformersSampler)
    codes = attempt(folder, run, *work, is_killed=True, **AHEAD)
    assert codes[1] == -signal.SIGKILL
    assert store.checkpoints(folder / run)
    codes = attempt(folder, run, *work, is_killed=False, **AHEAD)
    assert codes == [0] * number, said(folder, run)
    assert_same_rollouts(one.folder, folder / run)
    for rank in range(number):
        assert_close(torch.load(folder / f"{run}-{rank}.pt", weights_only=False), one)
