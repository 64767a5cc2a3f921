"""The models of clients that are in memory: made, loaded, put on the disk for others, and run again from there."""

import logging
import threading
import time

from treewise.errors import CheckpointError, DataError, DiskError
from treewise.serve.adapter_slots import Shape
from treewise.serve.request_queue import RequestQueue
from treewise.serve.run import Run
from treewise.serve.store import CheckpointName, Store

logger = logging.getLogger("treewise")


class HeldRuns:
    """At most `max_models` of them; the worker's thread calls. turns: of all models, under `lock`."""

    def __init__(self, store: Store, turns: RequestQueue, lock: threading.Condition) -> None:
        self.store, self.journal, self.model, self.settings = store, store.journal, store.model, store.model.settings
        self._turns, self._changed = turns, lock
        self._runs: dict[str, Run] = {}

    def get(self, name: str) -> Run | None:
        """A model that is in memory."""
        return self._runs.get(name)

    def drop(self, name: str) -> None:
        """Forgets a model; its requests do not run again in this process."""
        self._runs.pop(name, None)

    def save_all(self) -> None:
        """Those that hold no gradients, as far as there is room."""
        for name, run in self._runs.items():
            self.try_save(name, run)

    def of(self, name: str) -> Run:
        if name not in self._runs:
            facts = self.journal.get("model", name)
            if facts is None:
                raise DataError(f"{name}: no such model.")
            while len(self._runs) >= self.settings.max_models:
                self._evict()
            weights = self.model.new_weights(Shape(**facts["shape"]), facts["seed"])
            run, seq = Run(weights, facts, self.model.new_window()), self.journal.snapshot_seq(name)
            if seq >= 0:
                saved = self.store.restore(name, seq, weights)
                run.steps, run.moved = int(saved["steps"]), saved.get("moved", "")
                run.window.is_worth_it = saved.get("shares")
            elif facts["path"]:
                self.store.load(CheckpointName.parsed(facts["path"]), weights, with_optimizer=facts["optimizer"])
            self._runs[name] = run
        self._runs[name].used = time.monotonic()
        return self._runs[name]

    def _evict(self) -> None:
        """Puts the model that waited longest on the disk; where all hold gradients, it is forgotten, and its requests
        since the last snapshot run again when it has its turn."""
        name = min(self._runs, key=lambda held: (self._runs[held].has_gradients, self._runs[held].used))
        run = self._runs.pop(name)
        if run.has_gradients or not self.try_save(name, run):
            self.run_again(name)

    def run_again(self, name: str) -> None:
        """Forgets a model, and runs its requests since the newest snapshot again when it has its turn."""
        with self._changed:
            self._runs.pop(name, None)
            self._turns.go_to(name, self.journal.snapshot_seq(name) + 1)
            self._turns.add(self.journal.works(name))

    def save(self, name: str, run: Run, answer: tuple[str, str, bytes] | None = None) -> None:
        """answer: of the newest request, which is written with the snapshot or not at all."""
        with self._changed:
            seq = self._turns.next_of(name) - 1
        if run.has_gradients or seq <= self.journal.snapshot_seq(name):
            return
        facts = {"steps": run.steps, "moved": run.moved, "shares": run.window.is_worth_it}
        self.store.snapshot(name, seq, run.weights, facts)
        self.journal.snapshot(name, seq, answer)

    def try_save(self, name: str, run: Run) -> bool:
        """Whether a model is on the disk; where it is not, its requests since the snapshot before run again."""
        try:
            self.save(name, run)
        except (CheckpointError, DiskError) as error:
            logger.warning("%s The journal keeps the requests of %s since its last snapshot.", error, name)
            return False
        return True
