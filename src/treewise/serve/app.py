"""The routes of the API, as the SDK of this version calls them. Nothing here computes: requests go to the worker.

A request that changes a model is answered at once with a future, whose id follows from the model and the sequence
number; the client then asks for the future until it is there (at most `WAIT_SECONDS` at a time).
"""

import asyncio
import hmac
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from tinker import types

from treewise.errors import TreewiseError
from treewise.serve.catalog import Catalog, UnknownError, json_of, lora_facts, text_of
from treewise.serve.journal import FAILED, REFUSED, Work
from treewise.serve.losses import UNPUBLISHED
from treewise.serve.settings import LOOPBACK, ServeSettings
from treewise.serve.store import Place
from treewise.serve.weights import Shape
from treewise.serve.wire import read_call
from treewise.serve.worker import JSON, QueueFullError, Worker

WAIT_SECONDS = 20.0
MAX_SEQ = 1 << 53
MAX_RUNS = 10**6  # of a session
PAGE = Path(__file__).with_name("page.html")
Handler = Callable[[Request], Awaitable[Any]]
_CHANGES: dict[str, Any] = {
    "optim_step": types.OptimStepRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "save_weights_external": types.SaveWeightsExternalRequest,
}


class RefusedError(Exception):
    """An answer that is no success. Statuses are those that the SDK knows: 408, 409, 429 and 5xx it sends again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """The handlers of requests that reach the worker; each returns what is sent as JSON, or a response."""

    def __init__(self, settings: ServeSettings, catalog: Catalog, worker: Worker) -> None:
        self.settings, self.catalog, self.worker = settings, catalog, worker
        self.journal, self.store = catalog.journal, catalog.store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: dict[str, asyncio.Event] = {}

    def on_answer(self, name: str) -> None:
        """Wakes who waits for a request; the worker's thread calls this."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, name)

    def _wake(self, name: str) -> None:
        if event := self._events.pop(name, None):
            event.set()

    def app(self) -> Starlette:
        """The application; its worker runs while it does."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self._loop = asyncio.get_running_loop()
            self.worker.start()
            yield
            await run_in_threadpool(self.worker.stop)

        own, listed = self, self.catalog
        one = "training_runs/{run}/checkpoints/{kind}/{name}"
        table: list[tuple[str, str, Handler]] = [
            ("POST", "client/config", own.client_config),
            ("POST", "client/dynamic_config", own.dynamic_config),
            ("POST", "create_session", own.create_session),
            ("POST", "session_heartbeat", own.heartbeat),
            ("POST", "sessions/{session}/finish", own.finish),
            ("POST", "create_model", own.create_model),
            ("POST", "load_weights", own.load_weights),
            ("POST", "get_info", own.get_info),
            ("POST", "weights_info", own.weights_info),
            ("POST", "forward_backward", own.call),
            *(("POST", name, own.change) for name in _CHANGES),
            ("POST", "create_sampling_session", own.create_sampling_session),
            ("POST", "join_sampling_session", own.join_sampling_session),
            ("POST", "asample", own.sample),
            ("POST", "retrieve_future", own.retrieve),
            ("POST", "cancel_future", own.cancel),
            ("POST", "create_custom_loss", own.custom_loss),
            ("POST", "telemetry", own.telemetry),
            ("GET", "healthz", own.health),
            ("GET", "get_server_capabilities", own.capabilities),
            ("GET", "samplers/{sampler}", listed.sampler),
            ("GET", "sessions", listed.sessions),
            ("GET", "sessions/{session}", listed.session),
            ("GET", "training_runs", listed.runs),
            ("GET", "training_runs/{run}", listed.run),
            ("GET", "training_runs/{run}/checkpoints", listed.run_checkpoints),
            ("GET", "checkpoints", listed.checkpoints),
            ("DELETE", one, listed.delete),
            ("PUT", f"{one}/ttl", listed.set_life),
            ("GET", f"{one}/external_weights_urls", listed.urls),
            ("GET", f"{one}/files/{{file}}", listed.file),
            ("GET", "status", listed.status),
        ]
        routes = [Route(f"/api/v1/{path}", self._guarded(each), methods=[way]) for way, path, each in table]
        hosts = [*LOOPBACK, "[::1]"] if self.settings.host in LOOPBACK else ["*"]
        guard = Middleware(TrustedHostMiddleware, allowed_hosts=hosts)
        return Starlette(routes=[*routes, Route("/", _page)], lifespan=lifespan, middleware=[guard])

    # -- every request ------------------------------------------------------------------------------------------------

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                request.state.body = await self._body(request)
                answer = await handler(request)
            except ClientDisconnect:  # while it sent; nobody hears the answer
                return Response(status_code=400)
            except (RefusedError, UnknownError) as error:
                return _error(error, getattr(error, "status", 404))
            except QueueFullError as error:
                return _error(error, 429, {"Retry-After": "1"})
            except (TreewiseError, ValidationError, KeyError, ValueError) as error:
                return _error(error, 400)
            return answer if isinstance(answer, Response) else _json(answer)

        return guarded

    def _check_key(self, request: Request) -> None:
        """Every client sends a key, which pages of other origins cannot; a server with a token wants the token. A key
        in a URL, which any page can send, only fetches files.
        """
        in_url = request.query_params.get("key", "") if "file" in request.path_params else ""
        key = request.headers.get("x-api-key") or in_url
        if not key or (self.settings.token and not hmac.compare_digest(key.encode(), self.settings.token.encode())):
            raise RefusedError(401, "the X-API-Key header (TINKER_API_KEY) is missing or is not this server's token.")

    async def _body(self, request: Request) -> bytes:
        limit = self.settings.max_request_mb << 20
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RefusedError(415, "compressed requests are not taken.")
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                parts.append(part)
            elif size > 4 * limit:  # what is a little larger is read to its end, or its sender would not hear why
                break
        if size > limit:
            raise RefusedError(413, f"the request is larger than {self.settings.max_request_mb} MB (max_request_mb).")
        return b"".join(parts)

    async def _submit(self, name: str, owner: str, seq: int, kind: str, body: bytes) -> dict[str, Any]:
        await run_in_threadpool(self.worker.submit, Work(name, owner, seq, kind), body)
        return {"request_id": name, "model_id": owner}

    # -- clients ------------------------------------------------------------------------------------------------------

    async def client_config(self, _: Request) -> Any:
        """Flags of the SDK: what it leaves out or does otherwise with this server."""
        part = min(5_000_000, (self.settings.max_request_mb << 20) // 2)
        off = dict.fromkeys(
            ("use_pyqwest_transport", "sample_enable_stuck_detection", "custom_loss_server_side"), False
        )
        return {"fwdbwd_max_chunk_bytes_count": part, **off}

    async def dynamic_config(self, _: Request) -> Any:
        return {"sample_cancel_enabled": True}

    async def create_session(self, request: Request) -> Any:
        asked = types.CreateSessionRequest.model_validate(json_of(request))
        session = str(uuid.uuid4())
        self.journal.put("session", session, "", asked.model_dump(mode="json"))
        return {"session_id": session, "type": "create_session"}

    async def heartbeat(self, request: Request) -> Any:
        session = text_of(request, "session_id")
        if (self.journal.get("session", session) or {"finished": True}).get("finished"):
            raise RefusedError(410, f"session {session} has ended or is unknown.")
        self.catalog.beats[session] = time.time()
        return {"type": "session_heartbeat"}

    async def finish(self, request: Request) -> Any:
        """A client that ends; its runs stay."""
        session, asked = request.path_params["session"], json_of(request)
        self.journal.put("session", session, "", {"finished": asked, **self.catalog.facts("session", session)})
        return Response(status_code=204)

    async def telemetry(self, _: Request) -> Any:
        """Taken and dropped."""
        return {"status": "accepted"}

    async def health(self, _: Request) -> Any:
        if not self.worker.is_alive():
            raise RefusedError(503, "the worker has ended.")
        return {"status": "ok"}

    async def capabilities(self, _: Request) -> Any:
        facts = {"max_context_length": self.worker.model.max_length, "trainable": True, "sampleable": True}
        names = dict.fromkeys([self.store.base_name, self.settings.model])
        return {"supported_models": [{"model_name": name, **facts} for name in names]}

    def _check_base(self, name: str | None) -> None:
        known = (self.store.base_name, self.settings.model)
        if name is not None and name not in known:
            raise RefusedError(400, f"base_model={name!r} is not served here; this server has {known[0]!r}.")

    def _check_optimizer(self, config: Any) -> None:
        if config is not None and config.type != "adamw":
            raise RefusedError(400, f"optimizer {config.type!r} is not implemented; use adamw.")

    # -- models -------------------------------------------------------------------------------------------------------

    async def create_model(self, request: Request) -> Any:
        """A run, with new adapters (or a copy of all weights)."""
        asked = types.CreateModelRequest.model_validate(json_of(request))
        self._check_base(asked.base_model)
        self._check_optimizer(asked.optimizer_config)
        shape, lora, most = Shape(0), asked.lora_config, self.settings.max_rank
        if self.settings.train == "lora":
            if lora is None or not 1 <= lora.rank <= most:
                raise RefusedError(400, f"lora_config with a rank of 1 to {most} (max_rank) is needed.")
            shape = Shape(lora.rank, lora.train_mlp, lora.train_attn, lora.train_unembed)
        seed = secrets.randbits(48) if lora is None or lora.seed is None else lora.seed
        return await self._new_run(asked, {"shape": asdict(shape), "seed": seed, "path": None})

    async def load_weights(self, request: Request) -> Any:
        """Into a model, or into a new run."""
        asked = types.LoadWeightsRequest.model_validate(json_of(request))
        self._check_optimizer(asked.optimizer_config)
        if asked.weights_access_token is not None:
            raise RefusedError(400, "weights_access_token: this server has no other accounts.")
        if asked.model_id is not None:
            return await self._change("load_weights", asked)
        place = Place.parsed(asked.path)
        self._check_base(asked.base_model)
        facts = {"shape": asdict(self.store.shape(place)), "seed": 0, "path": str(place), "optimizer": asked.optimizer}
        return await self._new_run(asked, facts)

    async def _new_run(self, asked: Any, facts: dict[str, Any]) -> Any:
        self.catalog.facts("session", asked.session_id)
        if not 0 <= asked.model_seq_id < MAX_RUNS:
            raise RefusedError(400, f"model_seq_id must be 0 to {MAX_RUNS - 1}.")
        name = f"{asked.session_id}:train:{asked.model_seq_id}"
        if self.journal.get("model", name) is None:
            facts |= {"user_metadata": asked.user_metadata, "created": time.time()}
            self.journal.put("model", name, asked.session_id, facts)
        return await self._submit(f"{name}:0", name, 0, "create", orjson.dumps(asked.model_dump(mode="json")))

    async def get_info(self, request: Request) -> Any:
        name = text_of(request, "model_id")
        shape, folder = Shape(**self.catalog.facts("model", name)["shape"]), self.store.runs.parent / "tokenizer"
        tokenizer = str(folder.resolve()) if folder.is_dir() else None  # the SDK on this machine loads it from there
        base, arch = self.store.base_name, str(self.worker.model.base.config.model_type)
        data = {"model_name": base, "tokenizer_id": tokenizer, "arch": arch}
        return {"type": "get_info", "model_id": name, "model_name": base, "model_data": data, **lora_facts(shape)}

    async def weights_info(self, request: Request) -> Any:
        shape = self.store.shape(Place.parsed(text_of(request, "tinker_path")))
        kinds = {"train_mlp": shape.mlp, "train_attn": shape.attn, "train_unembed": shape.unembed}
        return {"base_model": self.store.base_name, **lora_facts(shape), **kinds}

    async def call(self, request: Request) -> Any:
        """forward, forward_backward."""
        call = read_call(body := request.state.body)
        self._check_seq(call.model_id, call.seq_id)
        return await self._submit(f"{call.model_id}:{call.seq_id}", call.model_id, call.seq_id, call.kind, body)

    async def change(self, request: Request) -> Any:
        """Every other request that names a model and its sequence number."""
        kind = request.url.path.rpartition("/")[2]
        return await self._change(kind, _CHANGES[kind].model_validate(json_of(request)))

    async def _change(self, kind: str, asked: Any) -> Any:
        self._check_seq(asked.model_id, asked.seq_id or 0)
        body = orjson.dumps(asked.model_dump(mode="json"))
        return await self._submit(f"{asked.model_id}:{asked.seq_id}", asked.model_id, asked.seq_id, kind, body)

    def _check_seq(self, model: str, seq: int) -> None:
        self.catalog.facts("model", model)
        if not 1 <= seq < MAX_SEQ:
            raise RefusedError(400, f"seq_id must be 1 to {MAX_SEQ - 1}.")

    async def custom_loss(self, _: Request) -> Any:
        """Refused: no code or graph of a client runs here. The SDK computes custom losses itself."""
        raise RefusedError(400, "custom losses are computed at the client (custom_loss_server_side is off).")

    # -- samples ------------------------------------------------------------------------------------------------------

    async def create_sampling_session(self, request: Request) -> Any:
        """Weights to sample from: a checkpoint's, or the base model's."""
        asked = types.CreateSamplingSessionRequest.model_validate(json_of(request))
        self.catalog.facts("session", asked.session_id)
        self._check_base(asked.base_model)
        name = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        self._put_sampler(name, asked.session_id, asked.model_path)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    def _put_sampler(self, name: str, session: str, path: str | None) -> None:
        if path is not None:
            self.store.find(Place.parsed(path))
        self.journal.put("sampler", name, session, {"base_model": self.store.base_name, "model_path": path})

    async def join_sampling_session(self, request: Request) -> Any:
        """A number for another client of a sampling session."""
        name = text_of(request, "sampling_session_id")
        facts = self.catalog.facts("sampler", name)
        count = int(facts.get("clients", 0)) + 1
        self.journal.put("sampler", name, name.split(":")[0], {**facts, "clients": count})
        return {"type": "join_sampling_session", "client_counter": count}

    async def sample(self, request: Request) -> Any:
        asked = types.SampleRequest.model_validate_json(body := request.state.body)
        owner, seq = asked.sampling_session_id, asked.seq_id
        if not 1 <= asked.num_samples <= self.settings.max_queue:
            raise RefusedError(400, f"num_samples={asked.num_samples} must be 1 to {self.settings.max_queue}.")
        if asked.record_stability_info and self.settings.stable_reinforce == "refused":
            raise RefusedError(400, f"record_stability_info, for stable_reinforce: {UNPUBLISHED['stable_reinforce']}.")
        if unknown := set(json_of(request)["sampling_params"]) - set(types.SamplingParams.model_fields):
            raise RefusedError(400, f"sampling_params has fields that this server does not know: {sorted(unknown)}.")
        if owner is not None and seq is not None:
            if not 0 <= seq < MAX_SEQ:
                raise RefusedError(400, f"seq_id must be 0 to {MAX_SEQ - 1}.")
            self.catalog.facts("sampler", owner)
            name = f"{owner}:{seq}"
        else:  # without a session; a request that is sent again is another one
            self._check_base(asked.base_model)
            name, owner, seq = f"direct:{uuid.uuid4()}", f"direct:{asked.model_path or ''}", 0
            self._put_sampler(owner, "", asked.model_path)
        promised = await self._submit(name, owner, seq, "sample", body)
        return {**promised, "sample_sequence_ids": [f"{name}:{index}" for index in range(asked.num_samples)]}

    async def cancel(self, request: Request) -> Any:
        """Takes a sampling request that has not begun out of the queue."""
        await run_in_threadpool(self.worker.cancel, text_of(request, "request_id"))
        return Response(status_code=204)

    async def retrieve(self, request: Request) -> Any:
        """An answer, or 408 after `WAIT_SECONDS`: ask again."""
        name = types.FutureRetrieveRequest.model_validate(json_of(request)).request_id
        if self.journal.kind_of(name) is None:
            raise RefusedError(410, f"request {name} is unknown or forgotten.")
        event = self._events.setdefault(name, asyncio.Event())
        found = self.journal.answered(name)
        if found is None:
            try:
                await asyncio.wait_for(event.wait(), WAIT_SECONDS)
            except TimeoutError:
                return _json({"type": "try_again", "request_id": name, "queue_state": "active"}, 408)
            found = self.journal.answered(name)
        self._wake(name)  # others that wait for it
        assert found is not None
        media, content = found
        return Response(content, media_type=JSON if media in (FAILED, REFUSED) else media)


async def _page(_: Request) -> Response:
    """Loads nothing from elsewhere; its figures come from `status`."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": policy})


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, JSON)


def _error(error: Exception, status: int, headers: dict[str, str] | None = None) -> Response:
    text = " ".join(str(error).split()) or type(error).__name__
    return _json({"error": text, "detail": text}, status, headers)
