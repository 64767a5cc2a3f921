"""What objectives promise: separability, one loss however a step is cut, metrics, scoring, settings."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

import treewise as tw
from tests.advantages.test_advantages import cut, rollout_lists
from tests.flat_objectives import over_rollouts, run_padded, stream
from tests.objectives.test_objectives import DISTILLATION, EXACT, POLICY, rollout_rows, with_teacher
from treewise import SFT, Forest, Trajectory, TreeEngine
from treewise.advantages import with_rollout_weights
from treewise.errors import ConfigError, DataError
from treewise.objectives import Objective, PolicyGradient, objective_named
from treewise.objectives.sft import fixed_denominator
from treewise.testing.families import tiny_model
from treewise.testing.oracle import gradient_error, gradients_of
from treewise.testing.strategies import MAX_SEED

ALL = {"sft": SFT(), **POLICY, **DISTILLATION}


def sample(seed: int = 0, num_rollouts: int = 6, with_old: bool = True) -> list[Trajectory]:
    """Rollouts of one prompt, with every stream; two pairs of rows share a rollout."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(3, 64, 5)
    items = []
    for number in range(num_rollouts):
        ids = np.concatenate([prompt[: 3 + number % 3], rng.integers(3, 64, int(rng.integers(2, 9)))])
        weights = rng.choice([0.0, 1.0, 1.0, 2.0], len(ids))
        weights[0], weights[-1] = 0, 1
        items.append(
            Trajectory(ids, weights, rng.normal(size=len(ids)), group="a", rollout=[0, 0, 1, None, 2, 2][number % 6])
        )
    with torch.no_grad():
        near = run_padded(EXACT, items).logprobs.numpy()
    for row, item in enumerate(items):
        names = ("old_logprobs", "ref_logprobs", "sampler_logprobs")[0 if with_old else 1 :]
        drawn = {name: near[row, : len(item)] + rng.normal(0, 0.2, len(item)) for name in names}
        items[row] = replace(item, **drawn)
    return with_teacher(items, rng)


def step(items_of_calls: list[list[Trajectory]], objective: Objective, max_tokens: int | None = None, **options):
    """Loss, gradient and outputs of one step that is spread over several calls."""
    EXACT.zero_grad()
    forests = [Forest.from_trajectories(items) for items in items_of_calls]
    total = sum(objective.denominator(forest) for forest in forests)
    if fixed_denominator(objective) is not None:
        total = fixed_denominator(objective)
    engine = TreeEngine(EXACT, max_tokens, check=False, **options)
    outs = [engine.step(forest, objective, denominator=total) for forest in forests]
    return sum(out.loss for out in outs), gradients_of(EXACT), outs


# -- separable --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_old", [True, False], ids=["old", "on policy"])
@pytest.mark.parametrize("objective", ALL.values(), ids=ALL.keys())
def test_separability_is_as_declared(objective: Objective, with_old: bool) -> None:
    """The gradient of all terms together is that of each tree token alone, exactly where an objective says so.

    Then moving the values of one token cannot move the gradient of another one.
    """
    forest = Forest.from_trajectories(sample(1, with_old=with_old))
    terms = objective.terms(forest)
    streams = {
        name: torch.as_tensor(value, dtype=torch.float64 if value.dtype.kind == "f" else torch.long)
        for name, value in terms.streams.items()
    }
    near = streams.get("ref_logprobs", streams.get("teacher_logprobs", torch.full((len(terms.positions),), -2.0)))
    noise = np.random.default_rng(0)
    start = {name: near.double() + torch.from_numpy(noise.normal(0, 0.01, len(near))) for name in objective.outputs}

    def gradient(values: dict[str, torch.Tensor], chosen: torch.Tensor) -> torch.Tensor:
        """[outputs, P], of the chosen terms alone."""
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        parts = {name: value[chosen] for name, value in leaves.items()}
        given = {name: value[chosen] for name, value in streams.items()}
        for name in {"sequence", "turn"} & set(given):
            given[name] = torch.unique(given[name], return_inverse=True)[1]
        loss = objective.token_losses(parts, given).sum()
        return torch.stack(torch.autograd.grad(loss, list(leaves.values())))

    everything = torch.ones(len(near), dtype=torch.bool)
    together = gradient(start, everything)
    assert together.abs().max() > 0
    owned = [torch.from_numpy(terms.positions == position) for position in np.unique(terms.positions)]
    alone = sum(gradient(start, own) for own in owned)
    assert objective.is_separable(forest) is torch.allclose(alone, together, rtol=1e-9, atol=1e-12)
    for own in owned if objective.is_separable(forest) else ():
        moved = gradient({name: torch.where(own, value - 0.05, value) for name, value in start.items()}, everything)
        assert torch.equal(moved[:, ~own], together[:, ~own])


def test_which_are_separable() -> None:
    forests = [Forest.from_trajectories(sample(1, with_old=with_old)) for with_old in (True, False)]
    found = {name: [each.is_separable(forest) for forest in forests] for name, each in ALL.items()}
    coupled = {name: values for name, values in found.items() if not all(values)}
    assert coupled == {
        "gspo": [False, False],
        "gspo with all": [False, False],
        "ppo sequence weights": [True, False],
        "dapo": [True, False],  # with sequence weights in this table
        "turns": [False, False],
        "turns, cispo": [False, True],  # on policy its weight is 1
        "turns with all": [False, False],
    }


def test_a_separable_objective_takes_one_walk_and_others_two() -> None:
    forest = Forest.from_trajectories(sample())
    engine = TreeEngine(EXACT, 8, check=False)
    single = engine.plan(forest).num_computed_tokens
    assert engine.step(forest, tw.GRPO()).num_computed_tokens == single
    assert engine.step(forest, tw.GSPO()).num_computed_tokens == single + forest.num_tokens
    assert TreeEngine(EXACT, check=False).step(forest, tw.GSPO()).num_computed_tokens == forest.num_tokens


# -- one loss, however a step is cut ----------------------------------------------------------------------------------


@pytest.mark.representatives(
    "sft", "reinforce masked", "ppo dual, entropy", "grpo per rollout", "gspo", "cispo", "turns, cispo", "bucket"
)
@pytest.mark.parametrize("objective", ALL.values(), ids=ALL.keys())
def test_a_step_may_be_spread_over_calls(objective: Objective) -> None:
    """Rollouts stay together, as they must for ratios of whole sequences."""
    if getattr(objective, "weighting", "") == "once":
        pytest.skip("what other trajectories train is seen within one call")
    items = sample()
    loss, gradient, (whole,) = step([items], objective)
    parted, summed, outs = step([items[:2], items[2:4], items[4:]], objective, 9)
    assert parted == pytest.approx(loss, rel=1e-6)
    assert gradient_error(summed, gradient) < 1e-6
    for name, value in whole.metrics.items():
        mean = sum(out.metrics[name] * out.weight for out in outs) / sum(out.weight for out in outs)
        assert mean == pytest.approx(value, rel=1e-6)


@settings(max_examples=5)
@given(items=rollout_rows(max_sequences=6), seed=st.integers(0, MAX_SEED))
@pytest.mark.parametrize("normalization", ["token_mean", "rollout_mean", "rollout_sum"])
def test_rows_of_a_rollout_may_lie_in_several_calls(items: list[Trajectory], normalization: str, seed: int) -> None:
    items = with_rollout_weights(items)
    objective = PolicyGradient(normalization=normalization)
    loss, gradient, _ = step([items], objective)
    order = np.random.default_rng(seed).permutation(len(items))
    parted, summed, _ = step([[items[row]] for row in order], objective)
    assert parted == pytest.approx(loss, rel=1e-6)
    assert all(torch.allclose(summed[name], value, rtol=1e-5, atol=1e-7) for name, value in gradient.items())


@pytest.mark.parametrize("name", ["gspo with all", "grpo per rollout"])
def test_a_rollout_reaches_across_the_forests_of_one_call(name: str) -> None:
    """Sub-agents have other prompts, so rows of one rollout lie in different trees, and train no token in common."""
    objective = replace(POLICY[name], weighting="per_trajectory")
    items = [replace(item, loss_weights=np.where(np.arange(len(item)) < 4, 0, item.loss_weights)) for item in sample()]
    loss, gradient, _ = step([items], objective)
    forests = [Forest.from_trajectories(items[1::2]), Forest.from_trajectories(items[0::2])]
    EXACT.zero_grad()
    out = TreeEngine(EXACT, 9, check=False).step(forests, objective)
    assert out.loss == pytest.approx(loss, rel=1e-6)
    assert gradient_error(gradients_of(EXACT), gradient) < 1e-6
    with_one_each = objective.denominator(forests[0]) + objective.denominator(forests[1])
    assert with_one_each > objective.denominator(Forest.concatenate(forests))  # which is why one call has to see them


def test_rows_of_a_rollout_may_lie_apart_where_ratios_are_of_turns() -> None:
    items = with_rollout_weights(sample())
    objective = tw.DAPO(ratio_level="turn", clip_low=0.05, clip_high=0.1)
    loss, gradient, _ = step([items], objective)
    parted, summed, _ = step([[item] for item in items], objective, 5)
    assert parted == pytest.approx(loss, rel=1e-6)
    assert gradient_error(summed, gradient) < 1e-6


def test_turn_ratios_are_those_of_one_row_per_turn_and_of_one_turn_per_rollout() -> None:
    """With one turn in each rollout the ratio is GSPO's; with one token in each turn, that of tokens."""
    items = sample()
    one_turn = [
        replace(item, loss_weights=np.where(np.arange(len(item)) >= len(item) - 3, 1.0, 0.0), rollout=None)
        for item in items
    ]
    options = {"clip_low": 0.05, "clip_high": 0.1, "normalization": "rollout_mean"}
    alternating = [replace(item, loss_weights=np.arange(len(item)) % 2) for item in items]
    for rows, level in ((one_turn, "sequence"), (alternating, "token")):
        loss, gradient, _ = step([rows], PolicyGradient(ratio_level=level, **options))
        found, by_turn, _ = step([rows], PolicyGradient(ratio_level="turn", **options))
        assert found == pytest.approx(loss, rel=1e-6)
        assert gradient_error(by_turn, gradient) < 1e-6


def test_parts_of_a_rollout_are_refused_where_all_of_it_is_needed() -> None:
    items = with_rollout_weights([Trajectory([1, 2, 3], advantages=1.0, group="g", rollout=5)] * 2)
    whole = with_rollout_weights([Trajectory([1, 2, 4], [0, 0.01, 0.01], 1.0, group="g", rollout=6)])
    part = Forest.from_trajectories([*whole, items[0]])
    for objective in (tw.GSPO(), tw.GRPO(weighting="per_rollout"), SFT("per_rollout", "rollout_mean")):
        with pytest.raises(DataError, match=r"all rows of a rollout in one call.*rollout 5 of group 'g'"):
            objective.terms(part)
        objective.terms(Forest.from_trajectories([*items, *whole, replace(whole[0], rollout=7, rollout_weight=None)]))


@pytest.mark.representatives("grpo", "gspo with all", "turns")
@settings(max_examples=5)
@given(items=rollout_lists(), seed=st.integers(0, MAX_SEED))
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "gspo with all", "reinforce truncated", "turns"])
def test_cutting_rollouts_into_rows_changes_neither_loss_nor_gradient(name: str, items, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        near = run_padded(EXACT, items).logprobs.numpy()
    whole = []
    for row, item in enumerate(items):
        drawn = {
            stream: near[row, : len(item)] + rng.normal(0, 0.2, len(item))
            for stream in ("old_logprobs", "ref_logprobs", "sampler_logprobs")
        }
        whole.append(replace(item, **drawn, advantages=rng.normal(size=len(item))))
    rows, owner = cut([replace(item, **dict.fromkeys(STREAMS)) for item in whole], rng)
    rows = [
        replace(row, **{name: getattr(whole[number], name)[: len(row)] for name in STREAMS})
        for row, number in zip(rows, owner, strict=True)
    ]
    objective = replace(POLICY[name], weighting="per_trajectory")
    loss, gradient, (out,) = step([whole], objective)
    loss_of_rows, found, (out_of_rows,) = step([rows], objective)
    assert loss_of_rows == pytest.approx(loss, rel=1e-6)
    assert all(torch.allclose(found[each], value, rtol=1e-5, atol=1e-7) for each, value in gradient.items())
    assert out_of_rows.metrics == pytest.approx(out.metrics, rel=1e-6)


STREAMS = ("old_logprobs", "ref_logprobs", "sampler_logprobs", "advantages")


def test_per_rollout_weighting_makes_overlapping_rows_count_once() -> None:
    """A prefix that is trained in both rows of a rollout, against the one row that holds it all."""
    whole = [Trajectory([1, 2, 3, 4], advantages=1.0, rollout=1), Trajectory([1, 2, 9], advantages=-1.0, rollout=2)]
    overlapping = [Trajectory([1, 2, 3], advantages=1.0, rollout=1), *whole]
    for make in (tw.GRPO, tw.DAPO, tw.REINFORCE, tw.GSPO):
        loss, gradient, _ = step([whole], make())
        found = step([overlapping], make(weighting="per_rollout"))
        assert found[0] == pytest.approx(loss, rel=1e-6)
        assert gradient_error(found[1], gradient) < 1e-6


def test_turns_that_rows_of_a_rollout_repeat_count_once() -> None:
    """The first turn stands in a row of its own and in the one that holds all."""
    options = {"advantages": 1.0, "group": "a", "rollout": 1}
    whole = Trajectory([1, 2, 3, 9, 4], [0, 1, 1, 0, 1], old_logprobs=[0, -4.1, -4, 0, -4.2], **options)
    first = Trajectory([1, 2, 3], [0, 1, 1], old_logprobs=[0, -4.1, -4], **options)
    objective = tw.GRPO(ratio_level="turn", weighting="per_rollout", clip_low=None, clip_high=9.0)
    loss, gradient, _ = step([[whole]], objective)
    found = step([[first, whole]], objective)
    assert found[0] == pytest.approx(loss, rel=1e-6)
    assert gradient_error(found[1], gradient) < 1e-6


def test_advantages_of_nodes_are_those_of_their_tokens() -> None:
    parents, token_ids = [-1, 0, 0], [[1, 2], [3, 4], [5]]
    forest = Forest.from_nodes(parents, token_ids, advantages=[0.0, 2.0, -1.5])
    assert [item.advantages.tolist() for item in forest.trajectories] == [[0, 0, 2, 2], [0, 0, -1.5]]
    flat = [Trajectory([1, 2, 3, 4], advantages=[0, 0, 2, 2]), Trajectory([1, 2, 5], advantages=[0, 0, -1.5])]
    _, expected, _ = step([flat], tw.DAPO())
    EXACT.zero_grad()
    TreeEngine(EXACT, check=False).step(forest, tw.DAPO())
    assert gradient_error(gradients_of(EXACT), expected) < 1e-6


# -- what a step reports ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [None, 7])
def test_metrics_by_hand(max_tokens: int | None) -> None:
    items = sample(3)
    objective = tw.GRPO(clip_low=0.1, beta=0.1, measure_entropy=True, sampler_correction="truncate", sampler_max=1.1)
    EXACT.zero_grad()
    out = TreeEngine(EXACT, max_tokens, check=False).step(Forest.from_trajectories(items), objective)
    with torch.no_grad():
        rows = run_padded(EXACT, items)
    logp = rows.logprobs.double()
    old, ref, sampler, advantages, weights = (
        stream(items, name, logp) for name in (*STREAMS[:3], "advantages", "loss_weights")
    )
    ratio = torch.exp(logp - old)
    values = {
        "ratio": ratio,
        "approx_kl": ratio - 1 - (logp - old),
        "clip_fraction": (((ratio < 0.9) & (advantages < 0)) | ((ratio > 1.1) & (advantages > 0))).double(),
        "kl": torch.exp(ref - logp) - (ref - logp) - 1,
        "entropy": rows.entropy.double(),
        "sampler_ratio": torch.exp(old - sampler),
        "sampler_weight": torch.exp(old - sampler).clamp(max=1.1),
        "sampler_truncated": (torch.exp(old - sampler) > 1.1).double(),
        "logprob_gap": torch.exp((old - sampler).abs()),
    }
    expected = {name: float((weights * value).sum() / weights.sum()) for name, value in values.items()}
    assert min(expected["clip_fraction"], expected["sampler_truncated"]) > 0
    assert dict(out.metrics) == pytest.approx(expected, rel=1e-6)
    assert out.weight == pytest.approx(float(weights.sum()))
    assert tw.logprob_gap(items) == pytest.approx(expected["logprob_gap"])
    evaluated = TreeEngine(EXACT, max_tokens, check=False).evaluate(Forest.from_trajectories(items), objective)
    assert evaluated.loss == pytest.approx(out.loss)
    assert evaluated.metrics == pytest.approx(out.metrics)


def test_metrics_need_the_streams_that_they_speak_about() -> None:
    bare = [Trajectory([1, 2, 3], advantages=1.0), Trajectory([1, 2, 4], advantages=-1.0)]
    out = TreeEngine(EXACT, check=False).step(Forest.from_trajectories(bare), tw.GRPO())
    assert out.metrics == {}
    with pytest.raises(DataError, match="no sampler_logprobs, so there is no gap"):
        tw.logprob_gap([replace(item, old_logprobs=[0.0] * 3) for item in bare])
    with pytest.raises(DataError, match="no old_logprobs"):
        tw.logprob_gap(bare)
    with pytest.raises(DataError, match="no trajectory given"):
        tw.logprob_gap([])


def test_sequence_weights_are_those_of_the_distinct_tokens_of_a_rollout() -> None:
    items = sample(4, with_old=False)
    objective = tw.REINFORCE(sampler_correction="truncate", sampler_level="sequence", sampler_max=3.0)
    out = TreeEngine(EXACT, 6, check=False).step(Forest.from_trajectories(items), objective)
    with torch.no_grad():
        logp = run_padded(EXACT, items).logprobs.double()
    weights = stream(items, "loss_weights", logp)
    sums = over_rollouts(logp - stream(items, "sampler_logprobs", logp), items, is_mean=False)
    expected = (weights * torch.exp(sums).clamp(max=3.0)).sum() / weights.sum()
    assert out.metrics["sampler_weight"] == pytest.approx(float(expected), rel=1e-6)


def test_distillation_reports_the_mass_of_the_candidates() -> None:
    items = sample(5)
    out = TreeEngine(EXACT, 6, check=False).step(Forest.from_trajectories(items), tw.Distillation())
    weights = np.concatenate([item.loss_weights for item in items])
    mass = np.concatenate([np.exp(item.teacher_logprobs.astype(float)).sum(1) for item in items])
    assert out.metrics["teacher_mass"] == pytest.approx((weights * mass).sum() / weights.sum(), rel=1e-6)
    assert 0 < out.metrics["student_mass"] < 1


# -- scoring ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [None, 6])
@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs", "sampler_logprobs"])
def test_scored_fills_a_stream(max_tokens: int | None, name: str) -> None:
    items = sample()
    found = TreeEngine(EXACT, max_tokens, check=False).scored(items, name)
    everywhere = TreeEngine(EXACT, max_tokens, check=False).scored(items, name, all_tokens=True)
    with torch.no_grad():
        expected = run_padded(EXACT, items).logprobs.numpy()
    for row, (before, after, full) in enumerate(zip(items, found, everywhere, strict=True)):
        trained = before.loss_weights > 0
        np.testing.assert_allclose(getattr(after, name)[trained], expected[row, : len(before)][trained], rtol=1e-6)
        np.testing.assert_allclose(getattr(full, name), expected[row, : len(before)], rtol=1e-6)
        untouched = {each.name for each in fields(Trajectory)} - {name}
        assert all(np.array_equal(getattr(after, each), getattr(before, each)) for each in untouched - {"rollout"})


def test_ratios_to_scored_logprobs_are_one() -> None:
    engine = TreeEngine(EXACT, 6, check=False)
    items = engine.scored(sample(with_old=False))
    out = engine.step(Forest.from_trajectories(items), tw.GRPO())
    assert out.metrics["ratio"] == pytest.approx(1, abs=1e-6)
    assert out.metrics["clip_fraction"] == 0
    bare = [replace(item, old_logprobs=None) for item in items]
    assert engine.step(Forest.from_trajectories(bare), tw.GRPO()).loss == pytest.approx(out.loss, rel=1e-6)


def test_a_reference_is_the_model_without_its_adapter() -> None:
    items = sample()
    base = TreeEngine(tiny_model("llama", num_hidden_layers=2), check=False).scored(items, "ref_logprobs")
    model = get_peft_model(tiny_model("llama", num_hidden_layers=2), LoraConfig(r=4, lora_dropout=0.0))
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.3)
    engine = TreeEngine(model, 8, check=False)
    with model.disable_adapter():
        off = engine.scored(items, "ref_logprobs")
    on = engine.scored(items, "ref_logprobs")
    gap = [np.abs(a.ref_logprobs - b.ref_logprobs).max() for a, b in zip(off, base, strict=True)]
    assert max(gap) < 1e-6
    assert max(np.abs(a.ref_logprobs - b.ref_logprobs).max() for a, b in zip(on, base, strict=True)) > 1e-3


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_missing_streams_are_named() -> None:
    good = Trajectory([1, 2, 3], advantages=1.0, old_logprobs=[0, -1, -1])
    bare = Trajectory([1, 2, 4], advantages=1.0, source="rows.jsonl:2")
    engine = TreeEngine(EXACT, check=False)
    for objective, item, message in (
        (tw.GRPO(), Trajectory([1, 2], source="rows.jsonl:2"), "rows.jsonl:2: no advantages"),
        (tw.GRPO(), bare, "rows.jsonl:2: no old_logprobs"),
        (tw.GRPO(beta=0.1), good, "trajectory 0: no ref_logprobs"),
        (tw.GRPO(sampler_correction="mask"), good, "trajectory 0: no sampler_logprobs"),
        (tw.Distillation(), good, "trajectory 0: no teacher_ids"),
    ):
        with pytest.raises(DataError, match=message):
            engine.step(Forest.from_trajectories([good, item]), objective)
    lonely = Trajectory([1, 2, 3], teacher_ids=[[1]] * 3, teacher_logprobs=[[-1.0], [-1.0], [-np.inf]], source="t:1")
    with pytest.raises(DataError, match="t:1: token 2 is trained, but its teacher has no candidate"):
        engine.step(Forest.from_trajectories([lonely]), tw.Distillation())


BAD_SETTINGS = [
    ("grpo", {"kl": "k4"}, "kl='k4'"),
    ("grpo", {"clip_low": -0.1}, "clip_low=-0.1"),
    ("grpo", {"clip_low": "low"}, "objective 'grpo': clip_low='low' must be a number or none"),
    ("grpo", {"constant": 4}, "constant=4 belongs to"),
    ("grpo", {"weighting": "twice"}, "weighting='twice'"),
    ("grpo", {"normalization": "mean"}, "normalization='mean'"),
    ("grpo", {"dual_clip": 1.1}, "dual_clip=1.1 must exceed"),
    ("grpo", {"max_ratio": 2.0}, "surrogate='cispo' and max_ratio"),
    ("grpo", {"surrogate": "best"}, "surrogate='best'"),
    ("grpo", {"betta": 1}, "unknown setting 'betta' of objective 'grpo'. Did you mean 'beta'"),
    ("reinforce", {"surrogate": "clip"}, "objective 'reinforce' determines surrogate; leave it out"),
    ("reinforce", {"ratio_level": "sequence"}, "has no ratio"),
    ("reinforce", {"ratio_level": "turn"}, "has no ratio"),
    ("grpo", {"ratio_level": "turns"}, "ratio_level='turns'"),
    ("grpo", {"sampler_level": "turn"}, "sampler_level='turn'"),
    ("cispo", {"max_ratio": 0}, "max_ratio=0"),
    ("dr_grpo", {}, "'dr_grpo' needs max_length"),
    ("dr_grpo", {"max_length": 0}, "constant=0 must be positive"),
    ("ppo", {"sampler_correction": "mask", "sampler_max": None}, "needs sampler_min or sampler_max"),
    ("ppo", {"sampler_correction": "mask", "sampler_min": 2.5}, "must be less than sampler_max"),
    ("ppo", {"normalization": "constant"}, "needs constant"),
    ("sft", {"constant": 3.0}, "constant=3.0 belongs to"),
    ("sft", {"beta": 1}, "unknown setting 'beta' of objective 'sft'"),
    ("distillation", {"tail": "none"}, "tail='none'"),
    ("distillation", {"divergence": "js"}, "divergence='js'"),
    ("ddpo", {}, "unknown objective 'ddpo'"),
    ("gpo", {}, "Did you mean"),
]


@pytest.mark.parametrize(("name", "given_settings", "message"), BAD_SETTINGS)
def test_bad_settings_are_refused(name: str, given_settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        objective_named(name, **given_settings)


def test_objectives_by_name() -> None:
    assert objective_named("grpo", beta=0.04) == tw.GRPO(beta=0.04)
    assert objective_named("dr_grpo", max_length=9) == tw.DrGRPO(max_length=9)
    assert objective_named("sft", weighting="once") == SFT("once")
    assert objective_named("distillation") == tw.Distillation()
    assert all(isinstance(each, Objective) for each in ALL.values())


def test_a_function_takes_no_denominator() -> None:
    forest = Forest.from_trajectories(sample())
    with pytest.raises(ConfigError, match="denominator= belongs to an objective"):
        TreeEngine(EXACT, check=False).step(forest, lambda logprobs: logprobs[0].sum(), denominator=2.0)


def test_unknown_stream() -> None:
    with pytest.raises(ConfigError, match="stream='advantages'"):
        TreeEngine(EXACT, check=False).scored(sample(), "advantages")
