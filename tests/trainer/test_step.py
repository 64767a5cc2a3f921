"""Batches with a `StepRunner` alone, without a trainer."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from tests.trainer.helpers import tiny_model
from treewise.engine.engine import TreeEngine
from treewise.errors import ConfigError, DataError
from treewise.nn import compilation
from treewise.nn.platform.releases import recomputation_name
from treewise.nn.wrapped import is_compiled
from treewise.objectives import GSPO, SFT
from treewise.planning.fastest import fastest_plan
from treewise.planning.planner import plan
from treewise.testing.families import tiny_model as family_model
from treewise.testing.oracle import gradient_error, gradients_of
from treewise.trainer import TreeTrainingArguments, recomputation, step
from treewise.trainer.step import StepRunner, optimizer_bytes
from treewise.tree.forest import Forest


@pytest.fixture
def forests(trees):
    return [Forest.from_trajectories(tree) for tree in trees]


@pytest.fixture
def make_runner(tmp_path, forests):
    def make(model, **settings):
        args = TreeTrainingArguments(str(tmp_path), report_to="none", use_cpu=True, **settings)
        return StepRunner(model, args.sft_objective(), args, lambda: forests[0])

    return make


@pytest.mark.representatives("gspo-14-4")
@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [None, 14])
@pytest.mark.parametrize("objective", ["sft", "gspo"])
def test_router_losses_belong_to_the_step_however_it_is_cut(make_runner, trees, objective, max_tokens, num_parts):
    for tree in trees:
        for index, item in enumerate(tree):
            old_logprobs = np.full(len(item.token_ids), -4.0)
            advantages = np.full(len(item.token_ids), 1.0 - 2.0 * (index % 2))
            changes = {"token_ids": item.token_ids % 60, "advantages": advantages, "old_logprobs": old_logprobs}
            tree[index] = dataclasses.replace(item, **changes)
    forests = [Forest.from_trajectories(tree) for tree in trees]
    model = family_model(
        "mixtral", router_aux_loss_coef=0.7, output_router_logits=True, pad_token_id=None, vocab_size=64
    )
    runner = make_runner(model, max_tokens=max_tokens, router_z_coefficient=0.1)
    if objective == "gspo":  # takes two walks
        runner.objective = GSPO()
    denominator = runner.begin_step([runner.prepare(forests)], 1)
    whole = runner.engine.step(forests, runner.objective, denominator=denominator)
    expected = gradients_of(model)
    model.zero_grad()
    batches = [runner.prepare(forests[part::num_parts]) for part in range(num_parts)]
    assert runner.begin_step(batches, 1) == pytest.approx(denominator)
    losses = [runner.train_batch(batch).loss for batch in batches]
    assert sum(losses) == pytest.approx(whole.loss, rel=1e-6)
    assert gradient_error(gradients_of(model), expected) < 1e-6


def test_a_batch_without_a_trained_token_computes_nothing(make_runner, forests):
    runner = make_runner(tiny_model(), max_tokens=40)
    for forest in forests:
        for item in forest.trajectories:
            item.loss_weights[:] = 0
    batch = runner.prepare(forests)
    assert batch.ready is runner.prepare([]).ready is None
    assert runner.train_batch(batch) is None
    with pytest.raises(DataError, match=r"step 4 has no trained token; leave these trees out: rows.jsonl:0"):
        runner.begin_step([batch], 4)


@pytest.mark.parametrize(("setting", "expected"), [("auto", 17), (40, 40)])
def test_a_resumed_budget_replaces_a_measurement_alone(make_runner, setting, expected):
    runner = make_runner(tiny_model(), max_tokens=setting)
    runner.resume_budget(17)
    assert runner.engine.max_tokens == expected


def test_a_resumed_run_cuts_trees_as_the_run_that_measured_did(make_runner):
    token_ids = [[number] * size for number, size in enumerate((2, 4, 8, 5))]
    forest = Forest.from_nodes([-1, 0, 0, 2], token_ids, merge_siblings=False)
    runner = make_runner(tiny_model(), max_tokens="auto")
    runner.resume_budget(17)
    fewest, fastest = plan(forest, 17), fastest_plan(forest, 17)
    assert (fewest.num_micro_batches, fastest.num_micro_batches) == (3, 2)
    assert runner.engine.plan(forest).num_micro_batches == 2
    assert runner.engine.budget.recovers


def test_trajectories_that_are_not_finite_are_found_one_by_one(make_runner, trees, forests):
    model = tiny_model()
    bad = int(trees[2][0].token_ids[-2])
    model.model.embed_tokens.weight.data[bad] = float("nan")
    named = make_runner(model, max_tokens=40).nonfinite_trajectories(forests)
    assert named == [item.source for tree in trees for item in tree if bad in item.token_ids]


def test_an_optimizer_that_has_not_run_needs_two_moments():
    model = tiny_model()
    num_bytes = 8 * sum(each.numel() for each in model.parameters())
    optimizer = torch.optim.Adam(model.parameters())
    assert optimizer_bytes(model, None) == optimizer_bytes(model, optimizer) == num_bytes
    for each in model.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    assert optimizer_bytes(model, optimizer) == 0


def test_an_optimizer_of_8_bits_needs_two_bytes():
    model = tiny_model().bfloat16()
    number = sum(each.numel() for each in model.parameters())
    sizes = {name: optimizer_bytes(model, None, name) / number for name in ("adamw_torch", "adamw_torch_8bit", "sgd")}
    assert sizes == {"adamw_torch": 4.0, "adamw_torch_8bit": 2.0, "sgd": 0.0}


def test_layers_that_are_computed_again_are_chosen_before_a_budget_is_measured(make_runner, forests, monkeypatch):
    """Also where routers are counted before the first backward."""
    found = []

    def recompute_as_set(engine, first, *_, **__):
        found.append((engine.budget.is_measured, engine.model.training, first().num_tokens))

    monkeypatch.setattr(recomputation, "recompute_as_set", recompute_as_set)
    model = family_model("mixtral", output_router_logits=True, pad_token_id=None, vocab_size=64).eval()
    runner = make_runner(model, max_tokens="auto", **{f"{recomputation_name()}_checkpointing": "auto"})
    batches = [runner.prepare(part) for part in ([], forests[:2], forests[2:])]
    runner.begin_step(batches, 1)
    assert found == [(False, True, sum(each.num_tokens for each in forests[:2]))]
    assert runner.engine.budget.is_measured
    runner.begin_step(batches, 2)
    assert len(found) == 1


# -- sums of gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_wide", [False, True])
def test_gradients_of_a_step_are_added_up_in_float32(make_runner, forests, is_wide):
    """And rounded once: the sum of what each batch gives alone."""
    parts = {}
    for forest in forests:
        model = family_model(dtype=torch.bfloat16)
        runner = make_runner(model, max_tokens=None, max_grad_norm=0.0)
        denominator = SFT().denominator(Forest.concatenate(forests))
        runner.engine.step([forest], SFT(), denominator=denominator)
        for name, each in model.named_parameters():
            parts.setdefault(name, []).append(each.grad.float())
    settings = {"float32_gradients": True} if is_wide else {}
    runner = make_runner(model := family_model(dtype=torch.bfloat16), max_tokens=None, max_grad_norm=0.0, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in (1, 2):
        batches = [runner.prepare([forest]) for forest in forests]
        runner.begin_step(batches, number)
        for batch in batches:
            runner.train_batch(batch)
        assert all(each.grad.dtype == (torch.float32 if is_wide else each.dtype) for each in model.parameters())
        runner.end_step()
        if number == 1:
            sums = {name: torch.stack(each).sum(0).bfloat16() for name, each in parts.items()}
            equal = [torch.equal(each.grad, sums[name]) for name, each in model.named_parameters()]
            assert all(equal) == is_wide
        optimizer.step()
        model.zero_grad()


@pytest.mark.parametrize("max_tokens", [5, None])
def test_sums_in_float32_are_nearer_to_flat_training(make_runner, forests, max_tokens):
    exact = family_model(dtype=torch.float64)
    TreeEngine(exact, check=False).step(forests)
    expected, errors = gradients_of(exact), {}
    for is_wide in (False, True):
        model = family_model(dtype=torch.bfloat16)
        runner = make_runner(model, max_tokens=max_tokens, max_grad_norm=0.0, float32_gradients=is_wide)
        batches = [runner.prepare([forest]) for forest in forests]
        runner.begin_step(batches, 1)
        for batch in batches:
            runner.train_batch(batch)
        runner.end_step()
        errors[is_wide] = gradient_error(gradients_of(model), expected)
    assert errors[True] < errors[False]


def test_shards_add_their_gradients_up_themselves(tmp_path, forests):
    args = TreeTrainingArguments(str(tmp_path), report_to="none", use_cpu=True, sharded=True, float32_gradients=True)
    with pytest.raises(ConfigError, match="float32_gradients=True, and parameters are divided"):
        StepRunner(tiny_model(), SFT(), args, lambda: forests[0])


# -- compiled layers ---------------------------------------------------------------------------------------------------

DYNAMO = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning",
    "ignore:`is_gradient_checkpointing`:FutureWarning",
    "ignore:`torch.jit.script:DeprecationWarning",
)
COMPILED = {"torch_compile_backend": "aot_eager"}


@DYNAMO
def test_what_compiles_the_layers(make_trainer, trees, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")  # as accelerate launch sets it always
    assert not make_trainer(trees).args.torch_compile
    for settings in ({"torch_compile": True}, {"torch_compile_mode": "default"}, COMPILED):
        args = make_trainer(trees, **settings).args
        assert (args.torch_compile, args.torch_compile_backend) == (
            True,
            settings.get("torch_compile_backend", "inductor"),
        )
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    trainer = make_trainer(trees)
    assert trainer.args.torch_compile_backend == "aot_eager"
    assert all(layer._compiled_call_impl is not None for layer in trainer.model.model.layers)
    prepared = trainer.accelerator.prepare_model(trainer.model)
    assert type(prepared) is type(trainer.model)  # and not compiled once more around the layers


@DYNAMO
def test_layers_are_compiled_by_themselves_on_a_gpu_alone(make_trainer, trees, monkeypatch):
    args = make_trainer(trees).args
    assert (args.compile_layers, args.compiles_by_itself) == ("auto", False)
    monkeypatch.setattr(TreeTrainingArguments, "device", torch.device("cuda"))
    assert args.compiles_by_itself
    for settings in (
        {"compile_layers": "never"},
        {"compile_layers": "always"},
        {"torch_compile": True},
    ):
        assert not replace_settings(args, **settings).compiles_by_itself
    assert replace_settings(args, compile_layers="always").torch_compile
    for settings in ({"tp_size": 2}, {"sharded": True}, {"context_size": 2}):
        assert replace_settings(args, **settings).compiles_by_itself


def replace_settings(args, **changes):
    """The arguments with other values, of which nothing is checked but what compiles."""
    found = copy.copy(args)
    for name, value in changes.items():
        setattr(found, name, value)
    if "compile_layers" in changes:
        found._take_over_compilation()
    return found


@DYNAMO
@pytest.mark.representatives("forward", "backward")
@pytest.mark.parametrize("fails_in", ["nothing", "forward", "backward"])
def test_what_cannot_be_compiled_runs_as_before_and_says_so(make_runner, forests, monkeypatch, fails_in):
    """The compiler's errors come in the probe, before a gradient of a step."""

    def fails(graph, _):
        raise NotImplementedError("no such kernel")

    boxed = {"fw_compiler": lambda graph, _: make_boxed_func(graph.forward), "bw_compiler": fails}
    backends = {"nothing": "aot_eager", "forward": fails, "backward": aot_autograd(**boxed)}
    model = tiny_model()
    plain = make_runner(model, max_tokens=14)
    plain.engine.step(forests, denominator=1.0)
    expected = gradients_of(model)
    model.zero_grad()
    torch.compiler.reset()
    told = []
    monkeypatch.setattr(step.logger, "warning", lambda *words: told.append(words[0] % words[1:]))
    monkeypatch.setattr(TreeTrainingArguments, "compiles_by_itself", True)
    monkeypatch.setattr(compilation, "DEFAULT_BACKEND", backends[fails_in])
    monkeypatch.setattr(compilation, "check_compilation", lambda *_: None)
    runner = make_runner(model, max_tokens=14)
    assert is_compiled(model)
    batch = runner.prepare(forests)
    runner.begin_step([batch], 1)
    assert is_compiled(model) == (fails_in == "nothing")
    assert len(told) == (fails_in != "nothing")
    assert all(each.startswith("compile_layers=auto: layers run uncompiled: ") for each in told)
    assert all("no such kernel" in each for each in told)
    runner.engine.step(forests, denominator=1.0)
    assert gradient_error(gradients_of(model), expected) < 1e-5


def test_hooks_on_accumulated_gradients_are_refused_where_a_step_has_several_batches(make_trainer, trees):
    for accumulation in (1, 2):
        trainer = make_trainer(trees, max_steps=1, gradient_accumulation_steps=accumulation)
        calls = []
        trainer.model.lm_head.weight.register_post_accumulate_grad_hook(calls.append)
        if accumulation == 1:
            trainer.train()
            assert len(calls) == 1
            continue
        with pytest.raises(ConfigError, match=r"lm_head.weight has the hook list.append on its accumulated gradient"):
            trainer.train()
