"""The server: routes, limits, and calls whose clients go away. What a call means is in `wire`, what becomes of it in
`episodes`.
"""

import asyncio
import hmac
import json
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from treewise.data.io.field_checks import printable
from treewise.errors import ConfigError
from treewise.rl.agents.endpoint_settings import CONTEXT, LOOPBACK, TRAIN, check_host
from treewise.rl.agents.episodes import Episode, Episodes, OpenCall
from treewise.rl.agents.passing_on import passed_on
from treewise.rl.agents.streaming import Spoken, more, replies_of, rest
from treewise.rl.agents.wire import chat, completions, messages, responses
from treewise.rl.agents.wire.asked import AgentRequest, RefusedError
from treewise.rl.agents.wire.common import Fields, Usage, anthropic_error, openai_error

logger = logging.getLogger("treewise")

ODD_VALUE = re.compile(rb"\\u[dD]|NaN|Infinity|[0-9][eE]\+?[0-9]{3}")  # what Python reads, and JSON does not hold
PING_SECONDS = 10.0  # of a stream in which nothing comes: a comment, for clients that would give up
SERVED = ("chat/completions", "completions", "responses", "messages", "messages/count_tokens", "models")
NOT_SERVED = (
    *("embeddings", "audio/speech", "audio/transcriptions", "images/generations", "moderations", "files", "batches"),
    *("assistants", "threads", "fine_tuning/jobs", "vector_stores", "realtime", "conversations"),
)


class _Events(StreamingResponse):
    """A stream; `gone` is called once it is over, also where the client went away before it began."""

    def __init__(self, events: AsyncIterator[bytes], gone: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._gone = gone

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._gone()


class Endpoint:
    """The handlers.

    Parameters:
        episodes: whose keys are taken.
        on_end: what becomes of an episode that a client ends (`treewise record`); None: clients begin and end none.
        on_close: is called once the server takes no calls.
        token: what keys begin with, where others reach the server.

    Raises:
        ConfigError: others reach the server, any key begins an episode, and there is no token.
    """

    def __init__(
        self,
        episodes: Episodes,
        *,
        name: str = "policy",
        host: str = "127.0.0.1",
        token: str | None = None,
        on_end: Callable[[Episode], Any] | None = None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        if episodes.takes_any_key:
            check_host(host, token)
        self.episodes, self.name, self.host, self.token = episodes, name, host, token
        self.on_end, self.on_close = on_end, on_close

    def app(self) -> Starlette:
        """The ASGI application that answers agents' calls."""
        routes = [
            self._route("chat/completions", self._chat),
            self._route("completions", self._completions),
            self._route("responses", self._responses),
            self._route("messages", self._messages),
            self._route("messages/count_tokens", self._count),
            self._route("models", self._models, "GET"),
            self._route("models/{model:path}", self._models, "GET"),
            self._route("reward", self._reward),
            *(
                []
                if self.on_end is None
                else [self._route("episodes", self._begin), self._route("episodes/end", self._end)]
            ),
            Route("/{path:path}", self._missing, methods=["GET", "POST", "DELETE", "PUT", "PATCH"]),
        ]
        hosts = [*LOOPBACK, "[::1]"] if self.host in LOOPBACK else ["*"]

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            for episode in self.episodes.all_open:
                await run_in_threadpool(episode.end)
            await run_in_threadpool(self.on_close)

        return Starlette(
            routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)], lifespan=lifespan
        )

    # -- every request ------------------------------------------------------------------------------------------------

    def _route(self, path: str, handler: Any, method: str = "POST") -> Route:
        async def guarded(request: Request) -> Response:
            try:
                request.state.body = await self._body(request) if method == "POST" else b""
                found: Response = await handler(request)
                return found
            except ClientDisconnect:
                return Response(status_code=499)
            except RefusedError as error:
                return _refused(error, request)
            except Exception as error:
                logger.exception("a call to %s fails", request.url.path)
                return _refused(RefusedError(f"{type(error).__name__}: {error}", status=500), request)

        return Route(f"/v1/{path}", guarded, methods=[method])

    async def _body(self, request: Request) -> bytes:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RefusedError("compressed requests are not taken.", status=415)
        body, limit = bytearray(), self.episodes.settings.max_request_mb << 20
        async for part in request.stream():  # what is too large is read to its end, or its sender would not hear why
            body += part[: limit + 1 - len(body)]
        if len(body) > limit:
            raise RefusedError(f"the request is larger than {limit >> 20} MB (max_request_mb).", status=413)
        return bytes(body)

    def _json(self, request: Request) -> dict[str, Any]:
        body: bytes = request.state.body
        try:
            value = json.loads(body or b"{}")
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"the body is not JSON: {error}.") from None
        if not isinstance(value, dict):
            raise RefusedError("the body must be a JSON object.")
        for name, item in value.items() if ODD_VALUE.search(body) else ():
            try:
                json.dumps([name, item], ensure_ascii=False, allow_nan=False).encode()
            except ValueError as error:
                kind = (
                    "half of a surrogate pair"
                    if isinstance(error, UnicodeEncodeError)
                    else "a number that is not finite"
                )
                raise RefusedError(
                    f"{printable(name)} holds {kind}, which is no JSON.", param=printable(name)
                ) from None
        return value

    def _episode(self, request: Request) -> Episode:
        return self.episodes.find(self._key(request))

    def _key(self, request: Request) -> str:
        """The key of a request; with a token, one that begins with it."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if self.token is not None:
            given, _, name = key.partition(".")
            if not hmac.compare_digest(given.encode(), self.token.encode()):
                raise RefusedError(
                    "the API key does not begin with this server's token.", status=401, code="invalid_api_key"
                )
            return name or "default"
        return key

    # -- calls --------------------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        return await self._call(request, chat.read, chat.ReplyStream, chat.answer)

    async def _messages(self, request: Request) -> Response:
        return await self._call(request, messages.read, messages.ReplyStream, messages.answer)

    async def _responses(self, request: Request) -> Response:
        def answer(found: Any, text_of_ids: Any, *, shows_ids: bool = False) -> Any:
            del shows_ids
            return responses.answer(found, self._json(request), text_of_ids)

        return await self._call(request, responses.read, responses.ReplyStream, answer)

    async def _call(self, request: Request, read: Any, stream: Any, answer: Any) -> Response:
        episode, body = self._episode(request), self._json(request)
        use = self.episodes.settings.use_of(str(body.get("model") or ""))
        if use not in (TRAIN, CONTEXT):
            return await self._passed_on(request, episode, body, use)
        asked: AgentRequest = read(body, self.episodes.writer.source)
        opened = await self._begun(episode, asked, is_trained=use == TRAIN)
        decode, shows_ids = self.episodes.writer.decode, bool(body.get("return_token_ids"))
        if asked.is_streamed:
            return self._streamed(request, episode, [opened], [stream(opened.answer, body, decode)])
        await self._ended(request, episode, opened)
        return JSONResponse(answer(opened.answer, decode, shows_ids=shows_ids))

    async def _completions(self, request: Request) -> Response:
        episode, body = self._episode(request), self._json(request)
        use = self.episodes.settings.use_of(str(body.get("model") or ""))
        if use not in (TRAIN, CONTEXT):
            return await self._passed_on(request, episode, body, use)
        asked, decode = completions.read(body), self.episodes.writer.decode
        opened = [await self._begun(episode, prompt, is_trained=use == TRAIN) for prompt in asked]
        if asked[0].is_streamed:
            firsts = [index * prompt.num_choices for index, prompt in enumerate(asked)]
            streams = [
                completions.ReplyStream(call.answer, body, decode, at) for call, at in zip(opened, firsts, strict=True)
            ]
            return self._streamed(request, episode, opened, streams)
        for call in opened:
            await self._ended(request, episode, call)
        found = completions.answer(
            [call.answer for call in opened], decode, shows_ids=bool(body.get("return_token_ids"))
        )
        return JSONResponse(found)

    async def _count(self, request: Request) -> Response:
        """Tokens of a prompt, which is not sampled from."""
        self._episode(request)
        asked, writer = (
            messages.read(self._json(request), self.episodes.writer.source, counts=True),
            self.episodes.writer,
        )
        ids = await run_in_threadpool(lambda: writer.prompt_ids(writer.written(asked).text))
        return JSONResponse({"input_tokens": len(ids)})

    async def _begun(self, episode: Episode, asked: AgentRequest, *, is_trained: bool) -> OpenCall:
        most = self.episodes.settings.max_waiting
        if episode.batcher.num_waiting >= most:
            raise RefusedError(f"{most} calls wait already (max_waiting).", status=429, is_final=False)
        found: OpenCall = await run_in_threadpool(lambda: episode.begin(asked, is_trained=is_trained))
        return found

    async def _ended(self, request: Request, episode: Episode, opened: OpenCall) -> None:
        """Waits for the replies. Raises `RefusedError` where there are none; nobody waits for a client that is gone."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        opened.done.add_done_callback(lambda _: _wake(loop, event))
        gone = asyncio.create_task(_disconnected(request))
        waits = asyncio.create_task(event.wait())
        try:
            seconds = self.episodes.settings.call_seconds
            done, _ = await asyncio.wait({gone, waits}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if waits not in done:
                episode.cancel(opened)
            if gone in done and waits not in done:
                raise ClientDisconnect
            if not done:
                raise RefusedError(f"no reply within {seconds:g} seconds (call_seconds).", status=504, code="timeout")
            replies_of(opened)
        finally:
            for task in (gone, waits):
                task.cancel()

    def _streamed(
        self, request: Request, episode: Episode, opened: list[OpenCall], streams: list[Any]
    ) -> StreamingResponse:
        def gone() -> None:
            for call in opened:
                if not call.done.done():
                    episode.cancel(call)

        return _Events(self._events(request, opened, streams), gone)

    async def _events(self, request: Request, opened: list[OpenCall], streams: list[Any]) -> AsyncIterator[bytes]:
        """The events of one stream."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        end = loop.time() + self.episodes.settings.call_seconds
        spoken = [[Spoken() for _ in call.tokens] for call in opened]
        for call in opened:
            call.on_progress = lambda: _wake(loop, event)
            call.done.add_done_callback(lambda _: _wake(loop, event))
        left = list(range(len(opened)))
        try:
            for index in left:
                for part in streams[index].begin():
                    yield part
            while left:
                for index in list(left):
                    call = opened[index]
                    if call.done.done():
                        left.remove(index)
                        for part in rest(call, spoken[index], streams[index]):
                            yield part
                    else:
                        for part in more(self.episodes.writer, call, spoken[index], streams[index]):
                            yield part
                if not left:
                    break
                try:
                    await asyncio.wait_for(event.wait(), min(PING_SECONDS, max(end - loop.time(), 0.001)))
                except TimeoutError:
                    if loop.time() > end:
                        raise RefusedError("no reply in time (call_seconds).", status=504, code="timeout") from None
                    yield b": ping\n\n"
                event.clear()
            parts = [call.answer.usage for call in opened]
            usage = Usage(*(sum(getattr(part, name) for part in parts) for name in ("prompt", "completion", "cached")))
            for part in streams[-1].end(usage):
                yield part
        except RefusedError as error:
            form = anthropic_error if _is_anthropic(request) else openai_error
            for part in streams[0].error(form(error)):
                yield part

    async def _passed_on(self, request: Request, episode: Episode, body: dict[str, Any], use: Any) -> Response:
        """A call that another endpoint answers. It is counted, and no part of the recording."""
        episode.num_passed_on += 1
        return await passed_on(request, body, use, self.episodes.settings.call_seconds)

    # -- the rest -----------------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        self._episode(request)
        names = dict.fromkeys([self.name, *(name for name in self.episodes.settings.models if name != "*")])
        wanted = request.path_params.get("model")
        if wanted is not None:
            self.episodes.settings.use_of(wanted)
            names = {wanted: None}
        found: list[dict[str, Any]]
        if _is_anthropic(request):
            found = [
                {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
                for name in names
            ]
            listed: dict[str, Any] = {
                "data": found,
                "has_more": False,
                "first_id": next(iter(names)),
                "last_id": list(names)[-1],
            }
        else:
            found = [{"id": name, "object": "model", "created": 0, "owned_by": "treewise"} for name in names]
            listed = {"object": "list", "data": found}
        return JSONResponse(listed if wanted is None else found[0])

    async def _reward(self, request: Request) -> Response:
        """Of the episode whose key it is, or of one of its calls."""
        episode, fields = self._episode(request), Fields(self._json(request))
        value, call_id, choice = (
            fields.need("reward", float),
            fields.take("call_id", str),
            fields.take("choice", int, default=0),
        )
        fields.done()
        episode.set_reward(value, call_id, choice)
        return JSONResponse({"status": "ok"})

    async def _begin(self, request: Request) -> Response:
        """A new episode: its key."""
        self._key(request)
        fields = Fields(self._json(request))
        name, group, seed = (
            fields.need("name", str),
            fields.take("group", str, int),
            fields.take("seed", int, default=0),
        )
        fields.done()
        episode = self.episodes.open(name, group, seed)
        key = episode.key if self.token is None else f"{self.token}.{episode.key}"
        return JSONResponse({"key": key, "name": name})

    async def _end(self, request: Request) -> Response:
        """The end of an episode; what was recorded of it."""
        assert self.on_end is not None
        episode, fields = self._episode(request), Fields(self._json(request))
        reward = fields.take("reward", float)
        fields.done()
        if reward is not None:
            episode.set_reward(reward)
        await run_in_threadpool(self.episodes.end, episode)
        return JSONResponse(await run_in_threadpool(self.on_end, episode))

    async def _missing(self, request: Request) -> Response:
        path = request.url.path.removeprefix("/v1/")
        if path in SERVED:
            wanted = "GET" if path == "models" else "POST"
            error = RefusedError(f"{request.url.path} takes {wanted}, not {request.method}.", status=405)
            return _refused(error, request)
        what = "is not served" if path in NOT_SERVED else "does not exist"
        known = f"{request.url.path} {what}; under /v1 are {', '.join(SERVED)}."
        return _refused(RefusedError(known, status=404, code="not_found"), request)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Sets an event of a loop, from any thread; a loop that is closed waits for none."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)


def _is_anthropic(request: Request) -> bool:
    return request.url.path.startswith("/v1/messages") or "anthropic-version" in request.headers


def _refused(error: RefusedError, request: Request) -> Response:
    """An error in the protocol's own form. Both SDKs send a call again, unless the answer says not to."""
    form = anthropic_error if _is_anthropic(request) else openai_error
    headers = {"x-should-retry": "false"} if error.is_final else {"x-should-retry": "true", "retry-after": "1"}
    return JSONResponse(form(error), error.status, headers)


# -- a server in a thread ---------------------------------------------------------------------------------------------


@contextmanager
def listening(endpoint: Endpoint, port: int = 0) -> Iterator[str]:
    """The endpoint in a thread of this process; yields its address.

    Raises:
        ConfigError: the port is not free.
    """
    import uvicorn

    try:
        own = socket.create_server(
            (endpoint.host, port), family=socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        )
    except OSError as error:
        raise ConfigError(f"port {port} of {endpoint.host} cannot be listened on: {error}.") from None
    config = uvicorn.Config(
        endpoint.app(),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        ws="none",
        http="h11",
        lifespan="on",
    )
    server, is_up = uvicorn.Server(config), threading.Event()
    startup = server.startup

    async def announced(*args: Any, **kwargs: Any) -> None:
        await startup(*args, **kwargs)
        is_up.set()

    server.startup = announced
    thread = threading.Thread(target=server.run, args=([own],), daemon=True, name="treewise-endpoint")
    thread.start()
    try:
        while not is_up.wait(0.1):
            if not thread.is_alive():
                raise ConfigError("the endpoint does not start; see the log.")
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        yield f"http://{host}:{own.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        own.close()
