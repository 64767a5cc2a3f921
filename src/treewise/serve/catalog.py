"""The routes that list what there is: sessions, runs, checkpoints and their files, and the figures of the page.

Each key sees what its own sessions made. What is another's is answered as what is not there.
"""

import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
import psutil
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from tinker import types

from treewise.errors import DataError
from treewise.serve.adapter_slots import Shape
from treewise.serve.links import LIFE_SECONDS, Links
from treewise.serve.store import TYPES, CheckpointName, NoCheckpointError, size_of
from treewise.serve.worker import Worker


class Catalog:
    """Handlers of requests that change no model. Each is given the request (its second argument is for others, whose
    requests have a type), and returns what is sent as JSON, or a response. `key_of(request)` is the digest of the key
    that asks.
    """

    def __init__(self, worker: Worker) -> None:
        self.journal, self.store, self.worker = worker.journal, worker.store, worker
        self.links = Links(worker.store.runs.parent / "secret")
        self.beats: dict[str, float] = {}  # when each session was last heard of

    def is_own(self, request: Request, name: str) -> bool:
        """Whether a session, or what its id begins, belongs to the key that asks."""
        return bool(key_of(request) == self.journal.key_of(name))

    def facts(self, request: Request, kind: str, name: str) -> dict[str, Any]:
        """What the journal holds of a session, model or sampler of the key that asks. Raises `HTTPException`: 404."""
        facts: dict[str, Any] | None = self.journal.get(kind, name) if self.is_own(request, name) else None
        if facts is None:
            raise HTTPException(404, f"no {kind} {name}.")
        return facts

    async def sessions(self, request: Request, _: object) -> object:
        return {"sessions": _page(request, self.journal.names("session", key_of(request)))[0]}

    async def session(self, request: Request, _: object) -> object:
        name = request.path_params["session"]
        facts = self.facts(request, "session", name)
        named = {key: facts.get(key) for key in ("user_metadata", "display_name")}
        made = {
            "training_run_ids": self.journal.names("model", name),
            "sampler_ids": self.journal.names("sampler", name),
        }
        return {**made, **named}

    async def sampler(self, request: Request, _: object) -> object:
        name = request.path_params["sampler"]
        facts = self.facts(request, "sampler", name)
        return {"sampler_id": name, "base_model": facts["base_model"], "model_path": facts["model_path"]}

    async def training_runs(self, request: Request, _: object) -> object:
        names, cursor = _page(request, self.journal.names_of("model", key_of(request)))
        return {"training_runs": [self._run_of(request, name) for name in names], "cursor": cursor}

    async def training_run(self, request: Request, _: object) -> object:
        return self._run_of(request, request.path_params["run"])

    def _run_of(self, request: Request, name: str) -> types.TrainingRun:
        facts, places = self.facts(request, "model", name), self.store.places(name)
        last = {place.kind: _checkpoint(place, own) for place, own in places.items()}
        return types.TrainingRun(
            training_run_id=name,
            base_model=self.store.base_name,
            model_owner="local",
            **lora_facts(Shape(**facts["shape"])),
            last_request_time=max([facts["created"], *(own["time"] for own in places.values())]),
            last_checkpoint=last.get("weights"),
            last_sampler_checkpoint=last.get("sampler_weights"),
            user_metadata=facts.get("user_metadata"),
        )

    async def run_checkpoints(self, request: Request, _: object) -> object:
        self.facts(request, "model", request.path_params["run"])
        places = self.store.places(request.path_params["run"])
        return {"checkpoints": [_checkpoint(*item) for item in places.items()]}

    async def checkpoints(self, request: Request, _: object) -> object:
        runs = self.journal.names_of("model", key_of(request))
        found = [item for run in runs for item in self.store.places(run).items()]
        items, cursor = _page(request, sorted(found, key=lambda item: item[1]["time"]), 100)
        return {"checkpoints": [_checkpoint(*item) for item in items], "cursor": cursor}

    def _place(self, request: Request) -> tuple[CheckpointName, dict[str, Any]]:
        """The checkpoint that a path names, and what is written down with it. Raises `NoCheckpointError`."""
        place = _place(request)
        return place, self.store.facts(place, key_of(request))

    async def delete(self, request: Request, _: object) -> object:
        await run_in_threadpool(self.store.delete, self._place(request)[0])
        return Response(status_code=204)

    async def set_life(self, request: Request, _: object) -> object:
        self.store.set_life(self._place(request)[0], json_of(request).get("ttl_seconds"))
        return Response(status_code=204)

    async def urls(self, request: Request, _: object) -> object:
        """Links to the files of an export, for whoever has them: each to its file as it is now, for an hour."""
        place, facts = self._place(request)
        base, now = str(request.url.replace(query="")).removesuffix("external_weights_urls"), time.time()
        return {
            "urls": {
                file: f"{base}files/{file}?{self.links.made(_named(place, facts, file), now)}" for file in _files(facts)
            },
            "expires": datetime.fromtimestamp(int(now) + LIFE_SECONDS, UTC),
        }

    async def file(self, request: Request, _: object) -> object:
        """One file of a checkpoint, by its plain name: for its owner, or by a link."""
        name, link = request.path_params["file"], request.query_params
        if "signature" in link:
            facts = self._linked(_place(request), name, link["signature"], link.get("expires", ""))
        else:
            _, facts = self._place(request)
        if (found := _files(facts).get(name)) is None:
            raise HTTPException(404, "no such file in the checkpoint.")
        return FileResponse(found, media_type="application/octet-stream")

    def _linked(self, place: CheckpointName, name: str, signature: str, expires: str) -> dict[str, Any]:
        with suppress(NoCheckpointError):
            facts = self.store.facts(place)
            if self.links.is_valid(_named(place, facts, name), expires, signature):
                return facts
        raise HTTPException(403, "this link is not one of this server, or its hour is over; ask for another.")

    async def status(self, request: Request, _: object) -> object:
        """What the page shows: of the key that asks, and how busy the server is."""
        worker, key = self.worker, key_of(request)
        names, (kind, owner) = self.journal.names_of("model", key)[:50], worker.now
        seen = [session for session, heard in self.beats.items() if time.time() - heard < 60]
        return {
            **worker.counts(key),
            "started": worker.started,
            "seconds": worker.seconds,
            "now": f"{kind} of {owner if self.is_own(request, owner) else 'another key'}" if kind else "",
            "curves": {name: self.journal.get("curve", name) or [] for name in names},
            "model": self.store.base_name,
            "share": worker.settings.share,
            "waiting": worker.num_waiting,
            "max_queue": worker.settings.max_queue,
            "memory_bytes": psutil.Process().memory_info().rss,
            "clients": sum(self.is_own(request, session) for session in seen),
            "runs": [{"id": name, **self.facts(request, "model", name)} for name in names],
        }


def key_of(request: Request) -> str:
    """The digest of the key that asks."""
    key: str = request.state.key
    return key


def body_of(request: Request) -> bytes:
    """What was sent with a request, once it has come."""
    body: bytes = request.state.body
    return body


def json_of(request: Request) -> dict[str, Any]:
    """The body that came with a request. Raises `DataError`."""
    found = orjson.loads(body_of(request) or b"{}")
    if not isinstance(found, dict):
        raise DataError("the body is not a JSON object.")
    return found


def lora_facts(shape: Shape) -> dict[str, Any]:
    """As several answers have them."""
    return {"is_lora": bool(shape.rank), "lora_rank": shape.rank or None}


def _place(request: Request) -> CheckpointName:
    return CheckpointName.parsed("tinker://{run}/{kind}/{name}".format(**request.path_params))


def _files(facts: dict[str, Any]) -> dict[str, Path]:
    return {path.name: path for path in sorted(facts["folder"].iterdir()) if path.is_file()}


def _named(place: CheckpointName, facts: dict[str, Any], file: str) -> str:
    """What a link is signed for: a file of a checkpoint, as the request of this id saved it."""
    return f"{place}/{file} {facts['request']}"


def _checkpoint(place: CheckpointName, facts: dict[str, Any]) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id=f"{place.kind}/{place.name}",
        checkpoint_type=TYPES[place.kind],
        time=facts["time"],
        tinker_path=str(place),
        size_bytes=size_of(facts["folder"]),
        user_metadata=facts.get("user_metadata"),
        expires_at=facts["expires"],
    )


def _page(request: Request, items: list[Any], default: int = 20) -> tuple[list[Any], dict[str, int]]:
    """The part that was asked for, and where it lies in the whole."""
    given = request.query_params
    offset, limit = max(int(given.get("offset", 0)), 0), min(max(int(given.get("limit", default)), 0), 1000)
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}
