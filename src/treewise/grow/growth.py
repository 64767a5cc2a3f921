"""`grow`: a checkpoint folder of transformers to a larger one."""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from treewise.errors import ConfigError, UnsupportedModelError
from treewise.grow.checkpoint import SmallCheckpoint, copy_companions, new_checkpoint, write_tensors
from treewise.grow.configuration import Target, check_like, grown_configuration, refuse_configuration, target_like
from treewise.grow.function_check import TOLERANCE, largest_difference, load_whole
from treewise.grow.growth_plan import GrowthPlan, widening_of
from treewise.grow.layer_map import layer_sources
from treewise.grow.moments import grow_optimizer
from treewise.grow.operator_training import OperatorSettings, trained_operator

logger = logging.getLogger("treewise")
OPERATORS = ("copy", "stack", "ligo", "mango")
LEARNED = ("ligo", "mango")
OPTIMIZER_CHOICES = ("drop", "grow")


@dataclass(frozen=True, slots=True)
class GrowReport:
    """What `grow` did; `grow.json` in the output holds the same.

    Attributes:
        source: the small model's folder.
        source_sha256: SHA-256 over its weight files.
        output: the grown model's folder.
        operator: `copy`, `stack`, `ligo` or `mango`.
        depth: how layers were added, `zero` or `stack`.
        width, inner, num_layers, experts: factors, and layers of the grown model.
        noise, seed: of what parts the copies.
        optimizer: what became of the source's optimizer state, `drop` or `grow`.
        num_parameters_before, num_parameters_after: counted in the checkpoints.
        keeps_function: whether this operator promises equal logits.
        logit_difference: largest difference, relative to the largest logit; None: not checked.
        rank, steps, learning_rate, data_sha256: of a learned operator, else None.
        operator_losses: loss at each of its steps.
    """

    source: str
    source_sha256: str
    output: str
    operator: str
    depth: str
    width: int
    inner: int
    num_layers: int
    experts: int
    noise: float
    seed: int
    optimizer: str
    num_parameters_before: int
    num_parameters_after: int
    keeps_function: bool
    logit_difference: float | None = None
    rank: int | None = None
    steps: int | None = None
    learning_rate: float | None = None
    data_sha256: str | None = None
    operator_losses: tuple[float, ...] = ()


def grow(
    source: str | Path,
    output: str | Path,
    *,
    width: int = 1,
    inner: int | None = None,
    num_layers: int | None = None,
    experts: int = 1,
    like: Any = None,
    operator: str = "copy",
    noise: float = 0.01,
    seed: int = 0,
    optimizer: str = "drop",
    check: bool = True,
    forests: Sequence[Any] | None = None,
    settings: OperatorSettings | None = None,
) -> GrowReport:
    """Grows a model.

    `copy` repeats units and adds layers that begin as the identity; logits stay. `stack` adds copies of the whole
    stack of layers; logits change. `ligo` (arXiv 2303.00980) and `mango` (arXiv 2310.10699) begin as a copy and are
    fitted to the task loss for some steps, the small model frozen, before the large weights are made from them;
    logits change.

    Parameters:
        source: folder of the small model, with safetensors.
        output: folder to write, which must not exist.
        width: whole factor of hidden size, heads and key heads.
        inner: whole factor of the inner sizes of MLPs and experts; None: `width`.
        num_layers: layers of the grown model; None: as many as the small one has.
        experts: whole factor of experts and of experts per token.
        like: configuration of the wanted model, in place of width, inner, num_layers and experts.
        operator: one of `OPERATORS`.
        noise: breaks the symmetry between copies, in standard deviations of each matrix; sums over copies keep their
            value.
        seed: of the noise and of a learned operator.
        optimizer: `drop`, or `grow` the optimizer's state that lies in `source`, a checkpoint of `treewise train`.
        check: compare logits of both models (both are loaded in float32).
        forests: `ligo` and `mango`: the trees that the operator is fitted to.
        settings: `ligo` and `mango`: rank, steps, learning rate, budget.

    Raises:
        UnsupportedModelError: a family, field or tensor that no rule covers (named), or logits that did not stay.
        ConfigError: a target that is no growth (the field is named), an unknown operator, an existing output, missing
            data or files.
    """
    source, output = Path(source), Path(output)
    _check_settings(operator, optimizer, noise)
    if output.exists():
        raise ConfigError(f"{output} exists already; name a folder that does not exist.")
    if operator in LEARNED and not forests:
        raise ConfigError(f"operator {operator!r} is fitted to trees: give data.")
    config = _configuration(source)
    target = Target(width, num_layers, experts, inner) if like is None else target_like(config, like)
    plan = plan_of(config, target, operator, noise, seed)
    if like is not None:
        check_like(config, plan.grown_config, like)
    small = SmallCheckpoint(source)
    shapes = [shape for shape, _ in small.kinds().values()]
    report = GrowReport(
        source=str(source),
        source_sha256=small.sha256(),
        output=str(output),
        operator=operator,
        depth=plan.depth,
        width=target.width,
        inner=target.inner_factor,
        num_layers=len(plan.layer_sources),
        experts=target.experts,
        noise=noise,
        seed=seed,
        optimizer=optimizer,
        num_parameters_before=sum(map(math.prod, shapes)),
        num_parameters_after=0,
        keeps_function=operator == "copy"
        or (operator == "stack" and len(plan.layer_sources) == config.num_hidden_layers),
    )
    with new_checkpoint(output) as folder:
        if operator in LEARNED:
            report = _write_learned(plan, small, source, folder, report, forests or (), settings or OperatorSettings())
        else:
            tensors = plan.tensors(small)
            write_tensors(folder, tensors)
            plan.grown_config.save_pretrained(folder)
            report = replace(report, num_parameters_after=sum(math.prod(each.shape) for each in tensors))
        if optimizer == "grow":
            grow_optimizer(source, folder, plan)
        copy_companions(source, folder)
        if check:
            report = replace(report, logit_difference=largest_difference(load_whole(source), load_whole(folder)))
            _judge(report, plan)
        (folder / "grow.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return report


def _check_settings(operator: str, optimizer: str, noise: float) -> None:
    if operator not in OPERATORS:
        raise ConfigError(f"operator is {operator!r}; choose one of {', '.join(OPERATORS)}.")
    if optimizer not in OPTIMIZER_CHOICES or (optimizer == "grow" and operator in LEARNED):
        raise ConfigError(f"optimizer is {optimizer!r}; choose drop, or grow with operator copy or stack.")
    if not 0 <= noise < math.inf:
        raise ConfigError(f"noise is {noise}; give a finite number that is not negative.")


def plan_of(config: Any, target: Target, operator: str, noise: float, seed: int) -> GrowthPlan:
    """What a growth makes, without reading any weights. Same errors as `grow`."""
    refuse_configuration(config, target)
    depth = "stack" if operator == "stack" else "zero"
    num_layers = target.num_layers or config.num_hidden_layers
    grown_from = layer_sources(config.num_hidden_layers, num_layers, depth)
    grown_config = grown_configuration(config, target, grown_from)
    plan = GrowthPlan(config, grown_config, grown_from, depth, widening_of(config, grown_config, target, noise, seed))
    if getattr(config, "do_layer_norm_before", True) is False and plan.identities:
        raise UnsupportedModelError(
            f"{config.model_type} with do_layer_norm_before=False has no identity layer; use operator='stack'."
        )
    return plan


def _write_learned(
    plan: GrowthPlan,
    small: SmallCheckpoint,
    source: Path,
    folder: Path,
    report: GrowReport,
    forests: Sequence[Any],
    settings: OperatorSettings,
) -> GrowReport:
    plan.roles({name: shape for name, (shape, _) in small.kinds().items()})  # refuses before anything is loaded
    fit = trained_operator(
        report.operator,
        load_whole(source),
        plan.grown_config,
        plan.layer_sources,
        forests,
        settings,
        report.seed,
        plan.widening,
    )
    fit.model.save_pretrained(folder)
    written = SmallCheckpoint(folder).kinds().values()
    return replace(
        report,
        num_parameters_after=sum(math.prod(shape) for shape, _ in written),
        rank=settings.rank if report.operator == "mango" else None,
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        data_sha256=fit.data_sha256,
        operator_losses=tuple(fit.losses),
    )


def _judge(report: GrowReport, plan: GrowthPlan) -> None:
    """Warns, or raises for float32 checkpoints, where an operator that keeps the function did not."""
    assert report.logit_difference is not None
    is_exact = str(getattr(plan.config, "dtype", "float32")).endswith(("float32", "float64", "None"))
    # A difference that is not a number compares as false.
    if report.keeps_function and not report.logit_difference <= TOLERANCE:
        text = f"{report.output}: logits differ by {report.logit_difference:.1e} of the largest one"
        if is_exact:
            raise UnsupportedModelError(f"{text}, beyond {TOLERANCE:g}; the growth rules do not fit this model.")
        logger.warning("%s; the weights are rounded to %s. noise=0 rounds nothing.", text, plan.config.dtype)


def _configuration(source: Path) -> Any:
    from transformers import AutoConfig

    if not (source / "config.json").is_file():
        raise ConfigError(f"{source}: no config.json, so this is not a model; name a folder of save_pretrained.")
    return AutoConfig.from_pretrained(source, trust_remote_code=False)
