"""The predicted peak of a step against every allocation that torch makes in one."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile

from treewise.engine import step_memory as module
from treewise.engine.engine import TreeEngine
from treewise.engine.step_memory import LiveBytes, step_memory
from treewise.objectives import SFT
from treewise.objectives.policy_gradient import PolicyGradient
from treewise.planning.planner import plan
from treewise.planning.plans import FORWARD, HOLD, Pass, Plan
from treewise.testing.families import tiny_model
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

WHOLE, QUARTER = 1.0, 0.25
FLOAT, HALF = torch.float32, torch.bfloat16
# Family, what else, the part of the tree that a micro-batch may hold, and the dtype.
CASES = [
    ("llama", "", WHOLE, FLOAT),
    ("qwen3", "tied", QUARTER, HALF),
    ("qwen3_moe", "checkpointing", QUARTER, FLOAT),
    ("llama", "autocast", WHOLE, FLOAT),
    ("qwen3", "autocast entropy tied", QUARTER, FLOAT),
    ("qwen3_moe", "routers experts checkpointing", WHOLE, FLOAT),
    ("qwen3_moe", "parameters", QUARTER, FLOAT),
    ("llama", "tied checkpointing small", WHOLE, FLOAT),
]
REST = [
    (family, more, part, dtype)
    for family, more in (
        *((each, "") for each in ("llama", "qwen3", "gemma2", "gpt2", "qwen3_moe", "qwen3_next")),
        *(("qwen3", each) for each in ("tied", "lora", "checkpointing")),
        *(("mamba", each) for each in ("", "checkpointing")),
        ("qwen3_moe", "checkpointing"),
        *(("qwen3_moe", each) for each in ("parameters", "parameters checkpointing")),
    )
    for part in (WHOLE, QUARTER)
    for dtype in (FLOAT, HALF)
] + [
    (family, more, part, dtype)
    for family, more, dtypes in (
        *((each, "autocast", (FLOAT,)) for each in ("llama", "qwen3", "gemma2", "gpt2", "qwen3_moe", "qwen3_next")),
        *(("qwen3", f"autocast {each}", (FLOAT,)) for each in ("tied", "lora", "checkpointing")),
        *((each, "routers", (FLOAT, HALF)) for each in ("mixtral", "qwen3_moe")),
        ("qwen3_moe", "autocast routers", (FLOAT,)),
        ("qwen3_moe", "routers experts", (FLOAT, HALF)),
        ("qwen3_moe", "routers experts checkpointing", (FLOAT,)),
        *((each, "entropy", (FLOAT, HALF)) for each in ("qwen3", "gemma2")),
        ("qwen3", "entropy tied", (FLOAT, HALF)),
        ("qwen3", "measured entropy tied", (FLOAT, HALF)),
        ("qwen3_moe", "autocast entropy routers", (FLOAT,)),
    )
    for part in (WHOLE, QUARTER)
    for dtype in dtypes
]


COSTS = module.flop_model(tiny_model("llama"))


def forest(part: int = 1) -> Forest:
    """A prompt of 100 tokens with two answers that fork once more; 480 tokens. part: each a `part`-th as long."""
    rng = np.random.default_rng(0)
    tokens = iter(rng.integers(3, 60, (9, 100)).astype(np.int32))
    prompt, left, right = next(tokens)[: 100 // part], next(tokens)[: 80 // part], next(tokens)[: 60 // part]
    rows = [np.concatenate([prompt, half, next(tokens)[: 60 // part]]) for half in (left, left, right, right)]
    return Forest.from_trajectories([Trajectory(row, advantages=np.ones(len(row))) for row in rows])


def model_of(family: str, more: str, dtype: torch.dtype) -> Any:
    tied = {"tie_word_embeddings": True, "vocab_size": 2000} if "tied" in more else {}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32}
    if "experts" in more:
        sizes |= {"num_experts": 256, "moe_intermediate_size": 16}
    model: Any = tiny_model(family, dtype, **sizes, **tied)
    if "lora" in more:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    if "parameters" in more:  # peft disables autocast around adapters on those, which torch refuses for `meta`
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=experts))
    if "checkpointing" in more:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def allocated(step: Callable[[], object], model: torch.nn.Module) -> int:
    """Bytes at the peak of a step beyond those before it, of all that torch allocates."""
    step()  # gradients, and tables of the masks
    model.zero_grad(set_to_none=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events = [each for each in recorded.profiler.kineto_results.events() if each.name() == "[memory]"]
    return int(np.cumsum([each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]).max())


@pytest.mark.parametrize(
    ("family", "more", "part", "dtype"),
    [*CASES, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in REST if each not in CASES)],
)
def test_the_peak_is_what_a_step_allocates_from_above(family: str, more: str, part: float, dtype: torch.dtype) -> None:
    """Predicted bytes of tensors over those that were allocated."""
    model, items = model_of(family, more, dtype), forest(8 if "small" in more else 1)
    coefficient = 0.1 if "routers" in more else 0.0
    more_of_engine = {"router_aux_loss": "routers" in more, "router_z_coefficient": coefficient, "check": False}
    engine = TreeEngine(model, None if part == WHOLE else int(part * items.num_tokens), **more_of_engine)
    is_measured = "measured" in more
    entropy = PolicyGradient(entropy_coefficient=0.0 if is_measured else 0.1, measure_entropy=is_measured)
    objective: Any = entropy if "entropy" in more else SFT()
    autocast = HALF if "autocast" in more else None

    def step() -> None:
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            engine.step(items, objective)

    settings = {"autocast": autocast, "router_loss": engine.router_loss_rule, "outputs": objective.outputs}
    settings["measured"] = ("entropy",) if is_measured else ()
    found = step_memory(model, engine.plan(items), **settings)
    assert 1.0 <= found.live / allocated(step, model) <= 1.1


def test_a_prediction_leaves_the_model_as_it_was_and_needs_no_weights() -> None:
    model, made = model_of("qwen3", "", FLOAT), plan(forest(), 120)
    found = step_memory(model, made)
    assert all(each.grad is None and each.device.type == "cpu" for each in model.parameters())
    assert step_memory(model.to("meta"), made) == found


def test_a_gpu_has_larger_chunks_of_logits_and_no_heap_of_glibc() -> None:
    model = model_of("qwen3", "tied", FLOAT)
    long = plan(Forest.from_trajectories([Trajectory(np.zeros(10_000, dtype=np.int32))]))
    on_cpu, on_gpu = (step_memory(model, long, kind) for kind in ("cpu", "cuda"))
    assert on_gpu.allocator == 0 < on_cpu.allocator
    assert on_gpu.others > on_cpu.others > 0


def test_live_bytes_are_counted_once_for_all_views_until_the_last_is_gone() -> None:
    linear = torch.nn.Linear(4, 4, bias=False)
    live = LiveBytes(linear)
    with live:
        made = torch.zeros(8, 4)
        view, product = made[2:].t(), made @ linear.weight.t()
        assert live.now == 2 * 8 * 4 * 4
        del made, product
        assert live.now == 8 * 4 * 4
        del view
    assert (live.now, live.peak) == (0, 2 * 8 * 4 * 4)


def test_a_log_sum_exp_allocates_its_terms() -> None:
    live = LiveBytes(torch.nn.Linear(4, 4))
    with live:
        rows = torch.zeros(64, 100)
        torch.logsumexp(rows, dim=1)
    assert live.peak == 2 * rows.nbytes + 64 * 4


def test_operations_on_shapes_that_were_met_before_count_as_the_first_did() -> None:
    """New results, views, a result in another's place, one that is given."""
    linear = torch.nn.Linear(4, 4, device="meta")
    live, counts = LiveBytes(linear), []
    with live:
        for _ in range(2):
            rows = torch.zeros(6, 4, device="meta")
            product = linear(rows[2:])
            counts.append(live.now)
            product.detach().add_(1).t().mul_(2)
            counts.append(live.now)
            torch.add(rows, rows, out=rows)
            largest, index = rows.max(dim=1)
            counts.append(live.now)
            del rows, product, largest, index
            counts.append(live.now)
    assert counts[:4] == counts[4:] == [160, 160, 160 + 24 + 48, 0]


def test_a_plan_of_many_passes_runs_only_those_that_its_fullest_need() -> None:
    rng = np.random.default_rng(0)
    rows = [np.concatenate([np.arange(30), rng.integers(3, 60, 20)]).astype(np.int32) for _ in range(40)]
    made = plan(Forest.from_trajectories([Trajectory(row) for row in rows]), 60, hold="never")
    model = model_of("llama", "", FLOAT)
    assert len(module._fullest(made, module.flop_model(model), FLOAT).schedule) <= 5 < len(made.schedule)


def test_each_pass_that_runs_finds_alive_what_it_does_in_the_whole_plan() -> None:
    for made in plans():
        whole = alive(made)
        assert all(whole[step] == found for step, found in alive(chosen(made)).items())


def test_the_pass_that_finds_most_graphs_is_one_of_them() -> None:
    for made in plans():
        held = {each.micro_batch for each in made.schedule if each.action == HOLD}
        most = [max(len(found & held) for found in alive(each).values()) for each in (made, chosen(made))]
        assert most[0] == most[1]


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_passes_of_one_size_are_told_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the keys that they see, and by gradients of states that others below them have read."""
    rng = np.random.default_rng(0)
    spine, *answers = (rng.integers(3, 60, size).astype(np.int32) for size in (120, 40, 40))
    rows = [*(np.concatenate([spine, answer]) for answer in answers), np.concatenate([spine[:40], answers[0]])]
    made, model = plan(Forest.from_trajectories(map(Trajectory, rows)), 40, hold="never"), model_of(family, "", HALF)
    found = step_memory(model, made).live
    monkeypatch.setattr(module, "_fullest", lambda plan, *_, **__: plan)
    assert found == pytest.approx(step_memory(model, made).live, rel=0.01)


def chosen(made: Plan) -> Plan:
    return module._fullest(made, COSTS, FLOAT)


def plans() -> Iterator[Plan]:
    """Of trees with three forks at 10 tokens, each with another 1 to 11 tokens further down, at three budgets."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        rows = []
        for _ in range(4):
            prompt = rng.integers(3, 60, 10)
            for _ in range(3):
                trunk = np.concatenate([prompt, rng.integers(3, 60, rng.integers(1, 12))])
                rows += [np.concatenate([trunk, rng.integers(3, 60, rng.integers(1, 12))]) for _ in range(2)]
        items = Forest.from_trajectories([Trajectory(each.astype(np.int32)) for each in rows])
        yield from (plan(items, budget) for budget in (15, 40, 60))


def alive(made: Plan) -> dict[Pass, set[int]]:
    """At each pass with a backward, the micro-batches that were opened and not ended."""
    found: dict[Pass, set[int]] = {}
    opened: set[int] = set()
    for step in made.schedule:
        if step.action in (FORWARD, HOLD):
            opened.add(step.micro_batch)
        else:
            found[step] = set(opened)
            opened.discard(step.micro_batch)
    return found
