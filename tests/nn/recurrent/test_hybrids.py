"""Hybrid models on trees equal flat training: whole, in parts, held, recomputed, cut inside segments."""

import copy
import importlib
import io
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from hypothesis import given
from hypothesis import strategies as st

import treewise.nn.recurrent.kinds
from tests.nn.recurrent.hybrids import HYBRIDS, hybrid
from tests.nn.recurrent.wide import widened
from treewise import Forest, Trajectory, TreeEngine
from treewise.engine import step
from treewise.errors import UnsupportedModelError
from treewise.nn.recurrent import kinds_of
from treewise.nn.recurrent.segments import row_segments
from treewise.planning.planner import plan
from treewise.planning.plans import lay_out
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of
from treewise.testing.strategies import budgets, trajectories

# Their scans' chunks of 64 (delta rules), 32 (Mamba2) and 16 (lightning) are crossed; the others share code with these.
LONG = {"lfm2", "lfm3", "qwen3_next", "qwen3_5_text", "nemotron_h", "falcon_h1", "zamba2", "minimax", "jamba"}
ONE_OF_EACH_KIND = [
    *("lfm2", "qwen3_next", "kimi_linear", "bailing_hybrid", "nemotron_h", "jamba", "minimax", "recurrent_gemma")
]


def conversations(longest: int = 90) -> list[Trajectory]:
    """Segments of 1 to 90 tokens: shorter than a convolution, and longer than the scans' chunks of 32 and 64."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(3, 64, longest)
    items = []
    for cut, new in ((longest, 1), (longest, 12), (longest - 20, 70), (11, 2), (1, 20)):
        ids = np.concatenate([trunk[:cut], rng.integers(3, 64, new)])
        items.append(Trajectory(ids, loss_weights=np.append(0, rng.integers(1, 5, len(ids) - 1) / 4)))
    # A prefix of another one, a duplicate, a second tree.
    return [*items, Trajectory(items[2].token_ids[:-5]), items[1], Trajectory(rng.integers(3, 64, 9))]


def tree_gradients(model, items, max_tokens=None, **options):
    model.zero_grad()
    out = TreeEngine(model, max_tokens, **options).step(Forest.from_trajectories(items))
    return out, gradients_of(model)


# Flat training alone is 1e-4 from float64 in Bailing: it is compared in float64 only.
@pytest.mark.representatives("qwen3_next", "jamba")
@pytest.mark.parametrize("family", [each for each in HYBRIDS if each != "bailing_hybrid"])
def test_every_hybrid_equals_flat_training(family: str) -> None:
    model, items = hybrid(family), conversations(90 if family in LONG else 30)
    loss, logprobs, expected = flat_sft(model, items)
    # States add up rounding along a path: the gradient of one token's embedding alone may be 3e-5 from float64.
    tolerance = expected.tolerance_from(flat_sft(widened(model), items)[2])
    forest = Forest.from_trajectories(items)
    for max_tokens in (None, 40):
        out, found = tree_gradients(model, items, max_tokens, hold="never")
        assert out.loss == pytest.approx(loss, rel=tolerance)
        assert gradient_error(found, expected) < tolerance, max_tokens
    for one, other in zip(TreeEngine(model, 40).logprobs(forest), logprobs, strict=True):
        np.testing.assert_allclose(one.detach(), other, atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ONE_OF_EACH_KIND)
def test_against_a_float64_oracle(family: str) -> None:
    """In float64 nothing but the last bits differs; in float32 the tree is no farther from float64 than flat training.

    Up to a factor: the two round the same sums in another order, so their distances are of one size but not the same.
    """
    model, items = hybrid(family), conversations(90 if family in LONG else 30)
    wide = widened(model)
    _, _, exact = flat_sft(wide, items)
    for max_tokens, hold in ((None, "auto"), (70, "always"), (40, "never")):
        _, found = tree_gradients(wide, items, max_tokens, hold=hold)
        assert gradient_error(found, exact) < 1e-12, (max_tokens, hold)
    _, _, flat = flat_sft(model, items)
    _, tree = tree_gradients(model, items, 70)
    assert gradient_error(tree, exact) < flat.tolerance_from(exact)


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "jamba", "minimax", "recurrent_gemma"])
def test_these_models_notice_a_lost_state(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random models as configured hardly do, and then every other test here would pass without states."""
    model, items = hybrid(family), conversations()
    _, _, expected = flat_sft(model, items)
    monkeypatch.setattr(treewise.nn.recurrent.kinds, "_initial", lambda *arguments: None)
    _, found = tree_gradients(model, items, check=False)
    assert gradient_error(found, expected) > 0.1


SMALL = {
    "lfm2": {"layer_types": ["conv", "conv"], "conv_L_cache": 4},
    "nemotron_h": {"layers_block_type": ["mamba", "mamba"], "chunk_size": 4},
}


@cache
def small(family: str) -> Any:
    return widened(hybrid(family, num_hidden_layers=2, **SMALL[family]))


@pytest.mark.representatives("nemotron_h")
@pytest.mark.parametrize("family", SMALL)
@given(data=st.data(), items=trajectories(vocab_size=5, max_sequences=5))
def test_random_forests_at_random_budgets(family: str, data: st.DataObject, items: list[Trajectory]) -> None:
    model = small(family)
    loss, _, expected = flat_sft(model, items)
    hold = data.draw(st.sampled_from(["auto", "never", "always"]))
    max_tokens = data.draw(budgets(Forest.from_trajectories(items)))
    out, found = tree_gradients(model, items, max_tokens, hold=hold, check=False)
    assert out.loss == pytest.approx(loss, rel=1e-12)
    assert gradient_error(found, expected) < 1e-11


@pytest.mark.parametrize("family", SMALL)
def test_branches_of_several_cuts_in_one_micro_batch(family: str) -> None:
    rng = np.random.default_rng(2)
    trunk = rng.integers(3, 64, 14)
    items = [Trajectory(np.concatenate([trunk[:cut], rng.integers(3, 64, 2)])) for cut in (2, 3, 7, 11, 12, 14)]
    model, forest = small(family), Forest.from_trajectories(items)
    run = plan(forest, 9, hold="never")
    read = [
        set(zip(segments.gateway[is_cut].tolist(), segments.gateway_row[is_cut].tolist(), strict=True))
        for number in range(run.num_micro_batches)
        for segments in [row_segments(run, number, lay_out(run, number))]
        for is_cut in [segments.gateway >= 0]
    ]
    assert max(map(len, read)) >= 3
    _, _, expected = flat_sft(model, items)
    _, found = tree_gradients(model, items, 9, hold="never", check=False)
    assert gradient_error(found, expected) < 1e-11


SCANS = {
    "qwen3_next": ("torch_chunk_gated_delta_rule", lambda given: given[0].shape[:2]),
    "nemotron_h": ("mamba2_chunk_scan", lambda given: given[0].shape[:2]),
    "lfm2": ("causal_conv1d_fn", lambda given: (given[0].shape[0], given[0].shape[2])),
}


@pytest.mark.parametrize("family", SCANS)
@pytest.mark.parametrize("max_tokens", [None, 70])
def test_recurrent_layers_process_tree_tokens(family: str, max_tokens: int | None, monkeypatch) -> None:
    """Counted where the model's own function is called, padding and tails of convolutions included."""
    model, items = hybrid(family), conversations()
    name, size = SCANS[family]
    module = importlib.import_module(type(model).__module__)
    original, seen = getattr(module, name), []

    def counting(*given, **options):
        seen.append(int(np.prod(size(given))))
        return original(*given, **options)

    monkeypatch.setattr(module, name, counting)
    forest = Forest.from_trajectories(items)
    out, _ = tree_gradients(model, items, max_tokens, hold="never", check=False)
    num_layers = len(kinds_of(model))
    processed = sum(seen) / num_layers
    assert out.num_computed_tokens <= processed <= 1.5 * out.num_computed_tokens < 0.75 * forest.num_flat_tokens
    if max_tokens is None:
        assert out.num_computed_tokens == forest.num_tokens


def test_a_mixer_sees_each_token_of_a_micro_batch_once() -> None:
    model, items = hybrid("qwen3_next"), conversations()
    rows = []
    engine = TreeEngine(model, 70, hold="never", check=False)
    mixer = model.model.layers[0].linear_attn
    mixer.register_forward_hook(lambda module, args, kwargs, out: rows.append(out.shape[1]), with_kwargs=True)
    out = engine.step(Forest.from_trajectories(items))
    assert sum(rows) == out.num_computed_tokens


@pytest.mark.representatives("jamba-True")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5_text", "jamba", "falcon_mamba"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_gradient_checkpointing(family: str, use_reentrant: bool) -> None:
    model, items = hybrid(family), conversations(30)
    _, _, expected = flat_sft(model, items)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    for max_tokens, hold in ((None, "auto"), (40, "never"), (40, "always")):
        _, found = tree_gradients(model, items, max_tokens, hold=hold)
        assert gradient_error(found, expected) < expected.tolerance


@pytest.mark.representatives("lfm2")
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "bamba"])
def test_bfloat16_deviates_no_more_than_flat_bfloat16(family: str) -> None:
    items = conversations(30)
    _, _, exact = flat_sft(hybrid(family), items)
    model = hybrid(family).bfloat16()
    _, _, flat = flat_sft(model, items)
    for max_tokens in (None, 40):
        _, found = tree_gradients(model, items, max_tokens)
        assert gradient_error(found, exact) < 1.25 * gradient_error(flat, exact)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text", "bamba", "mamba"])
def test_forwards_without_a_tree_are_the_models_own(family: str) -> None:
    model = hybrid(family).eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    before, text = model(input_ids=ids).logits, model.generate(ids, **options)
    TreeEngine(model).step(Forest.from_trajectories(conversations(30)))
    assert torch.equal(model(input_ids=ids).logits, before)
    assert torch.equal(model.generate(ids, **options), text)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(input_ids=ids).logits, before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(model(input_ids=ids).logits, before)


def test_a_copy_and_a_saved_model_follow_trees_with_their_own_weights() -> None:
    model, items = hybrid("lfm2"), conversations(30)
    TreeEngine(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].conv.in_proj.weight.mul_(2)
    _, _, expected = flat_sft(twin, items)
    assert gradient_error(tree_gradients(twin, items)[1], expected) < expected.tolerance
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)  # written two lines above
    assert gradient_error(tree_gradients(loaded, items)[1], expected) < expected.tolerance


def run_again(model: Any) -> None:
    """As in looped models: each pass has states of its own in the gateways."""
    model.model.layers[2] = model.model.layers[0]


def hook(model: Any) -> None:
    add_hook_to_module(model.model.layers[0].linear_attn, ModelHook())


def compile_each(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager")


@pytest.mark.parametrize(
    ("family", "change", "options"),
    [
        ("qwen3_5_text", hook, {}),
        pytest.param("qwen3_5_text", run_again, {}, marks=pytest.mark.exhaustive),
        pytest.param("lfm2", compile_each, {}, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", lambda _: None, {"offload": True}, marks=pytest.mark.exhaustive),
    ],
    ids=["accelerate", "run again", "compiled", "states in host memory"],
)
def test_changed_layers(family: str, change: Callable[[Any], None], options: dict[str, bool]) -> None:
    model, items = hybrid(family), conversations(30)
    change(model)
    _, _, expected = flat_sft(model, items)
    for max_tokens, hold in ((None, "auto"), (40, "never"), (40, "always")):
        _, found = tree_gradients(model, items, max_tokens, hold=hold, **options)
        assert gradient_error(found, expected) < expected.tolerance


def test_refusals() -> None:
    replaced = hybrid("lfm2")
    mixer = replaced.model.layers[0].conv
    mixer.forward = lambda *args, **kwargs: args[0]
    with pytest.raises(UnsupportedModelError, match=r"layers.0.conv \(Lfm2ShortConv\) runs a forward that replaces"):
        TreeEngine(replaced)
    unknown = hybrid("lfm2")
    unknown.model.layers[1].self_attn.mix = torch.nn.Conv1d(32, 32, 4, groups=32)
    with pytest.raises(UnsupportedModelError, match=r"layers.1.self_attn.mix is a convolution over tokens"):
        TreeEngine(unknown)
    decaying = hybrid("lfm2")
    decaying.model.layers[2].feed_forward.A_log = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(UnsupportedModelError, match=r"layers.2.feed_forward \(Lfm2MLP\) is a recurrent layer"):
        TreeEngine(decaying)


def test_kinds_are_named() -> None:
    assert kinds_of(hybrid("qwen3_next")) == {
        "model.layers.0.linear_attn": "short convolution, gated delta net",
        "model.layers.2.linear_attn": "short convolution, gated delta net",
    }


def test_float64_recurrences_may_round_as_float32_does(monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers' scans compute in float32 in a float64 model, and may round otherwise beside other rows.
    model = hybrid("mamba", torch.float64)
    plain, noise = step.run_decoder, torch.Generator().manual_seed(0)

    def rounded(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        rows, router_logits = plain(*args, **kwargs)
        return rows * (1 + 1e-6 * torch.randn(rows.shape, generator=noise, dtype=rows.dtype)), router_logits

    monkeypatch.setattr(step, "run_decoder", rounded)
    TreeEngine(model).check(Forest.from_trajectories([Trajectory([3, 4, 5, 6])]))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_an_interrupted_step_leaves_nothing_behind() -> None:
    model = hybrid("qwen3_next")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.arange(3, 12)[None]
    expected = model(input_ids=ids, use_cache=False).logits.detach()
    engine = TreeEngine(model, 4)
    forest = Forest.from_trajectories([Trajectory([3, 4, 5, 6, 7, 8]), Trajectory([3, 4, 9, 10])])
    engine.evaluate(forest)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt  # which skips hooks that are called after errors

    hook = model.model.layers[0].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step(forest)
    hook.remove()
    logits = model(input_ids=ids, use_cache=False).logits
    logits.sum().backward()
    torch.testing.assert_close(logits.detach(), expected)
