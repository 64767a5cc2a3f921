"""Makes the capability table: every family of transformers as a tiny random model, its tree against its flat training.

    python -m tests.capability            # all families; writes the table and the pages; what `make models` runs
    python -m tests.capability llama ...  # these alone; prints, writes nothing
    python -m tests.capability --write llama ...  # these alone; writes them beside the stored others

A family is supported when loss and whole gradient equal flat training's to a relative 1e-5 in float32 (more where flat
training's own rounding is more on this processor), as one micro-batch by the reference and by the implementation of
this device, and in parts by two budgets; and when the engine's own probe finds no leak between branches. It is refused
when the engine refuses it. Anything else is a fault, which ends the run with exit code 1. Families that see are tried
with images, too (`tests/image_capability.py`), and their images are supported under the same conditions, or refused for
the reason in the table.
"""

# ruff: noqa: T201 - a command
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.image_capability import every_family_admitted, image_error, image_model
from treewise import Forest, Trajectory, TreeEngine
from treewise.errors import UnsupportedModelError
from treewise.nn import recurrent
from treewise.nn.attention import observe_masks
from treewise.nn.support_table import FILE, REFUSED, SUPPORTED, UNTRIED, Capability, CapabilityTable, own_table
from treewise.testing.families import causal_families, tiny_model
from treewise.testing.oracle import flat_sft, gradient_error, gradients_of

WRONG, BROKEN = "wrong", "broken"
# float32 sums in another order: 24 bits give 6e-8 per operation; most families differ by 1e-7 to 5e-7 here.
TOLERANCE = 1e-5
RUNS = (("reference", None), ("auto", None), ("auto", 17), ("auto", 5))
ROOT = Path(__file__).parents[1]
_WHOLE = "its decoder is a whole language model with a head of its own, of which trees cannot take the decoder alone"
_CODES = "turns images into tokens by a map of codes (vocabulary_map) that only a checkpoint holds"
_TIMM = "its tower is a model of the library timm, which is not installed where this table is made"
_ORDER = "its tower gives an image other features when it comes after another in the same call"
# What families do that trees cannot, or what a small model of them lacks, where others' exceptions do not tell.
SENTENCES = {
    "apertus1p5": "turns images into tokens of its vocabulary, so no gradient reaches its tower",
    "chameleon": _CODES,
    "deepseek_ocr2": "transformers builds no small model of it without the parts of its tower's configuration",
    "dots3_note": "its configuration sets layers 25 to 41 one by one, so no small model of it can be built",
    "emu3": _CODES,
    "evolla": "reads proteins; transformers has no class of images and text for it",
    "fast_vlm": _TIMM,
    "florence2": "is an encoder-decoder, whose encoder reads text and image in both directions",
    "gemma3n": _TIMM,
    "glm5_next": "its layers attend to tokens that an index chooses (DSA), which cannot follow a tree",
    "granite4_vision": "needs the list of layers that take features of images, without which no model of it is built",
    "llama4": _WHOLE,
    "minicpmv4_6": _ORDER,
    "minicpmv4_7": _ORDER,
    "mllama": "reads images by cross-attention in layers of its own; no tokens stand for them",
    "muse_spark": "its tower has stages of several widths and depths, of which no small model is built by rule",
    "ovis2": "writes rows of its visual vocabulary over the tokens around an image, beside the features of the image",
    "perception_lm": _TIMM,
    "pp_formulanet": "is an encoder-decoder, whose decoder reads the image by cross-attention",
}
MARK = "<!-- the table below is made by tests/capability.py -->\n"


def image_families() -> list[str]:
    """Every family that transformers builds from images and text, and that is not a causal language model by itself."""
    return [name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if name not in causal_families()]


def sample_trajectories() -> list[Trajectory]:
    """Forks, a contained prefix, a duplicate, a second tree; longer than every window and chunk of the tiny models."""
    rng = np.random.default_rng(0)
    base = rng.integers(3, 64, 8)
    items = []
    for _ in range(6):
        ids = np.concatenate([base[: rng.integers(2, 9)], rng.integers(3, 6, rng.integers(1, 14))])
        weights = (rng.random(len(ids)) < 0.6) * rng.random(len(ids))
        weights[0], weights[-1] = 0, 1
        items.append(Trajectory(ids, loss_weights=weights))
    return [*items, Trajectory(items[0].token_ids[:-1]), items[1], Trajectory(rng.integers(3, 64, 7))]


def examine(family: str) -> Capability:
    """Tries one family."""
    try:
        model = tiny_model(family)
    except Exception as error:  # whatever transformers raises for a configuration that it cannot build
        return Capability(family, UNTRIED, reason=SENTENCES.get(family) or _first_line(error))
    name = type(model).__name__
    try:
        error, limit = largest_error(model)
    except UnsupportedModelError as refusal:
        reason = SENTENCES.get(family) or str(refusal).removesuffix(" Supported models: docs/models.md.")
        return Capability(family, REFUSED, name, reason)
    except Exception as fault:
        return Capability(family, BROKEN, name, _first_line(fault))
    status = SUPPORTED if error < limit else WRONG
    row = Capability(family, status, name, layers=layers_of(model), error=float(f"{error:.0e}"))
    return with_images(row) if family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else row


def with_images(row: Capability) -> Capability:
    """The row with what came of images."""
    try:
        with every_family_admitted():
            error = image_error(image_model(row.family))
    except Exception as fault:  # of many models
        if row.family in SENTENCES:
            return replace(row, image_reason=SENTENCES[row.family])
        is_named = isinstance(fault, UnsupportedModelError | NotImplementedError)
        reason = " ".join(str(fault).split()).removesuffix(" Supported models: docs/models.md.")
        return replace(row, image_reason=reason[:300] if is_named else _first_line(fault))
    if error < TOLERANCE:
        return replace(row, image_error=float(f"{error:.0e}"))
    return replace(row, image_reason=f"gradients differ from flat training's by {error:.0e}")


def largest_error(model: nn.Module) -> tuple[float, float]:
    """The largest relative difference, of loss or whole gradient, between flat training and any run on the tree; and
    what is allowed: TOLERANCE, or what flat training's own rounding makes on this processor."""
    trajectories = sample_trajectories()
    forest = Forest.from_trajectories(trajectories)
    engine = TreeEngine(model)
    engine.evaluate(forest)  # probes
    flat_loss, _, flat_gradients = flat_sft(model, trajectories)
    errors = []
    for attention, max_tokens in RUNS:
        model.zero_grad()
        loss = TreeEngine(model, max_tokens, attention, check=False).step(forest).loss
        errors += [abs(loss - flat_loss) / flat_loss, gradient_error(gradients_of(model), flat_gradients)]
    error = float(np.max(errors))  # not max(), which loses a NaN
    return error, TOLERANCE if error < TOLERANCE else max(TOLERANCE, flat_gradients.tolerance)


def layers_of(model: nn.Module) -> tuple[str, ...]:
    """What a model's layers are, in words: from what they asked of attention, and from their modules' names."""
    decoder = TreeEngine(model, check=False).lm.decoder
    with torch.no_grad(), observe_masks() as observations:
        model(input_ids=torch.arange(3, 9)[None], use_cache=False)
    modules = set(decoder.modules())
    rules = [each.rule for each in observations if each.module in modules]
    names = [name for name, _ in decoder.named_parameters()]
    found = {
        "full attention": any(rule.window is None and rule.chunk is None for rule in rules),
        "sliding windows": any(rule.window is not None for rule in rules),
        "chunked attention": any(rule.chunk is not None for rule in rules),
        "score cap": any(rule.softcap is not None for rule in rules),
        "sinks": any("sink" in name for name in names),
        "latent attention": any("kv_a_proj" in name for name in names),
        "experts": any("expert" in name for name in names),
    }
    kinds = sorted({kind for each in recurrent.kinds_of(decoder).values() for kind in each.split(", ")})
    return (*(word for word, is_there in found.items() if is_there), *kinds)


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def main(families: list[str]) -> int:
    """Examines families, prints a line for each, and writes the table if they are all."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    rows = []
    writes_some = families[:1] == ["--write"]
    for family in families[writes_some:] or [*causal_families(), *image_families()]:
        rows.append(examine(family))
        row = rows[-1]
        print(
            f"{family:28} {row.status:10} {row.error or row.reason} {row.image_error or row.image_reason}", flush=True
        )
    if writes_some:
        new = {row.family: row for row in rows}
        write(CapabilityTable(transformers.__version__, tuple(new.get(row.family, row) for row in own_table().rows)))
    elif not families:
        write(CapabilityTable(transformers.__version__, tuple(rows)))
    return 1 if any(row.status in (WRONG, BROKEN) for row in rows) else 0


def write(table: CapabilityTable) -> None:
    """The table, and the pages that quote it."""
    table.save(ROOT / "src" / "treewise" / "nn" / FILE)
    page = ROOT / "docs" / "model-table.md"
    prose = page.read_text(encoding="utf-8").split(MARK)[0]
    page.write_text(prose + MARK + "\n" + as_markdown(table), encoding="utf-8")
    readme = ROOT / "README.md"
    count = f"{table.counts()[SUPPORTED]} of {len(table.rows)}"
    claim = f"{count} families of transformers {transformers.__version__[:4]}"
    text = re.sub(r"\d+ of \d+ families of transformers \S+(?=,)", claim, readme.read_text(encoding="utf-8"))
    readme.write_text(text, encoding="utf-8")
    print(dict(table.counts()))


def as_markdown(table: CapabilityTable) -> str:
    """The table for the documentation."""
    counts = table.counts()
    parts = [
        f"Tried with transformers {table.transformers}: {counts[SUPPORTED]} families supported, "
        f"{len(table.with_images())} of them with images, too, {counts[REFUSED]} refused, {counts[UNTRIED]} not tried.",
        "### Supported",
        _columns(
            ("family", "model", "layers", "error", "error with images"),
            [
                (f"`{row.family}`", row.model, ", ".join(row.layers), f"{row.error:.0e}", _of_images(row))
                for row in table.of_status(SUPPORTED)
            ],
        ),
        "### Images refused",
        "Of families that are supported on text.",
        _columns(
            ("family", "why"),
            [(f"`{row.family}`", row.image_reason) for row in table.of_status(SUPPORTED) if row.image_reason],
        ),
        "### Refused",
        _columns(
            ("family", "why"),
            [(f"`{row.family}`", row.reason) for row in table.of_status(REFUSED)],
        ),
        "### Not tried",
        "transformers builds no small random model of these from their configuration class alone.",
        _columns(("family", "why"), [(f"`{row.family}`", row.reason) for row in table.of_status(UNTRIED)]),
    ]
    return "\n\n".join(parts) + "\n"


def _of_images(row: Capability) -> str:
    return "refused" if row.image_reason else "" if row.image_error is None else f"{row.image_error:.0e}"


def _columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
