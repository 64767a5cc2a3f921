"""The routes that list what there is: sessions, runs, checkpoints and their files, and the figures of the page."""

import time
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
from treewise.nn.adapter_slots import Shape
from treewise.serve.store import TYPES, Place, size_of
from treewise.serve.worker import Worker


class Catalog:
    """Handlers of requests that change no model. Each is given the request (its second argument is for others, whose
    requests have a type), and returns what is sent as JSON, or a response.
    """

    def __init__(self, worker: Worker) -> None:
        self.journal, self.store, self.worker = worker.journal, worker.store, worker
        self.beats: dict[str, float] = {}  # when each session was last heard of

    def facts(self, kind: str, name: str) -> dict[str, Any]:
        """What the journal holds of a session, model or sampler. Raises `HTTPException`: 404."""
        facts = self.journal.get(kind, name)
        if facts is None:
            raise HTTPException(404, f"no {kind} {name}.")
        return facts

    async def sessions(self, request: Request, _: object) -> object:
        return {"sessions": _page(request, self.journal.names("session"))[0]}

    async def session(self, request: Request, _: object) -> object:
        name = request.path_params["session"]
        named = {key: self.facts("session", name).get(key) for key in ("user_metadata", "display_name")}
        made = {
            "training_run_ids": self.journal.names("model", name),
            "sampler_ids": self.journal.names("sampler", name),
        }
        return {**made, **named}

    async def sampler(self, request: Request, _: object) -> object:
        name = request.path_params["sampler"]
        facts = self.facts("sampler", name)
        return {"sampler_id": name, "base_model": facts["base_model"], "model_path": facts["model_path"]}

    async def runs(self, request: Request, _: object) -> object:
        names, cursor = _page(request, self.journal.names("model"))
        return {"training_runs": list(map(self._run, names)), "cursor": cursor}

    async def run(self, request: Request, _: object) -> object:
        return self._run(request.path_params["run"])

    def _run(self, name: str) -> types.TrainingRun:
        facts, places = self.facts("model", name), self.store.places(name)
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
        self.facts("model", request.path_params["run"])
        places = self.store.places(request.path_params["run"])
        return {"checkpoints": [_checkpoint(*item) for item in places.items()]}

    async def checkpoints(self, request: Request, _: object) -> object:
        items, cursor = _page(request, list(self.store.places().items()), 100)
        return {"checkpoints": [_checkpoint(*item) for item in items], "cursor": cursor}

    async def delete(self, request: Request, _: object) -> object:
        await run_in_threadpool(self.store.delete, _place(request))
        return Response(status_code=204)

    async def set_life(self, request: Request, _: object) -> object:
        self.store.set_life(_place(request), json_of(request).get("ttl_seconds"))
        return Response(status_code=204)

    async def urls(self, request: Request, _: object) -> object:
        """Where the files of an export are fetched, by whoever may ask here."""
        base, key = str(request.url).removesuffix("external_weights_urls"), request.headers.get("x-api-key", "")
        expires = datetime.fromtimestamp(time.time() + 3600, UTC)
        return {
            "urls": {each: f"{base}files/{each}?key={key}" for each in sorted(self._files(request))},
            "expires": expires,
        }

    def _files(self, request: Request) -> dict[str, Path]:
        return {path.name: path for path in self.store.facts(_place(request))["folder"].iterdir() if path.is_file()}

    async def file(self, request: Request, _: object) -> object:
        """One file of a checkpoint, by its plain name."""
        if (found := self._files(request).get(request.path_params["file"])) is None:
            raise HTTPException(404, "no such file in the checkpoint.")
        return FileResponse(found, media_type="application/octet-stream")

    async def status(self, *_: object) -> object:
        """What the page shows."""
        names = self.journal.names("model")[:50]
        return {
            **self.worker.figures,
            "curves": {name: self.journal.get("curve", name) or [] for name in names},
            "model": self.store.base_name,
            "share": self.worker.settings.share,
            "waiting": self.worker.num_waiting,
            "max_queue": self.worker.settings.max_queue,
            "memory_bytes": psutil.Process().memory_info().rss,
            "clients": sum(time.time() - seen < 60 for seen in self.beats.values()),
            "runs": [{"id": name, **self.facts("model", name)} for name in names],
        }


def json_of(request: Request) -> dict[str, Any]:
    """The body that came with a request. Raises `DataError`."""
    found = orjson.loads(request.state.body or b"{}")
    if not isinstance(found, dict):
        raise DataError("the body is not a JSON object.")
    return found


def lora_facts(shape: Shape) -> dict[str, Any]:
    """As several answers have them."""
    return {"is_lora": bool(shape.rank), "lora_rank": shape.rank or None}


def _place(request: Request) -> Place:
    return Place.parsed("tinker://{run}/{kind}/{name}".format(**request.path_params))


def _checkpoint(place: Place, facts: dict[str, Any]) -> types.Checkpoint:
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
