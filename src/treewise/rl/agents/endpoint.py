"""The server: routes, limits, and calls whose clients go away. What a call means is in `wire`, what becomes of it in
`episodes`.
"""

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from treewise.base.http.bodies import Bodies, BodyLimits
from treewise.base.http.server import check_host, host_guard, is_token, listening_socket, server_of, url_of
from treewise.data.io.field_checks import printable
from treewise.errors import ConfigError, DiskError
from treewise.rl.agents.endpoint_settings import CONTEXT, KEY_FORM, TRAIN
from treewise.rl.agents.episodes import Episode, Episodes, OpenCall
from treewise.rl.agents.kept_paths import kept_paths
from treewise.rl.agents.passing_on import passed_on
from treewise.rl.agents.recording import written_for
from treewise.rl.agents.streaming import Spoken, more, replies_of, rest
from treewise.rl.agents.wire.asked import AgentRequest, RefusedError
from treewise.rl.agents.wire.common import Fields, Usage
from treewise.rl.agents.wire.protocol import Protocol, Provider, key_of, protocols, provider_of, providers

logger = logging.getLogger("treewise")

ODD_VALUE = re.compile(rb"\\u[dD]|NaN|Infinity|[0-9][eE]\+?[0-9]{3}")  # what Python reads, and JSON does not hold
PING_SECONDS = 10.0  # of a stream in which nothing comes: a comment, for clients that would give up
CLOSE_SECONDS = 20.0  # that calls under way have, all together, once the server ends
NOT_SERVED = (
    *("embeddings", "audio/speech", "audio/transcriptions", "images/generations", "moderations", "files", "batches"),
    *("assistants", "threads", "fine_tuning/jobs", "vector_stores", "realtime"),
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
            check_host(host, token, KEY_FORM)
        self.episodes, self.name, self.host, self.token = episodes, name, host, token
        self.on_end, self.on_close = on_end, on_close
        self._bodies = Bodies(BodyLimits(episodes.settings.max_request_mb))

    def app(self) -> Starlette:
        """The ASGI application that answers agents' calls."""
        routes = [
            *(self._route(path, partial(self._call, each)) for each in protocols() for path in each.paths),
            *(self._route(path, partial(self._count, each)) for each in protocols() for path in each.count_paths),
            *(self._route(*path) for path in kept_paths(lambda request: self._episode(request).kept, self._json)),
            *(
                self._route(path, self._models, "GET")
                for listed in dict.fromkeys(each.models for each in providers())
                for path in (listed, f"{listed}/{{model:path}}")
            ),
            self._route("/v1/reward", self._reward),
            *(
                []
                if self.on_end is None
                else [self._route("/v1/episodes", self._begin), self._route("/v1/episodes/end", self._end)]
            ),
            Route("/{path:path}", self._missing, methods=["GET", "POST", "DELETE", "PUT", "PATCH"]),
        ]

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            under_way, end = self.episodes.all_open, time.monotonic() + CLOSE_SECONDS
            for episode in under_way:  # all calls are cancelled before one is waited for
                episode.end(0.0)
            for episode in under_way:
                await run_in_threadpool(episode.end, max(0.0, end - time.monotonic()))
            await run_in_threadpool(self.on_close)

        return Starlette(routes=routes, middleware=[host_guard(self.host)], lifespan=lifespan)

    # -- every request ------------------------------------------------------------------------------------------------

    def _route(self, path: str, handler: Any, method: str = "POST") -> Route:
        async def guarded(request: Request) -> Response:
            try:
                async with self._bodies.read(request, "", None) as request.state.body:
                    pass  # it is whole; the call may take long
                found: Response = await handler(request)
                return found
            except ClientDisconnect:
                return Response(status_code=499)
            except RefusedError as error:
                return _refused(error, request)
            except HTTPException as error:  # of its body
                text, status = error.detail, error.status_code
                return _refused(RefusedError(text, status=status, is_final=status not in (408, 503)), request)
            except DiskError as error:  # what was to be written is kept; the same request may come again
                refusal = RefusedError(str(error), status=error.status_code, code="no_room", is_final=False)
                return _refused(refusal, request)
            except Exception as error:
                logger.exception("a call to %s fails", request.url.path)
                return _refused(RefusedError(f"{type(error).__name__}: {error}", status=500), request)

        return Route(path, guarded, methods=[method])

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
        key = key_of(request.headers)
        if self.token is not None:
            given, _, name = key.partition(".")
            if not is_token(given, self.token):
                raise RefusedError(
                    "the API key does not begin with this server's token.", status=401, code="invalid_api_key"
                )
            return name or "default"
        return key

    # -- calls --------------------------------------------------------------------------------------------------------

    async def _call(self, protocol: Protocol, request: Request) -> Response:
        """A call of a protocol: answered as a whole, or by events."""
        episode, body = self._episode(request), protocol.body(_place(request), self._json(request))
        use = self.episodes.settings.use_of(str(body.get("model") or ""))
        if use not in (TRAIN, CONTEXT):
            if not protocol.is_passed_on:
                raise RefusedError(
                    f"{body['model']!r} is another endpoint's (models), and calls of {protocol.provider.name} are not "
                    "passed on.",
                    param="model",
                )
            return await self._passed_on(request, episode, body, use)
        exchange = protocol.exchange(body, self.episodes.chat.template.source, episode.kept)
        decode, opened = self.episodes.chat.decode, list[OpenCall]()
        try:
            for asked in exchange.asked:
                opened.append(await self._begun(episode, asked, is_trained=use == TRAIN))
        except BaseException:  # the call gets an error, so nobody waits for those that have begun
            for call in opened:
                episode.cancel(call)
            raise
        if exchange.asked[0].is_streamed:
            firsts = [index * asked.num_choices for index, asked in enumerate(exchange.asked)]
            events = [exchange.events(call.answer, at, decode) for call, at in zip(opened, firsts, strict=True)]
            return self._streamed(request, episode, opened, events)
        for call in opened:
            await self._ended(request, episode, call)
        return JSONResponse(exchange.answer([call.answer for call in opened], decode))

    async def _count(self, protocol: Protocol, request: Request) -> Response:
        """Tokens of a prompt, which is not sampled from."""
        self._episode(request)
        assert protocol.count is not None
        body = protocol.body(_place(request), self._json(request))
        chat = self.episodes.chat
        asked = protocol.count(body, chat.template.source)
        ids = await run_in_threadpool(lambda: chat.ids_of(written_for(chat, asked).text))
        return JSONResponse(protocol.counted(len(ids)))

    async def _begun(self, episode: Episode, asked: AgentRequest, *, is_trained: bool) -> OpenCall:
        most = self.episodes.settings.max_waiting
        if episode.batcher.num_open >= most:
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
                        for part in more(self.episodes.chat, call, spoken[index], streams[index]):
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
            for part in streams[0].error(_provider_of(request).error(error)):
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
        provider = _provider_of(request)
        return JSONResponse(provider.listed(list(names)) if wanted is None else provider.model(wanted))

    async def _reward(self, request: Request) -> Response:
        """Of the episode whose key it is, or of one of its calls."""
        episode, fields = self._episode(request), Fields(self._json(request))
        value, call_id, choice = (
            fields.need("reward"),
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
            fields.take("seed", int),
        )
        fields.done()
        assert group is None or isinstance(group, str | int)
        episode = self.episodes.open(name, group, self.episodes.seed_of(name) if seed is None else seed)
        key = episode.key if self.token is None else f"{self.token}.{episode.key}"
        return JSONResponse({"key": key, "name": name})

    async def _end(self, request: Request) -> Response:
        """The end of an episode; what was recorded of it."""
        assert self.on_end is not None
        episode, fields = self._episode(request), Fields(self._json(request))
        reward = fields.take("reward")
        fields.done()
        if reward is not None:
            episode.set_reward(reward)
        found = await run_in_threadpool(self.episodes.end, episode, self.on_end)
        if found is None:
            raise RefusedError("this key's episode has ended.", status=410, code="episode_ended")
        return JSONResponse(found)

    async def _missing(self, request: Request) -> Response:
        path = request.url.path
        lists = dict.fromkeys(each.models for each in providers())
        calls = [path.replace(":path", "") for each in protocols() for path in (*each.paths, *each.count_paths)]
        served = [*calls, "/v1/conversations", *lists]
        if path in served:
            wanted = "GET" if path in lists else "POST"
            return _refused(RefusedError(f"{path} takes {wanted}, not {request.method}.", status=405), request)
        what = "is not served" if path.removeprefix("/v1/") in NOT_SERVED else "does not exist"
        known = f"{path} {what}; {', '.join(served)} are there."
        return _refused(RefusedError(known, status=404, code="not_found"), request)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """Sets an event of a loop, from any thread; a loop that is closed waits for none."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)


def _place(request: Request) -> dict[str, Any]:
    return {**request.query_params, **request.path_params, "path": request.url.path}


def _provider_of(request: Request) -> Provider:
    return provider_of(request.url.path, request.headers)


def _refused(error: RefusedError, request: Request) -> Response:
    """An error in the protocol's own form. SDKs send a call again, unless the answer says not to."""
    headers = {"x-should-retry": "false"} if error.is_final else {"x-should-retry": "true", "retry-after": "1"}
    return JSONResponse(_provider_of(request).error(error), error.status, headers)


# -- a server in a thread ---------------------------------------------------------------------------------------------


@contextmanager
def listening(endpoint: Endpoint, port: int = 0) -> Iterator[str]:
    """The endpoint in a thread of this process; yields its address.

    Raises:
        ConfigError: the port is not free.
    """
    own, is_up = listening_socket(endpoint.host, port), threading.Event()
    server = server_of(endpoint.app(), is_up.set, log_level="warning", timeout_graceful_shutdown=1, lifespan="on")
    thread = threading.Thread(target=server.run, args=([own],), daemon=True, name="treewise-endpoint")
    thread.start()
    try:
        while not is_up.wait(0.1):
            if not thread.is_alive():
                raise ConfigError("the endpoint does not start; see the log.")
        yield url_of(own, endpoint.host)
    finally:
        server.should_exit = True
        thread.join()
        own.close()
