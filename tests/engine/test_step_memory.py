"""The predicted peak of a step against every allocation that torch makes in one."""

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile

from treewise.engine import step_memory as module
from treewise.engine.engine import TreeEngine
from treewise.engine.step_memory import LiveBytes, step_memory
from treewise.planning.planner import plan
from treewise.testing.families import tiny_model
from treewise.tree.forest import Forest
from treewise.tree.trajectory import Trajectory

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it

WHOLE, QUARTER = 1.0, 0.25
FLOAT, HALF = torch.float32, torch.bfloat16
# Family, what else, the part of the tree that a micro-batch may hold, and the dtype.
CASES = [
    ("llama", "", WHOLE, FLOAT),
    ("qwen3", "tied", QUARTER, HALF),
    ("qwen3_moe", "checkpointing", QUARTER, FLOAT),
]
REST = [
    (family, more, part, dtype)
    for family, more in (
        *((each, "") for each in ("llama", "qwen3", "gemma2", "gpt2", "qwen3_moe", "qwen3_next")),
        *(("qwen3", each) for each in ("tied", "lora", "checkpointing")),
        ("qwen3_moe", "checkpointing"),
    )
    for part in (WHOLE, QUARTER)
    for dtype in (FLOAT, HALF)
]


def forest() -> Forest:
    """A prompt of 100 tokens with two answers that fork once more; 480 tokens."""
    rng = np.random.default_rng(0)
    tokens = iter(rng.integers(3, 60, (9, 100)).astype(np.int32))
    prompt, left, right = next(tokens), next(tokens)[:80], next(tokens)[:60]
    rows = [np.concatenate([prompt, half, next(tokens)[:60]]) for half in (left, left, right, right)]
    return Forest.from_trajectories([Trajectory(row) for row in rows])


def model_of(family: str, more: str, dtype: torch.dtype) -> Any:
    tied = {"tie_word_embeddings": True, "vocab_size": 2000} if more == "tied" else {}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "head_dim": 32}
    model: Any = tiny_model(family, dtype, **sizes, **tied)
    if more == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    if more == "checkpointing":
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model


def allocated(engine: TreeEngine, items: Forest) -> int:
    """Bytes at the peak of a step beyond those before it, of all that torch allocates."""
    engine.step(items)  # gradients, and tables of the masks
    engine.model.zero_grad(set_to_none=False)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        engine.step(items)
    events = [each for each in recorded.profiler.kineto_results.events() if each.name() == "[memory]"]
    return int(np.cumsum([each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]).max())


@pytest.mark.parametrize(
    ("family", "more", "part", "dtype"),
    [*CASES, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in REST if each not in CASES)],
)
def test_the_peak_is_what_a_step_allocates_from_above(family: str, more: str, part: float, dtype: torch.dtype) -> None:
    """Predicted bytes of tensors over those that were allocated."""
    model, items = model_of(family, more, dtype), forest()
    engine = TreeEngine(model, None if part == WHOLE else int(part * items.num_tokens), check=False)
    assert 1.0 <= step_memory(model, engine.plan(items)).live / allocated(engine, items) <= 1.1


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


def test_a_plan_of_many_passes_runs_only_those_that_its_fullest_need() -> None:
    rng = np.random.default_rng(0)
    rows = [np.concatenate([np.arange(30), rng.integers(3, 60, 20)]).astype(np.int32) for _ in range(40)]
    made = plan(Forest.from_trajectories([Trajectory(row) for row in rows]), 60, hold="never")
    model = model_of("llama", "", FLOAT)
    chosen = module._fullest(made, module.flop_model(model), FLOAT)
    assert len(chosen.schedule) <= 5 < len(made.schedule)
