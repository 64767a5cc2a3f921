"""The routes of the API, as the SDK of this version calls them. Nothing here computes: requests go to the worker.

A request that changes a model is answered at once with a future, whose id follows from the model and the sequence
number; the client then asks for the future until it is there (at most `WAIT_SECONDS` at a time).

The SDK counts the requests of a model, those that are refused too, and sends the next one with the next number. So
every refusal of a request that names a model and a number takes that number (`_occupied`).
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from tinker import types
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from treewise.base.http.bodies import Bodies, BodyLimits, BodyRefusedError
from treewise.base.http.server import host_guard, is_token, listening_socket, serve_on
from treewise.errors import DataError, DiskError, TreewiseError
from treewise.serve.adapter_slots import Shape
from treewise.serve.catalog import Catalog, body_of, json_of, key_of, lora_facts
from treewise.serve.journal import ERRORS, QueuedRequest, RequestJournal, digest_of
from treewise.serve.settings import ServeSettings
from treewise.serve.store import KINDS, CheckpointName, Store
from treewise.serve.weights import ServedModel
from treewise.serve.wire import UNPUBLISHED, named_in, read_head
from treewise.serve.worker import CALLS, JSON, PATIENCE_SECONDS, QueueFullError, Worker
from treewise.trainer.run_context import RunLock

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails
    from starlette.types import ExceptionHandler

logger = logging.getLogger("treewise")
WAIT_SECONDS = 20.0
MAX_SEQ = 1 << 53
MAX_RUNS = 10**6  # of a session
CHANGES = (*CALLS, *KINDS, "optim_step", "load_weights")  # requests that have a model's sequence number
_ERRORS = (HTTPException, ClientDisconnect, TreewiseError, KeyError, ValueError)  # what is answered, see `_refused`
PAGE = Path(__file__).with_name("page.html")
_Handler = Callable[..., Awaitable[object]]  # given the request, and what it asks
_Change = (
    types.OptimStepRequest
    | types.SaveWeightsRequest
    | types.SaveWeightsForSamplerRequest
    | types.SaveWeightsExternalRequest
    | types.LoadWeightsRequest
)


class Api(Catalog):
    """The handlers of requests that reach the worker. Each is given the request and what it asks, of the type that the
    route names, and returns what is sent as JSON, or a response. Errors are answers, see `_refused`; a newer SDK's
    paths, and those of other servers of this API (projects, publishing, billing), are 404.
    """

    def __init__(self, store: Store) -> None:
        self.settings = store.model.settings
        own = self.settings
        self.bodies = Bodies(BodyLimits(own.max_request_mb, own.max_uploads_mb, own.max_request_seconds))
        super().__init__(Worker(store, self.on_answers, self.bodies.uploaded))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answered = asyncio.Event()  # a new one after each time that something was

    def on_answers(self) -> None:
        """Wakes who waits for answers; from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._answered.set()
        self._answered = asyncio.Event()

    def app(self) -> Starlette:
        """The application; its worker runs while it does."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self._loop = asyncio.get_running_loop()
            self.worker.start()
            yield
            await run_in_threadpool(self.worker.stop)
            self.journal.close()

        answers: dict[Any, ExceptionHandler] = dict.fromkeys(_ERRORS, _refused)
        every = [Route("/", _page), *self._routes()]
        return Starlette(
            routes=every, lifespan=lifespan, middleware=[host_guard(self.settings.host)], exception_handlers=answers
        )

    # -- every request ------------------------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        # What the SDK leaves out or does otherwise with this server; releases before 0.25 send protobuf where asked to.
        part = min(5_000_000, (self.settings.max_request_mb << 20) // 2)
        off = ("use_pyqwest_transport", "sample_enable_stuck_detection", "custom_loss_server_side")
        on = ("proto_write_fwdbwd", "fwd_via_fwdbwd")
        flags = {"fwdbwd_max_chunk_bytes_count": part, **dict.fromkeys(off, False), **dict.fromkeys(on, True)}
        one = "training_runs/{run}/checkpoints/{kind}/{name}"
        posted: list[
            tuple[str, _Handler | dict[str, Any], type[BaseModel] | None]
        ] = [  # a handler, or its one answer; the request's type, None: the handler's
            ("client/config", flags, None),
            ("client/dynamic_config", {"sample_cancel_enabled": True}, None),
            ("telemetry", {"status": "accepted"}, None),
            ("create_session", self.create_session, types.CreateSessionRequest),
            ("session_heartbeat", self.heartbeat, types.SessionHeartbeatRequest),
            ("sessions/{session}/finish", self.finish, None),
            ("create_model", self.create_model, types.CreateModelRequest),
            ("load_weights", self.load_weights, types.LoadWeightsRequest),
            ("get_info", self.get_info, types.GetInfoRequest),
            ("weights_info", self.weights_info, None),
            ("forward_backward", self.change, None),
            ("optim_step", self.change, types.OptimStepRequest),
            ("save_weights", self.change, types.SaveWeightsRequest),
            ("save_weights_for_sampler", self.change, types.SaveWeightsForSamplerRequest),
            ("save_weights_external", self.change, types.SaveWeightsExternalRequest),
            ("create_sampling_session", self.create_sampling_session, types.CreateSamplingSessionRequest),
            ("asample", self.sample, types.SampleRequest),
            ("retrieve_future", self.retrieve, types.FutureRetrieveRequest),
            ("cancel_future", self.cancel, types.FutureRetrieveRequest),
        ]
        others: list[tuple[str, str, _Handler]] = [
            ("GET", "healthz", self.health),
            ("GET", "get_server_capabilities", self.capabilities),
            ("GET", "samplers/{sampler}", self.sampler),
            ("GET", "sessions", self.sessions),
            ("GET", "sessions/{session}", self.session),
            ("GET", "training_runs", self.training_runs),
            ("GET", "training_runs/{run}", self.training_run),
            ("GET", "training_runs/{run}/checkpoints", self.run_checkpoints),
            ("GET", "checkpoints", self.checkpoints),
            ("DELETE", one, self.delete),
            ("PUT", f"{one}/ttl", self.set_life),
            ("GET", f"{one}/external_weights_urls", self.urls),
            ("GET", f"{one}/files/{{file}}", self.file),
            ("GET", "status", self.status),
        ]
        table = [("POST", *route) for route in posted] + [(*route, None) for route in others]
        return [
            Route(f"/api/v1/{path}", self._guarded(handler, kind), methods=[way]) for way, path, handler, kind in table
        ]

    def _guarded(
        self, handler: _Handler | dict[str, Any], kind: type[BaseModel] | None
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            refusal = self._check_head(request)
            try:
                async with self.bodies.read(request, key_of(request), refusal) as request.state.body:
                    asked = kind.model_validate(json_of(request)) if kind else None
                    answer = await handler(request, asked) if callable(handler) else handler
                    return answer if isinstance(answer, Response) else _json(answer)
            except _ERRORS as error:
                if isinstance(error, DiskError):
                    self.worker.tell_full(error)
                if (future := await self._occupied(request, error)) is not None:
                    return _json(future)
                raise

        return guarded

    async def _occupied(self, request: Request, error: Exception) -> dict[str, Any] | None:
        """Takes the number of a model's request that is refused for good. A call that is too large is answered with a
        future that failed: where a part of a call is refused outright, the SDK never sends the first, and waits for it.
        """
        kind, (status, text) = request.url.path.rpartition("/")[2], _said(error)
        if kind not in CHANGES or status in (408, 409, 429) or status >= 500:  # the SDK sends these again
            return None
        name = named_in(error.ends if isinstance(error, BodyRefusedError) else getattr(request.state, "body", b""))
        if name is None or not 0 < name[1] < MAX_SEQ or not self.is_own(request, name[0]):
            return None
        if self.journal.get("model", name[0]) is None:
            return None
        is_call = kind in CALLS and status == 413
        work = QueuedRequest(f"{name[0]}:{name[1]}", *name, kind)
        await run_in_threadpool(self.worker.refuse, work, text, None if is_call else status, _patience(request, kind))
        return {"request_id": work.id, "model_id": work.owner} if is_call else None

    def _check_head(self, request: Request) -> HTTPException | None:
        """The refusal of a request by its head. Every client sends a key, which pages of other origins cannot; a server
        with a token wants the token. A link that is signed fetches its file without one.
        """
        key = request.headers.get("x-api-key", "")
        request.state.key = digest_of(key)
        is_right = bool(key) and is_token(key, self.settings.token or key)
        if not is_right and not ("file" in request.path_params and "signature" in request.query_params):
            return HTTPException(401, "the X-API-Key header (TINKER_API_KEY) is missing or is not this server's token.")
        return None

    async def _submit(
        self, owner: str, seq: int | None, kind: str, body: bytes, patience: float = PATIENCE_SECONDS
    ) -> dict[str, Any]:
        """Queues a request; its answer as a future of Tinker's."""
        if seq is None or not (kind in ("create", "sample") or seq > 0) or not 0 <= seq < MAX_SEQ:
            raise DataError(f"seq_id must be 1 to {MAX_SEQ - 1}.")
        name = f"{owner}:{seq}"
        await run_in_threadpool(self.worker.submit, QueuedRequest(name, owner, seq, kind), body, patience)
        return {"request_id": name, "model_id": owner}

    # -- clients ------------------------------------------------------------------------------------------------------

    async def create_session(self, request: Request, asked: types.CreateSessionRequest) -> object:
        session = str(uuid.uuid4())
        self.journal.put("session", session, key_of(request), asked.model_dump(mode="json"))
        return {"session_id": session, "type": "create_session"}

    async def heartbeat(self, request: Request, asked: types.SessionHeartbeatRequest) -> object:
        facts = self.journal.get("session", asked.session_id) if self.is_own(request, asked.session_id) else None
        if facts is None or facts.get("finished"):
            raise HTTPException(410, f"session {asked.session_id} has ended or is unknown.")
        self.beats[asked.session_id] = time.time()
        return {"type": "session_heartbeat"}

    async def finish(self, request: Request, _: object) -> object:
        """A client that ends; its runs stay."""
        session = request.path_params["session"]
        facts = self.facts(request, "session", session)
        self.journal.put("session", session, key_of(request), {**facts, "finished": True})
        return Response(status_code=204)

    async def health(self, *_: object) -> object:
        if not self.worker.is_alive():
            raise HTTPException(503, "the worker has ended.")
        if self.worker.full is not None:
            raise self.worker.full
        return {"status": "ok"}

    async def capabilities(self, *_: object) -> object:
        facts = {"max_context_length": self.worker.model.max_length, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **facts} for name in self.settings.names]}

    def _check_base(self, name: str | None) -> None:
        if name is not None and name not in self.settings.names:
            raise DataError(f"base_model={name!r} is not served here; this server has {self.settings.names}.")

    def _check_optimizer(self, config: "types.OptimizerConfig | None") -> None:
        if config is not None and config.type != "adamw":
            raise DataError(f"optimizer {config.type!r} is not implemented; use adamw.")

    # -- models -------------------------------------------------------------------------------------------------------

    async def create_model(self, request: Request, asked: types.CreateModelRequest) -> object:
        """A run, with new adapters (or a copy of all weights)."""
        self._check_optimizer(asked.optimizer_config)
        shape, lora, most = Shape(0), asked.lora_config, self.settings.max_rank
        if self.settings.train == "lora":
            if lora is None or not 1 <= lora.rank <= most:
                raise DataError(f"lora_config with a rank of 1 to {most} (max_rank) is needed.")
            shape = Shape(lora.rank, lora.train_mlp, lora.train_attn, lora.train_unembed)
        given = None if lora is None else lora.seed
        return await self._new_run(request, asked, {"shape": asdict(shape), "seed": given, "path": None})

    async def load_weights(self, request: Request, asked: types.LoadWeightsRequest) -> object:
        """Into a model, or into a new run."""
        if asked.weights_access_token is not None:
            raise DataError("weights_access_token: this server has no other accounts.")
        self._check_optimizer(asked.optimizer_config)
        if asked.model_id is not None:
            return await self.change(request, asked)
        place = CheckpointName.parsed(asked.path)
        shape = self.store.shape(place, key_of(request))
        facts = {"shape": asdict(shape), "seed": 0, "path": str(place), "optimizer": asked.optimizer}
        return await self._new_run(request, asked, facts)

    async def _new_run(
        self, request: Request, asked: types.CreateModelRequest | types.LoadWeightsRequest, facts: dict[str, Any]
    ) -> object:
        self._check_base(asked.base_model)
        if asked.session_id is None:
            raise DataError("session_id is missing; create_session gives one.")
        self.facts(request, "session", asked.session_id)
        if asked.model_seq_id is None or not 0 <= asked.model_seq_id < MAX_RUNS:
            raise DataError(f"model_seq_id must be 0 to {MAX_RUNS - 1}.")
        name = f"{asked.session_id}:train:{asked.model_seq_id}"
        if self.journal.get("model", name) is None:
            facts["seed"] = self.settings.seed_of(name) if facts["seed"] is None else facts["seed"]
            facts |= {"user_metadata": asked.user_metadata, "created": time.time()}
            self.journal.put("model", name, asked.session_id, facts)
        return await self._submit(name, 0, "create", asked.model_dump_json().encode())

    async def get_info(self, request: Request, asked: types.GetInfoRequest) -> object:
        facts, folder = self.facts(request, "model", asked.model_id), self.store.runs.parent / "tokenizer"
        shape = Shape(**facts["shape"])
        tokenizer = str(folder.resolve()) if folder.is_dir() else None  # the SDK on this machine loads it from there
        base, arch = self.store.base_name, str(self.worker.model.base.config.model_type)
        data = {"model_name": base, "tokenizer_id": tokenizer, "arch": arch}
        named = {"model_id": asked.model_id, "model_name": base, "model_data": data}
        return {"type": "get_info", **named, **lora_facts(shape)}

    async def weights_info(self, request: Request, _: object) -> object:
        shape = self.store.shape(CheckpointName.parsed(json_of(request).get("tinker_path")), key_of(request))
        kinds = {"train_mlp": shape.mlp, "train_attn": shape.attn, "train_unembed": shape.unembed}
        return {"base_model": self.store.base_name, **lora_facts(shape), **kinds}

    async def change(self, request: Request, asked: _Change | None) -> object:
        """A request that names a model and its sequence number. Calls, forward or forward_backward, are in protobuf."""
        kind = request.url.path.rpartition("/")[2]
        if asked is None:
            body = body_of(request)
            head = read_head(body)
            kind = "forward" if head.forward_only else kind
            model: str | None = head.model_id
            seq: int | None = head.seq_id
        else:
            body, model, seq = asked.model_dump_json().encode(), asked.model_id, asked.seq_id  # with the defaults
        if model is None:
            raise DataError("model_id is missing; create_model gives one.")
        self.facts(request, "model", model)
        return await self._submit(model, seq, kind, body, _patience(request, kind))

    # -- samples ------------------------------------------------------------------------------------------------------

    async def create_sampling_session(self, request: Request, asked: types.CreateSamplingSessionRequest) -> object:
        """Weights to sample from: a checkpoint's, or the base model's."""
        self.facts(request, "session", asked.session_id)
        self._check_base(asked.base_model)
        name = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        if asked.model_path is not None:
            self.store.facts(CheckpointName.parsed(asked.model_path), key_of(request))
        facts = {"base_model": self.store.base_name, "model_path": asked.model_path}
        self.journal.put("sampler", name, asked.session_id, facts)
        return {"type": "create_sampling_session", "sampling_session_id": name}

    async def sample(self, request: Request, asked: types.SampleRequest) -> object:
        if not 1 <= asked.num_samples <= self.settings.max_queue:
            raise DataError(f"num_samples={asked.num_samples} must be 1 to {self.settings.max_queue}.")
        if asked.record_stability_info and self.settings.stable_reinforce == "refused":
            raise DataError(f"record_stability_info, for stable_reinforce: {UNPUBLISHED['stable_reinforce']}.")
        if unknown := set(json_of(request)["sampling_params"]) - set(types.SamplingParams.model_fields):
            raise DataError(f"sampling_params has fields that this server does not know: {sorted(unknown)}.")
        if asked.sampling_session_id is None:
            raise DataError("sampling_session_id is missing; create_sampling_session gives one.")
        self.facts(request, "sampler", asked.sampling_session_id)
        promised = await self._submit(asked.sampling_session_id, asked.seq_id, "sample", body_of(request))
        names = [f"{promised['request_id']}:{index}" for index in range(asked.num_samples)]
        return {**promised, "sample_sequence_ids": names}

    async def cancel(self, request: Request, asked: types.FutureRetrieveRequest) -> object:
        """Ends a sampling request."""
        if self.is_own(request, asked.request_id):
            await run_in_threadpool(self.worker.cancel, asked.request_id)
        return Response(status_code=204)

    async def retrieve(self, request: Request, asked: types.FutureRetrieveRequest) -> object:
        """An answer, or 408 after `WAIT_SECONDS`: ask again."""
        name, ends = asked.request_id, time.monotonic() + WAIT_SECONDS
        while True:
            answered = self._answered  # of what is answered after this look
            if not self.is_own(request, name) or (found := self.journal.find(name)) is None:
                raise HTTPException(410, f"request {name} is unknown or forgotten.")
            if found.answer is not None:
                return Response(found.answer, media_type=JSON if found.media in ERRORS else found.media)
            try:
                await asyncio.wait_for(answered.wait(), ends - time.monotonic())
            except TimeoutError:
                return _json({"type": "try_again", "request_id": name, "queue_state": "active"}, 408)


async def _page(_: Request) -> Response:
    """Loads nothing from elsewhere; its figures come from `status`."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": policy})


async def _refused(_: Request, error: Exception) -> Response:
    """The answer to an error. Of its statuses the SDK sends 408, 409, 429 and 5xx again."""
    status, text = _said(error)
    headers = {"Retry-After": "1"} if status in (429, 503, 507) else {}
    headers |= {"Connection": "close"} if status == 408 else {}  # the rest of a body may still come
    return _json({"error": text, "detail": text}, status, headers)


def _said(error: Exception) -> tuple[int, str]:
    """The status and the text of an error."""
    status = 429 if isinstance(error, QueueFullError) else getattr(error, "status_code", 400)
    text = str(getattr(error, "detail", error))
    if isinstance(error, ValidationError):
        found = [problem for problem in error.errors() if problem["type"] != "missing"] or error.errors()
        text = "; ".join(
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}{_given(problem)}" for problem in found[:5]
        )
    return status, " ".join(text.split()) or type(error).__name__


def _given(error: "ErrorDetails") -> str:
    if error["type"] == "missing":
        return ""
    return f", not {error['input']!r:.100}" if error["input"] is not None else ", not null, nor NaN, which is sent so"


def _patience(request: Request, kind: str) -> float:
    """How long requests with lower numbers may be under way, in seconds. The SDK sends a request once those before it
    were answered or failed for good, and the parts of a call together but for the first, which follows at once.
    """
    if not request.headers.get("user-agent", "").startswith("AsyncTinker/"):
        return PATIENCE_SECONDS
    return 5.0 if kind in CALLS else 0.0


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content, default=BaseModel.model_dump), status, headers, JSON)


# -- a server ---------------------------------------------------------------------------------------------------------


def make_app(
    settings: ServeSettings,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
) -> Starlette:
    """The application over the settings' folder, which no other server may hold. model, tokenizer: in place of those
    that the settings name.

    Raises:
        ConfigError: the model cannot be served, or the folder cannot be used.
    """
    folder = Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)
    served = ServedModel(settings, model, tokenizer)
    if served.tokenizer is not None:
        served.tokenizer.save_pretrained(folder / "tokenizer")
    journal = RequestJournal(folder / "journal.sqlite")
    names = journal.names("session") if settings.token else []
    if others := sum(journal.key_of(name) != digest_of(settings.token or "") for name in names):
        logger.warning(
            "%s: %d sessions and their runs belong to other keys than --token, which reach them without it.",
            *(folder, others),
        )
    return Api(Store(folder, served, settings.names[0], journal)).app()


def serve(settings: ServeSettings, when_loaded: Callable[[], object] = lambda: None) -> None:
    """Serves until a signal ends it; then the request at hand is finished, and models are saved.

    when_loaded: called before the first request is taken.

    Raises:
        ConfigError: as `make_app`; or another server holds the folder.
    """
    with RunLock(settings.folder, "folder"), listening_socket(settings.host, settings.port) as own:
        app = make_app(settings)
        when_loaded()
        # h11's limit ends headers that never do.
        limits = {"limit_concurrency": max(1024, 4 * settings.max_queue), "timeout_graceful_shutdown": 5}
        serve_on(own, settings.host, app, **limits)
