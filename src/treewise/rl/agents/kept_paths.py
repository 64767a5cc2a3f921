"""The paths under which clients look at what an episode keeps: responses, their items, conversations."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from treewise.rl.agents.wire.asked import RefusedError
from treewise.rl.agents.wire.kept import Kept


def kept_paths(
    kept_of: Callable[[Request], Kept], body_of: Callable[[Request], dict[str, Any]]
) -> list[tuple[str, Any, str]]:
    """Each with its handler and its method. kept_of, body_of: of a request; they raise `RefusedError`."""

    def handler(act: Callable[[Kept, str, Request], Any]) -> Any:
        async def answered(request: Request) -> Response:
            return JSONResponse(act(kept_of(request), str(request.path_params.get("name")), request))

        return answered

    def cancel(kept: Kept, name: str, _: Request) -> None:
        kept.response(name)
        raise RefusedError("responses are not made in the background, so none can be cancelled.")

    one, talk = "/v1/responses/{name}", "/v1/conversations/{name}"
    return [
        (one, handler(lambda kept, name, _: kept.response(name).value), "GET"),
        (one, handler(lambda kept, name, _: kept.forget_response(name)), "DELETE"),
        (f"{one}/input_items", handler(lambda kept, name, _: kept.input_items(name)), "GET"),
        (f"{one}/cancel", handler(cancel), "POST"),
        ("/v1/conversations", handler(lambda kept, _, request: kept.begin(body_of(request))), "POST"),
        (talk, handler(lambda kept, name, _: kept.conversation(name).value()), "GET"),
        (talk, handler(lambda kept, name, request: kept.change(name, body_of(request))), "POST"),
        (talk, handler(lambda kept, name, _: kept.forget_conversation(name)), "DELETE"),
        (f"{talk}/items", handler(lambda kept, name, _: kept.items(name)), "GET"),
        (f"{talk}/items", handler(lambda kept, name, request: kept.add_items(name, body_of(request))), "POST"),
    ]
