"""Whether a saved model is the one that was trained: read back by transformers, and by PEFT, and compared.

After a save the first rank reads the folder as its user will, on the CPU in the dtype that was saved, and computes the
log-probs of some rows of the data by that model's own forward. They have to be those of the model in memory. What may
lie between is measured on the model that was read: how far its log-probs move when the result of every module is
rounded once more, at random. Weights, ties, scales and settings all change log-probs. Where this process holds the
whole model, its parameters have to be equal besides: what rounding in 16 bits hides is found, too.

Others who load the folder may be asked as well, as servers of vLLM are (`Reader`): log-probs of the same rows, compared
with those of the model in memory, by roundings in the dtype in which they compute.
"""

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from treewise.base import features
from treewise.distributed import ranks
from treewise.distributed.divided_tensors import local_part
from treewise.engine.engine import TreeEngine
from treewise.errors import CheckpointError, bytes_as_text
from treewise.nn.model_checks import placeholders
from treewise.nn.platform.memory import free_bytes
from treewise.nn.wrapped import base_model, is_peft, num_embeddings, uncompiled, unwrap_model
from treewise.tree.trajectory import Trajectory

_MOST_ROWS, _MOST_TOKENS, _DRAWN_TOKENS = 2, 512, 64
# Two orders of computation differ by some roundings of each module, on another device or in another kernel; of one of
# each module so many, and of a log-prob itself.
_TIMES_ROUNDING, _OF_LOGPROB = 4, 2
_SPARE = 1.25  # of the bytes of the weights
_POLL_SECONDS = 0.2
_CALLS = count()  # the same number on every rank
# While transformers loads a model it changes what the whole process has: `PreTrainedModel.tie_weights`, the default
# dtype of torch. Of two loads at once, in threads, the second would leave the changes of the first behind.
LOADING = threading.Lock()
_WAY_OUT = "Do not use this folder; verify_saves=False skips this."


class Reading(NamedTuple):
    """What another reader of a folder computes. by: who. logprobs: at temperature 1 of every token but the first of
    each row. dtype: in which it computes. why_not: it did not read it."""

    by: str
    logprobs: Sequence[np.ndarray] = ()
    dtype: torch.dtype = torch.float32
    why_not: str = ""


# Of a folder, the model that was read from it here, and rows of token ids.
Reader = Callable[[Path, nn.Module, Sequence[np.ndarray]], Reading]


@dataclass(frozen=True, slots=True)
class SavedFolder:
    """What is read back. path: where it lies. name: what messages call it (its path). base: loads the model below
    adapters, in place of the one that they name. readers: who else reads it. way_out: what messages advise."""

    path: Path
    name: str = ""
    base: Callable[[], PreTrainedModel] | None = None
    readers: Sequence[Reader] = ()
    way_out: str = _WAY_OUT

    def __str__(self) -> str:
        return self.name or str(self.path)


def verify_saved(folder: SavedFolder, model: nn.Module, rows: Sequence[Trajectory], engine: TreeEngine) -> str:
    """Compares a saved model with the one in memory; every rank calls this. Returns a line for the log.

    rows: some of the data. engine: of the model in memory; where ranks hold parts of it, within `StepRunner.scoring`.

    Raises:
        CheckpointError: on every rank, where what was saved is not what was trained; names the folder, and the
            parameter that differs most.
    """
    chosen = _short_texts(rows)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), uncompiled(unwrap_model(model)):
            trained = [each.double().cpu().numpy() for each in engine.logprobs(chosen)] if chosen else []
            engine.drain()
    finally:
        model.train(was_training)
    found = _on_first_rank(lambda: _compared(folder, unwrap_model(model), chosen, trained, engine))
    if found["error"] is None:
        return str(found["line"])
    worst = ""
    if found["names_worst"]:
        state = _state_of(model)
        worst = _on_first_rank(lambda: {"text": _worst(folder, unwrap_model(model), state)})["text"]
    raise CheckpointError(f"{folder}: {found['error']}{worst} {folder.way_out}")


def drawn_rows(model: nn.Module, vocabulary: int, longest: int | None) -> list[Trajectory]:
    """A small tree of drawn tokens, where no data are at hand: two rows with a prefix in common. longest: of a row."""
    size = min(_DRAWN_TOKENS, longest or _DRAWN_TOKENS)
    rng = np.random.default_rng(0)
    tokens = np.setdiff1d(np.arange(vocabulary), [*placeholders(model).values()])
    prefix = rng.choice(tokens, size // 2)
    return [Trajectory(np.append(prefix, rng.choice(tokens, size - size // 2))) for _ in range(_MOST_ROWS)]


def _short_texts(rows: Sequence[Trajectory]) -> list[Trajectory]:
    texts = sorted((each.token_ids[:_MOST_TOKENS] for each in rows if not each.images and len(each) > 1), key=len)
    return [Trajectory(each) for each in texts[-_MOST_ROWS:]]


# -- on the first rank ------------------------------------------------------------------------------------------------


def _compared(
    folder: SavedFolder, model: nn.Module, rows: list[Trajectory], trained: list[np.ndarray], engine: TreeEngine
) -> dict[str, Any]:
    """line: of what was found. error: of what is wrong, or None. names_worst: whether a parameter may be named."""
    skipped = _why_not(model, rows)
    if skipped:
        return {"line": f"{folder}: not read back, because {skipped}", "error": None}
    try:
        saved, missing = _read(folder, model)
    except (OSError, ValueError, RuntimeError) as error:
        return {"error": f"cannot be read back: {' '.join(str(error).split())}", "names_worst": False}
    if isinstance(saved, str):
        return {"line": f"{folder}: not read back, because {saved}", "error": None}
    if missing:
        return {"error": f"{', '.join(missing[:3])} is not in it, and would be drawn at random.", "names_worst": False}
    found = _logprobs(saved, rows, engine.temperature)
    allowed = _rounding(saved, rows, found, engine.temperature, _dtype_of(saved))
    other, difference = _other_dtype(saved, model), _largest(found, trained)
    how = f"log-probs of {sum(map(len, found)):,} tokens differ by {difference:.1e} at most"
    if other:
        return {"error": other, "names_worst": False}
    if not difference <= allowed:  # one that is not a number compares as false
        return {"error": f"{how}, and by rounding {allowed:.1e}.", "names_worst": True}
    name, off = (None, 0.0) if _is_parted(model) else _furthest(saved, dict(model.named_parameters()))
    if name is not None:
        return {"error": f"{name} differs by {off:.1e} of its largest element.", "names_worst": False}
    by = "transformers and PEFT" if is_peft(model) else "transformers"
    line = f"{folder}: read back by {by}, {how} (rounding: {allowed:.1e})"
    expected = trained if engine.temperature == 1 else _logprobs(saved, rows, 1.0)
    for reader in folder.readers:
        line, wrong = _read_by(reader, folder, saved, rows, expected, line)
        if wrong:
            return {"error": wrong, "names_worst": False}
    return {"line": line, "error": None}


def _read_by(
    reader: Reader,
    folder: SavedFolder,
    saved: PreTrainedModel,
    rows: list[Trajectory],
    expected: list[np.ndarray],
    line: str,
) -> tuple[str, str]:
    """The line with what another reader found, and what is wrong, or an empty text."""
    reading = reader(folder.path, saved, [row.token_ids for row in rows])
    if reading.why_not:
        return f"{line}; not by {reading.by}, because {reading.why_not}", ""
    expected = [each[: len(own)] for each, own in zip(expected, reading.logprobs, strict=True)]  # of rows that it cut
    coarser = max(reading.dtype, _dtype_of(saved), key=lambda dtype: torch.finfo(dtype).eps)
    allowed = _rounding(saved, rows, _logprobs(saved, rows, 1.0), 1.0, coarser)
    difference = _largest(reading.logprobs, expected)
    how = f"by {difference:.1e} at most"
    if not difference <= allowed:
        return line, f"as {reading.by} reads it, log-probs differ {how}, and by rounding {allowed:.1e}."
    return f"{line}; by {reading.by}, {how} (rounding: {allowed:.1e})", ""


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)


def _largest(found: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """The largest difference; not a number where one of them is none."""
    return max(float(np.abs(one - other).max()) for one, other in zip(found, others, strict=True))


def _rounding(
    model: nn.Module, rows: list[Trajectory], found: list[np.ndarray], temperature: float, dtype: torch.dtype
) -> float:
    """By how much log-probs of two readers of this model may differ. found: of this one."""
    with _rounded_once_more(model, dtype):
        moved = _logprobs(model, rows, temperature)
    largest = max(float(np.abs(each).max()) for each in found)
    return _TIMES_ROUNDING * _largest(found, moved) + _OF_LOGPROB * torch.finfo(dtype).eps * max(1.0, largest)


def _why_not(model: nn.Module, rows: list[Trajectory]) -> str:
    """Why a model is not read back; empty where it is."""
    if not rows:
        return "the first tree has no row of text"
    if any(getattr(each, "quant_state", None) is not None for each in model.parameters()):
        return "its weights are quantised"
    needed = round(_SPARE * sum(each.numel() * each.element_size() for each in model.parameters()))
    free = free_bytes(torch.device("cpu"))
    if free < needed:
        return f"that takes {bytes_as_text(needed)} of host memory, and {bytes_as_text(free)} is free"
    return ""


def _read(folder: SavedFolder, model: nn.Module) -> tuple[PreTrainedModel | str, list[str]]:
    """The model of a folder as its user reads it, and what it lacks; in place of the model why it was not read."""
    base = base_model(model)
    is_causal = type(base.config) in MODEL_FOR_CAUSAL_LM_MAPPING
    read: Callable[..., Any] = (AutoModelForCausalLM if is_causal else type(base)).from_pretrained
    with LOADING, _quiet(), torch.random.fork_rng(devices=[]):  # new modules are drawn before their weights are read
        if not is_peft(model):
            saved, info = read(folder.path, dtype="auto", output_loading_info=True)
            return saved.eval(), sorted(info["missing_keys"])
        name = model.active_adapter
        below = model.peft_config[name].base_model_name_or_path
        if not below and folder.base is None:
            return "its base model has no name", []
        try:
            named = partial(read, below, dtype=base.dtype, local_files_only=True)
            whole: PreTrainedModel = (folder.base or named)()
        except OSError:
            return f"its base model {below} is not on this machine", []
        from peft import PeftModel

        # Adapters that hold a larger table are loaded on a base that was resized first, by PEFT's rule.
        num_tokens = num_embeddings(base)
        if num_embeddings(whole) != num_tokens:
            whole.resize_token_embeddings(num_tokens, mean_resizing=False)
        own = folder.path / name  # where PEFT writes one of another name than the usual
        path = own if own.is_dir() and name != "default" else folder.path
        return PeftModel.from_pretrained(whole, path, adapter_name=name).eval(), []


@torch.no_grad()
def _logprobs(model: nn.Module, rows: list[Trajectory], temperature: float) -> list[np.ndarray]:
    """Of every token but the first, by the model's own forward."""
    found = []
    for row in rows:
        ids = torch.tensor(row.token_ids, dtype=torch.long)
        logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        chosen = logits.gather(1, ids[1:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
        found.append(chosen.double().numpy())
    return found


@contextmanager
def _rounded_once_more(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, results of modules with parameters of their own are off by up to a rounding, at random."""
    generator, epsilon = torch.Generator().manual_seed(0), torch.finfo(dtype).eps

    def round_again(module: nn.Module, args: object, output: object) -> object:
        del module, args
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        drawn = torch.rand(output.shape, generator=generator, dtype=torch.float32) - 0.5
        return (output.float() * (1 + epsilon * drawn)).to(output.dtype)

    with ExitStack() as hooks:
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                hooks.callback(module.register_forward_hook(round_again).remove)
        yield


def _other_dtype(saved: nn.Module, model: nn.Module) -> str:
    """A sentence on a parameter that was saved in another dtype than it has in memory; empty where there is none."""
    held = dict(model.named_parameters())
    for name, parameter in saved.named_parameters():
        own = held.get(name)
        if own is not None and own.dtype != parameter.dtype:
            names = (str(each.dtype).removeprefix("torch.") for each in (parameter, own))
            return f"{name} was saved in {' and trained in '.join(names)}."
    return ""


def _is_parted(model: nn.Module) -> bool:
    return any(local_part(each) is not each for each in model.parameters())


def _state_of(model: nn.Module) -> Mapping[str, Tensor]:
    """Parameters of the model in memory; of one that ranks hold in parts, gathered on the first."""
    model = unwrap_model(model)
    if _is_parted(model):
        gathered: Mapping[str, Tensor] = features.fsdp.whole_state(model)
        return gathered
    return dict(model.named_parameters())


@torch.no_grad()
def _furthest(saved: nn.Module, held: Mapping[str, Tensor]) -> tuple[str | None, float]:
    """The parameter that differs most, relative to its largest element, and by how much; None: all are equal."""
    worst, name = 0.0, None
    for each, parameter in saved.named_parameters():
        own = held.get(each)
        # What PEFT keeps beside a copy that is trained computes nothing, and has drawn rows where a table was resized.
        if own is None or ".original_module." in each:
            continue
        own = own.cpu()
        if own.shape != parameter.shape:
            return each, float("inf")
        if torch.equal(own, parameter):
            continue
        off = float((own.double() - parameter.double()).abs().max() / own.abs().max().double().clamp(min=1e-30))
        if not off <= worst:
            worst, name = off, each
    return name, worst


def _worst(folder: SavedFolder, model: nn.Module, held: Mapping[str, Tensor]) -> str:
    """The same as a sentence."""
    saved, _ = _read(folder, model)
    assert not isinstance(saved, str), "it was read before"
    name, off = _furthest(saved, held)
    if name is None:
        return " Every parameter is the same, so a setting of its configuration is another one."
    shapes = tuple(saved.get_parameter(name).shape), tuple(held[name].shape)
    if shapes[0] != shapes[1]:
        return f" {name} was saved with the shape {shapes[0]}, and has {shapes[1]}."
    return f" {name} differs most, by {off:.1e} of its largest element."


@contextmanager
def _quiet() -> Iterator[None]:
    """Without bars, and warnings of PEFT and transformers about what was warned of when the model was made."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


def _on_first_rank(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 finds, on every rank. The others poll the store of the run: reading a large model may take longer
    than a collective operation may wait. Rank 0, which may hold the store, goes on when all have read it: a run's last
    save is followed by its end.
    """
    if ranks.count() == 1:
        return work()
    world = distributed.group.WORLD
    assert world is not None, "several processes form a group"
    store, key = world.get_group_store(), f"treewise/saved/{next(_CALLS)}"
    if ranks.own() == 0:
        try:
            found = work()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}", "names_worst": False}
        store.set(key, json.dumps(found))
    else:
        while not store.check([key]):
            time.sleep(_POLL_SECONDS)
        found = json.loads(store.get(key))
    ranks.on_every_rank(lambda: None)
    return found
