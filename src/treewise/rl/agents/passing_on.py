"""Calls that another endpoint answers, as they are, but for the name of the model and the key."""

from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from treewise.base.addresses import client_settings
from treewise.rl.agents.wire.asked import RefusedError


async def passed_on(request: Request, body: dict[str, Any], use: Any, seconds: float) -> Response:
    """The other endpoint's answer, as it comes. use: `base_url`, `model` and `api_key` of it.

    Raises:
        RefusedError: it does not answer.
    """
    import httpx

    url = str(use["base_url"]).rstrip("/").removesuffix("/v1") + request.url.path
    payload = {**body, "model": use.get("model", body.get("model"))}
    headers = {"x-api-key": use["api_key"], "authorization": f"Bearer {use['api_key']}"} if use.get("api_key") else {}
    if version := request.headers.get("anthropic-version"):
        headers["anthropic-version"] = version
    try:
        client = httpx.AsyncClient(**client_settings([url], seconds))
    except (ImportError, ValueError) as error:
        raise RefusedError(f"HTTP_PROXY, HTTPS_PROXY or ALL_PROXY: {error}.", status=502) from None
    try:
        found = await client.send(client.build_request("POST", url, json=payload, headers=headers), stream=True)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        await client.aclose()
        raise RefusedError(f"{url} does not answer: {type(error).__name__}: {error}.", status=502) from None

    async def parts() -> AsyncIterator[bytes]:
        try:
            async for part in found.aiter_bytes():
                yield part
        finally:
            await found.aclose()
            await client.aclose()

    return StreamingResponse(parts(), found.status_code, media_type=found.headers.get("content-type"))
