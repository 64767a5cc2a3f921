"""Checkpoints of clients, by the code that checkpoints of training have: complete or absent, listed with checksums.

    FOLDER/runs/RUN/weights/NAME/checkpoint-1            save_state: weights and optimizer
    FOLDER/runs/RUN/sampler_weights/NAME/checkpoint-1    save_weights_for_sampler
    FOLDER/runs/RUN/external_weights/NAME/checkpoint-1   save_weights_external
    FOLDER/runs/RUN/snapshots/checkpoint-SEQ             the server's own, from which a restart goes on

Each is a folder of PEFT (or a whole model with full fine-tuning), which `treewise rl --model`, PEFT and vLLM read.
"""

import json
import re
import shutil
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from treewise.errors import CheckpointError, DataError
from treewise.rl.samplers.server_weights import save_adapter
from treewise.serve.weights import ServedModel, Shape, Weights
from treewise.trainer.checkpoint import store
from treewise.trainer.checkpoint.optimizer_state import OPTIMIZER, load_optimizer, optimizer_state, save_optimizer
from treewise.trainer.checkpoint.store import MANIFEST, listed_files, read_manifest, write_atomically

TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
KINDS = {  # what each request saves
    "save_weights": "weights",
    "save_weights_external": "external_weights",
    "save_weights_for_sampler": "sampler_weights",
}
_PATH = re.compile(
    r"tinker://([A-Za-z0-9-]{1,80}:train:[0-9]{1,6})"
    rf"/({'|'.join(TYPES)})/([A-Za-z0-9_-][A-Za-z0-9_.-]{{0,199}})"
)
_KEPT = 4  # weights to sample from that stay in memory
_LONGEST_LIFE = 10**10
_LIFE = "life.json"  # beside a checkpoint: when it ends


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint's name: `tinker://RUN/KIND/NAME`."""

    run: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @classmethod
    def parsed(cls, path: Any) -> "Place":
        """Raises `DataError` for anything that is no such name; so no path leads out of the folder."""
        if (found := _PATH.fullmatch(str(path))) is None:
            raise DataError(f"{path!r} is no path of a checkpoint, as tinker://RUN/weights/NAME: plain names alone.")
        return cls(*found.groups())


class Store:
    """The checkpoints below a folder."""

    def __init__(self, folder: Path, model: ServedModel, base_name: str) -> None:
        self.runs, self.model, self.base_name = folder / "runs", model, base_name
        self._loaded = lru_cache(_KEPT)(self._load_sampler)
        for each in self.runs.glob("*/*"):  # what a killed server left
            for inner in [each] if each.name == "snapshots" else each.iterdir():
                store.recover(inner)

    def _folder(self, place: Place) -> Path:
        return self.runs / place.run.replace(":", ".") / place.kind / place.name

    def find(self, place: Place) -> Path:
        """The folder of a checkpoint. Raises `DataError` where it is not there or has expired."""
        found, ends = self._folder(place) / "checkpoint-1", self.ends(place)
        if not (found / MANIFEST).is_file() or (ends is not None and ends < time.time()):
            raise DataError(f"{place}: no such checkpoint.")
        return found

    def exists(self, place: Place) -> bool:
        """Whether it is there."""
        try:
            return self.find(place) is not None
        except DataError:
            return False

    def facts(self, place: Place) -> dict[str, Any]:
        """What was written down with it."""
        return facts_of(self.find(place))

    def ends(self, place: Place) -> float | None:
        """When it expires, in seconds since 1970."""
        return _ends(self._folder(place) / _LIFE)

    def set_life(self, place: Place, seconds: float | None) -> None:
        """Lets a checkpoint expire; None: never. Raises `DataError` for a time that is no number of seconds."""
        self.find(place)
        _check_life(seconds)
        ends = None if seconds is None else time.time() + seconds
        write_atomically(self._folder(place) / _LIFE, json.dumps({"ends": ends}))

    def save(self, place: Place, weights: Weights, facts: dict[str, Any], life: float | None = None) -> Place:
        """Writes a checkpoint; the optimizer's state, too, where it is one of training.

        Raises:
            CheckpointError: it could not be written whole; what was there is untouched. DataError: a wrong `life`.
        """
        _check_life(life)
        self._write(self._folder(place), 1, weights, facts, with_optimizer=place.kind == "weights")
        if life is not None:
            self.set_life(place, life)
        return place

    def forget(self) -> None:
        """Removes what has expired."""
        for each in self.runs.glob(f"*/*/*/{_LIFE}"):
            ends = _ends(each)
            if ends is not None and ends < time.time():
                shutil.rmtree(each.parent, ignore_errors=True)  # a client may delete it, too

    def delete(self, place: Place) -> None:
        """Raises `DataError` where there is none."""
        self.find(place)
        shutil.rmtree(self._folder(place))

    def places(self, run: str | None = None) -> list[Place]:
        """All checkpoints, or those of a run, the oldest first; files that a killed server left are none."""
        pattern = "*" if run is None else run.replace(":", ".")
        found = [
            Place(each.parents[1].name.replace(".", ":"), each.parent.name, each.name)
            for kind in TYPES
            for each in self.runs.glob(f"{pattern}/{kind}/*")
            if each.is_dir()
        ]
        return sorted((place for place in found if self.exists(place)), key=lambda place: self.facts(place)["time"])

    def size(self, place: Place) -> int:
        """Bytes of its files."""
        return sum(path.stat().st_size for path in self.find(place).rglob("*") if path.is_file())

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def snapshot(self, run: str, seq: int, weights: Weights, steps: int) -> None:
        """The server's own checkpoint of a run after request `seq`; the one before is kept."""
        folder = self.runs / run.replace(":", ".") / "snapshots"
        self._write(folder, seq, weights, {"request": f"{run}:{seq}", "steps": steps}, with_optimizer=True)
        store.prune(folder, 2, None)

    def restore(self, run: str, seq: int, weights: Weights) -> dict[str, Any]:
        """The weights after request `seq`; returns what was written down with them. Newer snapshots, which the journal
        of a killed server does not have, go: else they would count when old ones are removed."""
        parent = self.runs / run.replace(":", ".") / "snapshots"
        for each in store.checkpoints(parent):
            if store.step_of(each) > seq:
                shutil.rmtree(each)
        folder = parent / f"checkpoint-{seq}"
        self._read(folder, weights, with_optimizer=True)
        return facts_of(folder)

    # -- files --------------------------------------------------------------------------------------------------------

    def _write(self, folder: Path, step: int, weights: Weights, facts: dict[str, Any], *, with_optimizer: bool) -> None:
        aside = store.aside(folder, step)
        size = sum(each.numel() * each.element_size() for each in weights.parameters.values())
        facts = {"time": time.time(), "base_model": self.base_name, "shape": asdict(weights.shape), **facts}
        with store.explained(aside, size * (3 if with_optimizer else 1)), self.model.using(weights):
            store.new_folder(folder, step)
            if weights.shape.rank:
                self.model.model.peft_config[weights.shape.name].base_model_name_or_path = self.base_name
                save_adapter(self.model.model, aside)
            else:
                self.model.base.save_pretrained(aside)
                if self.model.tokenizer is not None:
                    self.model.tokenizer.save_pretrained(aside)
            if with_optimizer and weights.optimizer is not None:
                save_optimizer(aside, optimizer_state(weights.optimizer, self.model.model))
            store.publish(aside, {"serve": facts})

    def load(self, place: Place, weights: Weights, *, with_optimizer: bool = False) -> None:
        """Puts the values of a checkpoint into weights of its shape.

        Raises:
            DataError: it is not there, of another shape, or without the optimizer's state. CheckpointError: damaged.
        """
        folder = self.find(place)
        if with_optimizer and place.kind != "weights":
            raise DataError(f"{place} holds no optimizer's state; load a checkpoint of save_state, or weights alone.")
        self._read(folder, weights, with_optimizer=with_optimizer)

    def weights_of(self, place: Place) -> Weights:
        """Those of a checkpoint, to sample from. Raises as `load`."""
        return self._loaded(place, self.facts(place)["request"])

    def _load_sampler(self, place: Place, _request: str) -> Weights:
        weights = self.model.new_weights(self.shape(place), 0)
        weights.optimizer = None
        self.load(place, weights)
        return weights

    def shape(self, place: Place) -> Shape:
        """What the checkpoint's weights are."""
        return Shape(**self.facts(place)["shape"])

    def _read(self, folder: Path, weights: Weights, *, with_optimizer: bool) -> None:
        read_manifest(folder)  # compares every file with its checksum
        shape = Shape(**facts_of(folder)["shape"])
        if shape != weights.shape:
            raise DataError(f"{folder.parent.name} is of shape {shape.name}, the model of {weights.shape.name}.")
        with self.model.using(weights), listed_files(folder) as listed:
            if shape.rank:
                from peft import get_peft_model_state_dict, set_peft_model_state_dict

                stored = load_file(listed / "adapter_model.safetensors")
                name = shape.name
                wanted = get_peft_model_state_dict(self.model.model, adapter_name=name, save_embedding_layers=False)
                if {key: each.shape for key, each in wanted.items()} != {
                    key: each.shape for key, each in stored.items()
                }:
                    raise CheckpointError(f"{folder}: its adapters are not those of this base model.")
                set_peft_model_state_dict(self.model.model, stored, adapter_name=name)
            else:
                parameters = dict(self.model.base.named_parameters())
                for file in sorted(listed.glob("*.safetensors")):
                    for key, each in load_file(file).items() if not file.name.startswith(OPTIMIZER) else ():
                        parameters.pop(key).data.copy_(each)
                if parameters:
                    raise CheckpointError(f"{folder}: {len(parameters)} weights are missing, as {min(parameters)}.")
            if with_optimizer:
                assert weights.optimizer is not None
                load_optimizer(listed, weights.optimizer, self.model.model)


def _ends(file: Path) -> float | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))["ends"]
    except (OSError, ValueError, KeyError):
        return None


def _check_life(seconds: Any) -> None:
    if seconds is not None and not (isinstance(seconds, int | float) and 0 <= seconds <= _LONGEST_LIFE):
        raise DataError(f"ttl_seconds={seconds!r} must be null or 0 to {_LONGEST_LIFE} seconds.")


def facts_of(folder: Path) -> dict[str, Any]:
    """What was written into the manifest of a checkpoint."""
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["serve"]
    return found
