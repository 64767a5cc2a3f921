"""Steps on a GPU that is not there: every tensor is made where it is used, and the host waits for the loss alone."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from benchmarks.count_gpu import RESULTS, WORKLOADS, count_step, forest_of, model_without_data
from tests.cuda_pretend import CUDA, PretendCuda, pretend_cuda
from treewise import GRPO, GSPO, SFT, Distillation, Forest, Trajectory, TreeEngine
from treewise.engine import step
from treewise.nn.platform.tensors import on_host, to_device
from treewise.planning.planner import plan
from treewise.planning.plans import FORWARD, lay_out
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of

# Where the host reads a result: the loss and the metrics, once, when all is computed.
LOSS = ("read", "treewise.engine: output")
ROUTERS = {
    ("read", "treewise.nn: added_loss"),
    ("read", "treewise.nn: report"),
}


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch):
    with pretend_cuda(monkeypatch) as found:
        yield found


@pytest.fixture
def rollouts() -> list[Trajectory]:
    rng = np.random.default_rng(1)
    prompt = rng.integers(3, 64, 9)
    items = [np.concatenate([prompt[: 4 + number], rng.integers(3, 64, 3 + 2 * number)]) for number in range(5)]
    return [with_streams(ids, rng, number) for number, ids in enumerate([*items, items[2][:6], items[0]])]


def with_streams(ids: np.ndarray, rng: np.random.Generator, number: int) -> Trajectory:
    """A trajectory with all that a policy gradient or a distillation may ask for."""
    length = len(ids)
    teacher = np.stack([rng.permutation(np.arange(3, 64))[:3] for _ in range(length)]).astype(np.int32)
    return Trajectory(
        ids,
        advantages=np.full(length, rng.normal()),
        old_logprobs=rng.normal(size=length) - 4,
        sampler_logprobs=rng.normal(size=length) - 4,
        ref_logprobs=rng.normal(size=length) - 4,
        teacher_ids=teacher,
        teacher_logprobs=np.log(np.full((length, 3), 0.3)),
        group="a",
        rollout=str(number),
    )


def waits_of(pretend: PretendCuda, call) -> dict[tuple[str, str], int]:
    """Where the library waits during a call; what models and this test do by themselves aside."""
    pretend.waits.clear()
    call()
    return {found: count for found, count in pretend.waits.items() if found[1].startswith("treewise")}


# -- the pretence itself ----------------------------------------------------------------------------------------------


def test_tensors_of_both_devices_do_not_mix(pretend: PretendCuda) -> None:
    there = torch.ones(3, device="cuda")
    assert there.device == CUDA
    assert (there.view(1, 3) + 1).t().is_cuda
    assert there.new_zeros(2).is_cuda
    assert not torch.ones(3).is_cuda
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        there.index_select(0, torch.tensor([0]))
    assert (there + torch.tensor(1.0)).is_cuda  # a scalar may come from anywhere
    with pytest.raises(TypeError, match=r"Tensor\.cpu"):
        there.numpy()


@pytest.mark.parametrize(
    "wait",
    [
        lambda there: there.sum().item(),
        lambda there: float(there[0]),
        lambda there: there.tolist(),
        lambda there: there.cpu(),
        lambda there: there.to("cpu"),
        lambda there: there[there > 0],
        lambda there: torch.nonzero(there),
        lambda there: torch.unique_consecutive(there),
        lambda there: bool(torch.equal(there, there)),
        lambda there: there[torch.tensor([0])],
        lambda there: torch.ones(2).to("cuda"),
        lambda there: torch.tensor([1.0], device="cuda"),
        lambda there: there.new_tensor([1.0]),
        lambda there: torch.as_tensor(np.ones(2), device="cuda"),
        lambda there: there.copy_(torch.ones(3)),
    ],
)
def test_waits_are_noted(pretend: PretendCuda, wait) -> None:
    there = torch.ones(3, device="cuda")
    pretend.waits.clear()
    wait(there)
    assert sum(pretend.waits.values()) == 1


def test_what_a_backward_does_is_seen(pretend: PretendCuda) -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * float(grad[0])

    there = torch.ones(3, device="cuda", requires_grad=True)
    for backward in (lambda out: out.backward(), torch.autograd.backward):
        out = Reads.apply(there).sum()
        pretend.waits.clear()
        backward(out)
        assert sum(pretend.waits.values()) == 1
    assert there.grad.is_cuda


def test_arrays_go_over_without_a_wait(pretend: PretendCuda) -> None:
    there = to_device(np.arange(4, dtype=np.int32), torch.device("cuda"), torch.long)
    assert there.is_cuda
    assert there.dtype == torch.long
    assert not pretend.waits
    assert there.cpu().tolist() == [0, 1, 2, 3]


# -- steps ------------------------------------------------------------------------------------------------------------

FAMILIES = (
    "gemma2",  # windows in every other layer, capped scores and logits
    "gpt_oss",  # sinks, experts
    "llama4_text",  # chunks; a mask that looks into a tensor of the device
    "qwen3_next",  # gated delta nets, experts
)


@pytest.mark.representatives("llama4_text")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("default")
def test_the_host_waits_once_in_a_step(family: str, pretend: PretendCuda, rollouts: list[Trajectory]) -> None:
    """Whole, and under a budget with recomputed parts; that gradients are right is seen on a GPU (test_cuda_first)."""
    model, forest = tiny_model(family).cuda(), Forest.from_trajectories(rollouts)
    for max_tokens in (None, 17):
        engine = TreeEngine(model, max_tokens, hold="never", check=max_tokens is None)
        assert engine.implementation == "flex"
        engine.check(forest)
        assert waits_of(pretend, lambda engine=engine: engine.step(forest)) == {LOSS: 1}
        assert all(each.grad is None or each.grad.is_cuda for each in model.parameters())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "objective",
    [
        GRPO(beta=0.1, measure_entropy=True, sampler_correction="truncate"),
        GSPO(),
        Distillation(),
    ],
    ids=["grpo", "gspo", "distillation"],
)
def test_of_any_objective(objective, pretend: PretendCuda, rollouts: list[Trajectory]) -> None:
    model = tiny_model(num_hidden_layers=1).cuda()
    engine = TreeEngine(model, 17, hold="always", check=False)
    forest = Forest.from_trajectories(rollouts)
    assert waits_of(pretend, lambda: engine.step(forest, objective)) == {LOSS: 1}
    assert waits_of(pretend, lambda: engine.evaluate(forest, objective)) == {LOSS: 1}
    assert all(each.grad.is_cuda for each in model.parameters())


@pytest.mark.filterwarnings("default")
def test_of_any_function_of_logprobs(pretend: PretendCuda, rollouts: list[Trajectory]) -> None:
    """Of a model with adapters."""
    adapters = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    model = get_peft_model(tiny_model(num_hidden_layers=1), adapters).cuda()
    engine = TreeEngine(model, 17, check=False)
    forest = Forest.from_trajectories(rollouts)

    def loss(logprobs: list[torch.Tensor]) -> torch.Tensor:
        return -torch.stack([each.sum() for each in logprobs]).mean()

    assert waits_of(pretend, lambda: engine.step(forest, loss)) == {LOSS: 1}
    assert waits_of(pretend, lambda: engine.logprobs(forest, trained_only=True)[0].sum().backward()) == {}
    assert waits_of(pretend, lambda: sum(each.sum() for each in engine.hidden_states(forest)).backward()) == {}
    scored = waits_of(pretend, lambda: engine.scored(rollouts))
    assert scored == {("read", "treewise.engine: scored"): 1}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")
def test_of_losses_on_routers(pretend: PretendCuda, rollouts: list[Trajectory]) -> None:
    """What routers did is read after the loss."""
    fields = {"router_aux_loss_coef": 0.1, "output_router_logits": True, "num_hidden_layers": 1}
    model = tiny_model("mixtral", **fields).cuda()
    engine = TreeEngine(model, 17, router_z_coefficient=0.1)
    forest = Forest.from_trajectories(rollouts)
    engine.check(forest)
    for objective in (SFT(), GSPO()):
        waits = waits_of(pretend, lambda objective=objective: engine.step(forest, objective))
        assert set(waits) == {LOSS} | ROUTERS
        assert sum(waits.values()) == 4


@pytest.mark.parametrize("max_tokens", [None, 17])
def test_what_a_step_asks_of_a_gpu(max_tokens: int | None, rollouts: list[Trajectory]) -> None:
    """Counted on tensors without data. Layers copy nothing to the device and nothing back; the loss is read once."""
    forest = Forest.from_trajectories(rollouts)
    small, large = (count_step(tiny_model(num_hidden_layers=number), forest, max_tokens) for number in (1, 3))
    assert (small.copies, small.copied_bytes) == (large.copies, large.copied_bytes)
    assert small.copies <= 7 * small.passes
    assert small.copied_bytes <= 64 * plan(forest, max_tokens).num_computed_tokens
    assert (large.kernels - small.kernels) / 2 / small.passes <= 125  # of a layer, forward and backward
    assert small.kernels / small.passes <= 266  # with the mask, the embedding, the head and the loss
    assert (large.allocations - small.allocations) / 2 / small.passes <= 118
    assert small.allocations / small.passes <= 259
    assert (small.waits, small.copies_back, small.copied_back_bytes) == (1, 1, 8)


def test_bytes_that_offloaded_gateways_move(rollouts: list[Trajectory]) -> None:
    """Each token's keys and values go to the host once, and back for each micro-batch that reads its gateway."""
    forest, layers = Forest.from_trajectories(rollouts), 3
    model = tiny_model(num_hidden_layers=layers)
    here, away = (count_step(model, forest, 17, hold="never", offload=each) for each in (False, True))
    parts = plan(forest, 17, hold="never")
    above_others = [parts.micro_batches[each.micro_batch] for each in parts.schedule if each.action == FORWARD]
    written = sum(each.num_tokens for each in above_others)
    reads = [
        (parts.micro_batches[above].num_tokens, rows)
        for each in parts.schedule
        for above, rows in lay_out(parts, each.micro_batch).gateway
    ]
    read = sum(len(rows) if rows[-1] - rows[0] + 1 == len(rows) else size for size, rows in reads)
    token = layers * 2 * model.config.num_key_value_heads * model.config.head_dim * 4
    assert away.copied_back_bytes - here.copied_back_bytes == token * written
    assert away.copied_bytes - here.copied_bytes == token * read
    assert away.copies_back == 1 + layers * 2 * len(above_others)
    assert away.copies - here.copies == layers * 2 * len(reads)
    assert away.waits == here.waits == 1


COUNTED = json.loads((RESULTS / "gpu-counts.json").read_text(encoding="utf-8"))


def test_the_counts_in_the_documents_are_of_all_workloads_and_wait_once() -> None:
    assert {each["workload"] for each in COUNTED["rows"]} == set(WORKLOADS)
    assert {each["waits"] for each in COUNTED["rows"]} == {1}
    assert {(each["max_tokens"] is None, each["offload"]) for each in COUNTED["rows"]} == {
        (True, False),
        (False, False),
        (False, True),
    }


def test_the_counts_of_compiled_layers_are_of_the_same_steps() -> None:
    """With fewer launches; those of the head, which is not compiled, are among them."""
    plain, compiled = ([each for each in COUNTED["rows"] if each["layers"] == name] for name in ("plain", "compiled"))
    same = ("workload", "tree_tokens", "max_tokens", "offload", "micro_batches", "passes", "waits")
    for ours, theirs in zip(compiled, plain, strict=True):
        assert [ours[name] for name in same] == [theirs[name] for name in same]
        assert ours["kernels"] < 0.62 * theirs["kernels"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_counts_in_the_documents_are_those_of_a_step(workload: str) -> None:
    """Of each workload under its budget; all figures of the file."""
    model, forest = model_without_data(COUNTED["model"]), forest_of(workload, COUNTED["model"])
    rows = [each for each in COUNTED["rows"] if each["layers"] == "plain" and each["workload"] == workload]
    for row in (each for each in rows if each["max_tokens"]):
        assert row == row | asdict(count_step(model, forest, row["max_tokens"], offload=row["offload"]))


def test_a_measured_budget_fits_the_memory_of_the_device(pretend: PretendCuda, rollouts: list[Trajectory]) -> None:
    model = tiny_model(num_hidden_layers=1).cuda()
    engine = TreeEngine(model, "auto", check=False)
    assert engine.plan(Forest.from_trajectories(rollouts)).max_tokens == 2**20  # the most on a GPU; 64 GiB are free


@pytest.mark.representatives(
    "phi3-never-sums on the host", "llama-always-sums on the device", "qwen3_next-never-sums on the host"
)
@pytest.mark.parametrize("free", [2**36, 2**10], ids=["sums on the device", "sums on the host"])
@pytest.mark.parametrize(("family", "hold"), [("phi3", "never"), ("llama", "always"), ("qwen3_next", "never")])
def test_gateways_that_wait_in_host_memory(family: str, hold: str, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, states, activations and sums go there and back in queued copies alone: the host waits for the loss. Leaves
    below the second fork of the trunk read rows of it that are no slice."""
    prompt, *branches = np.split(np.random.default_rng(1).integers(3, 64, 56), [4, 6, 8])
    leaves = branches.pop().reshape(2, 3, 8)
    rows = [[*prompt, *branches[number], *leaf] for number in range(2) for leaf in leaves[number]]
    items, kinds, read = [Trajectory(np.array(each)) for each in rows], set(), step.GatewayRead
    monkeypatch.setattr(step, "GatewayRead", lambda above, rows, size: kinds.add(type(rows)) or read(above, rows, size))
    _, _, expected = flat_sft(tiny_model(family), items)
    with pretend_cuda(monkeypatch) as pretend:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 2**37))
        model = tiny_model(family).cuda()
        engine = TreeEngine(model, 17, hold=hold, offload=True, check=False)
        forest = Forest.from_trajectories(items)
        pretend.queued.clear()
        assert waits_of(pretend, lambda: engine.step(forest)) == {LOSS: 1}
        assert pretend.queued["cpu"] > 0
        assert pretend.streams.num_beside > 0
        assert pretend.streams.faults == []
        found = {name: grad.cpu() for name, grad in gradients_of(model).items()}
    assert kinds == {slice, torch.Tensor}
    assert gradient_error(found, expected) < expected.tolerance


@pytest.mark.parametrize(
    "look",
    [
        lambda kept: kept + 1,
        lambda kept: kept.clone(),
        lambda kept: kept.index_select(0, torch.tensor([0])),
        lambda kept: kept.t().to("cuda", non_blocking=True),
        lambda kept: kept[:, :2].to("cuda", non_blocking=True),
        lambda kept: kept.zero_(),
    ],
)
def test_the_host_may_not_look_into_memory_that_is_being_written(pretend: PretendCuda, look) -> None:
    there = torch.arange(12.0, device="cuda").reshape(4, 3)
    kept = on_host(there)
    back = kept[1:3].to("cuda", non_blocking=True)
    assert not pretend.waits
    with pytest.raises(RuntimeError, match="may not have written yet"):
        look(kept)
    assert back.tolist() == [[3, 4, 5], [6, 7, 8]]  # which waits
    look(kept)


def test_copies_of_ordinary_memory_wait(pretend: PretendCuda) -> None:
    there = torch.ones(4, 3, device="cuda")
    for copy in (
        lambda: torch.ones(4, 3).to("cuda", non_blocking=True),
        lambda: torch.empty(4, 3).copy_(there, non_blocking=True),
        lambda: torch.empty(3, 4, pin_memory=True).t().copy_(there, non_blocking=True),
    ):
        pretend.waits.clear()
        copy()
        assert sum(pretend.waits.values()) == 1
