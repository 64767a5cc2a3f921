"""`grow`: a checkpoint folder of transformers to a larger one, with logits before and after."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from treewise.errors import ConfigError, UnsupportedModelError
from treewise.experimental.grow.checkpoint import SmallCheckpoint, copy_companions, new_checkpoint, write_tensors
from treewise.experimental.grow.configuration import MANGO, Growth
from treewise.experimental.grow.growth_plan import GrowthPlan, plan_of
from treewise.experimental.grow.operators import trained_operator
from treewise.tree import Forest

logger = logging.getLogger("treewise")
TOLERANCE = 1e-5  # of logits before and after, in float32, of the largest one
NUM_ROWS, LENGTH = 2, 24  # of the tokens on which they are compared


@dataclass(frozen=True, slots=True)
class GrowReport:
    """What `grow` did; `grow.json` in the output holds the same.

    Attributes:
        source: the small model's folder.
        source_sha256: SHA-256 over its weight files.
        output: the grown model's folder.
        operator: `copy`, `stack` or `mango`.
        depth: how layers were added, `zero` or `stack`.
        width, num_layers: factor, and layers of the grown model.
        noise, seed: of what parts the copies.
        num_parameters_before, num_parameters_after: counted in the checkpoints.
        keeps_function: whether this operator promises equal logits.
        logit_difference: largest difference, relative to the largest logit; None: not checked.
        rank, steps, learning_rate, data_sha256: of mango, else None.
        operator_losses: loss at each of its steps.
    """

    source: str
    source_sha256: str
    output: str
    operator: str
    depth: str
    width: int
    num_layers: int
    noise: float
    seed: int
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
    num_layers: int | None = None,
    operator: str = "copy",
    noise: float = 0.01,
    seed: int = 0,
    check: bool = True,
    forests: Sequence[Forest] = (),
    rank: int = 1,
    steps: int = 100,
    learning_rate: float = 1e-3,
    trees_per_step: int = 1,
    max_tokens: int | None = None,
) -> GrowReport:
    """Grows a model: the folder `source`, with safetensors, to the folder `output`, which must not exist.

    `copy` repeats units and adds layers that begin as the identity; logits stay. `stack` adds copies of the whole
    stack of layers; logits change. `mango` (arXiv 2310.10699) begins as a copy and is fitted to the task loss for some
    steps, the small model frozen, before the large weights are made from it; logits change.

    Parameters:
        source, output: folders. The others: as of `treewise.experimental.grow.configuration.Growth`.

    Raises:
        UnsupportedModelError: a family, field or tensor that no rule covers (named), or logits that did not stay.
        ConfigError: a target that is no growth (the field is named), an unknown operator, an existing output, missing
            data or files.
    """
    source, output = Path(source), Path(output)
    wanted = Growth(
        width=width,
        num_layers=num_layers,
        operator=operator,
        noise=noise,
        seed=seed,
        check=check,
        forests=forests,
        rank=rank,
        steps=steps,
        learning_rate=learning_rate,
        trees_per_step=trees_per_step,
        max_tokens=max_tokens,
    )
    if output.exists():
        raise ConfigError(f"{output} exists already; name a folder that does not exist.")
    if not (source / "config.json").is_file():
        raise ConfigError(f"{source}: no config.json, so this is not a model; name a folder of save_pretrained.")
    if wanted.operator == MANGO and not wanted.forests:
        raise ConfigError("operator 'mango' is fitted to trees: give data.")
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    plan, small = plan_of(config, wanted), SmallCheckpoint(source)
    has_all_layers = len(plan.layer_sources) == config.num_hidden_layers
    keeps_function = wanted.operator == "copy" or (wanted.operator == "stack" and has_all_layers)
    with new_checkpoint(output) as folder:
        learned = _write_learned(plan, small, folder, wanted) if wanted.operator == MANGO else {}
        if not learned:
            write_tensors(folder, plan.tensors(small))
            plan.grown_config.save_pretrained(folder)
        copy_companions(source, folder)
        difference = None
        if wanted.check:
            difference = largest_difference(load_whole(source), load_whole(folder))
            if keeps_function:
                _judge(difference, output, config)
        report = GrowReport(
            source=str(source),
            source_sha256=small.sha256(),
            output=str(output),
            operator=wanted.operator,
            depth=plan.depth,
            width=wanted.width,
            num_layers=len(plan.layer_sources),
            noise=wanted.noise,
            seed=wanted.seed,
            num_parameters_before=small.num_parameters,
            num_parameters_after=SmallCheckpoint(folder).num_parameters,
            keeps_function=keeps_function,
            logit_difference=difference,
            **learned,
        )
        (folder / "grow.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return report


def _write_learned(plan: GrowthPlan, small: SmallCheckpoint, folder: Path, wanted: Growth) -> dict[str, Any]:
    """Fits an operator and writes what it makes; returns what the report says of it."""
    plan.roles(small.shapes)  # refuses before anything is loaded
    model, losses, data_sha256 = trained_operator(load_whole(small.folder), plan, wanted)
    model.save_pretrained(folder)
    return {
        "rank": wanted.rank,
        "steps": wanted.steps,
        "learning_rate": wanted.learning_rate,
        "data_sha256": data_sha256,
        "operator_losses": tuple(losses),
    }


def _judge(difference: float, output: Path, config: PreTrainedConfig) -> None:
    """Warns, or raises for float32 checkpoints, where an operator that keeps the function did not."""
    if not difference <= TOLERANCE:  # one that is not a number compares as false
        text = f"{output}: logits differ by {difference:.1e} of the largest one"
        if str(getattr(config, "dtype", "float32")).endswith(("float32", "float64", "None")):
            raise UnsupportedModelError(f"{text}, beyond {TOLERANCE:g}; the growth rules do not fit this model.")
        logger.warning("%s; the weights are rounded to %s. noise=0 rounds nothing.", text, config.dtype)


def largest_difference(small: PreTrainedModel, grown: PreTrainedModel) -> float:
    """The largest difference of logits on random tokens, divided by the largest logit of the small model (at least 1).

    Parameters:
        small, grown: models of transformers with one vocabulary, on one device; both are left in evaluation mode.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, small.config.vocab_size, (NUM_ROWS, LENGTH), generator=generator).to(small.device)
    with torch.no_grad():
        before, after = (each.eval()(input_ids=tokens, use_cache=False).logits.float() for each in (small, grown))
    return float((after - before).abs().max() / before.abs().max().clamp(min=1.0))


def load_whole(folder: Path) -> PreTrainedModel:
    """A checkpoint in float32 with the attention that transformers itself checks against.

    Raises:
        OSError, ValueError: what transformers raises for a damaged folder.
    """
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, attn_implementation="eager"
    )
