"""One draw as a model, trees and an objective, without treewise's engine.

Letters: L tokens of a trajectory, V vocabulary.
"""

import copy
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from tests import image_models as images
from tests import replayed_rows
from tests.crossings import space
from tests.crossings.drawing import Draw, ImpossibleError
from tests.flat_objectives import run_alone
from treewise.nn.model import split_model
from treewise.nn.routing import routers_of
from treewise.objectives import DPO, KTO, SFT, Distillation, PolicyGradient, with_mismatched
from treewise.testing.families import tiny_model
from treewise.tree import routes
from treewise.tree.images import ImageSpan
from treewise.tree.trajectory import Trajectory

NUM_STEPS = 2
PICTURES = (images.png(1), images.png(2, 30, 20))
# Log-probs of other policies differ from the model's by these, far from every bound of `space.POLICY`.
OFFSETS = (-0.6, -0.05, 0.02, 0.6)
LEARNING_RATE = 1e-3
REPLAYED = ("exact", "by_tokens")

Tree = list[Trajectory]


@dataclass(frozen=True)
class Case:
    """What a draw trains. steps: the trees of each optimizer step; flat_steps: the same, each trajectory with the
    experts that it is trained through. processor: of images; None where there are none."""

    draw: Draw
    model: Any
    steps: list[list[Tree]]
    flat_steps: list[list[Tree]]
    objective: Any
    processor: Any

    @property
    def is_per_call(self) -> bool:
        """Whether the loss of a step is the sum of those of its calls."""
        return self.draw["objective"] in space.FUNCTIONS

    def calls(self, step: int, steps: list[list[Tree]] | None = None) -> list[list[Tree]]:
        """The trees of each call of a step."""
        trees, number = (self.steps if steps is None else steps)[step], self.draw["accumulation"]
        return [trees[len(trees) * index // number : len(trees) * (index + 1) // number] for index in range(number)]

    def fresh_model(self) -> PreTrainedModel:
        """A copy of the model before training."""
        return copy.deepcopy(self.model)


def make_case(draw: Draw) -> Case:
    """Raises `ImpossibleError` where transformers or PEFT cannot build it."""
    rng = np.random.default_rng(draw["seed"])
    try:
        model = adapted(base_model(draw), draw)
        mark_trained(model, draw)
        trees = [some_tree(draw, rng, index) for index in range(NUM_STEPS * trees_per_step(draw))]
        processor = images.FAMILIES[draw["family"]].images() if draw["images"] != "none" else None
        if processor is not None:
            rows = [images.num_rows(model, processor, picture) for picture in PICTURES]
            trees = [with_images(tree, draw["images"], rows) for tree in trees]
        if draw["replay"] != "none":
            trees = with_routes(trees, model, draw, rng)
        trees = with_streams(trees, wide(model), processor, draw, rng)
    except ImpossibleError:
        raise
    except Exception as error:
        raise ImpossibleError(f"{type(error).__name__}: {error}") from error
    size = trees_per_step(draw)
    sides = [[as_given(tree, draw) for tree in trees], [as_trained(tree, draw) for tree in trees]]
    steps, flat = ([side[step * size : (step + 1) * size] for step in range(NUM_STEPS)] for side in sides)
    return Case(draw, model, steps, flat, objective_of(draw), processor)


def trees_per_step(draw: Draw) -> int:
    """Two, or one for each batch of a step where these are more."""
    return max(2, draw["accumulation"] * space.MESHES[draw["processes"]][1])


def precision_of(draw: Draw) -> str:
    """The name of the dtype that rounding is of."""
    return "bfloat16" if draw["autocast"] else draw["dtype"]


# -- model ------------------------------------------------------------------------------------------------------------


def base_model(draw: Draw) -> PreTrainedModel:
    """The family's tiny model, in its dtype."""
    changes = copy.deepcopy(space.VARIANTS[draw["variant"]])
    dtype = getattr(torch, draw["dtype"])
    if draw["family"] in space.SEEING:
        own = copy.deepcopy(images.FAMILIES[draw["family"]].changes)
        text = {**own.pop("text_config", {}), **changes}
        changes = {"image_token_id": images.IMAGE_TOKEN, **own, "text_config": text}
    model = tiny_model(draw["family"], dtype, seed=draw["seed"] % 1000, **changes)
    if dtype == torch.float64:
        run_experts_in_loops(model)
    elif (
        precision_of(draw) == "bfloat16"
        and draw["replay"] not in REPLAYED
        and any("experts" in name for name, _ in model.named_modules())
    ):
        raise ImpossibleError("experts that are chosen in bfloat16 change with its rounding")
    if draw["replay"] != "none":  # routers are far from indifferent, or all formulas give equal weights
        for router in routers_of(split_model(model).decoder):
            for parameter in router.module.parameters():
                nn.init.normal_(parameter, std=0.5)
    return model


def run_experts_in_loops(model: nn.Module) -> None:
    """transformers' grouped multiplication has no float64."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"


def wide(model: nn.Module) -> PreTrainedModel:
    """A copy in float64."""
    result = copy.deepcopy(model).double()
    run_experts_in_loops(result)
    return result


def adapted(model: Any, draw: Draw) -> Any:
    """The model inside PEFT, where an adapter is drawn; fresh ones are stirred, because they are the identity."""
    if draw["trained"] not in space.ADAPTERS:
        return model
    import peft

    kind, settings = space.ADAPTERS[draw["trained"]]
    head, embedding = (_name_of(model, each) for each in (model.get_output_embeddings(), model.get_input_embeddings()))
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not re.search(rf"vision|visual|projector|[.](gate|{head})$", name)
    }
    ends = ("projector", "merger", "connector")
    projector = next((name.rpartition(".")[2] for name, _ in model.named_modules() if name.endswith(ends)), "")
    stand_ins = {"HEAD": head, "EMBEDDING": embedding, "PROJECTOR": projector}
    filled = {
        name: [stand_ins.get(each, each) for each in value] if isinstance(value, list) else value
        for name, value in settings.items()
    }
    if "target_parameters" in filled:
        filled["target_parameters"] = projections_of_routers(model)
    if filled.get("target_modules") == "LINEAR":
        filled["target_modules"] = sorted(linear)
    result = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **filled))
    generator = torch.Generator().manual_seed(draw["seed"])
    for parameter in result.parameters():
        if parameter.requires_grad:
            parameter.data += (0.1 * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)
    return result.train()


def projections_of_routers(model: nn.Module) -> list[str]:
    """Names of the parameters of routers, [experts, width] each."""
    routers = [router.module for router in routers_of(split_model(model).decoder)]
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if any(module is router for router in routers)
        for name, each in module.named_parameters()
        if each.dim() == 2
    ]


def _name_of(model: nn.Module, wanted: nn.Module | None) -> str:
    return next((name.rpartition(".")[2] for name, module in model.named_modules() if module is wanted), "")


def mark_trained(model: nn.Module, draw: Draw) -> None:
    """Leaves `requires_grad` to what is drawn, where no adapter decides it."""
    if draw["trained"] in space.ADAPTERS:
        return
    numbers = [int(each) for name, _ in model.named_parameters() for each in re.findall("[.]([0-9]+)[.]", name)]
    pattern = space.TRAINED[draw["trained"]].replace("LAST", str(max(numbers, default=0)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(pattern, name) is not None)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ImpossibleError(f"no parameter for trained={draw['trained']!r}")


def add_hooks(model: nn.Module, draw: Draw) -> None:
    """What a user may hang on a model, on one side; deep copies of a model have none."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if draw["hooks"] == "gradient":
        trained[0].register_hook(lambda gradient: 0.5 * gradient)
    elif draw["hooks"] == "accumulated":

        def squash(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad /= 1 + parameter.grad.norm()

        trained[-1].register_post_accumulate_grad_hook(squash)
    elif draw["hooks"] == "output":
        layers = [module for name, module in model.named_modules() if re.search("(layers|h|layer)[.]1$", name)]
        if not layers:
            raise ImpossibleError("no layer to hook")
        layers[-1].register_forward_hook(_scaled)


def _scaled(_module: nn.Module, _inputs: object, output: Any) -> object:
    return (1.1 * output[0], *output[1:]) if isinstance(output, tuple) else 1.1 * output


# -- data -------------------------------------------------------------------------------------------------------------


def some_tree(draw: Draw, rng: np.random.Generator, index: int) -> Tree:
    """Rollouts of one prompt, a group of their own, with loss weights, advantages and rewards. No two trees share a
    token, so a step is the same however its trees are divided.
    """
    shape = draw["shape"]
    prompt = np.concatenate([[3 + index], rng.integers(12, 50, int(rng.integers(1, 5)))])
    rows = [np.concatenate([prompt, rng.integers(12, 50, int(rng.integers(5, 10)))])]
    rollouts = [0]
    for number in range(1, 1 if shape == "chain" else 3 + index % 2):
        above = rows[int(rng.integers(len(rows)))]
        cut = len(prompt) if shape in ("star", "apart") else int(rng.integers(len(prompt), len(above)))
        row = np.concatenate([above[:cut], rng.integers(12, 50, int(rng.integers(1, 7)))])
        if shape == "apart":
            row[0] += 8 * max(0, number - 1)
        if shape == "copies" and number > 1:
            row = above if number == 2 else above[: max(len(prompt) + 1, len(above) - 2)]
        rows.append(row)
        rollouts.append(rollouts[-1] if shape == "rows" and number == 2 else rollouts[-1] + 1)
    rewards = rng.permutation(len(rows))
    return [
        _trajectory(row, len(prompt), rng, index, rollout, float(rewards[rollout]))
        for row, rollout in zip(rows, rollouts, strict=True)
    ]


def _trajectory(
    ids: np.ndarray, num_prompt: int, rng: np.random.Generator, group: int, rollout: int, reward: float
) -> Trajectory:
    weights = rng.choice([0.0, 0.5, 1.0, 1.0, 2.0], len(ids))
    weights[:num_prompt] = 0
    weights[-1] = 1.0
    advantages = rng.normal() + 0.3 * rng.normal(size=len(ids))
    return Trajectory(
        ids, loss_weights=weights, advantages=advantages, group=group, rollout=f"{group}.{rollout}", reward=reward
    )


def with_images(tree: Tree, where: str, rows: list[int]) -> Tree:
    """The tree with a picture behind every first token, or with one of two before the answers of some rollouts.

    rows: placeholder tokens of each of `PICTURES`.
    """
    result = []
    for number, item in enumerate(tree):
        picture = 0 if where == "prompt" else number % 3
        at = 1 if where == "prompt" else int(np.flatnonzero(item.loss_weights)[0])
        if picture == 2:  # a rollout without
            result.append(item)
            continue
        span = ImageSpan(PICTURES[picture], at, at + rows[picture])
        streams = {"loss_weights": 0.0, "advantages": 0.0, "token_ids": images.IMAGE_TOKEN}
        longer: dict[str, Any] = {
            name: np.insert(getattr(item, name), at, [fill] * rows[picture]) for name, fill in streams.items()
        }
        result.append(replace(item, images=(span,), **longer))
    return result


def with_routes(trees: list[Tree], model: nn.Module, draw: Draw, rng: np.random.Generator) -> list[Tree]:
    """The trees with recorded experts, which part now and then. In bfloat16 all are recorded, because what a router
    chooses changes with rounding."""
    sizes = replayed_rows.router_sizes(model)
    is_whole = precision_of(draw) == "bfloat16"
    return [
        replayed_rows.random_routes(
            sizes, tree, rng, parting=rng.choice([0.0, 0.1, 0.5]), unknown=0.0 if is_whole else rng.choice([0.0, 0.3])
        )
        for tree in trees
    ]


def as_given(tree: Tree, draw: Draw) -> Tree:
    """A tree as treewise gets it, by what is done with its records."""
    if draw["replay"] == "off":
        return [replace(item, routed_experts=None) for item in tree]
    return routes.by_tokens(tree) if draw["replay"] == "by_tokens" else tree


def as_trained(tree: Tree, draw: Draw) -> Tree:
    """A tree with the experts that each trajectory is trained through."""
    if draw["replay"] == "off":
        return [replace(item, routed_experts=None) for item in tree]
    return replayed_rows.filled(replayed_rows.first_by_tokens(tree) if draw["replay"] == "by_tokens" else tree)


def with_streams(
    trees: list[Tree], model: nn.Module, processor: Any, draw: Draw, rng: np.random.Generator
) -> list[Tree]:
    """The trees with log-probs of other policies and candidates of a teacher, near those of the model."""
    objective = draw["objective"]
    if objective == "kto":
        trees = with_mismatched(trees)
    if objective == "kto_zero" or objective == "kto":
        trees = [
            [replace(item, reward=None if item.reward is None else item.reward % 2) for item in tree] for tree in trees
        ]
    result = []
    for tree in trees:
        with torch.no_grad(), replayer_of(model, draw) as replayer:
            alone, seen = as_trained(tree, draw), seen_by(model, processor)
            rows = run_alone(model, alone, temperature=draw["temperature"], seen=seen, replayer=replayer)
        result.append(
            [_with_streams(item, rows.everything[row].numpy(), objective, rng) for row, item in enumerate(tree)]
        )
    return result


def replayer_of(model: nn.Module, draw: Draw) -> AbstractContextManager[replayed_rows.Replayer | None]:
    """What gives rows their recorded experts, where they have any."""
    return replayed_rows.replayed(model) if draw["replay"] in REPLAYED else nullcontext()


def seen_by(model: nn.Module, processor: Any) -> Callable[[Trajectory], dict[str, torch.Tensor]]:
    """What the model's own forward takes of a trajectory's images."""
    return lambda item: images.row_inputs(model, processor, item)


def _with_streams(item: Trajectory, logprobs_LV: np.ndarray, objective: str, rng: np.random.Generator) -> Trajectory:
    length = len(item)
    own = logprobs_LV[np.arange(length), item.token_ids]

    def near() -> np.ndarray:
        return np.minimum(own + rng.choice(OFFSETS, length), 0.0)

    streams: dict[str, Any] = {}
    if objective in space.POLICY and objective != "on_policy":
        streams["old_logprobs"] = near()
    if objective in ("truncated", "masked", "sequence_masked"):
        streams["sampler_logprobs"] = near()
    if objective in space.POLICY or objective in space.PREFERENCES:
        streams["ref_logprobs"] = near()
    if objective in space.DISTILLATIONS:
        ids = np.stack([rng.permutation(60)[:3] for _ in range(length)])
        teacher = np.log(rng.dirichlet([1.0] * 4, length)[:, :3])
        streams |= {"teacher_ids": ids, "teacher_logprobs": np.where(teacher < -6, -6.0, teacher)}
        streams["teacher_logprobs"][rng.random(length) < 0.3, 2] = -np.inf
    return replace(item, **streams)


# -- objective --------------------------------------------------------------------------------------------------------


def objective_of(draw: Draw) -> Any:
    """An objective, or a function of log-probs."""
    name = draw["objective"]
    norm: dict[str, Any] = {"weighting": draw["weighting"], "normalization": draw["normalization"]}
    if draw["normalization"] == "constant":
        norm["constant"] = 7.0
    if name == "sft":
        return SFT(**norm)
    if name in space.DISTILLATIONS:
        return Distillation(**space.DISTILLATIONS[name], **norm)
    if name in space.PREFERENCES:
        return (KTO if name.startswith("kto") else DPO)(**space.PREFERENCES[name])
    if name in space.FUNCTIONS:
        return focal
    kl: dict[str, Any] = {} if draw["reference"] == "none" else {"kl": draw["reference"], "beta": 0.2}
    return PolicyGradient(**{**space.POLICY[name], **norm, **kl})


def focal(logprobs: list[torch.Tensor]) -> torch.Tensor:
    """A loss of one's own, which couples all tokens."""
    values = torch.cat(logprobs)
    return -((1 - values.exp()) ** 2 * values).mean() + 0.1 * torch.logsumexp(values, 0)


def trained_parts(logprobs: list[torch.Tensor], items: Tree) -> list[torch.Tensor]:
    """[trained tokens] log-probs of each trajectory's trained tokens."""
    masks = [torch.from_numpy(np.asarray(item.loss_weights[1:]) != 0) for item in items]
    return [values[mask] for values, mask in zip(logprobs, masks, strict=True)]
