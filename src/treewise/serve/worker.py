"""The one thread that owns the model: takes requests in their order, runs them in groups, and answers.

Requests of one model run in the order of their sequence numbers. All forward_backward requests of a model that are
there when the first of them runs are one forest; so are the prompts of all sampling requests of the same weights.

Where the disk is full, the request at hand waits until its answer can be written, with all that it computed; what comes
meanwhile is refused (`DiskError`), and nothing that was taken is lost.

A client counts each request, whatever becomes of it; so does the server. A number that was refused is passed over, and
so is one that does not come (`GAP`): a client had its error then, and goes on with the next.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tinker import types

from treewise.errors import (
    ConfigError,
    DataError,
    DiskError,
    NonFiniteError,
    SamplerError,
    TreewiseError,
    UnsupportedModelError,
)
from treewise.serve.held_runs import HeldRuns
from treewise.serve.journal import FAILED, GAP, LOST, REFUSED, QueuedRequest
from treewise.serve.request_queue import RequestQueue
from treewise.serve.run import Run, read_adam
from treewise.serve.sampling import Sampling, answers, read_request
from treewise.serve.step_window import GradientsLostError
from treewise.serve.store import KINDS, CheckpointName, Store, size_of
from treewise.serve.weights import COUNTS, WeightsError
from treewise.serve.wire import PROTOBUF, call_answer, read_rows

logger = logging.getLogger("treewise")
JSON = "application/json"
CALLS = ("forward", "forward_backward")
MAX_GROUP_SAMPLES = 64  # requests that are drawn together before others get their turn
CANCELLED = DataError("cancelled by the client.")
PATIENCE_SECONDS = 40.0  # for requests with lower numbers; the SDK waits 30 s at most between two tries
TIDY_SECONDS, LOOK_SECONDS = 60.0, 2.0  # between looks for what is old, and for what does not come
_CURVE, _KEPT_SAMPLES, _SHOWN = 2000, 20, 400  # on the page: points of a curve, samples, characters of each


class QueueFullError(TreewiseError, BlockingIOError):
    """As many requests wait as the server lets."""


class RefusedBeforeError(DataError):
    """The number of a request was refused, with this status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status_code = status


class Worker(threading.Thread):
    """on_answers: called when requests were answered. uploaded: until when a key's large bodies are under way, as
    `time.monotonic` counts. seconds: of work, by kind of request. now: the kind and the owner of what runs. full: why
    nothing can be written now.
    """

    def __init__(
        self, store: Store, on_answers: Callable[[], None], uploaded: Callable[[str], float] = lambda _: 0.0
    ) -> None:
        super().__init__(name="treewise-serve", daemon=True)
        self.store, self.journal, self.model, self.settings = store, store.journal, store.model, store.model.settings
        self.on_answers, self.uploaded = on_answers, uploaded
        self.started, self.seconds, self.now = time.time(), dict[str, float](), ("", "")
        self.full: DiskError | None = None
        self._counts: dict[str, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._turns = RequestQueue(self.journal)
        self.held = HeldRuns(store, self._turns, self._changed)
        self._drawn: set[str] = set()  # samples that have begun and were not cancelled
        self._patience: dict[str, float] = {}  # until when a model waits for lower numbers, once its client sent one
        self._doubtful: set[str] = set()  # models with a gap where this process first heard of them
        self._begun = time.monotonic()
        self._is_stopping = self._was_sample = False
        works = self.journal.works()
        self._turns.add(work for work in works if work.owner not in store.lost)
        for work in works:
            if work.owner in store.lost and not work.is_answered:
                self._fail(work, DataError(store.lost[work.owner]), REFUSED)

    def counts(self, key: str) -> dict[str, Any]:
        """What was done for an API key since the start, and its last samples; the page shows it."""
        none = {**dict.fromkeys((*COUNTS, "sampled_tokens", "failures"), 0), "samples": []}
        return self._counts.get(key, none)

    def _counts_of(self, work: QueuedRequest) -> dict[str, Any]:
        key = self.journal.key_of(work.owner) or ""
        return self._counts.setdefault(key, self.counts(key))

    # -- the queue, from any thread -----------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests without an answer."""
        with self._changed:
            return sum(not work.is_answered for work in self._turns.waiting.values())

    def submit(self, work: QueuedRequest, body: bytes, patience: float = PATIENCE_SECONDS) -> None:
        """Takes a request; one that was taken before is the same one. One whose turn has passed is answered so.

        patience: how long its model then waits for requests with lower numbers, in seconds; 0: none is under way.

        Raises:
            DataError: its sequence number was used for something else, or the model cannot go on. RefusedBeforeError:
                the number was refused. QueueFullError: too many wait. The request that a model waits for is taken
                nevertheless, because it lets the others go.
        """
        with self._changed:
            if work.owner in self.store.lost:
                raise DataError(self.store.lost[work.owner])
            if (before := self.journal.find(work.id)) is not None:
                refusal = json.loads(before.answer or b"{}") if before.media == REFUSED else {}
                if "status" in refusal:
                    raise RefusedBeforeError(refusal["error"], refusal["status"])
                if before.kind not in (work.kind, GAP):
                    raise DataError(f"request {work.id} was {before.kind}, and is {work.kind} now.")
            elif work.kind != "sample" and work.seq < self._turns.next_of(work.owner):
                self._refuse(work, f"the turn of request {work.seq} has passed; the model is at a later one.")
            else:
                is_next = work.kind != "sample" and work.seq == self._turns.next_of(work.owner)
                if is_next:
                    self._doubtful.discard(work.owner)
                elif self.num_waiting >= self.settings.max_queue:
                    raise QueueFullError(f"{self.settings.max_queue} requests wait (max_queue); send it again later.")
                self._hear(work, patience)
                self.journal.add(work, body)
                self._turns.add([work])
                if not patience:
                    self._pass_over(work.owner, work.seq)
                self._changed.notify()

    def refuse(self, work: QueuedRequest, error: str, status: int | None, patience: float = PATIENCE_SECONDS) -> None:
        """A request that the door refuses takes its number all the same, so that the next one has its turn. status:
        with which it was answered, and is when it comes again; None: as a future. One that was taken before stays, and
        numbers far ahead are not taken.
        """
        with self._changed:
            ahead, is_lost = work.seq - self._turns.next_of(work.owner), work.owner in self.store.lost
            if not is_lost and self.journal.find(work.id) is None and 0 <= ahead <= self.settings.max_queue:
                self._hear(work, patience)
                self._refuse(work, error, status)
                if not patience:
                    self._pass_over(work.owner, work.seq)
                self._changed.notify()

    def _refuse(self, work: QueuedRequest, error: str, status: int | None = None) -> None:
        content: dict[str, object] = {"error": error, "category": types.RequestErrorCategory.User}
        content |= {} if status is None else {"status": status}
        self.journal.refuse(work, json.dumps(content).encode())
        self._turns.add([replace(work, is_answered=True, is_done=True)])

    def _hear(self, work: QueuedRequest, patience: float) -> None:
        """Notes that a model's client sends something. Where the first that this process hears leaves a gap, it cannot
        be known whether requests did not come or were lost in a power failure.
        """
        if work.kind != "sample":
            if work.owner not in self._patience and work.seq > self.journal.last_seq(work.owner) + 1:
                self._doubtful.add(work.owner)
            self._patience[work.owner] = time.monotonic() + patience

    def _pass_over(self, owner: str, below: int) -> None:
        """Lets a model go on without those of its requests below a number that have not come. Where a write has no
        room, all of it is done again later."""
        gaps = self._turns.gaps(owner, below)
        if gaps and owner in self._doubtful:
            error = DataError(
                f"requests {gaps[0][0]} to {gaps[-1][1]} of {owner}, before this one, are not in the server's journal. "
                "If they had answers, the server lost them when its machine lost its power, and the weights are those "
                "before them: go on from a checkpoint (create_training_client_from_state_with_optimizer)."
            )
            asked = self._turns.asked_of(owner)
            for work in asked:
                self._fail(work, error, REFUSED)
            self._turns.add([replace(work, is_answered=True, is_done=True) for work in asked])
            self._doubtful.discard(owner)
            self.on_answers()
        for first, last in gaps:
            text = f"requests {first} to {last} of the model never came, or came after those that followed them."
            self._refuse(QueuedRequest(f"{owner}:{first}", owner, last, GAP), text)

    def _close_gaps(self, now: float) -> None:
        """For models whose requests wait for one that does not come."""
        with self._changed:
            for owner in self._turns.asking():
                ends = self._patience.get(owner, self._begun + PATIENCE_SECONDS)
                is_over = now > max(ends, self.uploaded(self.journal.key_of(owner) or ""))
                if is_over and self._turns.head_of(owner) is None:
                    self._pass_over(owner, max(work.seq for work in self._turns.asked_of(owner)))
                    self.on_answers()

    def cancel(self, name: str) -> None:
        """Takes a sampling request out of the queue; one that has begun ends at its next token."""
        with self._changed:
            self._drawn.discard(name)
            is_waiting = name in self._turns.waiting and self._turns.waiting[name].kind == "sample"
            work = self._turns.waiting.pop(name) if is_waiting else None
        if work is None:
            return
        try:
            self._fail(work, CANCELLED)
        except DiskError:
            with self._changed:  # it is drawn, unless it is cancelled again
                self._turns.add([work])
            raise
        self.on_answers()

    def stop(self) -> None:
        """Lets the request at hand end, and saves what can be."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self.join()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs requests in turn until `stop` is called."""
        tidied = looked = -math.inf
        while True:
            try:
                if self.full is not None:
                    self.journal.try_room()
                    self.full = None
                if time.monotonic() - tidied > TIDY_SECONDS:
                    self.journal.forget()
                    self.store.forget()
                    tidied = time.monotonic()
                if time.monotonic() - looked > LOOK_SECONDS:
                    self._close_gaps(time.monotonic())
                    looked = time.monotonic()
            except DiskError as error:  # it is done again at the next turn
                self.tell_full(error)
            with self._changed:
                if not (works := self._take()) and not self._is_stopping:
                    self.now = ("", "")
                    self._changed.wait(LOOK_SECONDS)
                if self._is_stopping:
                    break
            if works:
                begun = time.monotonic()
                self.now = (works[0].kind, works[0].owner)
                try:
                    with self.journal.waiting_for_room(self._wait_for_room):
                        self._begin(works)
                    self.full = None
                except DiskError:  # the server ends meanwhile: they run again after its next start
                    self.held.drop(works[0].owner)  # no snapshot may have what has no answer
                spent = self.seconds.get(works[0].kind, 0.0) + time.monotonic() - begun
                self.seconds = {**self.seconds, works[0].kind: spent}
                self.on_answers()
        self.held.save_all()
        self.model.close()

    def _wait_for_room(self, error: DiskError) -> None:
        """Between two tries of a write. Raises the error once the server ends."""
        self.tell_full(error)
        with self._changed:
            if not self._is_stopping:
                self._changed.wait(LOOK_SECONDS)
            if self._is_stopping:
                raise error

    def tell_full(self, error: DiskError) -> None:
        """Something could not be written; from any thread. One line tells it, until something can be."""
        if self.full is None:
            logger.warning("%s Requests are answered with 507 until then.", error)
        self.full = error

    def _begin(self, works: Sequence[QueuedRequest]) -> None:
        """One request's failure is no other's: samples and calls that fail together, or ended the process (calls, which
        run again as they ran before, at half of the starts), run one by one. A request that ended the process at too
        many starts is refused; others run.
        """
        spent = [work for work in works if work.begun >= self.settings.max_starts and not work.is_answered]
        for work in spent:
            error = DataError(f"the server ended {work.begun} times while this request ran (max_starts).")
            self._fail(work, error, REFUSED)
        works = [work for work in works if work not in spent and not work.is_done]
        if not works:
            return
        kind = works[0].kind
        is_group = len(works) > 1 and kind in ("sample", *CALLS)
        most = 0 if kind == "sample" else self.settings.max_starts // 2
        apart = is_group and any(work.begun > most and not work.is_answered for work in works)
        try:
            if not apart:
                self.journal.begin(works)
                self._run(works)
        except DiskError:
            raise
        except Exception as error:
            is_of_all = isinstance(error, WeightsError) or (isinstance(error, SamplerError) and error.is_away)
            apart = is_group and not is_of_all
            if not apart and not isinstance(error, TreewiseError):
                logger.exception("%s %s failed", kind, works[0].id)
            for work in works if not apart else ():
                is_lost = kind == "optim_step" and isinstance(error, GradientsLostError)
                self._fail(work, error, LOST if is_lost else FAILED)
            if kind in ("load_weights", "create") and not isinstance(error, DataError):
                self.held.run_again(works[0].owner)  # it may be half loaded
        for work in works if apart else ():  # which of them it was
            self._begin([work])

    def _take(self) -> list[QueuedRequest]:
        """The next group: the oldest request that can run, and those that run with it."""
        turns = self._turns
        samples = [work for work in turns.waiting.values() if work.kind == "sample"]
        heads = [head for head in map(turns.head_of, turns.asking()) if head is not None]
        self._was_sample = bool(samples) and (not heads or not self._was_sample)  # they take turns with models
        if self._was_sample:
            paths = {owner: self._path_of(owner) for owner in {work.owner for work in samples}}
            works = [work for work in samples if paths[work.owner] == paths[samples[0].owner]][:MAX_GROUP_SAMPLES]
            self._drawn = {work.id for work in works}
        elif heads:
            works = [head := min(heads, key=self._precedence)]
            while head.kind in CALLS and (work := turns.waiting.get(f"{head.owner}:{works[-1].seq + 1}")):
                if not work.is_done and (work.kind, work.batch) != (head.kind, head.batch):
                    break
                works.append(work)
            turns.go_to(head.owner, works[-1].seq + 1)
        else:
            works = []
        for work in works:
            del turns.waiting[work.id]
        return works

    def _precedence(self, work: QueuedRequest) -> tuple[bool, float]:
        """Models in memory that hold gradients first, for which others would have to go; then who waited longest."""
        run = self.held.get(work.owner)
        return (True, 0.0) if run is None else (not run.has_gradients, run.used)

    def _path_of(self, sampler: str) -> str | None:
        facts = self.journal.get("sampler", sampler)
        return None if facts is None else facts.get("model_path")

    def _run(self, works: Sequence[QueuedRequest]) -> None:
        if (work := works[0]).kind == "sample":
            self._sample(works)
            return
        run = self.held.of(work.owner)
        if work.kind in CALLS:
            self._call(run, works)
            return
        body = self.journal.body(work.id)
        found = getattr(self, f"_{work.kind}")(run, work, json.loads(body))
        answer = json.dumps({"type": work.kind, **found}).encode()
        if work.kind == "load_weights" or (work.kind == "create" and run.facts["path"]):
            self.held.save(work.owner, run, (work.id, JSON, answer))  # the checkpoint may be deleted one day
        self.journal.answer(work.id, JSON, answer)
        if work.kind == "optim_step" and run.steps % self.settings.snapshot_every == 0:
            self.held.try_save(work.owner, run)

    def _fail(self, work: QueuedRequest, error: Exception, media: str = FAILED) -> None:
        is_users = isinstance(error, DataError | ConfigError | UnsupportedModelError | NonFiniteError)
        self._counts_of(work)["failures"] += 1
        text = str(error) or type(error).__name__
        content = {"error": text, "category": types.RequestErrorCategory.User if is_users else "server"}
        self.journal.answer(work.id, media, json.dumps(content).encode())

    def _read(
        self, works: Sequence[QueuedRequest], read: Callable[[QueuedRequest, bytes], Any]
    ) -> dict[QueuedRequest, Any]:
        """What requests ask. One that is wrong is answered, and leaves the others as they are."""
        found = {}
        for work in works:
            try:
                found[work] = read(work, self.journal.body(work.id))
            except (TreewiseError, ValueError, TypeError, OverflowError) as error:
                self._fail(work, error if isinstance(error, TreewiseError) else DataError(str(error)))
        return found

    def _call(self, run: Run, works: Sequence[QueuedRequest]) -> None:
        """All calls of a group as one forest."""
        calls = self._read(works, lambda _, body: read_rows(body, self.model))
        if not calls:
            return
        begun, trains = time.monotonic(), works[0].kind == "forward_backward"
        rows = [row for own in calls.values() for row in own]
        try:
            loss, counted = self.model.compute(run.weights, rows, run.window, gradients=trains)
        except WeightsError:
            raise run.blame(works[0].owner) from None
        counts = self._counts_of(works[0])
        for name in COUNTS:
            counts[name] += counted[name]
        if trains:
            new = float(loss.losses.sum()), *(counted[name] for name in COUNTS), time.monotonic() - begun
            run.sums = [before + added for before, added in zip(run.sums, new, strict=True)]
        low = 0
        for work, own in calls.items():
            self.journal.answer(work.id, PROTOBUF, call_answer(loss, low, low + len(own), counted))
            low += len(own)

    # -- requests: (run, work, the request as JSON) to the answer as JSON ---------------------------------------------

    def _create(self, _: Run, work: QueuedRequest, asked: dict[str, Any]) -> dict[str, Any]:
        return {"type": asked.get("type"), "path": asked.get("path"), "model_id": work.owner}

    def _optim_step(self, run: Run, work: QueuedRequest, asked: dict[str, Any]) -> dict[str, Any]:
        adam, begun, num_apart = read_adam(asked), time.monotonic(), run.window.num_apart
        (*sums, num_computed, seconds), run.sums = run.sums, [0.0] * 5
        if work.is_answered and self.journal.is_lost(work.id):
            run.forget_gradients()
            raise GradientsLostError("the gradients of this step were lost before the server was killed.")
        num_computed += self.model.end_window(run.weights, run.window)
        sums += num_computed, seconds + time.monotonic() - begun
        norm = run.optimize(self.model, adam)
        before = self.journal.get("curve", work.owner) or []
        curve = [point for point in before if point[0] < run.steps]  # the others ran before the server was killed
        self.journal.put("curve", work.owner, work.owner, [*curve, [float(run.steps), *sums]][-_CURVE:])
        if not math.isfinite(run.largest):
            raise run.blame(work.owner)
        share = {"share_ratio:mean": sums[1] / sums[2]} if sums[2] else {}
        apart = {"apart_calls:sum": float(num_apart)} if num_apart else {}
        return {"metrics": {"grad_norm:mean": norm, "step:max": float(run.steps), **share, **apart}}

    def _save(self, run: Run, work: QueuedRequest, asked: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint by its name; one for a sampler without a name, which a sampling session then has."""
        if asked.get("age_encryption_recipients"):
            raise DataError("age_encryption_recipients: exports are not encrypted here.")
        kind, name, overwrite = KINDS[work.kind], asked.get("path"), asked.get("overwrite")
        is_unnamed = kind == "sampler_weights" and not name
        if is_unnamed:
            overwrite = asked.get("kind") == "inflight"
            name = "inflight" if overwrite else f"unnamed-{work.seq:08d}"
        place = CheckpointName.parsed(f"tinker://{work.owner}/{kind}/" + (name or f"{work.seq:08d}"))
        there, life = self.store.places(work.owner), asked.get("ttl_seconds")
        if place in there and there[place]["request"] == work.id:  # saved before the server was killed
            self.store.set_life(place, life)
        elif place in there and not overwrite:
            raise DataError(f"{place} is there already; choose another name, or overwrite=True.")
        else:
            facts = {"request": work.id, "steps": run.steps, "user_metadata": asked.get("user_metadata")}
            self.store.save(place, run.weights, facts, life)
        if not is_unnamed:
            return {"path": str(place), "size_bytes": size_of(self.store.folder(place))}
        session = work.owner.split(":")[0]
        sampler = f"{session}:sample:{asked['sampling_session_seq_id']}"
        self.journal.put("sampler", sampler, session, {"base_model": self.store.base_name, "model_path": str(place)})
        unnamed = [checkpoint for checkpoint in self.store.places(work.owner) if checkpoint.name.startswith("unnamed-")]
        for checkpoint in sorted(unnamed, key=lambda checkpoint: checkpoint.name)[: -self.settings.keep_samplers]:
            self.store.delete(checkpoint)
        return {"sampling_session_id": sampler}

    _save_weights = _save_weights_external = _save_weights_for_sampler = _save

    def _load_weights(self, run: Run, work: QueuedRequest, asked: dict[str, Any]) -> dict[str, Any]:
        place = CheckpointName.parsed(asked["path"])
        key = self.journal.key_of(work.owner)
        self.store.load(place, run.weights, with_optimizer=asked["optimizer"], key=key)
        run.forget_gradients(with_moments=not asked["optimizer"])
        run.moved = ""
        return {"path": str(place), "model_id": work.owner}

    # -- samples ------------------------------------------------------------------------------------------------------

    def _sample(self, works: Sequence[QueuedRequest]) -> None:
        def read(work: QueuedRequest, body: bytes) -> Sampling:
            asked = types.SampleRequest.model_validate_json(body)
            return read_request(asked, work.id, self.model, lambda: work.id not in self._drawn)

        requests = self._read(works, read)
        if not requests:
            return
        path = self._path_of(works[0].owner)
        weights = None if path is None else self.store.weights_of(CheckpointName.parsed(path))
        decode = str if self.model.tokenizer is None else self.model.tokenizer.decode
        try:
            found = answers(self.model, weights, list(requests.values()))
        except NonFiniteError as error:
            raise NonFiniteError(f"{path or 'the base model'}: {error}") from None
        for work, (content, drawn) in zip(requests, found, strict=True):
            if work.id not in self._drawn:
                self._fail(work, CANCELLED)
                continue
            self.journal.answer(work.id, PROTOBUF, content)
            counts = self._counts_of(work)
            counts["sampled_tokens"] += sum(completion.num_tokens for completion in drawn)
            shown = {"text": decode(drawn[0].token_ids.tolist())[:_SHOWN], "reason": drawn[0].finish_reason}
            counts["samples"].append({**shown, "tokens": drawn[0].num_tokens})
            del counts["samples"][:-_KEPT_SAMPLES]
