"""Context parallelism: ranks that share the tokens of each micro-batch, against one process.

All cases of one number of processes run in the same ones, forked from this one.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tests.distributed.test_mesh import (
    OBJECTIVES,
    TOLERANCE,
    VOCABULARY,
    Case,
    check_gradients,
    fork_ranks,
    items_of,
    model_of,
    names,
    trajectories,
    with_adapters,
)
from tests.image_models import png
from treewise import SFT, Trajectory, TreeEngine
from treewise.distributed import ranks
from treewise.distributed.context import ContextWalk, check_context_size, context_group
from treewise.errors import ConfigError, DataError, UnsupportedModelError
from treewise.objectives import GSPO, PolicyGradient
from treewise.testing import flat_sft, gradient_error, gradients_of, tiny_model
from treewise.trainer import TreeTrainer, TreeTrainingArguments
from treewise.tree.images import ImageSpan

pytestmark = pytest.mark.xdist_group("distributed/test_context")


@dataclass(frozen=True)
class Spread(Case):
    """A case of tokens that are spread over ranks. trained: `lora`, or `head` for adapters of the head alone."""

    checkpoints: bool = False
    trained: str = ""
    attention: str = "auto"

    @property
    def name(self):
        rest = ["checkpoints" if self.checkpoints else "", self.trained, self.attention.replace("auto", "")]
        return " ".join(filter(None, [self.family, self.objective, *rest]))


OBJECTIVES["sequence"] = GSPO()
OBJECTIVES["reference"] = PolicyGradient(beta=0.1, clip_high=0.28)
TWO = [
    Spread("qwen3", objective="reference", budgets=(12,), checkpoints=True, trained="lora"),
    Spread("llama", budgets=(None, 12)),
    Spread("llama", objective="sequence", budgets=(None, 12)),
    Spread("qwen3_moe", objective="routes", budgets=(None, 12)),
]
FOUR = [
    *(replace(case, budgets=(None, 12)) for case in TWO),
    Spread("qwen3_moe", objective="router", budgets=(None, 12)),
    Spread("llama", trained="head", budgets=(None, 12)),
    *(Spread(each, budgets=(None, 12)) for each in ("qwen3", "gemma3_text")),
]


def spread_model(case):
    """The model of a case, which trains what the case names."""
    model = model_of(case).train()
    if case.checkpoints:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    if case.trained == "lora":
        model = with_adapters(model)
    if case.trained == "head":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lm_head" in name)
    return model


def scored_by(engine, reference):
    """Trajectories with log-probs that the model and a reference were asked for, as GRPO keeps them."""
    items = engine.scored(trajectories())
    items = [replace(item, old_logprobs=item.old_logprobs + 0.2 * np.cos(item.token_ids)) for item in items]
    return reference.scored(items, "ref_logprobs")


def engines(case, budget, group):
    """Of the model and of a reference with other weights."""
    router = case.objective == "router"
    options = {
        "router_aux_loss": router,
        "router_z_coefficient": 0.1 if router else 0.0,
        "context": group,
        "attention": case.attention,
    }
    reference = tiny_model(case.family, vocab_size=VOCABULARY, seed=1)
    engine = TreeEngine(spread_model(case), budget, **options, check=budget == case.budgets[0])
    return engine, TreeEngine(reference, budget, context=group, check=False)


def computed(case, budget, group=None):
    """Loss, metrics, log-probs and gradients of the ranks of a group together; None: of one process."""
    engine, reference = engines(case, budget, group)
    items = scored_by(engine, reference) if case.objective == "reference" else items_of(case)
    evaluated = engine.evaluate(items, OBJECTIVES[case.objective])
    out = engine.step(items, OBJECTIVES[case.objective])
    if group is not None:
        group.sum_gradients(engine.model.parameters())
    gradients = gradients_of(engine.model)
    with torch.no_grad():
        logprobs = engine.logprobs(items_of(case))
    return {
        "losses": [out.loss, evaluated.loss], "metrics": dict(out.metrics), "logprobs": logprobs,
        "gradients": gradients, "load": None if out.routing is None else out.routing.expert_load,
        "replay": out.replay,
    }  # fmt: skip


def expected(case):
    """Of one process: flat where the oracle has the objective and what is trained."""
    found = computed(case, None)
    if case.objective == "sft":
        model = spread_model(case)
        loss, logprobs, gradients = flat_sft(model, trajectories())
        found |= {"losses": [loss, loss], "logprobs": logprobs, "gradients": gradients}
    return found


def on_context(case, size):
    """What the ranks of a group compute together, by budget."""
    return {budget: computed(case, budget, context_group(size, "cpu")) for budget in case.budgets}


def run_on(num_ranks, cases, folder, extra=None):
    def work():
        found = {case.name: on_context(case, num_ranks) for case in cases}
        return found if extra is None else found | {"extra": extra(folder)}

    return fork_ranks(num_ranks, work, folder)


def other_checks(folder):
    """What cannot be spread over tokens, and what else can."""
    group, model = context_group(2, "cpu"), tiny_model("llama")
    with pytest.raises(DataError, match=r"context_size=2.* have different trees or budgets: number 1"):
        TreeEngine(model, 9 + ranks.own() % 2, context=group).step(trajectories())
    with pytest.raises(ConfigError, match=r"max_tokens='auto'.*context_size"):
        TreeEngine(model, "auto", context=group)
    for family in ("qwen3_next", "lfm2"):
        with pytest.raises(UnsupportedModelError, match=r"recurrent layers .*leave context_size=2 out"):
            TreeEngine(tiny_model(family), context=group)
    with_image = Trajectory([5, 6, 7, 8], images=[ImageSpan(png(1), 1, 3)])
    with pytest.raises(UnsupportedModelError, match=r"images are not supported with context_size"):
        TreeEngine(model, context=group).step([with_image])
    settings = {
        "use_cpu": True,
        "report_to": "none",
        "context_size": 2,
        "max_tokens": 9,
        "output_dir": str(folder / "run"),
    }
    trainer = TreeTrainer(model, TreeTrainingArguments(**settings), train_dataset=[*trajectories(), with_image])
    forwards = []
    model.model.embed_tokens.register_forward_hook(lambda *_: forwards.append(1))
    with pytest.raises(UnsupportedModelError, match=r"images are not supported with context_size"):
        trainer.train()
    assert not forwards
    assert set(keys_at_last_norm(group)) == {0}
    return {"prompt": head_of_a_long_prompt(group), "autocast": by_autocast(group)}


def keys_at_last_norm(group):
    """How many tensors the exchanges of a step themselves hold, each time that layers have been run; autograd holds the
    rest, or drops it for activation checkpoints."""
    model, exchanges, counts = spread_model(Spread("llama", checkpoints=True)), [], []
    with pytest.MonkeyPatch.context() as patch:
        own = ContextWalk.exchange
        patch.setattr(ContextWalk, "exchange", lambda *args: exchanges.append(own(*args)) or exchanges[-1])
        model.model.norm.register_forward_hook(lambda *_: counts.append(len(exchanges[-1].read.gateway.keys)))
        TreeEngine(model, 12, context=group, check=False).step(trajectories())
    return counts


def head_of_a_long_prompt(group=None):
    """The gradient of the head alone, where the first rank has no trained token."""
    model = spread_model(Spread("llama", trained="head"))
    weights = (np.arange(30) >= 29).astype(np.float32)
    TreeEngine(model, context=group).step([Trajectory(np.arange(3, 33), weights)])
    if group is not None:
        group.sum_gradients(model.parameters())
    return gradients_of(model)


def by_autocast(group=None, dtype=torch.bfloat16):
    """Gradients of float32 parameters whose layers are computed in another precision; None: in float32."""
    model = tiny_model("qwen3", vocab_size=VOCABULARY)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        TreeEngine(model, 12, context=group, check=False).step(trajectories(), SFT())
    if group is not None:
        group.sum_gradients(model.parameters())
    return gradients_of(model)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_on(2, TWO, tmp_path_factory.mktemp("two"), other_checks)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_on(4, FOUR, tmp_path_factory.mktemp("four"))


def check(found, case):
    one = expected(case)
    for budget in case.budgets:
        for own in (each[case.name][budget] for each in found):
            assert own["losses"] == pytest.approx(one["losses"], rel=TOLERANCE)
            assert own["metrics"] == pytest.approx(one["metrics"], rel=1e-5, abs=1e-7)
            np.testing.assert_equal(own["load"], one["load"])
            assert own["replay"] == one["replay"]
            for ours, theirs in zip(own["logprobs"], one["logprobs"], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
            check_gradients(own["gradients"], one["gradients"])


@pytest.mark.filterwarnings("default")  # of peft about transformers
@pytest.mark.parametrize("case", TWO, ids=names(TWO))
def test_two_processes_give_what_one_gives(two, case):
    check(two, case)


def test_a_rank_without_a_trained_token_trains_the_head_alone(two):
    alone = head_of_a_long_prompt()
    for own in two:
        assert gradient_error(own["extra"]["prompt"], alone) <= TOLERANCE


def test_bfloat16_deviates_no_more_than_one_process(two):
    exact = by_autocast(dtype=None)
    limit = gradient_error(by_autocast(), exact)
    for own in two:
        assert 0 < gradient_error(own["extra"]["autocast"], exact) <= 1.1 * limit


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("default")  # of peft about transformers
@pytest.mark.parametrize("case", FOUR, ids=names(FOUR))
def test_four_processes_give_what_one_gives(four, case):
    check(four, case)


@pytest.mark.parametrize(("sizes", "message"), [
    ((0, 4), "context_size=0; give 1 or more"),
    ((3, 4), "context_size=3 does not divide the 4 processes"),
    ((2, 4, 2), "context_size=2 cannot be combined with tp_size=2, ep_size=1: leave it out and lower max_tokens"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_errors(sizes, message):
    with pytest.raises(ConfigError, match=message):
        check_context_size(*sizes)
