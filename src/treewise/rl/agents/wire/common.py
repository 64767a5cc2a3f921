"""What the protocols share: fields of a request that are taken, ignored or refused by name; errors; events."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from treewise.data.io.field_checks import shown
from treewise.errors import did_you_mean
from treewise.rl.agents.wire.asked import AgentRequest, GivenCall, RefusedError, Reply

T = TypeVar("T")
TextOf = Callable[[Sequence[int]], str]
_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_ERRORS |= dict.fromkeys((405, 410, 415), "invalid_request_error")
_ERRORS |= {408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error"}
_KINDS = {str: "text", int: "an integer", float: "a number", bool: "true or false", list: "a list", dict: "an object"}


class Fields:
    """The fields of an object. Those that nobody asked for are refused by name (`done`). ignored: names of those that
    were given and change nothing."""

    def __init__(self, value: object, location: str = "") -> None:
        if not isinstance(value, dict):
            raise RefusedError(
                f"{location or 'the body'} must be an object, found {shown(value)}.", param=location or None
            )
        self._left = {key: item for key, item in value.items() if item is not None}
        self._location = f"{location}." if location else ""
        self._known: list[str] = []
        self.ignored: list[str] = []

    @overload
    def take(self, name: str) -> object: ...
    @overload
    def take(self, name: str, *kinds: type[T]) -> T | None: ...
    @overload
    def take(self, name: str, *kinds: type[T], default: T) -> T: ...
    def take(self, name: str, *kinds: type, default: object = None) -> object:
        """A field of one of some types; `default` where it is missing or null."""
        self._known.append(name)
        if name not in self._left:
            return default
        value = self._left.pop(name)
        is_number = float in kinds and isinstance(value, int) and not isinstance(value, bool)
        if kinds and not (is_number or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)))):
            words = " or ".join(_KINDS[kind] for kind in kinds)
            raise RefusedError(
                f"{self._location}{name} must be {words}, found {shown(value)}.", param=self._param(name)
            )
        return value

    @overload
    def need(self, name: str) -> object: ...
    @overload
    def need(self, name: str, *kinds: type[T]) -> T: ...
    def need(self, name: str, *kinds: type) -> object:
        """A field that has to be there."""
        value: object = self.take(name, *kinds)
        if value is None:
            raise RefusedError(f"{self._location}{name} is missing.", param=self._param(name))
        return value

    def count(self, name: str) -> int | None:
        """A whole number of at least 1; None where it is missing."""
        value = self.take(name, int)
        if value is not None and value < 1:
            raise RefusedError(f"{self._location}{name} is {value}; it must be at least 1.", param=self._param(name))
        return value

    def only(self, name: str, values: Sequence[object] = (), hint: str = "") -> None:
        """A field that is served with these values alone, which change nothing."""
        self._known.append(name)
        if name in self._left and (value := self._left.pop(name)) not in values:
            raise RefusedError(
                f"{self._location}{name}={shown(value)} is not served{f'; {hint}' if hint else ''}.",
                param=self._param(name),
            )

    def ignore(self, *names: str) -> None:
        """Fields that ask for nothing that the sampler does."""
        self._known += names
        self.ignored += [f"{self._location}{name}" for name in names if self._left.pop(name, None) is not None]

    def done(self) -> None:
        """Raises `RefusedError` for a field that is left."""
        for name in self._left:
            hint = did_you_mean(name, self._known)
            raise RefusedError(f"{self._location}{name} is not served.{hint}", param=self._param(name))

    def _param(self, name: str) -> str:
        return f"{self._location}{name}"


def text_of(content: object, location: str, kinds: Sequence[str] = ("text", "input_text", "output_text")) -> str:
    """The text of a content that is a text, or parts of text alone."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RefusedError(f"{location} must be text or a list of parts, found {shown(content)}.", param=location)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "refusal" and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
            continue
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise RefusedError(f"{location}: content of type {shown(kind)} is not served, only text.", param=location)
        texts.append(part["text"])
    return "".join(texts)


def function_tool(value: object, location: str) -> dict[str, Any]:
    """A function schema of OpenAI's chat form, from that or from the flat one of Responses."""
    fields = Fields(value, location)
    kind = fields.take("type", str, default="function")
    if kind != "function":
        raise RefusedError(f"{location}: tools of type {kind!r} are not served, only functions.", param=location)
    has_inner = isinstance(value, dict) and "function" in value
    inner = Fields(fields.take("function", dict), f"{location}.function") if has_inner else fields
    function: dict[str, object] = {"name": inner.need("name", str)}
    if (text := inner.take("description", str)) is not None:
        function["description"] = text
    if (parameters := inner.take("parameters", dict)) is not None:
        function["parameters"] = parameters
    for part in (inner, fields):
        part.ignore("strict", "cache_control", "defer_loading")
        part.done()
    return {"type": "function", "function": function}


def output_schema(value: object, location: str) -> dict[str, Any] | None:
    """The JSON schema that a reply has to keep to, of `response_format`, `text.format` or Anthropic's `format`: any
    object for `json_object`; None for text."""
    fields = Fields({} if value is None else value, location)
    kind = fields.take("type", str, default="text")
    if kind == "text":
        found = None
    elif kind == "json_object":
        found = {"type": "object"}
    elif kind == "json_schema":
        given = fields.take("json_schema", dict)
        inner = fields if given is None else Fields(given, f"{location}.json_schema")
        found = inner.need("schema", dict)
        for part in (inner, fields):
            part.ignore("name", "description", "strict")
            part.done()
    else:
        raise RefusedError(
            f"{location}: outputs of type {shown(kind)} are not served; text, json_object and json_schema are.",
            param=location,
        )
    fields.done()
    return found


def stops_of(fields: Fields, name: str) -> tuple[str, ...]:
    """Texts that end a continuation."""
    value = fields.take(name, str, list, default=[])
    found = [value] if isinstance(value, str) else value
    if not all(isinstance(text, str) and text for text in found):
        raise RefusedError(f"{name} must be texts that are not empty, found {shown(value)}.", param=name)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a call. cached: of the prompt, those that an earlier call of the episode had."""

    prompt: int
    completion: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A call that is to be answered, or was. id: names it, for rewards. created: seconds since 1970. logprob_texts: of
    token ids, for log-probs."""

    id: str
    created: int
    asked: AgentRequest
    usage: Usage
    replies: tuple[Reply, ...] = ()
    prompt_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of a reply that is given out while it grows. reply: the whole of it, with the last one."""

    choice: int
    reasoning: str = ""
    content: str = ""
    calls: tuple[GivenCall, ...] = ()
    reply: Reply | None = None


def sse(value: object, event: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def error_kind(status: int, other: str) -> str:
    """OpenAI's and Anthropic's word for a status of HTTP; `other` where both have none."""
    return _ERRORS.get(status, other)


def template_variables(fields: Fields) -> dict[str, Any]:
    """vLLM's field for variables of the chat template."""
    given: Mapping[str, Any] = fields.take("chat_template_kwargs", dict, default={})
    return dict(given)


HOSTED = ("web_search", "image_generation")  # beginnings of tools that a server runs by itself, and this one does not


@dataclass(frozen=True, slots=True)
class NamedTools:
    """functions: schemas of OpenAI's chat form; None where there are none. namespaces: by the name that a function has
    for the model, its namespace and its name there. ignored: what was given besides, and is not there for the model.
    """

    functions: list[dict[str, Any]] | None
    namespaces: Mapping[str, tuple[str, str]]
    ignored: tuple[str, ...] = ()


def named_tools(values: Sequence[object]) -> NamedTools:
    """The functions among tools; those of a namespace have its name before their own."""
    functions: list[dict[str, Any]] = []
    namespaces: dict[str, tuple[str, str]] = {}
    ignored = []
    for index, tool in enumerate(values):
        location = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind.startswith(HOSTED):
            ignored.append(f"tools of type {kind}")
        elif isinstance(tool, dict) and kind == "namespace":
            fields = Fields(tool, location)
            space = fields.need("name", str)
            for number, inner in enumerate(fields.need("tools", list)):
                function = function_tool(inner, f"{location}.tools[{number}]")["function"]
                name = name_within(space, function["name"])
                namespaces[name] = space, function["name"]
                functions.append({"type": "function", "function": {**function, "name": name}})
        else:
            functions.append(function_tool(tool, location))
    return NamedTools(functions or None, namespaces, tuple(ignored))


def name_within(namespace: object, name: str) -> str:
    """The name that a function of a namespace has for the model."""
    return f"{namespace}__{name}" if namespace else name
