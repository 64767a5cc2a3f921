"""The routes that list what there is: sessions, runs, checkpoints and their files, and the figures of the page."""

import time
from datetime import UTC, datetime
from typing import Any

import orjson
import psutil
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from treewise.errors import DataError
from treewise.serve.store import TYPES, Place
from treewise.serve.weights import Shape
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

    def _run(self, name: str) -> dict[str, Any]:
        facts = self.facts("model", name)
        shape, places = Shape(**facts["shape"]), self.store.places(name)
        last = {place.kind: self._checkpoint(place) for place in places}
        return {
            "training_run_id": name,
            "base_model": self.store.base_name,
            "model_owner": "local",
            **lora_facts(shape),
            "last_request_time": _time(max([facts["created"], *(self.store.facts(place)["time"] for place in places)])),
            "last_checkpoint": last.get("weights"),
            "last_sampler_checkpoint": last.get("sampler_weights"),
            "user_metadata": facts.get("user_metadata"),
        }

    async def run_checkpoints(self, request: Request, _: object) -> object:
        self.facts("model", request.path_params["run"])
        return {"checkpoints": [self._checkpoint(place) for place in self.store.places(request.path_params["run"])]}

    async def checkpoints(self, request: Request, _: object) -> object:
        places, cursor = _page(request, self.store.places(), 100)
        return {"checkpoints": list(map(self._checkpoint, places)), "cursor": cursor}

    def _checkpoint(self, place: Place) -> dict[str, Any]:
        facts, ends = self.store.facts(place), self.store.ends(place)
        return {
            "checkpoint_id": f"{place.kind}/{place.name}",
            "checkpoint_type": TYPES[place.kind],
            "time": _time(facts["time"]),
            "tinker_path": str(place),
            "size_bytes": self.store.size(place),
            "user_metadata": facts.get("user_metadata"),
            "expires_at": None if ends is None else _time(ends),
        }

    async def delete(self, request: Request, _: object) -> object:
        await run_in_threadpool(self.store.delete, _place(request))
        return Response(status_code=204)

    async def set_life(self, request: Request, _: object) -> object:
        self.store.set_life(_place(request), json_of(request).get("ttl_seconds"))
        return Response(status_code=204)

    async def urls(self, request: Request, _: object) -> object:
        """Where the files of an export are fetched, by whoever may ask here."""
        base, key = str(request.url).removesuffix("external_weights_urls"), request.headers.get("x-api-key", "")
        names = sorted(path.name for path in self.store.find(_place(request)).iterdir() if path.is_file())
        return {"urls": {each: f"{base}files/{each}?key={key}" for each in names}, "expires": _time(time.time() + 3600)}

    async def file(self, request: Request, _: object) -> object:
        """One file of a checkpoint, by its plain name."""
        files = {path.name: path for path in self.store.find(_place(request)).iterdir() if path.is_file()}
        if request.path_params["file"] not in files:
            raise HTTPException(404, "no such file in the checkpoint.")
        content = await run_in_threadpool(files[request.path_params["file"]].read_bytes)
        return Response(content, media_type="application/octet-stream")

    async def status(self, *_: object) -> object:
        """What the page shows."""
        statistics, settings = self.worker.statistics, self.worker.settings
        return {
            **{name: getattr(statistics, name) for name in statistics.__slots__},
            "model": self.store.base_name,
            "share": settings.share,
            "waiting": self.worker.num_waiting,
            "max_queue": settings.max_queue,
            "memory_bytes": psutil.Process().memory_info().rss,
            "clients": sum(time.time() - seen < 60 for seen in self.beats.values()),
            "runs": [{"id": name, **self.facts("model", name)} for name in self.journal.names("model")[:50]],
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


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(request: Request, items: list[Any], default: int = 20) -> tuple[list[Any], dict[str, int]]:
    """The part that was asked for, and where it lies in the whole."""
    given = request.query_params
    offset, limit = max(int(given.get("offset", 0)), 0), min(max(int(given.get("limit", default)), 0), 1000)
    return items[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(items)}
