"""Checkpoints of clients, by the code that checkpoints of training have: complete or absent, listed with checksums.

    FOLDER/runs/RUN/weights/NAME/checkpoint-1            save_state: weights and optimizer
    FOLDER/runs/RUN/sampler_weights/NAME/checkpoint-1    save_weights_for_sampler
    FOLDER/runs/RUN/external_weights/NAME/checkpoint-1   save_weights_external
    FOLDER/runs/RUN/snapshots/checkpoint-SEQ             the server's own, from which a restart goes on

Each is a folder of PEFT (or a whole model with full fine-tuning), which `treewise rl --model`, PEFT and vLLM read.
"""

import json
import logging
import re
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from treewise.base import features
from treewise.base.weight_files import MANIFEST
from treewise.errors import CheckpointError, DataError
from treewise.nn.wrapped import is_peft
from treewise.rl.samplers.server_weights import save_adapter
from treewise.serve.adapter_slots import OwnedWeights, Shape
from treewise.serve.journal import RequestJournal
from treewise.serve.weights import ServedModel
from treewise.trainer.checkpoint import store
from treewise.trainer.checkpoint.load_optimizer import load_optimizer
from treewise.trainer.checkpoint.optimizer_state import optimizer_state, save_optimizer
from treewise.trainer.checkpoint.store import listed_files, read_manifest
from treewise.trainer.checkpoint.weights import load_weights

logger = logging.getLogger("treewise")
TYPES: dict[str, Literal["training", "sampler", "external"]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
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


@dataclass(frozen=True, slots=True)
class CheckpointName:
    """A checkpoint's name: `tinker://RUN/KIND/NAME`."""

    run: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @classmethod
    def parsed(cls, path: Any) -> "CheckpointName":
        """Raises `DataError` for anything that is no such name; so no path leads out of the folder."""
        if (found := _PATH.fullmatch(str(path))) is None:
            raise DataError(f"{path!r} is no path of a checkpoint, as tinker://RUN/weights/NAME: plain names alone.")
        return cls(*found.groups())


class NoCheckpointError(DataError):
    """It is not there, has expired, or is of another key, which are one answer."""

    status_code = 404

    def __init__(self, place: CheckpointName) -> None:
        super().__init__(f"{place}: no such checkpoint.")


class Store:
    """The checkpoints below a folder. The journal has when they expire, and whose they are.

    lost: models that cannot go on, each with the reason.
    """

    def __init__(self, folder: Path, model: ServedModel, base_name: str, journal: RequestJournal) -> None:
        self.runs, self.model, self.base_name, self.journal = folder / "runs", model, base_name, journal
        self._loaded = lru_cache(_KEPT)(self._load_sampler)
        self._read_back: set[Shape] = set()  # of samplers
        for kind in self.runs.glob("*/*"):  # what a killed server left
            for inner in [kind] if kind.name == "snapshots" else kind.iterdir():
                store.recover(inner)
        self.lost = self._compared()

    def _compared(self) -> dict[str, str]:
        """Holds the folders of runs against the journal. A line is logged for each run that one of both lacks; returns
        those that cannot go on. Nothing is removed.
        """
        names, lost = self.journal.names("model"), {}
        for folder in sorted(path for path in self.runs.glob("*") if path.is_dir()):
            name = folder.name.replace(".", ":")
            if name not in names or self.journal.key_of(name) is None:
                found = ", ".join(
                    str(manifest.parent.relative_to(folder)) for manifest in sorted(folder.rglob(MANIFEST))
                )
                logger.warning(
                    "%s: the journal has no such run, so no client finds it. Put back a copy of the journal that has "
                    "it; or read its checkpoints (%s), folders of PEFT, with treewise, PEFT or vLLM.",
                    *(folder, found or "none"),
                )
        for name in names:
            parent, seq = self._snapshots(name), self.journal.snapshot_seq(name)
            steps = [
                store.step_of(snapshot) for snapshot in store.checkpoints(parent) if (snapshot / MANIFEST).is_file()
            ]
            saved = {step: parent / f"checkpoint-{step}" for step in steps}
            for place, facts in self.places(name).items():
                saved.setdefault(int(str(facts["request"]).rpartition(":")[2]), self.folder(place))
            newest = max(saved, default=-1)
            if newest > self.journal.last_seq(name):
                lost[name] = (
                    f"{name} cannot go on: {saved[newest]} has its weights after request {newest}, "
                    f"and the journal lost what came after request {self.journal.last_seq(name)}."
                )
            elif seq >= 0 and not (parent / f"checkpoint-{seq}" / MANIFEST).is_file():
                lost[name] = f"{name} cannot go on: its weights, {parent / f'checkpoint-{seq}'}, are missing."
            if name in lost:
                lost[name] += " Put back a copy of what is missing, or go on from a checkpoint in a new run."
                logger.warning("%s", lost[name])
        return lost

    def _snapshots(self, run: str) -> Path:
        return self.runs / run.replace(":", ".") / "snapshots"

    def folder(self, place: CheckpointName) -> Path:
        """The folder of a checkpoint, there or not."""
        return self.runs / place.run.replace(":", ".") / place.kind / place.name

    def facts(self, place: CheckpointName, key: str | None = None) -> dict[str, Any]:
        """What was written down with a checkpoint, its `folder`, and when it `expires`, in seconds since 1970 or None.
        key: the digest of that which asks; None: the server does. Raises `NoCheckpointError` where it is not there, has
        expired, or belongs to another key.
        """
        folder, expires = self.folder(place) / "checkpoint-1", self.journal.get("expires", str(place))
        is_there = (folder / MANIFEST).is_file() and (expires is None or expires >= time.time())
        if not is_there or key not in (None, self.journal.key_of(place.run)):
            raise NoCheckpointError(place)
        return {**_facts(folder), "folder": folder, "expires": expires}

    def set_life(self, place: CheckpointName, seconds: Any) -> None:
        """Lets a checkpoint expire; None: never. Raises `DataError` for a time that is no number of seconds."""
        self.journal.put("expires", str(place), place.run, _end_of(seconds))

    def save(self, place: CheckpointName, weights: OwnedWeights, facts: dict[str, Any], life: Any = None) -> None:
        """Writes a checkpoint; the optimizer's state, too, where it is one of training.

        Raises:
            CheckpointError: it could not be written whole; what was there is untouched. DataError: a wrong `life`.
        """
        expires, kind = _end_of(life), place.kind
        # Runs save for a sampler at each step: of these the first of each shape is read back.
        is_read = kind != "sampler_weights" or weights.shape not in self._read_back
        name = str(place) if is_read and self.model.settings.verify_saves else None
        self._write(self.folder(place), 1, weights, facts, with_optimizer=kind == "weights", read_as=name)
        self._read_back |= {weights.shape} if kind == "sampler_weights" else set()
        self.journal.put("expires", str(place), place.run, expires)

    def forget(self) -> None:
        """Removes what has expired."""
        for name in self.journal.names("expires"):
            expires = self.journal.get("expires", name)
            if expires is not None and expires < time.time():
                self.delete(CheckpointName.parsed(name))

    def delete(self, place: CheckpointName) -> None:
        """Removes a checkpoint, if it is there."""
        shutil.rmtree(self.folder(place), ignore_errors=True)  # two may do so at once
        self.journal.remove("expires", str(place))

    def places(self, run: str | None = None) -> dict[CheckpointName, dict[str, Any]]:
        """All checkpoints, or those of a run, the oldest first, with their facts; files that a killed server left are
        none."""
        found = {}
        for manifest in self.runs.glob(f"{'*' if run is None else run.replace(':', '.')}/*/*/checkpoint-1/{MANIFEST}"):
            run_folder, kind, name, _, _ = manifest.relative_to(self.runs).parts
            place = CheckpointName(run_folder.replace(".", ":"), kind, name)
            with suppress(DataError, OSError):  # it has expired, or goes at this moment
                found[place] = self.facts(place)
        return dict(sorted(found.items(), key=lambda item: item[1]["time"]))

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def snapshot(self, run: str, seq: int, weights: OwnedWeights, facts: dict[str, Any]) -> None:
        """The server's own checkpoint of a run after request `seq`; the one before is kept."""
        folder = self._snapshots(run)
        self._write(folder, seq, weights, {"request": f"{run}:{seq}", **facts}, with_optimizer=True)
        store.prune(folder, 2, None)

    def restore(self, run: str, seq: int, weights: OwnedWeights) -> dict[str, Any]:
        """The weights after request `seq`; returns what was written down with them. Newer snapshots, which the journal
        of a killed server does not have, go: else they would count when old ones are removed."""
        parent = self._snapshots(run)
        for snapshot in store.checkpoints(parent):
            if store.step_of(snapshot) > seq:
                shutil.rmtree(snapshot)
        return self._read(parent / f"checkpoint-{seq}", weights, with_optimizer=True)

    # -- files --------------------------------------------------------------------------------------------------------

    def _write(
        self,
        folder: Path,
        step: int,
        weights: OwnedWeights,
        facts: dict[str, Any],
        *,
        with_optimizer: bool,
        read_as: str | None = None,
    ) -> None:
        """read_as: the name by which it is read back and compared before it is there; None: it is not."""
        aside = store.aside(folder, step)
        size = sum(parameter.numel() * parameter.element_size() for parameter in weights.parameters.values())
        facts = {"time": time.time(), "base_model": self.base_name, "shape": asdict(weights.shape), **facts}
        explained = partial(store.explained, aside, size * (3 if with_optimizer else 1))
        with self.model.using(weights):
            with explained():
                store.new_folder(folder, step)
                self._write_weights(aside, weights.shape)
                if with_optimizer and weights.optimizer is not None:
                    save_optimizer(aside, optimizer_state(weights.optimizer, self.model.model))
            if read_as is not None and features.is_there("verified_saves"):
                self._verify(aside, read_as)
            with explained():
                store.publish(aside, {"serve": facts})

    def _write_weights(self, aside: Path, shape: Shape) -> None:
        """Those that the model is using, as PEFT or `save_pretrained` does."""
        if shape.rank:
            adapted = self.model.model
            assert is_peft(adapted), "adapters are in the model whose weights they are"
            adapted.peft_config[shape.name].base_model_name_or_path = self.base_name
            save_adapter(adapted, aside)
            return
        self.model.base.save_pretrained(aside)
        if self.model.tokenizer is not None:
            self.model.tokenizer.save_pretrained(aside)

    def _verify(self, aside: Path, name: str) -> None:
        try:
            logger.info("%s", self.model.verify_saved(aside, name))
        except CheckpointError:
            shutil.rmtree(aside)
            raise

    def load(
        self, place: CheckpointName, weights: OwnedWeights, *, with_optimizer: bool = False, key: str | None = None
    ) -> None:
        """Puts the values of a checkpoint into weights of its shape. key: as in `facts`.

        Raises:
            DataError: it is not there, of another shape, or without the optimizer's state. CheckpointError: damaged.
        """
        folder = self.facts(place, key)["folder"]
        if with_optimizer and place.kind != "weights":
            raise DataError(f"{place} holds no optimizer's state; load a checkpoint of save_state, or weights alone.")
        self._read(folder, weights, with_optimizer=with_optimizer)

    def weights_of(self, place: CheckpointName) -> OwnedWeights:
        """Those of a checkpoint, to sample from. Raises as `load`."""
        return self._loaded(place, self.facts(place)["request"])

    def _load_sampler(self, place: CheckpointName, _request: str) -> OwnedWeights:
        weights = self.model.new_weights(self.shape(place), 0)
        weights.optimizer = None
        self.load(place, weights)
        return weights

    def shape(self, place: CheckpointName, key: str | None = None) -> Shape:
        """What the checkpoint's weights are. key: as in `facts`."""
        return Shape(**self.facts(place, key)["shape"])

    def _read(self, folder: Path, weights: OwnedWeights, *, with_optimizer: bool) -> dict[str, Any]:
        read_manifest(folder)  # compares every file with its checksum
        facts = _facts(folder)
        shape = Shape(**facts["shape"])
        if shape != weights.shape:
            raise DataError(f"{folder.parent.name} is of shape {shape.name}, the model of {weights.shape.name}.")
        with self.model.using(weights):
            load_weights(self.model.model, folder, shape.name if shape.rank else None)
            if with_optimizer:
                assert weights.optimizer is not None
                with listed_files(folder) as listed:
                    load_optimizer(listed, weights.optimizer, self.model.model)
        return facts


def size_of(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _end_of(seconds: Any) -> float | None:
    """When a life of so many seconds ends."""
    if seconds is not None and not (isinstance(seconds, int | float) and 0 <= seconds <= _LONGEST_LIFE):
        raise DataError(f"ttl_seconds={seconds!r} must be null or 0 to {_LONGEST_LIFE} seconds.")
    return None if seconds is None else time.time() + seconds


def _facts(folder: Path) -> dict[str, Any]:
    """What was written into the manifest of a checkpoint."""
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["serve"]
    return found
