"""Recorded experts are replayed as flat training with them is, for every family of mixtures; and what cannot be is named.

The oracle knows nothing of how experts are chosen: on the output of a router it finds the formula that turns logits and
chosen experts into weights, and applies it to the recorded experts.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

import treewise as tw
from treewise.errors import DataError, UnsupportedModelError
from treewise.nn.model import split_model
from treewise.nn.routing import heard, routers_of
from treewise.testing.families import causal_families, tiny_model
from treewise.tree.trajectory import Trajectory


def mixtures():
    """Every family with routers that transformers names."""
    found = []
    for family in causal_families():
        try:
            decoder = split_model(tiny_model(family)).decoder
        except Exception:  # not built, or no tree: `test_support_table` has why
            continue
        if routers_of(decoder):
            found.append(family)
    return found


ELSEWHERE = {"dbrx", "deepseek_v4", "phimoe"}
MIXTURES = mixtures()


def random_routes(model, trajectories, seed=0, share=0.8):
    """The trajectories with experts drawn for some tokens; those that share a prefix often share its routes."""
    rng = np.random.default_rng(seed)
    routers = routers_of(split_model(model).decoder)
    table = {}

    def drawn(prefix):
        if prefix not in table or rng.random() < 0.1:
            table[prefix] = np.stack([rng.permutation(experts_of(each))[: chosen_of(model, each)] for each in routers])
            if rng.random() > share:
                table[prefix] = np.full_like(table[prefix], -1)
        return table[prefix]

    return [
        replace(item, routed_experts=np.stack([drawn(tuple(item.token_ids[: at + 1])) for at in range(len(item))]))
        for item in trajectories
    ]


def experts_of(router):
    return vars(router.module)["weight"].shape[0] if "weight" in vars(router.module) else logits_of(router)


def logits_of(router):
    return next(each.shape[0] for each in reversed(list(router.module.parameters())) if each.ndim >= 1)


def chosen_of(model, _router):
    config = model.config.get_text_config()
    names = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k", "num_experts_per_token")
    return next(getattr(config, name) for name in names if getattr(config, name, None))


TREE = [
    Trajectory([5, 6, 7, 8, 9, 10, 11], [0, 1, 0, 1, 1, 1, 1]),
    Trajectory([5, 6, 7, 8, 12, 13], [0, 1, 0, 1, 1, 1]),
    Trajectory([5, 6, 7, 8, 12, 14, 15, 16], [0, 1, 0, 0, 1, 1, 1, 1]),
    Trajectory([5, 20, 21], [0, 1, 1]),
]


def formulas():
    """Weights [T, k] from logits [T, E] and experts [T, k]."""
    for name, act in (
        ("softmax", lambda z: z.softmax(-1)),
        ("sigmoid", lambda z: z.sigmoid()),
        ("softplus", lambda z: torch.nn.functional.softplus(z).sqrt()),
        ("exp", lambda z: (z - z.detach().max(-1, keepdim=True).values).exp()),
        ("logits", lambda z: z),
    ):
        yield name, lambda z, i, act=act: act(z).gather(-1, i)
        yield name + " of one", lambda z, i, act=act: (w := act(z).gather(-1, i)) / w.sum(-1, keepdim=True)


def with_experts(logits, weights, chosen, experts):
    """A router's weights where it had chosen other experts."""
    for name, formula in formulas():
        ours = formula(logits.float(), chosen)
        scale = (weights.float() / ours).detach()
        if torch.allclose(scale, scale.mean(), rtol=1e-4):
            return formula(logits.float(), experts).to(weights.dtype) * scale.mean()
    raise AssertionError(f"no formula gives the weights of the router: {weights} of {logits}")


def flat_loss(model, items):
    """The loss of each trajectory alone, its routers' outputs replaced."""
    routers = routers_of(split_model(model).decoder)
    total, weight = 0, 0
    for item in items:
        hooks = []
        for number, router in enumerate(routers):
            table = None if item.routed_experts is None else torch.as_tensor(item.routed_experts[:, number].astype(np.int64))

            def swap(module, _args, output, table=table, router=router):
                if table is None:
                    return output
                if type(module).__name__ == "Llama4Router":  # scores of all experts, 0 where not chosen
                    logits = output[1]
                    kept = torch.full_like(logits, float("-inf")).scatter(1, table.clamp(min=0), logits.gather(1, table.clamp(min=0)))
                    return torch.where(table[:, :1] >= 0, kept.float().sigmoid().to(output[0].dtype), output[0]), logits
                logits, weights, chosen, *rest = output
                experts = torch.where(table >= 0, table, chosen.reshape(table.shape))
                flat = logits.reshape(len(table), -1)
                found = with_experts(flat, weights.reshape(table.shape), chosen.reshape(table.shape), experts)
                return logits, found.reshape(weights.shape), experts.reshape(chosen.shape).to(chosen.dtype), *rest

            hooks.append(router.module.register_forward_hook(swap))
        try:
            logits = model(input_ids=torch.as_tensor(item.token_ids.astype(np.int64))[None], use_cache=False).logits[0].float()
        finally:
            for hook in hooks:
                hook.remove()
        logprobs = logits[:-1].log_softmax(-1).gather(-1, torch.as_tensor(item.token_ids[1:].astype(np.int64))[:, None])[:, 0]
        weights = torch.as_tensor(item.loss_weights[1:])
        total, weight = total - (logprobs * weights).sum(), weight + weights.sum()
    return total / weight


def gradients(model):
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    return found


def difference(ours, theirs):
    assert ours.keys() >= {name for name, each in theirs.items() if each.abs().max() > 0}
    return max(
        (float((ours[name] - each).norm() / theirs_norm) for name, each in theirs.items() if name in ours),
        default=0.0,
    ) if (theirs_norm := torch.cat([each.flatten() for each in theirs.values()]).norm()) else 0.0


def assert_replays(model, items, budgets=(None, 5), **options):
    flat = flat_loss(model, items)
    flat.backward()
    theirs = gradients(model)
    for budget in budgets:
        engine = tw.TreeEngine(model, max_tokens=budget, check=False, **options)
        output = engine.step(tw.Forest.from_trajectories(items))
        assert output.loss == pytest.approx(float(flat), rel=1e-5)
        assert difference(gradients(model), theirs) < 1e-5
    return output


@pytest.mark.parametrize("family", MIXTURES)
def test_every_family_replays_as_flat_training_does(family):
    model = tiny_model(family)
    items = random_routes(model, TREE)
    if family in ELSEWHERE:
        with pytest.raises(UnsupportedModelError, match="router"):
            tw.TreeEngine(model, check=False).step(tw.Forest.from_trajectories(items))
        return
    model.train()
    output = assert_replays(model, items)
    assert output.replay.num_otherwise > 0
