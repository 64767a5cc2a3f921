"""`grow`: a checkpoint folder of transformers to a larger one."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from treewise.errors import ConfigError, UnsupportedModelError
from treewise.grow.checkpoint import SmallCheckpoint, write_checkpoint
from treewise.grow.configuration import Target, grown_configuration, refuse_configuration
from treewise.grow.function_check import TOLERANCE, largest_difference, load_whole
from treewise.grow.layer_map import identity_layers, layer_sources
from treewise.grow.operator_training import OperatorSettings, trained_operator
from treewise.grow.tensor_roles import EXPERT, LAYER, TensorRole, role_of
from treewise.grow.widening import Widening, widened

logger = logging.getLogger("treewise")
OPERATORS = ("copy", "stack", "ligo", "mango")
LEARNED = ("ligo", "mango")
POST_NORM = "post_feedforward_layernorm"  # a layer that has it normalises the results of its branches, not their inputs
BRANCH_NORMS = ("post_attention_layernorm", POST_NORM)


@dataclass(frozen=True, slots=True)
class GrowReport:
    """What `grow` did; `grow.json` in the output holds the same.

    Attributes:
        source: the small model's folder.
        source_sha256: SHA-256 over its weight files.
        output: the grown model's folder.
        operator: `copy`, `stack`, `ligo` or `mango`.
        depth: how layers were added, `zero` or `stack`.
        width, num_layers, experts: factors, and layers of the grown model.
        num_parameters_before, num_parameters_after: counted in the checkpoints.
        keeps_function: whether this operator promises equal logits.
        logit_difference: largest difference, relative to the largest logit; None: not checked.
        rank, steps, data_sha256: of a learned operator, else None.
        operator_losses: loss at each of its steps.
    """

    source: str
    source_sha256: str
    output: str
    operator: str
    depth: str
    width: int
    num_layers: int
    experts: int
    num_parameters_before: int
    num_parameters_after: int
    keeps_function: bool
    logit_difference: float | None = None
    rank: int | None = None
    steps: int | None = None
    data_sha256: str | None = None
    operator_losses: tuple[float, ...] = ()


def grow(
    source: str | Path,
    output: str | Path,
    *,
    width: int = 1,
    num_layers: int | None = None,
    experts: int = 1,
    operator: str = "copy",
    noise: float = 0.01,
    seed: int = 0,
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
        width: whole factor of hidden size, inner sizes, heads and key heads.
        num_layers: layers of the grown model; None: as many as the small one has.
        experts: whole factor of experts and of experts per token.
        operator: one of `OPERATORS`.
        noise: breaks the symmetry between copies, in standard deviations of each matrix; sums over copies keep their
        value.
        seed: of the noise and of a learned operator.
        check: compare logits of both models (both are loaded in float32).
        forests: `ligo` and `mango`: the trees that the operator is fitted to.
        settings: `ligo` and `mango`: rank, steps, learning rate, budget.

    Raises:
        UnsupportedModelError: a family, field or tensor that no rule covers (named).
        ConfigError: a target that is no growth, an unknown operator, an existing output, missing data or files.
    """
    source, output = Path(source), Path(output)
    if operator not in OPERATORS:
        raise ConfigError(f"operator is {operator!r}; choose one of {', '.join(OPERATORS)}.")
    if output.exists():
        raise ConfigError(f"{output} is there already; name a folder that is not.")
    config, target = _configuration(source), Target(width, num_layers, experts)
    refuse_configuration(config, target)
    depth = "stack" if operator == "stack" else "zero"
    sources = layer_sources(config.num_hidden_layers, num_layers or config.num_hidden_layers, depth)
    if depth == "zero" and getattr(config, "do_layer_norm_before", True) is False and identity_layers(sources, depth):
        raise UnsupportedModelError(
            f"{config.model_type} with do_layer_norm_before=False has no identity layer; use operator='stack'."
        )
    small = SmallCheckpoint(source)
    grown_config = grown_configuration(config, target, sources)
    facts = GrowReport(
        source=str(source),
        source_sha256=small.sha256(),
        output=str(output),
        operator=operator,
        depth=depth,
        width=width,
        num_layers=len(sources),
        experts=experts,
        num_parameters_before=sum(_size(shape) for shape in small.shapes().values()),
        num_parameters_after=0,
        keeps_function=operator == "copy" or (operator == "stack" and len(sources) == config.num_hidden_layers),
    )
    plan = GrowthPlan(config, grown_config, sources, depth, _widening(config, grown_config, target, noise, seed))
    if operator in LEARNED:
        return _grow_learned(plan, small, source, output, facts, forests, settings or OperatorSettings(), seed)
    return _grow_by_rule(plan, small, source, output, facts, check)


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """Configurations, layers and factors of one growth."""

    config: Any
    grown_config: Any
    layer_sources: list[int]
    depth: str
    widening: Widening

    def tensors(self, small: SmallCheckpoint) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of the grown checkpoint, made one after the other."""
        shapes = small.shapes()
        grown_shapes = _shapes_of(self.grown_config)
        roles = {name: role_of(name, shape, self.config, grown_shapes.get(name)) for name, shape in shapes.items()}
        for name, role in roles.items():
            if role.layer is None:
                yield name, widened(name, small.read(name), role, self.widening)
        identities = identity_layers(self.layer_sources, self.depth)
        for layer, source_layer in enumerate(self.layer_sources):
            names = [name for name, role in roles.items() if role.layer == source_layer]
            is_post_norm = any(POST_NORM in name for name in names)
            for name in names:
                tensor = small.read(name)
                for grown_name, copy in self._names(name, roles[name], layer):
                    wide = widened(name, tensor, roles[name], self.widening, copy)
                    if layer in identities and _silenced(roles[name], is_post_norm):
                        wide = torch.full_like(wide, -self.widening.norm_offset if is_post_norm else 0.0)
                    yield grown_name, wide

    def _names(self, name: str, role: TensorRole, layer: int) -> Iterator[tuple[str, int]]:
        """Names of a layer's tensor in the grown model, with the index of the expert's copy."""
        match = LAYER.fullmatch(name)
        assert match is not None
        grown = f"{match['head']}{layer}{match['tail']}"
        if role.expert is None:
            yield grown, 0
            return
        part = EXPERT.fullmatch(grown)
        assert part is not None
        count = _count_experts(self.config)
        for copy in range(self.widening.experts):
            yield f"{part['head']}{role.expert + copy * count}{part['tail']}", copy


def _silenced(role: TensorRole, is_post_norm: bool) -> bool:
    """Whether a tensor of an identity layer is set so that its branch adds nothing to the residual stream.

    Where a norm follows the branch its gain is zero; the gradient of a norm at a result of zero would be huge.
    """
    if is_post_norm:
        return role.module in BRANCH_NORMS
    return role.adds_to_residual


def _grow_by_rule(
    plan: GrowthPlan, small: SmallCheckpoint, source: Path, output: Path, facts: GrowReport, check: bool
) -> GrowReport:
    num_parameters = 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_parameters
        for name, tensor in plan.tensors(small):
            num_parameters += tensor.numel()
            yield name, tensor

    values = asdict(facts)
    write_checkpoint(output, counted(), plan.grown_config, source, values)
    values["num_parameters_after"] = num_parameters
    if check:
        values["logit_difference"] = largest_difference(load_whole(source), load_whole(output))
    report = GrowReport(**values)
    _rewrite_facts(output, report)
    if check and report.keeps_function:
        _judge(report, plan)
    return report


def _judge(report: GrowReport, plan: GrowthPlan) -> None:
    """Warns, or raises for float32 checkpoints, where logits differ."""
    assert report.logit_difference is not None
    is_exact = str(getattr(plan.config, "dtype", "float32")).endswith(("float32", "float64", "None"))
    if report.logit_difference > TOLERANCE:
        text = f"{report.output}: logits differ by {report.logit_difference:.1e} of the largest one"
        if is_exact:
            raise UnsupportedModelError(f"{text}, beyond {TOLERANCE:g}; the growth rules do not fit this model.")
        logger.warning("%s; the weights are rounded to %s. noise=0 rounds nothing.", text, plan.config.dtype)


def _grow_learned(
    plan: GrowthPlan,
    small: SmallCheckpoint,
    source: Path,
    output: Path,
    facts: GrowReport,
    forests: Sequence[Any] | None,
    settings: OperatorSettings,
    seed: int,
) -> GrowReport:
    if not forests:
        raise ConfigError(f"operator {facts.operator!r} is fitted to trees: give data.")
    for name, shape in small.shapes().items():
        role_of(name, shape, plan.config)  # refuses what no rule covers before anything is loaded
    fit = trained_operator(
        facts.operator,
        load_whole(source),
        plan.grown_config,
        plan.layer_sources,
        forests,
        settings,
        seed,
        plan.widening,
    )
    values = asdict(facts) | {
        "num_parameters_after": sum(each.numel() for each in fit.tensors.values()),
        "rank": settings.rank if facts.operator == "mango" else None,
        "steps": settings.steps,
        "data_sha256": fit.data_sha256,
        "operator_losses": tuple(fit.losses),
    }
    report = GrowReport(**values)
    write_checkpoint(output, iter(fit.tensors.items()), plan.grown_config, source, asdict(report))
    return report


def _rewrite_facts(output: Path, report: GrowReport) -> None:
    (output / "grow.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")


def _configuration(source: Path) -> Any:
    from transformers import AutoConfig

    if not (source / "config.json").is_file():
        raise ConfigError(f"{source}: no config.json, so this is not a model; name a folder of save_pretrained.")
    return AutoConfig.from_pretrained(source, trust_remote_code=False)


def _shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the grown model's tensors, without memory for any."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _widening(config: Any, grown: Any, target: Target, noise: float, seed: int) -> Widening:
    scales_embedding = config.model_type.startswith("gemma")  # by the square root of the hidden size
    embedding_scale = (config.hidden_size / grown.hidden_size) ** 0.5 if scales_embedding else 1.0
    is_tied = bool(config.tie_word_embeddings)
    return Widening(
        width=target.width,
        experts=target.experts,
        embedding_scale=embedding_scale,
        final_norm_scale=1 / (target.width * embedding_scale) if is_tied else 1.0,
        norm_offset=1.0 if scales_embedding else 0.0,
        noise=noise,
        seed=seed,
    )


def _count_experts(config: Any) -> int:
    for name in ("num_local_experts", "num_experts"):
        if isinstance(getattr(config, name, None), int):
            return int(getattr(config, name))
    raise ConfigError(f"{config.model_type} has tensors of experts, but its configuration counts none.")


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
