"""What a model by name costs, counted once: building it takes seconds, though nothing but its shapes is read."""

import hashlib
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import treewise
from treewise import nn
from treewise.base.durable import moved_into_place
from treewise.base.own_files import read_own, sealed, unsealed
from treewise.base.weight_files import header_of
from treewise.errors import ConfigError
from treewise.models.load_model import load_shapes, locate, place_in_cache
from treewise.nn.adapters import ADAPTER_WEIGHTS, ADAPTERS, adapter_folder
from treewise.nn.flops import FlopModel, LayerReach
from treewise.nn.tower_flops import NO_FLOPS, VisionCosts

logger = logging.getLogger("treewise")

_COUNTED_BY = ("torch", "transformers", "peft")
_COUNTING = ("flops.py", "tower_flops.py", "model_flops.py", "vision/costs.py")  # of `nn`


def load_costs(name: str, gguf_file: str | None = None, lora: Mapping[str, Any] | None = None) -> FlopModel:
    """The costs of a model by name, from its configuration alone (`load_shapes`).

    Those of a folder or a GGUF file are kept under `$TREEWISE_CACHE`, by the content of the configuration and the
    versions of what counts: neither torch nor transformers is imported then. Raises `ConfigError` as `load_model` does.
    """
    facts = _facts(name, gguf_file, lora)
    kept = None if facts is None else place_in_cache("costs", facts).with_suffix(".json")
    if kept is not None and kept.exists():
        try:
            return read_own(kept, lambda data: _read(unsealed(data)), "the model's costs are counted again")
        except ConfigError as error:
            logger.warning("%s", error)
    from treewise.nn.model_flops import flop_model  # imports transformers' models

    costs = flop_model(load_shapes(name, gguf_file, lora=None if lora is None else dict(lora)))
    if kept is not None and (costs.vision is None or costs.vision.linear != NO_FLOPS):  # else a warning each time
        with suppress(OSError), moved_into_place(kept, is_durable=False) as part:
            part.write_text(sealed(asdict(costs)), encoding="utf-8")
    return costs


def _facts(name: str, gguf_file: str | None, lora: Mapping[str, Any] | None) -> list[Any] | None:
    """All that the costs of a model depend on; None for a name on the Hub, whose files are not here."""
    folder, file = locate(name, gguf_file)
    if not Path(folder).is_dir():
        return None
    if file is None:
        source: Any = _digest(Path(folder) / "config.json")
    else:
        status = (Path(folder) / file).stat()
        source = [str((Path(folder) / file).resolve()), status.st_size, status.st_mtime_ns]
    adapters = adapter_folder(name)
    counting = [_digest(Path(nn.__file__).parent / each) for each in _COUNTING]
    own = [treewise.__version__, *map(_version, _COUNTED_BY), *counting]
    saved = None if adapters is None else [_digest(adapters / ADAPTERS), _header(adapters / ADAPTER_WEIGHTS)]
    return [own, source, saved, None if lora is None else dict(lora)]


def _header(file: Path) -> str | None:
    """The names and shapes in a file of safetensors, among which are tables of a resized vocabulary."""
    if not file.is_file():
        return None
    return hashlib.sha256(header_of(file)).hexdigest()


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(kept: dict[str, Any]) -> FlopModel:
    """The costs as they were written; JSON keeps every digit of a float, and has lists for tuples."""
    pairs = tuple((LayerReach(**reach), flops) for reach, flops in kept.pop("pair_forward"))
    vision = kept.pop("vision")
    if vision is not None:
        parts: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in vision.items()}
        vision = VisionCosts(**parts)
    return FlopModel(pair_forward=pairs, vision=vision, **kept)
