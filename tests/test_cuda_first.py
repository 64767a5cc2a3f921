"""What to run first on a GPU, in this order: `pytest -m gpu -x`. Nothing here runs without one.

Expected values come from flat training on the CPU. Trees are larger than a block of FlexAttention, so that whole,
partial and empty blocks occur; heads are those of published models.
"""

import copy
import gc
import warnings

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.nn.attention.test_flex import branching_mask, with_gradients
from treewise import SFT, Forest, Trajectory, TreeEngine, TreeTrainer, TreeTrainingArguments
from treewise.nn.attention.flex import flex_attention_tree
from treewise.nn.attention.mask import LayerRule
from treewise.nn.attention.reference import reference_attention
from treewise.testing.families import tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*falling back to its reference.*"),
]
# Float32 kernels of two devices; TF32 is off by default, so their own rounding is what differs.
TOLERANCE = 5e-5
GIB = 2**30


@pytest.fixture(scope="module")
def tree() -> list[Trajectory]:
    """Some 600 tokens: a prompt longer than a block, branches with branches, one trajectory inside another."""
    rng = np.random.default_rng(7)
    prompt = rng.integers(3, 64, 140)
    middle = [np.concatenate([prompt, rng.integers(3, 64, 40)]) for _ in range(2)]
    ends = [np.concatenate([each, rng.integers(3, 64, length)]) for each in middle for length in (60, 1, 33)]
    return [Trajectory(ids) for ids in [*ends, middle[0], np.concatenate([prompt, rng.integers(3, 64, 70)])]]


def tree_gradients(model, items, max_tokens=None, objective=None, **options):
    """Loss and gradients of a step, the latter on the CPU."""
    model.zero_grad()
    out = TreeEngine(model, max_tokens, **options).step(Forest.from_trajectories(items), objective)
    return out, {name: grad.float().cpu() for name, grad in gradients_of(model).items()}


# -- 1: the kernels, in the head shapes of published models ------------------------------------------------------------

HEADS = {  # query heads, key heads, head size, head size of the values
    "qwen3-0.6b": (16, 8, 128, 128),
    "qwen3-8b": (32, 8, 128, 128),
    "llama-3.2-1b": (32, 8, 64, 64),
    "smollm2-135m": (9, 3, 64, 64),
    "phi-2": (8, 8, 80, 80),
    "phi-3": (8, 8, 96, 96),
    "deepseek-v3": (8, 8, 192, 128),
    "gemma-3": (8, 4, 256, 256),
    "tiny": (4, 2, 8, 6),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_kernels_for_the_heads_of_published_models(heads, dtype) -> None:
    """They err a few times as much as the reference in the same dtype; float64 judges both."""
    num_heads, num_key_heads, width, value_width = heads
    mask = branching_mask(3, 300, 151)
    shapes = [
        (1, num_heads, mask.num_queries, width),
        (1, num_key_heads, mask.num_keys, width),
        (1, num_key_heads, mask.num_keys, value_width),
    ]
    inputs = [torch.randn(shape, device="cuda").to(dtype).requires_grad_() for shape in shapes]
    cotangent = torch.randn(1, num_heads, mask.num_queries, value_width, device="cuda").to(dtype)
    rule = LayerRule(scaling=width**-0.5)
    found = with_gradients(flex_attention_tree, inputs, mask, rule, cotangent)
    plain = with_gradients(reference_attention, inputs, mask, rule, cotangent)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    oracle = with_gradients(reference_attention, wide, mask, rule, cotangent)
    for ours, same_dtype, exact in zip(found, plain, oracle, strict=True):
        budget = 4 * ((same_dtype - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max())
        assert (ours - exact).abs().max() <= budget


# -- 2: steps of whole models ------------------------------------------------------------------------------------------

FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 50},
    "gemma2": {"sliding_window": 50},  # and capped scores
    "gpt_oss": {"sliding_window": 50},  # and sinks, experts
    "llama4_text": {"attention_chunk_size": 50},  # and experts
    "qwen3_moe": {},
    "mixtral": {},
    "deepseek_v3": {},  # latent attention: keys and values of different sizes
    "qwen3_next": {},  # gated delta nets
    "lfm2": {},  # short convolutions
    "bamba": {},  # Mamba2
}


@pytest.mark.parametrize("max_tokens", [None, 200])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("default")
def test_a_step_has_the_gradients_of_flat_training(family: str, max_tokens: int | None, tree) -> None:
    loss, _, expected = flat_sft(tiny_model(family, **FAMILIES[family]), tree)
    for hold in ("auto",) if max_tokens is None else ("always", "never"):
        model = tiny_model(family, **FAMILIES[family]).cuda()
        out, found = tree_gradients(model, tree, max_tokens, hold=hold)
        assert out.loss == pytest.approx(loss, rel=TOLERANCE)
        assert gradient_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("max_tokens", [None, 200])
def test_bfloat16_deviates_no_more_than_flat_bfloat16(max_tokens: int | None, tree) -> None:
    """Of the model's own attention on the CPU; kernels round in another order, in either direction."""
    _, _, exact = flat_sft(tiny_model(), tree)
    _, _, flat = flat_sft(tiny_model(dtype=torch.bfloat16), tree)
    _, found = tree_gradients(tiny_model(dtype=torch.bfloat16).cuda(), tree, max_tokens)
    assert gradient_error(found, exact) < 1.5 * gradient_error(flat, exact)


@pytest.mark.parametrize("max_tokens", [None, 200])
def test_autocast(max_tokens: int | None, tree) -> None:
    _, _, exact = flat_sft(tiny_model(), tree)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        _, found = tree_gradients(tiny_model().cuda(), tree, max_tokens)
    assert gradient_error(found, exact) < 0.05


@pytest.mark.parametrize("max_tokens", [None, 200])
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_adapters(is_checkpointed: bool, max_tokens: int | None, tree) -> None:
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    plain = get_peft_model(tiny_model(), adapters)
    model = copy.deepcopy(plain).cuda()
    _, _, expected = flat_sft(plain, tree)
    if is_checkpointed:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    _, found = tree_gradients(model, tree, max_tokens)
    assert set(found) == set(expected)
    assert gradient_error(found, expected) < TOLERANCE


def test_gateways_in_host_memory(tree) -> None:
    _, _, expected = flat_sft(tiny_model(), tree)
    for hold in ("always", "never"):
        _, found = tree_gradients(tiny_model().cuda(), tree, 200, hold=hold, offload=True)
        assert gradient_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("max_tokens", [None, 200])
@pytest.mark.parametrize("family", ["llama", "bamba", "qwen3_next"])
@pytest.mark.filterwarnings("default")
def test_the_host_waits_once_in_a_step(family: str, max_tokens: int | None, tree) -> None:
    """torch itself says where it waits. What a GPU that is not there shows (test_cuda_pretend) holds on a real one."""
    dtype = torch.float32
    if family == "qwen3_next":  # its experts: other products of groups read their sizes on the host
        if torch.cuda.get_device_capability() not in ((9, 0), (10, 0)):
            pytest.skip("torch has no product of experts for this card that does not wait")
        dtype = torch.bfloat16
    engine = TreeEngine(tiny_model(family, dtype=dtype).cuda(), max_tokens)
    forest = Forest.from_trajectories(tree)
    engine.step(forest)  # probes and compiles
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # which says once in a process that it is a prototype
        try:
            engine.step(forest)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{each.filename}:{each.lineno}" for each in said if "called a synchronizing" in str(each.message)]
    assert len(waits) == 1, waits


def test_lengths_that_change_are_not_compiled_again() -> None:
    """With and without a graph: no step needs another kernel."""
    rng = np.random.default_rng(3)
    engine = TreeEngine(tiny_model(max_position_embeddings=4096).cuda(), 600)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(14):
        prompt = rng.integers(3, 64, int(rng.integers(20, 700)))
        ends = [rng.integers(3, 64, int(rng.integers(1, 400))) for _ in range(int(rng.integers(2, 6)))]
        engine.step(Forest.from_trajectories([Trajectory(np.concatenate([prompt, end])) for end in ends]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before <= 4


# -- 3: memory ---------------------------------------------------------------------------------------------------------


def large(dtype: torch.dtype, num_tokens: int, num_shared: int) -> tuple[torch.nn.Module, Forest]:
    """Of 18 leaves below a prompt, on a model whose head takes no memory to speak of."""
    rng = np.random.default_rng(5)
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "max_position_embeddings": 8192}
    model = tiny_model(head_dim=64, vocab_size=256, dtype=dtype, **shape).cuda()
    prompt, own = rng.integers(3, 256, num_shared), (num_tokens - num_shared) // 18
    items = [Trajectory(np.concatenate([prompt, rng.integers(3, 256, own)])) for _ in range(18)]
    return model, Forest.from_trajectories(items)


@pytest.fixture
def allow():
    """Sets how many bytes this process may take beside those that it has, whatever ran before; takes that back."""

    def limit(size: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_step_that_runs_out_of_memory_runs_again_with_half(allow) -> None:
    """By the reference attention, of which nothing is compiled: half of the tokens take a third of the memory."""
    model, forest = large(torch.float32, 4000, 400)
    engine = TreeEngine(model, attention="reference", check=False)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    expected_loss = engine.step(forest).loss
    peak = torch.cuda.max_memory_allocated() - before
    expected = gradients_of(model)
    model.zero_grad()
    allow(int(0.7 * peak))
    out = engine.step(forest)
    assert engine.max_tokens is not None
    assert forest.num_tokens // 4 <= engine.max_tokens < forest.num_tokens
    assert out.loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert gradient_error(gradients_of(model), expected) < TOLERANCE


def test_a_measured_budget_leaves_room(allow) -> None:
    """Where less than the whole tree fits, the first budget that is tried does. One kind of kernel is compiled."""
    model, forest = large(torch.bfloat16, 20_000, 2000)
    engine = TreeEngine(model, "auto", attention="flex", hold="always", check=False)
    allow(GIB // 2)
    engine.plan(forest)  # which may take less than the budget, where that is cheaper
    budget = engine.max_tokens
    engine.step(forest)
    assert engine.max_tokens == budget
    assert 1024 < budget < forest.num_tokens


# -- 4: trainers -------------------------------------------------------------------------------------------------------


def train(folder, tree, device: str, resume: str | None = None, **settings):
    model = tiny_model()
    arguments = {
        "output_dir": str(folder),
        "max_steps": 5,
        "per_device_train_batch_size": 1,
        "learning_rate": 0.05,
        "optim": "sgd",  # Adam's first steps turn a gradient of rounding into a full step
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": device == "cpu",
        "seed": 3,
        **settings,
    }
    trainer = TreeTrainer(model, TreeTrainingArguments(**arguments), train_dataset=[tree, tree[:3], tree[3:]])
    trainer.train(resume_from_checkpoint=resume)
    assert next(trainer.model.parameters()).device.type == device
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: each.detach().cpu() for name, each in trainer.model.named_parameters()}


@pytest.mark.parametrize("max_tokens", [None, 200, "auto"])
def test_five_steps_of_the_trainer(max_tokens, tmp_path, tree) -> None:
    expected, weights = train(tmp_path / "cpu", tree, "cpu")
    losses, found = train(tmp_path / "cuda", tree, "cuda", max_tokens=max_tokens)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert gradient_error(found, weights) < 1e-4


def test_a_resumed_run_goes_on(tmp_path, tree) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2}
    losses, whole = train(tmp_path / "whole", tree, "cuda", **settings)
    resume = str(tmp_path / "whole" / "checkpoint-2")
    again, resumed = train(tmp_path / "whole", tree, "cuda", resume=resume, **settings)
    assert again[-3:] == pytest.approx(losses[-3:], rel=1e-5)
    assert gradient_error(resumed, whole) < 1e-5


def test_a_trainer_of_trl(tmp_path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from tests.integrations.trl.helpers import assert_same_training, model_for_trl, settings, tiny_tokenizer

    rng = np.random.default_rng(2)
    prompt = " ".join(f"w{number}" for number in rng.integers(0, 50, 40))
    rows = [{"text": f"{prompt} " + " ".join(f"w{number}" for number in rng.integers(0, 50, 12))} for _ in range(12)]

    def make() -> SFTTrainer:
        arguments = SFTConfig(**settings(tmp_path, use_cpu=False, shuffle_dataset=False))
        return SFTTrainer(
            model_for_trl(), arguments, train_dataset=Dataset.from_list(rows), processing_class=tiny_tokenizer()
        )

    run = assert_same_training(make, tolerance=1e-4)
    assert next(run.trainer.model.parameters()).is_cuda
    assert run.sharings[0].counts.share_ratio > 1.5


def test_scores_and_losses_of_any_kind(tree) -> None:
    """Two walks, evaluation, scoring: against the same on the CPU."""
    on_cpu, on_cuda = (TreeEngine(tiny_model().to(device), 200) for device in ("cpu", "cuda"))
    forest = Forest.from_trajectories(tree)
    assert on_cuda.evaluate(forest).loss == pytest.approx(on_cpu.evaluate(forest).loss, rel=TOLERANCE)
    for ours, expected in zip(on_cuda.scored(tree), on_cpu.scored(tree), strict=True):
        np.testing.assert_allclose(ours.old_logprobs, expected.old_logprobs, atol=1e-4)
    losses = [engine.step(forest, lambda logprobs: -torch.cat(logprobs).exp().mean()) for engine in (on_cpu, on_cuda)]
    assert losses[1].loss == pytest.approx(losses[0].loss, rel=1e-4)
    found = {name: grad.cpu() for name, grad in gradients_of(on_cuda.model).items()}
    assert gradient_error(found, gradients_of(on_cpu.model)) < TOLERANCE


def test_a_real_shape_in_bfloat16(tree) -> None:
    """Qwen3-0.6B with random weights on a tree of 20,000 tokens, whole and in parts."""
    from treewise.bench import make, random_model

    model = random_model("qwen3-0.6b", torch.bfloat16, torch.device("cuda"))
    items = list(make("tau2", "full", 151_936).trajectories)
    whole, expected = tree_gradients(model, items, objective=SFT())
    parts, found = tree_gradients(model, items, 4096, objective=SFT())
    assert parts.loss == pytest.approx(whole.loss, rel=1e-3)
    assert gradient_error(found, expected) < 0.05
