"""Models on meshes of processes against one process: losses, log-probs and the gradient of every parameter.

All cases of one number of processes run in the same ones, forked from this one, which has imported everything.
"""

import os
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.needs import MESHES, require
from tests.nn.recurrent.wide import widened
from tests.trainer.forked_ranks import free_port
from tests.trainer.helpers import in_child
from treewise import SFT, Trajectory, TreeEngine, share_prefixes, verify
from treewise.distributed import ranks
from treewise.distributed.context import context_group
from treewise.distributed.fsdp import ShardSettings, data_mesh, shard
from treewise.distributed.mesh import check_mesh_sizes, load_on_mesh
from treewise.distributed.parts import mesh_of
from treewise.errors import ConfigError, DataError
from treewise.nn import tensor_parallel
from treewise.objectives import Distillation, PolicyGradient
from treewise.report.analysis.mesh_facts import read_mesh, report_mesh
from treewise.testing import flat_sft, gradients_of, tiny_model
from treewise.trainer import TreeTrainingArguments

pytestmark = pytest.mark.xdist_group("distributed/test_mesh")

TOLERANCE = 1e-6  # of the whole gradient, and of every parameter's own beside the rounding of one process
SMALLEST = 1e-2  # of the whole gradient's norm: without an oracle, errors of smaller ones are relative to this
TIMEOUT = timedelta(seconds=600)  # another one than torch's default
VOCABULARY = 61  # which neither 2 nor 4 divides


@dataclass(frozen=True)
class Case:
    """A model, a mesh, what is trained, and at which budgets."""

    family: str
    tp: int = 1
    ep: int = 1
    objective: str = "sft"
    budgets: tuple = (None, 16)
    dtype: torch.dtype = torch.float32
    lora: bool = False
    sharded: bool = False
    copies: int = 1

    @property
    def has_oracle(self):
        """Whether flat training in float64 is there to compare with."""
        return self.objective == "sft" and self.dtype == torch.float32 and not self.lora

    @property
    def name(self):
        rest = [str(self.dtype)[6:] if self.dtype != torch.float32 else "", "lora" if self.lora else ""]
        rest.append("sharded" if self.sharded else "")
        rest.append(f"copies{self.copies}" if self.copies > 1 else "")
        return " ".join(filter(None, [self.family, f"tp{self.tp}", f"ep{self.ep}", self.objective, *rest]))


OBJECTIVES = {
    "sft": SFT(),
    "router": SFT(),
    "policy": PolicyGradient(entropy_coefficient=0.1),
    "distillation": Distillation(),
    "routes": SFT(),
}
TWO = [
    Case("qwen3", tp=2, budgets=(16,)),
    Case("qwen3_moe", ep=2, objective="router", budgets=(16,)),
    Case("qwen3_moe", ep=2, objective="routes", budgets=(16,)),
    Case("llama", tp=2, lora=True, budgets=(16,)),
    Case("apertus", tp=2, objective="policy", budgets=(16,)),  # parameters in its activation function
]
FOUR = [
    Case("qwen3", tp=2, budgets=(16,), sharded=True),
    Case("qwen3_moe", ep=2, objective="router", budgets=(16,), sharded=True),
    Case("qwen3", tp=2, sharded=True, copies=2),
]


def model_of(case):
    return tiny_model(case.family, case.dtype, vocab_size=VOCABULARY)


def trajectories(seed=0):
    """Three trees of three answers to one prompt, with all that objectives need."""
    rng = np.random.default_rng(seed)
    system, items = rng.integers(3, VOCABULARY, 6), []
    for tree in range(3):
        prompt = np.concatenate([system, rng.integers(3, VOCABULARY, 4)])
        for _ in range(3):
            ids = np.concatenate([prompt, rng.integers(3, VOCABULARY, int(rng.integers(3, 9)))])
            weights = (np.arange(len(ids)) >= len(prompt)).astype(np.float32)
            teacher = np.stack([rng.permutation(VOCABULARY)[:3] for _ in ids])
            logprobs = np.log(rng.dirichlet(np.ones(5), len(ids))[:, :3])
            items.append(
                Trajectory(
                    *(ids, weights), advantages=np.full(len(ids), rng.normal()), group=tree,
                    old_logprobs=-4 * rng.random(len(ids)), teacher_ids=teacher, teacher_logprobs=logprobs,
                )
            )  # fmt: skip
    return items


def items_of(case):
    """The trajectories of a case; under `routes` with experts drawn for each token of the tree."""
    if case.objective != "routes":
        return trajectories()
    config, rng, drawn = model_of(case).config, np.random.default_rng(1), {}

    def draw():
        layers = range(config.num_hidden_layers)
        return [rng.permutation(config.num_experts)[: config.num_experts_per_tok] for _ in layers]

    def experts(ids):
        return np.array([drawn.setdefault(tuple(ids[: end + 1]), draw()) for end in range(len(ids))])

    return [replace(each, routed_experts=experts(each.token_ids.tolist())) for each in trajectories()]


def with_adapters(model):
    """LoRA of the same random numbers in every process, whatever part of them it holds."""
    import peft

    return fill_adapters(
        peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"]))
    )


def fill_adapters(model):
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            whole = 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if isinstance(parameter.data, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.data.copy_(whole)
    return model


def engine_of(model, case, budget, check=True):
    wants_router = case.objective == "router"
    z_coefficient = 0.1 if wants_router else 0.0
    return TreeEngine(model, budget, check=check, router_aux_loss=wants_router, router_z_coefficient=z_coefficient)


def expected(case):
    """Loss, log-probs and gradients of one process: flat where the oracle has the objective."""
    model = model_of(case)
    model = with_adapters(model) if case.lora else model
    if case.objective == "sft":
        return flat_sft(model, trajectories())
    engine = engine_of(model, case, None)
    out = engine.step(items_of(case), OBJECTIVES[case.objective])
    gradients = gradients_of(model)
    return out.loss, [each.detach() for each in engine.logprobs(items_of(case))], gradients


def on_mesh(case, folder):
    """The same of the processes of a mesh together, by budget."""
    model = load_on_mesh(str(folder / case.family), tp_size=case.tp, ep_size=case.ep, dtype=case.dtype).train()
    model = with_adapters(model) if case.lora else model
    engine, ends = engine_of(model, case, None), None
    if case.sharded:
        engine.check(engine.plan(trajectories()).forest)
        ends = shard(model, engine.lm, torch.device("cpu"), ShardSettings(dp_replicate_size=case.copies), None)
    return {budget: at_budget(model, case, budget, ends) for budget in case.budgets}


def at_budget(model, case, budget, ends):
    model.zero_grad()
    mesh, engine, items = mesh_of(model), engine_of(model, case, budget, check=ends is None), items_of(case)
    own = items[mesh.data.get_local_rank() :: mesh.data.size()]
    if mesh.needs_lockstep and ends is None:
        engine.check(engine.plan(items).forest)
    if mesh.needs_lockstep or ends is not None:
        engine.enable_lockstep(ranks.gather_texts)
    with nullcontext() if ends is None else ends.whole(trains=True):
        out, logprobs = step_of(engine, case, own, items)
    if ends is None:
        mesh.sum_gradients(model.parameters())
    loss = ranks.sum_over(torch.device("cpu"), out.loss if mesh.is_first_of_batch else 0.0)[0]
    whole = {name: each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
             for name, each in model.named_parameters() if each.grad is not None}  # fmt: skip
    held = sum(each.to_local().numel() if isinstance(each.data, DTensor) else each.numel()
               for each in model.parameters())  # fmt: skip
    return {"loss": loss, "logprobs": logprobs, "gradients": whole, "held": held}


def step_of(engine, case, own, items):
    """This rank's step and log-probs."""
    objective, counts = OBJECTIVES[case.objective], None
    if engine.router_loss_rule is not None:
        counts = engine.count_experts(own)
        engine.drain()
        parts = ranks.on_every_rank(lambda: counts)[:: case.tp]
        counts = sum(parts[1:], parts[0])
    denominator = objective.denominator(engine.plan(items).forest)
    out = engine.step(own, objective, denominator=denominator, router_counts=counts)
    engine.drain()
    with torch.no_grad():
        logprobs = engine.logprobs(own)
        engine.drain()
    return out, logprobs


def other_checks(folder):
    """What a mesh refuses, and what else runs on it, as text."""
    model = load_on_mesh(str(folder / "qwen3"), tp_size=2, dtype=torch.float32)
    model(torch.arange(5)[None]).logits.sum().backward()  # leaves hooks of transformers on head norms
    engine, found = TreeEngine(model, 9), {}
    with pytest.raises(DataError, match=r"number 1 of the group differs from number 0.*same trajectories"):
        engine.step(trajectories(seed=ranks.own()))
    with pytest.raises(DataError, match="same max_tokens"):
        TreeEngine(model, 9 + ranks.own()).step(trajectories())
    with pytest.raises(ConfigError, match=r"max_tokens='auto'.*give max_tokens a number"):
        TreeEngine(model, "auto")
    found["verified"] = verify(model, trajectories()[:4], [9]).passed
    scored = engine.scored(trajectories())
    found["scored"] = [each.old_logprobs for each in scored]
    found["values"] = with_value_head(model, TreeEngine(model, 9))
    check_line(model)
    mixture = load_on_mesh(str(folder / "qwen3_moe"), ep_size=2)
    with pytest.raises(ConfigError, match=r"tp_size=1, ep_size=2 on 2 processes.*DistributedConfig\(tp_size=2\)"):
        share_prefixes(mixture)
    with pytest.raises(ConfigError, match=r"hold='always' cannot be combined with tp_size=1, ep_size=2"):
        TreeEngine(mixture, hold="always")
    with pytest.raises(ConfigError, match=r"tp_size=3 does not divide the 2 processes"):
        load_on_mesh(str(folder / "qwen3"), tp_size=3)
    with pytest.raises(ConfigError, match=r"has no `ep_plan`"):
        load_on_mesh(str(folder / "qwen3"), ep_size=2)
    return found


def check_line(model):
    """Log-probs of TRL's head with and without the line, which compares the rows of all processes."""
    rows = torch.arange(3, 11).repeat(3, 1)
    rows[:, 6:] += torch.arange(3)[:, None]
    from trl.trainer.utils import add_fused_lm_head  # the tests of verl import this file beside another TRL

    add_fused_lm_head(model)
    flat = model(rows, labels=rows, fused_lm_head=True).log_probs
    sharing = share_prefixes(model, 9)
    torch.testing.assert_close(model(rows, labels=rows, fused_lm_head=True).log_probs, flat, rtol=1e-5, atol=2e-6)
    assert sharing.counts.num_calls == 1
    rows = rows + ranks.own()
    with pytest.raises(DataError, match=r"tp_size=2\) have different rows: number 1.*call transformers\.set_seed"):
        model(rows, labels=rows, fused_lm_head=True)
    sharing.remove()


def with_value_head(model, engine):
    """Values of a head of ours on hidden rows, its gradient, and that of the model."""
    torch.manual_seed(0)
    head = torch.nn.Linear(model.config.hidden_size, 1)
    model.zero_grad()
    values = [head(rows)[:, 0] for rows in engine.hidden_states(trajectories())]
    sum(each.square().sum() for each in values).backward()
    parameters = {"head": head.weight, **dict(model.named_parameters())}
    grads = {name: each.grad for name, each in parameters.items() if each.grad is not None}
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in grads.items()}
    return [each.detach() for each in values], whole


def run_on(num_ranks, cases, folder, extra=None):
    """Runs the cases in so many processes; their results by name and budget."""
    require(MESHES)
    for case in cases:
        model_of(case).float().save_pretrained(folder / case.family)

    def work():
        found = {case.name: on_mesh(case, folder) for case in cases}
        return found if extra is None else found | {"extra": extra(folder)}

    return fork_ranks(num_ranks, work, folder)


def fork_ranks(num_ranks, work, folder):
    """The result of `work` in each of so many processes, which are to end well."""
    port = free_port()

    def run(rank):
        values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in values.items()} | {"MASTER_ADDR": "127.0.0.1"})
        try:
            warnings.simplefilter("default")  # of transformers and peft about torch
            AcceleratorState._reset_state(reset_partial_state=True)  # of earlier tests of the parent
            torch.distributed.init_process_group("gloo", timeout=TIMEOUT)
            found = work()
            torch.distributed.barrier()  # rank 0 holds the store that the others may still read
        except BaseException:
            (folder / f"error{rank}").write_text(traceback.format_exc())
            raise
        torch.save(found, folder / f"found{rank}.pt")

    children = [in_child(lambda rank=rank: run(rank), 900) for rank in range(num_ranks)]
    ends = [os.waitpid(child, 0)[1] for child in children]
    assert ends == [0] * num_ranks, "\n".join(each.read_text() for each in sorted(folder.glob("error*")))
    return [torch.load(folder / f"found{rank}.pt", weights_only=False) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_on(2, TWO, tmp_path_factory.mktemp("two"), other_checks)


def check_gradients(found, expected):
    """The whole gradient is off by 1e-6 of its norm, and that of each parameter by twice that of its own, or of a
    hundredth of the whole."""
    assert found.keys() == expected.keys()
    norm = sum(float(each.norm()) ** 2 for each in expected.values()) ** 0.5
    gaps = {name: float((found[name] - each).norm()) for name, each in expected.items()}
    assert sum(gap**2 for gap in gaps.values()) ** 0.5 <= TOLERANCE * norm, max(gaps, key=gaps.__getitem__)
    for name, gap in gaps.items():
        assert gap <= 2 * TOLERANCE * max(float(expected[name].norm()), SMALLEST * norm), name


def check_against(oracle, flat, found):
    """No parameter's gradient is further from float64 than one process is without trees, and 1e-6 of its norm."""
    for name, grad in oracle.items():
        of_flat, of_mesh = (float((each[name].double() - grad).norm()) for each in (flat, found))
        assert of_mesh <= of_flat + TOLERANCE * float(grad.norm()), (name, of_mesh, of_flat)


def check(found, case):
    loss, logprobs, gradients = expected(case)
    oracle = flat_sft(widened(model_of(case)), trajectories())[2] if case.has_oracle else None
    num_data = len(found) // case.tp
    for budget in case.budgets:
        of_ranks = [each[case.name][budget] for each in found]
        assert of_ranks[0]["loss"] == pytest.approx(loss, rel=TOLERANCE)
        for rank, own in enumerate(of_ranks):
            for ours, theirs in zip(own["logprobs"], logprobs[rank // case.tp :: num_data], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
            check_gradients(own["gradients"], gradients)
            if case.has_oracle:
                check_against(oracle, gradients, own["gradients"])
        whole = sum(each.numel() for each in model_of(case).parameters())
        assert all(each["held"] < whole for each in of_ranks)
        axes = {"fsdp": num_data // case.copies, "dp": case.copies} if case.sharded else {"fsdp": 1, "dp": num_data}
        mesh = {"tp": case.tp, "ep": case.ep, **axes}
        predicted = report_mesh(model_of(case).config, mesh, torch.float32).bytes_weights
        assert case.lora or np.mean([each["held"] for each in of_ranks]) == pytest.approx(predicted / 4, abs=1)
    return True


def names(cases):
    return [case.name for case in cases]


@pytest.mark.parametrize("case", TWO, ids=names(TWO))
def test_two_processes_give_what_one_gives(two, case):
    check(two, case)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_on(4, FOUR, tmp_path_factory.mktemp("four"), timeouts)


def timeouts(folder):
    """Those of all groups of a mesh."""
    mesh = mesh_of(load_on_mesh(str(folder / "qwen3"), tp_size=2))
    copies = data_mesh(torch.device("cpu"), 2)
    context = context_group(2, "cpu").group
    with pytest.raises(ConfigError, match=r"dp_replicate_size=3 does not divide the 2 processes.*choose 1 or 2, or"):
        mesh.in_copies(3)
    groups = [mesh.tensor.get_group(), mesh.data.get_group(), context, *copies.get_all_groups()]
    groups += mesh.in_copies(2).data.get_all_groups()
    return [each._get_backend(torch.device("cpu")).options._timeout for each in groups]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", FOUR, ids=names(FOUR))
def test_four_processes_give_what_one_gives(four, case):
    check(four, case)


@pytest.mark.exhaustive
def test_groups_of_meshes_wait_as_long_as_the_run(four):
    for each in four:
        assert each["extra"] == [TIMEOUT] * 7


def test_models_on_a_mesh_are_verified_and_scored(two):
    (first, second), model = (each["extra"] for each in two), model_of(TWO[0])
    assert first["verified"]
    expected = [each.old_logprobs for each in TreeEngine(model, None).scored(trajectories())]
    for ours, theirs, other in zip(first["scored"], expected, second["scored"], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
        np.testing.assert_array_equal(ours, other)


def test_a_value_head_on_a_mesh(two):
    model = model_of(TWO[0])
    values, gradients = with_value_head(model, TreeEngine(model, None))
    for each in two:
        torch.testing.assert_close(each["extra"]["values"][0], values, rtol=1e-5, atol=2e-6)
        check_gradients(each["extra"]["values"][1], gradients)


@MESHES
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 4), "tp_size=0; give 1 or more"),
        ((3, 1, 4), "tp_size=3 does not divide the 4 processes"),
        ((2, 3, 4), "ep_size=3 must be a multiple of tp_size=2 and divide the 4 processes; choose one of 2, 4"),
    ],
)
def test_sizes_that_do_not_fit_are_errors(sizes, message):
    with pytest.raises(ConfigError, match=message):
        check_mesh_sizes(*sizes)


@dataclass
class OlderConfig:
    """The fields of `DistributedConfig` in transformers 5.17."""

    tp_size: int | None = None
    tp_plan: dict[str, str] | None = None
    enable_expert_parallel: bool = False
    fsdp_size: int | None = None
    pp_size: int | None = None


def test_an_older_transformers_is_refused_only_where_a_mesh_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(tensor_parallel, "DistributedConfig", OlderConfig)
    args = TreeTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert (args.tp_size, args.ep_size) == (1, 1)
    model = tiny_model()
    assert mesh_of(model) is None
    model._device_mesh = object()  # as an older transformers leaves it
    message = rf"meshes \(tp_size, ep_size\) need pip install 'transformers>=5.23'; found {transformers.__version__}"
    for asked in (
        lambda: TreeTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", tp_size=2),
        lambda: check_mesh_sizes(1, 2, 4),
        lambda: load_on_mesh("nowhere"),
        lambda: read_mesh("tp=2"),
        lambda: mesh_of(model),
    ):
        with pytest.raises(ConfigError, match=message):
            asked()
