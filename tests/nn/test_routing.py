"""Recorded experts are replayed as in flat training, for every family of mixtures; and what cannot be is named."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import treewise as tw
from tests import replayed_rows
from tests.needs import EXPERTS, ROUTERS, require
from tests.replayed_rows import ELSEWHERE, MIXTURES, filled, replayed, router_sizes
from treewise.engine.flat import FlatLoss
from treewise.errors import DataError, UnsupportedModelError
from treewise.nn.model import split_model
from treewise.nn.routing import check_record, heard, routers_of
from treewise.nn.routing import router_sizes as routing_sizes
from treewise.testing.families import tiny_model
from treewise.tree.trajectory import Trajectory

# Mixtures whose routers transformers names since 5.19.
NAMED_LATER = {"dbrx", "deepseek_v2", "deepseek_v3", "granitemoe", "jetmoe", "llama4_text"}


def random_routes(model, trajectories, share=0.8):
    """The trajectories with experts drawn for some tokens; those that share a prefix often share its routes."""
    return replayed_rows.random_routes(router_sizes(model), trajectories, np.random.default_rng(0), unknown=1 - share)


def ids_of(values):
    return torch.as_tensor(values.astype(np.int64))


TREE = [  # of one group, but for the last
    Trajectory([5, 6, 7, 8, 19, 10, 11], [0, 1, 0, 1, 1, 1, 1], group="g"),
    Trajectory([5, 6, 7, 8, 12, 13], [0, 1, 0, 1, 1, 1], group="g"),
    Trajectory([5, 6, 7, 8, 12, 14, 15, 16], [0, 1, 0, 0, 1, 1, 1, 1], group="g"),
    Trajectory([5, 20, 21], [0, 1, 1], group="g"),
    Trajectory([5, 6, 7, 22], [0, 1, 1, 1]),
]


def flat_loss(model, items):
    """The loss of each trajectory alone, its routers' outputs replaced."""
    total, weight = 0, 0
    for item in items:
        with replayed(model) as replayer, replayer.row(item):
            logits = model(input_ids=ids_of(item.token_ids)[None], use_cache=False).logits[0].float()
        logprobs = (
            logits[:-1].log_softmax(-1).gather(-1, torch.as_tensor(item.token_ids[1:].astype(np.int64))[:, None])[:, 0]
        )
        weights = torch.as_tensor(item.loss_weights[1:])
        total, weight = total - (logprobs * weights).sum(), weight + weights.sum()
    return total / weight


def gradients(model):
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def difference(ours, theirs):
    assert ours.keys() >= {name for name, each in theirs.items() if each.abs().max() > 0}
    return (
        max(
            (float((ours[name] - each).norm() / theirs_norm) for name, each in theirs.items() if name in ours),
            default=0.0,
        )
        if (theirs_norm := torch.cat([each.flatten() for each in theirs.values()]).norm())
        else 0.0
    )


def flat_step(model, items):
    flat = flat_loss(model, filled(items))
    flat.backward()
    return flat, gradients(model)


def assert_replays(model, items, budgets=(None, 5), flat_of=None, **options):
    flat, theirs = flat_step(model, items) if flat_of is None else flat_of
    forest = tw.Forest.from_trajectories(items)
    for budget in budgets:
        engine = tw.TreeEngine(model, max_tokens=budget, check=False, **options)
        output = engine.step(forest)
        assert output.loss == pytest.approx(flat.item(), rel=1e-5)
        assert difference(gradients(model), theirs) < 1e-5
    return output


def mixture(family, **changes):
    """A tiny model whose routers are far from indifferent, so that no two formulas give the same weights."""
    if family in NAMED_LATER:
        require(ROUTERS)
    model = tiny_model(family, **changes)
    for router in routers_of(split_model(model).decoder):
        for parameter in router.module.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.representatives("qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe", "llama4_text", "jetmoe", "dbrx")
@pytest.mark.parametrize("family", MIXTURES)
def test_every_family_replays_as_flat_training_does(family):
    model = mixture(family)
    if family in ELSEWHERE:
        items = [replace(item, routed_experts=np.tile([0, 1], (len(item), 3, 1))) for item in TREE]
        with pytest.raises(UnsupportedModelError, match=r"chooses experts (in another way|of several kinds)"):
            tw.TreeEngine(model, check=False).step(items)
        return
    output = assert_replays(model, random_routes(model, TREE))
    assert output.replay.num_otherwise > 0


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}),
        (
            "step3p7",
            {
                "text_config": {
                    "mlp_layer_types": ["dense", "sparse", "sparse"],
                    "share_expert_dim": 24,
                    "moe_router_scaling_factor": 2.5,
                    "swiglu_limits": [None, 0.5, None],
                }
            },
        ),
    ],
)
def test_families_whose_smallest_model_is_dense_replay_too(family, changes):
    """Their experts are a setting, which the table of models was made without."""
    model = mixture(family, **changes)
    assert len(router_sizes(model)) == (3 if family == "gemma4_text" else 2)
    output = assert_replays(model, random_routes(model, TREE), budgets=(None, 5, 3))
    assert output.replay.num_otherwise > 0


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_every_product_of_experts_is_exact(way, is_recorded):
    """Of transformers' `experts_implementation`, with a replay and without, against one that loops."""
    model = mixture("qwen3_moe")
    items = random_routes(model, TREE) if is_recorded else TREE
    model.set_experts_implementation("eager")
    flat = flat_step(model, items)
    model.set_experts_implementation(way)
    assert_replays(model, items, flat_of=flat)


def test_groups_are_those_of_the_recorded_experts():
    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
    for family, more in (("deepseek_v2", {"topk_method": "group_limited_greedy"}), ("deepseek_v3", {})):
        model = mixture(family, **groups, **more)
        # Of two groups of two experts each: 0, 1 and 6 are of the first and the last.
        items = [replace(item, routed_experts=np.tile([0, 1, 6], (len(item), 2, 1))) for item in TREE]
        assert_replays(model, items)


def test_a_record_may_have_all_layers_of_the_model():
    model = mixture("deepseek_v3")  # its first layer is dense
    items = random_routes(model, TREE, share=1)
    whole = [replace(item, routed_experts=np.pad(item.routed_experts, ((0, 0), (1, 0), (0, 0)))) for item in items]
    assert whole[0].routed_experts.shape[1] == 3
    losses = [tw.TreeEngine(model).evaluate(each).loss for each in (items, whole)]
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "qwen3_next"])
@pytest.mark.parametrize("options", [{"use_reentrant": False}, {"use_reentrant": True}])
def test_checkpointing_replays_the_experts_of_its_own_micro_batch(family, options):
    if options["use_reentrant"] and family == "qwen3_next":
        pytest.skip("hybrids refuse reentrant checkpoints")
    model = mixture(family)
    items = random_routes(model, TREE)
    flat = flat_step(model, items)
    model.gradient_checkpointing_enable(options)
    assert_replays(model, items, budgets=(None, 5, 3), flat_of=flat)


@pytest.mark.parametrize("hold", ["never", "always"])
def test_held_micro_batches_keep_their_experts(hold):
    model = mixture("qwen3_moe")
    assert_replays(model, random_routes(model, TREE), budgets=(5, 2), hold=hold)


# PEFT's wrapper of a parameter fails in these layers, or they do not call it.
WITHOUT_WRAPPERS = ("ernie4_5_moe", "llama4", "llama4_text", "longcat_flash")


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.representatives("qwen3_moe", "olmoe", "deepseek_v2")
@pytest.mark.parametrize("family", [each for each in MIXTURES if each not in (*ELSEWHERE, *WITHOUT_WRAPPERS)])
def test_adapters_of_routers_are_trained_in_the_first_step(family):
    """PEFT keeps a parameter with its adapter for a forward: who first reads it there decides whether it has a graph.
    Beside other adapters, and alone, where a lost gradient is the whole."""
    items = random_routes(mixture(family), TREE)
    for targets in (["o_proj"], []):
        flat = None
        for options in (None, {"use_reentrant": False}, {"use_reentrant": True}):
            model = with_adapted_routers(mixture(family), targets)
            flat = flat or flat_step(model, items)
            if options is not None and model.supports_gradient_checkpointing:
                model.gradient_checkpointing_enable(options)
                model.enable_input_require_grads()
            assert_replays(model, items, budgets=(None, 5), flat_of=flat)


def with_adapted_routers(model, targets):
    """A model with adapters on the parameter of its routers, and on modules of some names."""
    peft = pytest.importorskip("peft")
    routers = [router.module for router in routers_of(split_model(model).decoder)]
    parameters = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if any(module is router for router in routers)
        for name, each in module.named_parameters()
        if each.dim() == 2
    ]
    torch.manual_seed(0)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=targets, target_parameters=parameters, init_lora_weights=False)
    )


@pytest.mark.exhaustive
@EXPERTS
def test_compiled_layers_replay():
    model = mixture("qwen3_moe")
    items = random_routes(model, TREE)
    flat = flat_step(model, items)
    for layer in model.model.layers:
        layer.compile(dynamic=True, backend="eager")
    assert_replays(model, items, flat_of=flat)


def test_the_flat_oracle_of_verify_replays_as_this_one():
    model = mixture("qwen3_moe")
    forest = tw.Forest.from_trajectories(random_routes(model, TREE))
    flat, theirs = flat_step(model, forest.trajectories)
    run = FlatLoss(forest.trajectories, tw.SFT()).run(model, torch.device("cpu"))
    assert run.loss == pytest.approx(flat.item(), rel=1e-5)
    assert difference(gradients(model), theirs) < 1e-5
    once = tw.SFT(weighting="once")  # equal tokens that took other experts are trained on their own
    assert FlatLoss(forest.trajectories, once).run(model, torch.device("cpu")).loss == pytest.approx(
        tw.TreeEngine(model, check=False).evaluate(forest, once).loss, rel=1e-5
    )


def test_the_probe_passes_and_forwards_without_a_record_are_as_before():
    model = mixture("qwen3_moe")
    items = random_routes(model, TREE)
    plain = [replace(item, routed_experts=None) for item in items]
    before = tw.TreeEngine(model).evaluate(plain)
    assert before.replay is None
    engine = tw.TreeEngine(model)
    replayed = engine.evaluate(items)
    assert replayed.loss != before.loss
    assert engine.evaluate(plain).loss == before.loss


def test_what_a_model_chooses_itself_changes_nothing_when_it_is_replayed():
    model = mixture("olmoe")
    items = []
    with heard(split_model(model).decoder) as routes, torch.no_grad():
        for item in TREE:
            model(input_ids=ids_of(item.token_ids)[None], use_cache=False)
            items.append(replace(item, routed_experts=routes.taken(1)[0]))
    engine = tw.TreeEngine(model)
    output = engine.evaluate(items)
    assert output.loss == pytest.approx(engine.evaluate(TREE).loss, rel=1e-6)
    assert (
        output.num_tree_tokens == tw.Forest.from_trajectories(TREE).num_tokens
    )  # the same tokens took the same experts
    assert (output.replay.num_recorded, output.replay.num_otherwise) == (output.num_tree_tokens, 0)


def test_tokens_that_would_have_gone_elsewhere_are_counted():
    model = mixture("olmoe")
    item = TREE[0]
    with heard(split_model(model).decoder) as routes, torch.no_grad():
        model(input_ids=ids_of(item.token_ids)[None], use_cache=False)
        table = routes.taken(1)[0]
    table[2, 1] = [each for each in range(4) if each not in table[2, 1]]  # the last layers follow, in part
    table[5] = -1
    replay = tw.TreeEngine(model).evaluate([replace(item, routed_experts=table)]).replay
    assert replay.num_recorded == len(item) - 1
    assert replay.num_choices == 3 * (len(item) - 1)
    assert 1 <= replay.num_otherwise <= replay.num_otherwise_choices


def test_tokens_of_other_groups_are_counted():
    """Within the recorded groups a router may choose the recorded experts, and would have chosen other groups."""
    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "num_hidden_layers": 2}
    model, rng = mixture("deepseek_v3", **groups), np.random.default_rng(0)  # one router
    ids = rng.integers(3, 60, 60)
    with heard(split_model(model).decoder) as routes, torch.no_grad():
        model(input_ids=ids_of(ids)[None], use_cache=False)
        own = np.sort(routes.taken(1)[0], axis=-1)
    pairs = np.stack([np.sort(rng.permutation(4)[:2]) for _ in ids])  # two groups of two experts each
    table = np.stack([np.sort(rng.permutation(np.stack([2 * each, 2 * each + 1]).flatten())[:3]) for each in pairs])
    replay = tw.TreeEngine(model).evaluate([Trajectory(ids, routed_experts=table[:, None].astype(np.int16))]).replay
    assert replay.num_otherwise_choices == (table != own[:, 0]).any(-1).sum()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, 1]] * 2, r"rows:1: routed_experts of 2 layers, but the model has 3 routers in 3 layers"),
        ([[0, 1, 2]] * 3, r"rows:1: routed_experts of 3 experts a token, but layer 0 of the model chooses 2"),
        ([[0, 1], [2, 9], [0, 1]], r"rows:1: routed_experts\[0\] layer 1: expert 9, but the model has 4 there"),
    ],
)
def test_a_record_of_another_model_is_named(table, message):
    item = Trajectory([5, 6, 7], routed_experts=[table] * 3, source="rows:1")
    with pytest.raises(DataError, match=message):
        tw.TreeEngine(mixture("qwen3_moe")).step([item])


def test_experts_of_more_groups_than_the_model_chooses_are_named():
    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
    table = [[0, 1, 3], [0, 3, 7]]  # two experts a group: the last are of three
    item = Trajectory([5, 6, 7], routed_experts=[table] * 3, source="rows:1")
    words = r"rows:1: routed_experts\[0\] layer 2: experts \[0, 3, 7\] of 3 groups, but the model chooses 2 of 4 there"
    for family, more in (("deepseek_v2", {"topk_method": "group_limited_greedy"}), ("deepseek_v3", {})):
        model = mixture(family, **groups, **more)
        with pytest.raises(DataError, match=words):
            tw.TreeEngine(model).step([item])
        with pytest.raises(DataError, match=words):
            check_record(item.routed_experts, routing_sizes(model, split_model(model).decoder), "rows:1")


def test_a_router_that_its_layer_does_not_call_is_named():
    """As with kernels from the hub, which replace a layer's forward."""
    model = mixture("qwen3_moe")
    items = random_routes(model, TREE)
    engine = tw.TreeEngine(model, check=False)
    model.model.layers[1].mlp.forward = lambda hidden: hidden
    words = r"layers.1.mlp.gate \(Qwen3MoeTopKRouter\) is not called by its layer .* set routing_replay=off"
    with pytest.raises(UnsupportedModelError, match=words):
        engine.step(items)
    with heard(split_model(model).decoder) as routes:
        model(input_ids=ids_of(TREE[0].token_ids)[None])
        with pytest.raises(UnsupportedModelError, match=words):
            routes.taken(1)


def test_routers_of_which_peft_has_copies_are_refused_with_a_way():
    peft = pytest.importorskip("peft")
    model = mixture("qwen3_moe")
    items = random_routes(model, TREE)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"], modules_to_save=["gate"]))
    with pytest.raises(UnsupportedModelError, match=r"modules_to_save has copies .* target_parameters adapts a router"):
        tw.TreeEngine(model, check=False).step(items)


def test_a_dense_model_refuses_a_record():
    with pytest.raises(UnsupportedModelError, match="has no router that transformers names"):
        tw.TreeEngine(tiny_model("llama")).step([Trajectory([5, 6], routed_experts=[[[0]], [[1]]])])
