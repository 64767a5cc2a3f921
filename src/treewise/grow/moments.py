"""The optimizer's state of a checkpoint of `treewise train`, grown with its weights.

The gradient of a copied weight is that of the weight divided by the number of copies that its output has, because what
sums over those is divided by it. So first moments are repeated and divided by it, and second moments by its square (up
to the noise that parts the copies). Layers that begin as the identity have no earlier gradients, and get no state.
"""

from dataclasses import replace
from pathlib import Path

import torch

from treewise.errors import ConfigError
from treewise.grow.growth_plan import GrowthPlan, shapes_of
from treewise.grow.widening import LAYER, Role, TensorRole, repeat_blocks, role_of
from treewise.trainer.checkpoint.optimizer_state import OPTIMIZER, read_optimizer, save_optimizer

# Entries of an optimizer's state by the power of the gradient that they are means of.
POWERS = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "momentum_buffer": 1}


def grow_optimizer(source: Path, output: Path, plan: GrowthPlan) -> None:
    """Writes the grown state beside the grown weights, as checkpoints hold it. It is held in memory.

    Raises:
        ConfigError: no such state in `source`, or an entry of it that has no rule.
        CheckpointError: a state that is cut or damaged.
    """
    if not (source / f"{OPTIMIZER}.safetensors").is_file():
        raise ConfigError(
            f"{source}: no {OPTIMIZER}.safetensors, so there is no optimizer state to grow; name a whole checkpoint of "
            "treewise train, or drop it."
        )
    small, shapes = read_optimizer(source), shapes_of(plan.grown_config)
    grown = {
        grown_name: {entry: grown_entry(name, entry, value, plan, shapes) for entry, value in entries.items()}
        for name, entries in small.entries.items()
        for grown_name in grown_names(name, plan, with_identities=False)
    }
    groups = [
        {
            **group,
            "params": [each for name in group["params"] for each in grown_names(name, plan, with_identities=True)],
        }
        for group in small.groups
    ]
    save_optimizer(output, replace(small, entries=grown, groups=groups))


def grown_names(name: str, plan: GrowthPlan, *, with_identities: bool) -> list[str]:
    """Names of the grown model's parameters that come from one of the small model's."""
    match = LAYER.fullmatch(name)
    if match is None:
        return [name]
    return [
        f"{match['head']}{layer}{match['tail']}"
        for layer, source in enumerate(plan.layer_sources)
        if source == int(match["layer"]) and (with_identities or layer not in plan.identities)
    ]


def grown_entry(name: str, entry: str, value: object, plan: GrowthPlan, shapes: dict[str, tuple[int, ...]]) -> object:
    """One entry of a parameter's state, for the grown parameter.

    Parameters:
        name: of the small model's parameter; experts may lie in one tensor, [experts, out, in].
        value: a tensor in the parameter's shape, or what belongs to the parameter as a whole.
        shapes: of the grown model's parameters, by name.

    Raises:
        ConfigError: an entry that has no rule.
    """
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    if entry not in POWERS:
        raise ConfigError(
            f"{name}: the optimizer keeps {entry!r}, which has no growth rule; {', '.join(POWERS)} have one. Drop the "
            "optimizer's state."
        )
    is_fused = value.dim() == 3
    role = role_of(
        f"{name}.weight" if is_fused else name,
        tuple(value.shape[1:] if is_fused else value.shape),
        plan.config,
        None if is_fused else shapes.get(name),
    )
    factor, experts = gradient_factor(role, plan), plan.widening.experts if is_fused else 1
    rows, columns = plan.widening.factors(role)
    parts = [repeat_blocks(each, role.blocks, rows) for each in (value if is_fused else value[None])]
    wide = torch.stack([each.repeat(1, columns) if each.dim() == 2 else each for each in parts])
    wide = wide.repeat(experts, *[1] * (wide.dim() - 1)) if is_fused else wide[0]
    return wide * (factor / experts) ** POWERS[entry]


def gradient_factor(role: TensorRole, plan: GrowthPlan) -> float:
    """The gradient of each copy of a weight, over that of the weight; of one expert among its copies it is less."""
    rule = plan.widening
    if role.role in (Role.HEAD, Role.FIXED):
        return 1.0
    if role.role is Role.EMBEDDING:
        return 1 / (rule.width * rule.embedding_scale)
    if role.role is Role.POSITIONS:
        return 1 / rule.width
    if role.role is Role.FINAL_NORM and plan.config.tie_word_embeddings:
        return rule.embedding_scale
    return 1 / rule.factors(role)[0]
