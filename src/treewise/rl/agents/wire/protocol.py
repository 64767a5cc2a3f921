"""What a protocol is: one value (`PROTOCOL`) in a module of this folder, and nothing about it anywhere else.

From these values the server has its paths, keys, forms of errors and lists of models, and agents the variables of the
environment under which their SDKs find it. A module that is added here is served.
"""

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any
from typing import Protocol as Form

import treewise.rl.agents.wire
from treewise.rl.agents.wire.asked import AgentRequest, RefusedError
from treewise.rl.agents.wire.common import Answer, Delta, TextOf, Usage

if TYPE_CHECKING:
    from treewise.rl.agents.wire.kept import Kept

Body = dict[str, Any]
BEARER = "authorization"  # the header that holds a key behind a word


class Events(Form):
    """Server-sent events of one prompt's answer: before the first token, of a part, after the last reply, and in place
    of the rest where that fails (`value` is the body of an error)."""

    def begin(self) -> list[bytes]: ...
    def delta(self, delta: Delta) -> list[bytes]: ...
    def end(self, usage: Usage) -> list[bytes]: ...
    def error(self, value: Body) -> list[bytes]: ...


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A call that was read. asked: one for each prompt. answer: the body of the whole answer. events: of a prompt's
    answer, whose first choice has the given index."""

    asked: Sequence[AgentRequest]
    answer: Callable[[Sequence[Answer], TextOf], Body]
    events: Callable[[Answer, int, TextOf], Events]


@dataclass(frozen=True, kw_only=True)
class Provider:
    """What the protocols of one provider share.

    owns: whether a request is one of theirs, by its path and headers; None: what is nobody else's. key_header: holds
    the key; `BEARER` holds it as a bearer. error: the body of one. models: path of the list of models, whose
    body is `listed`, and of one model, `model`. addresses: variables of the environment that hold the server's
    address, each with what follows it. key_variables: those that hold the key. variables: further ones.
    """

    name: str
    owns: Callable[[str, Mapping[str, str]], bool] | None
    key_header: str
    error: Callable[[RefusedError], Body]
    models: str
    listed: Callable[[Sequence[str]], Body]
    model: Callable[[str], Body]
    addresses: Mapping[str, str]
    key_variables: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """paths: of its calls, as Starlette writes them. body: a call with what stands beside it: the parts of its path,
    the query, and the `path`. exchange: reads a body, with the text of the chat template and what the episode keeps;
    raises `RefusedError`. is_passed_on: whether another server may answer a call as it stands. count_paths, count,
    counted: of calls that ask for the tokens of a prompt."""

    provider: Provider
    paths: Sequence[str]
    exchange: Callable[[Body, str, "Kept"], Exchange]
    body: Callable[[Mapping[str, Any], Body], Body] = lambda _, body: body
    is_passed_on: bool = True
    count_paths: Sequence[str] = ()
    count: Callable[[Body, str], AgentRequest] | None = None
    counted: Callable[[int], Body] = lambda tokens: {"input_tokens": tokens}


@cache
def protocols() -> tuple[Protocol, ...]:
    """Of all modules in this folder, by their names."""
    package = treewise.rl.agents.wire
    names = sorted(each.name for each in pkgutil.iter_modules(package.__path__))
    modules = [import_module(f"{package.__name__}.{name}") for name in names]
    return tuple(module.PROTOCOL for module in modules if hasattr(module, "PROTOCOL"))


@cache
def providers() -> tuple[Provider, ...]:
    """Each once."""
    return tuple({each.provider.name: each.provider for each in protocols()}.values())


def provider_of(path: str, headers: Mapping[str, str]) -> Provider:
    """Whose form an answer to a request has."""
    found = [each for each in providers() if each.owns is not None and each.owns(path, headers)]
    return (found or [each for each in providers() if each.owns is None])[0]


def key_of(headers: Mapping[str, str]) -> str:
    """The key of a request: in a header of its own, else as a bearer; "" without one."""
    own = [headers.get(each.key_header, "") for each in providers() if each.key_header != BEARER]
    scheme, _, bearer = headers.get(BEARER, "").partition(" ")
    return next(filter(None, own), bearer.strip() if scheme.lower() == "bearer" else "")


def addresses(url: str) -> dict[str, str]:
    """The variable under which the SDK of each provider finds the server at an address."""
    return {name: f"{url}{suffix}" for each in providers() for name, suffix in list(each.addresses.items())[:1]}


def environment(url: str, key: str) -> dict[str, str]:
    """All variables under which SDKs find the server, with a key of it."""
    found = {name: f"{url}{suffix}" for each in providers() for name, suffix in each.addresses.items()}
    keys = dict.fromkeys([name for each in providers() for name in each.key_variables], key)
    further = {name: value for each in providers() for name, value in each.variables.items()}
    return {**found, **keys, **further}
