"""Both sides of a crossing: two steps of plain torch on each trajectory alone, and two steps of treewise; compared."""

import contextlib
import io
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import distributed, nn
from transformers import TrainerCallback
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.crossings import case as cases
from tests.crossings import ranks, space
from tests.crossings.case import LEARNING_RATE, NUM_STEPS, Case, Tree
from tests.crossings.drawing import Draw, ImpossibleError, WrongError
from tests.flat_objectives import Rows, loss_of_rows, run_alone
from tests.replayed_rows import Replayer
from treewise import share_prefixes
from treewise.distributed.mesh import load_on_mesh
from treewise.engine import TreeEngine
from treewise.objectives import Objective
from treewise.testing.oracle import Gradients, gradient_error, gradients_of
from treewise.trainer import TreeTrainer, TreeTrainingArguments
from treewise.tree.forest import Forest

LogprobsOf = Callable[[Tree], list[torch.Tensor]]
# How many times flat training's own distance from float64 a tree may be away from it.
FACTORS = {"float32": 8.0, "float64": 1.0, "bfloat16": 3.0}


@dataclass
class Trained:
    """What a side computed: the loss and the gradients (after clipping) of each step, and how far the weights moved.

    sizes: on the flat side, how much the loss of each step moves where every log-prob moves by one, for its terms may
    cancel.
    """

    losses: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    moves: Gradients = field(default_factory=dict)


def check(draw: Draw) -> None:
    """`check_here`, in as many processes as are drawn."""
    num_ranks = space.MESHES[draw["processes"]][0]
    if num_ranks == 1:
        check_here(draw)
    else:
        ranks.check(draw, num_ranks)


def check_here(draw: Draw) -> None:
    """Raises `WrongError` where trees and flat training differ, what treewise raises, and `ImpossibleError` where flat
    training fails."""
    with quiet():
        case = cases.make_case(draw)
        try:
            exact = train_flat(case, cases.wide(case.model))
            flat_model = case.fresh_model()
            flat_model = flat_model.float() if draw["dtype"] == "float64" else flat_model
            prepare_checkpoints(flat_model, draw)
            flat = train_flat(case, flat_model)
            refuse_inexact(draw, flat, exact)
        except ImpossibleError:
            raise
        except Exception as error:
            raise ImpossibleError(f"flat: {type(error).__name__}: {error}") from error
        tree = SIDES[draw["interface"]](case, case.fresh_model())
        compare(draw, tree, flat, exact)


def refuse_inexact(draw: Draw, flat: Trained, exact: Trained) -> None:
    """Raises `ImpossibleError` where flat training is itself no measure: reentrant checkpoints lose gradients of keys
    that layers share (Gemma 3n), and all of a layer whose input needs none (a tower's first)."""
    for ours, theirs in zip(flat.gradients, exact.gradients, strict=True):
        if lost := [name for name, each in theirs.items() if name not in ours and each.any()]:
            raise ImpossibleError(f"flat training has no gradient of {lost[0]} (checkpoints {draw['checkpoints']})")
        error = gradient_error(ours, theirs)
        if error > (0.5 if cases.precision_of(draw) == "bfloat16" else 1e-2):
            raise ImpossibleError(f"flat training is itself off by {error:.0e} (checkpoints {draw['checkpoints']})")


# -- flat -------------------------------------------------------------------------------------------------------------


def train_flat(case: Case, model: torch.nn.Module) -> Trained:
    """Each trajectory through the model's own forward; the loss by its formula; torch's optimizer."""
    cases.add_hooks(model, case.draw)
    if case.draw["interface"] == "shared":
        add_fused_head(case, model)
    result, before, optimizer = Trained(), weights_of(model), optimizer_of(case.draw, model)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        calls = case.calls(step, case.flat_steps) if case.is_per_call else [case.flat_steps[step]]
        with cases.replayer_of(model, case.draw) as replayer:
            with autocast(case.draw):  # nothing in float64 follows it
                parts = [
                    flat_loss_of(case, model, [item for tree in call for item in tree], replayer) for call in calls
                ]
            loss = torch.stack([each for each, _ in parts]).sum()
            loss.backward()
        result.sizes.append(sum(float(each.grad.abs().sum()) for _, each in parts if each.grad is not None))
        finish_step(case.draw, model, result, float(loss.detach()))
        optimizer.step()
    result.moves = moves_of(model, before)
    return result


def flat_loss_of(case: Case, model: Any, items: Tree, replayer: Replayer | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of some trajectories, with a graph, and the log-probs that it is of, whose gradient is kept."""
    seen, routers = cases.seen_by(model, case.processor), []
    hook = model.register_forward_hook(lambda _, __, output: routers.append(getattr(output, "router_logits", None)))
    if case.draw["interface"] == "shared":
        rows = rows_of([fused_logprobs(model, [item])[0] for item in items], items)
    else:
        rows = run_alone(model, items, temperature=case.draw["temperature"], seen=seen, replayer=replayer)
    hook.remove()
    rows.logprobs.retain_grad()
    if case.draw["objective"] != "function_of_trained":
        loss = loss_of_rows(rows, items, case.objective)
    else:
        logprobs = [rows.logprobs[row, 1 : len(item)] for row, item in enumerate(items)]
        loss = case.objective(cases.trained_parts(logprobs, items))
    if case.draw["variant"] == "routed":
        layers = tuple(torch.cat(each) for each in zip(*routers, strict=True))  # of all rows as one batch
        loss = loss + model.config.router_aux_loss_coef * load_balancing_loss_func(
            layers, layers[0].shape[1], model.config.num_experts_per_tok
        )
    return loss, rows.logprobs


def autocast(draw: Draw) -> torch.autocast:
    """What is drawn, on a CPU."""
    return torch.autocast("cpu", torch.bfloat16, enabled=draw["autocast"])


def optimizer_of(draw: Draw, model: nn.Module) -> torch.optim.Optimizer:
    """Over what is trained; AdamW with an epsilon that keeps it from making noise as large as a gradient."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if draw["optimizer"] == "sgd":
        return torch.optim.SGD(parameters, LEARNING_RATE)
    return torch.optim.AdamW(parameters, LEARNING_RATE, eps=0.01, weight_decay=0.0)


def finish_step(draw: Draw, model: nn.Module, result: Trained, loss: float) -> None:
    """Clips, and takes down what the optimizer is about to apply."""
    if draw["clip"]:
        torch.nn.utils.clip_grad_norm_(model.parameters(), draw["clip"])
    result.losses.append(loss)
    result.gradients.append(gradients_of(model))


def weights_of(model: nn.Module) -> Gradients:
    """Copies of what is trained."""
    return {name: whole(each.detach()).clone() for name, each in model.named_parameters() if each.requires_grad}


def moves_of(model: nn.Module, before: Gradients) -> Gradients:
    """How far each weight has moved."""
    return {name: each.double() - before[name].double() for name, each in weights_of(model).items()}


# -- trees ------------------------------------------------------------------------------------------------------------


def train_engine(case: Case, model: torch.nn.Module) -> Trained:
    """By `TreeEngine.step`, or by a loss of one's own on log-probs of `TreeEngine` or of TRL's head."""
    draw = case.draw
    cases.add_hooks(model, draw)
    prepare_layers(model, draw)
    result, before, optimizer = Trained(), weights_of(model), optimizer_of(draw, model)
    if draw["interface"] == "shared":
        engine, logprobs_of = shared_logprobs(case, model)
    else:
        engine = TreeEngine(
            model,
            budget_of(case),
            draw["attention"],
            hold=draw["hold"],
            temperature=draw["temperature"],
            check=draw["probe"],
            offload=draw["offload"],
            processor=case.processor,
        )
        logprobs_of = partial(engine_logprobs, case, engine)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        with window_of(draw, engine), autocast(draw):
            if draw["interface"] == "step":
                loss = step_engine(case, engine, step)
            else:
                loss = step_by_logprobs(case, logprobs_of, step)
        finish_step(draw, model, result, loss)
        optimizer.step()
    result.moves = moves_of(model, before)
    return result


def engine_logprobs(case: Case, engine: TreeEngine, items: Tree) -> list[torch.Tensor]:
    """Those of `TreeEngine.logprobs`."""
    of_trained = case.draw["objective"] == "function_of_trained"
    return engine.logprobs(Forest.from_trajectories(items), trained_only=of_trained)


def window_of(draw: Draw, sharing: Any) -> contextlib.AbstractContextManager[Any]:
    """Around the calls of a step of an engine, or of what `share_prefixes` returned."""
    settings: dict[str, dict[str, int]] = {"held": {}, "again": {"hold_tokens": 0}, "bounded": {"max_tokens": 24}}
    return contextlib.nullcontext() if draw["window"] == "none" else sharing.window(**settings[draw["window"]])


def parts_of(draw: Draw, items: Tree) -> list[list[int]]:
    """The rows of each call: all in one; within a window in an order and in sizes that are drawn."""
    if draw["window"] == "none":
        return [[*range(len(items))]]
    random = np.random.default_rng(draw["seed"])
    cuts = np.sort(random.integers(1, len(items) + 1, 3))
    return [part.tolist() for part in np.split(random.permutation(len(items)), cuts) if len(part)]


def shared_logprobs(case: Case, model: Any) -> tuple[Any, LogprobsOf]:
    """Those of TRL's fused head, after `treewise.share_prefixes`, and what that returns."""
    add_fused_head(case, model)
    sharing = share_prefixes(model, budget_of(case), attention=case.draw["attention"], min_ratio=1.0)
    of_trained = case.draw["objective"] == "function_of_trained"

    def logprobs_of(items: Tree) -> list[torch.Tensor]:
        found = fused_logprobs(model, items)
        return cases.trained_parts(found, items) if of_trained else found

    return sharing, logprobs_of


def add_fused_head(case: Case, model: Any) -> None:
    """As TRL's trainers do. It is not always the model's own head (it takes no adapter of that), so flat training has
    it, too.
    """
    from trl.trainer.utils import add_fused_lm_head

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    add_fused_lm_head(base, temperature=case.draw["temperature"])


def fused_logprobs(model: Any, items: Tree) -> list[torch.Tensor]:
    """[length - 1] log-probs of each trajectory, as TRL's trainers call for those of a batch."""
    rows = [torch.from_numpy(item.token_ids).long() for item in items]
    ids, mask = (
        nn.utils.rnn.pad_sequence(each, batch_first=True) for each in (rows, [torch.ones_like(row) for row in rows])
    )
    labels = ids.masked_fill(mask == 0, -100)
    found = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
    return [found[row, : len(item) - 1] for row, item in enumerate(items)]


def rows_of(logprobs: list[torch.Tensor], items: Tree) -> Rows:
    """Log-probs of trajectories as padded rows, without anything else."""
    length = max(len(item) for item in items)
    padded = torch.stack([nn.functional.pad(each, (1, length - 1 - len(each))) for each in logprobs])
    return Rows(padded, padded, padded)


def step_engine(case: Case, engine: TreeEngine, step: int) -> float:
    """One optimizer step in one call, or in several with their common denominator."""
    calls, objective = case.calls(step), case.objective
    if len(calls) == 1 or not isinstance(objective, Objective):
        of_trained = case.draw["objective"] == "function_of_trained"
        given = [items_of(case.draw, trees) for trees in calls]
        return math.fsum(engine.step(items, objective, trained_only=of_trained).loss for items in given)
    denominator = objective.denominator(forest_of(case.steps[step]))
    given = [items_of(case.draw, trees) for trees in calls]
    return math.fsum(engine.step(items, objective, denominator=denominator).loss for items in given)


def step_by_logprobs(case: Case, logprobs_of: LogprobsOf, step: int) -> float:
    """A loss of one's own on differentiable log-probs: the objective's formula, as on flat rows."""
    items = [item for tree in case.steps[step] for item in tree]
    of_item: dict[int, torch.Tensor] = {}
    for part in parts_of(case.draw, items):
        own = [items[index] for index in part]
        if of_item:  # an evaluation in between
            with torch.no_grad():
                logprobs_of(own[:1])
        of_item |= zip(part, logprobs_of(own), strict=True)
    logprobs = [of_item[index] for index in range(len(items))]
    if case.draw["objective"] == "function_of_trained":
        loss = case.objective(logprobs)
    else:
        loss = loss_of_rows(rows_of(logprobs, items), items, case.objective)
    loss.backward()
    return float(loss.detach())


def train_trainer(case: Case, model: torch.nn.Module) -> Trained:
    """By `TreeTrainer`, in one run or resumed after the first step."""
    draw = case.draw
    cases.add_hooks(model, draw)
    taken, before = _Taken(), weights_of(model)
    with (
        tempfile.TemporaryDirectory() as folder,
        shared_folder(folder) as run_folder,
        mock.patch("treewise.trainer.step.TreeEngine", partial(TreeEngine, hold=draw["hold"])),
    ):
        model = loaded(model, draw, f"{run_folder}/model")
        if draw["resumed"]:
            trainer = trainer_of(
                case, model, run_folder, [taken, _StopAfterFirst()], save_strategy="steps", save_steps=1
            )
            taken.trainer = trainer
            trainer.train()
            model = case.fresh_model()
            cases.add_hooks(model, draw)
            model = loaded(model, draw, f"{run_folder}/model")
        trainer = taken.trainer = trainer_of(case, model, run_folder, [taken])
        trainer.train(resume_from_checkpoint=True if draw["resumed"] else None)
    taken.result.losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    taken.result.moves = moves_of(trainer.model, before)
    return taken.result


@contextlib.contextmanager
def shared_folder(own: str) -> Iterator[str]:
    """The first process's folder, until all processes are done with it."""
    if not distributed.is_initialized():
        yield own
        return
    names = [own]
    distributed.broadcast_object_list(names)
    try:
        yield names[0]
    finally:  # also where all of them are refused
        distributed.barrier()


def loaded(model: Any, draw: Draw, folder: str) -> Any:
    """The model, as this process's part of a mesh that divides layers or experts."""
    if draw["processes"] not in space.LOADED:
        return model
    sizes = {name: size for name, size in space.MESHES[draw["processes"]][2].items() if name in ("tp_size", "ep_size")}
    if distributed.get_rank() == 0:
        model.save_pretrained(folder)
    distributed.barrier()
    result = load_on_mesh(folder, dtype=getattr(torch, draw["dtype"]), **sizes).train()
    cases.mark_trained(result, draw)
    cases.add_hooks(result, draw)
    return result


def trainer_of(
    case: Case, model: torch.nn.Module, folder: str, callbacks: list[TrainerCallback], **saving: object
) -> TreeTrainer:
    """A trainer whose steps are those of the case."""
    draw = case.draw
    _, batches, mesh = space.MESHES[draw["processes"]]
    args = TreeTrainingArguments(
        output_dir=folder,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=len(case.steps[0]) // draw["accumulation"] // batches,
        gradient_accumulation_steps=draw["accumulation"],
        max_tokens=budget_of(case),
        attention=draw["attention"],
        temperature=draw["temperature"],
        offload=draw["offload"],
        gradient_checkpointing={"none": False, "auto": "auto"}.get(draw["checkpoints"], True),
        gradient_checkpointing_kwargs={"use_reentrant": draw["checkpoints"] == "reentrant"},
        torch_compile=draw["compiled"],
        torch_compile_backend="eager" if draw["compiled"] else None,
        max_grad_norm=draw["clip"],
        steps_per_epoch=None if draw["items"] == "trees" else NUM_STEPS,
        optim="sgd" if draw["optimizer"] == "sgd" else "adamw_torch",
        adam_epsilon=0.01,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        bf16=draw["autocast"],
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **{"save_strategy": "no", **saving, **mesh},
    )
    trees = [tree for step in case.steps for tree in step]
    return TreeTrainer(
        model,
        args,
        train_dataset=trees if draw["items"] == "trees" else [row for tree in trees for row in tree],
        objective=case.objective,
        processing_class=case.processor,
        callbacks=callbacks,
    )


class _Taken(TrainerCallback):
    """Takes down the gradients that the optimizer applies."""

    trainer: Any = None

    def __init__(self) -> None:
        self.result = Trained()

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        grads = {name: each.grad for name, each in self.trainer.model.named_parameters() if each.grad is not None}
        self.result.gradients.append({name: whole(grad).clone() for name, grad in grads.items()})


def whole(tensor: Any) -> torch.Tensor:
    """A tensor of all ranks."""
    result: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return result


class _StopAfterFirst(TrainerCallback):
    def on_step_end(self, _args: Any, state: Any, control: Any, **_: object) -> None:
        control.should_training_stop = state.global_step == 1


def prepare_layers(model: torch.nn.Module, draw: Draw) -> None:
    """Activation checkpoints, and one compiled layer."""
    prepare_checkpoints(model, draw)
    if draw["compiled"]:
        for name, module in model.named_modules():
            if name.endswith((".layers.1", ".h.1")):
                module.compile(dynamic=True, backend="eager")


def prepare_checkpoints(model: Any, draw: Draw) -> None:
    """Activation checkpoints, as transformers has them."""
    if draw["checkpoints"] not in ("none", "auto"):
        model.gradient_checkpointing_enable({"use_reentrant": draw["checkpoints"] == "reentrant"})


def items_of(draw: Draw, trees: list[Tree]) -> list[Forest]:
    """What a call or a data set gets of some trees: each of them, or each row as a tree of its own."""
    apart = trees if draw["items"] == "trees" else [[row] for tree in trees for row in tree]
    return [Forest.from_trajectories(tree) for tree in apart]


def forest_of(trees: list[Tree]) -> Forest:
    """The forest of some trees."""
    return Forest.concatenate([Forest.from_trajectories(tree) for tree in trees])


def budget_of(case: Case) -> int | None:
    """None, a few tokens, or half of the smallest call; an image is never cut."""
    if case.draw["budget"] == "whole":
        return None
    forests = [forest_of(call) for step in range(NUM_STEPS) for call in case.calls(step)]
    tokens = 5 if case.draw["budget"] == "tiny" else min(forest.num_tokens for forest in forests) // 2
    return max(1, tokens, *(forest.images.largest for forest in forests))


SIDES: dict[str, Callable[[Case, Any], Trained]] = {
    "step": train_engine,
    "logprobs": train_engine,
    "shared": train_engine,
    "trainer": train_trainer,
}


# -- comparison -------------------------------------------------------------------------------------------------------


def compare(draw: Draw, tree: Trained, flat: Trained, exact: Trained) -> None:
    """Raises `WrongError` with every gradient, move and loss of a tree that is further from flat training in float64
    than flat training in its own dtype, a few times.

    Flat training in float32 stands for float64, too: norms are computed in float32 by most models.
    """
    precision = cases.precision_of(draw)
    factor = FACTORS[precision]
    eps = torch.finfo(torch.bfloat16 if precision == "bfloat16" else torch.float32).eps
    wrong = []
    for step in range(NUM_STEPS):
        gradients = tree.gradients[step], flat.gradients[step], exact.gradients[step]
        wrong += differences(f"gradient of step {step + 1}", *gradients, factor, eps)
        found, expected = tree.losses[step], exact.losses[step]
        allowed = factor * (abs(flat.losses[step] - expected) + 8 * eps * (abs(expected) + exact.sizes[step]))
        if not abs(found - expected) <= allowed:
            wrong.append(f"loss of step {step + 1}: {found:.7g}, flat {expected:.7g}, allowed {allowed:.1e}")
    wrong += differences("move", tree.moves, flat.moves, exact.moves, factor, eps)
    if wrong:
        raise WrongError("\n".join([*wrong[:6], *([f"and {len(wrong) - 6} more"] if len(wrong) > 6 else [])]))


def differences(what: str, tree: Gradients, flat: Gradients, exact: Gradients, factor: float, eps: float) -> list[str]:
    """A line for each tensor that is too far away; sizes are relative to the tensor's norm."""
    one_sided = [
        name for name in tree.keys() ^ exact.keys() if any(each[name].any() for each in (tree, exact) if name in each)
    ]
    if one_sided:
        return [f"{what}: only on one side: {', '.join(sorted(one_sided)[:4])}"]
    names = tree.keys() & exact.keys() & flat.keys()
    norm = {name: float(exact[name].double().norm()) for name in names}
    off = {name: float((flat[name].double() - exact[name].double()).norm()) for name in names}
    whole = math.hypot(*norm.values())
    typical = max(math.hypot(*off.values()) / (whole or 1.0), 4 * eps)
    lines = []
    for name in sorted(names):
        found = float((tree[name].double() - exact[name].double()).norm())
        allowed = factor * (off[name] + typical * norm[name] + eps * whole)
        if not found <= allowed:
            size = norm[name] or 1.0
            lines.append(f"{what}: {name} is off by {found / size:.1e}, allowed {allowed / size:.1e}")
    return lines


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without warnings, logs and tables, of libraries on tiny models, too."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    nowhere = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
