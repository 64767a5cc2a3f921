"""What OpenAI's Responses keep for later calls to name, for as long as an episode lasts: responses, by
`previous_response_id` and `GET /v1/responses/ID`; their items, by `item_reference`; conversations.

A response holds its own items alone, and the one before it; what a call adds is therefore kept once.
"""

import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from treewise.data.io.field_checks import shown
from treewise.rl.agents.wire.asked import RefusedError
from treewise.rl.agents.wire.common import Fields
from treewise.rl.agents.wire.responses import is_kept

Items = list[dict[str, Any]]


@dataclass(slots=True)
class KeptResponse:
    """value: as it was answered. before: the response that it goes on from. items: that its call added."""

    value: dict[str, Any]
    before: "KeptResponse | None"
    items: Items


@dataclass(slots=True)
class KeptConversation:
    """Items of all calls that named it."""

    id: str
    created: int
    metadata: dict[str, Any]
    items: Items = field(default_factory=list)

    def value(self) -> dict[str, Any]:
        """As the protocol shows it."""
        shown_as = {"id": self.id, "object": "conversation", "created_at": self.created}
        return {**shown_as, "metadata": self.metadata}


@dataclass(frozen=True, slots=True)
class Resolved:
    """A call with all of its items. items: those that it adds. before, conversation: what it goes on from."""

    body: dict[str, Any]
    items: Items
    before: KeptResponse | None
    conversation: KeptConversation | None


class Kept:
    """Of one episode. For several threads."""

    def __init__(self) -> None:
        self._responses: dict[str, KeptResponse] = {}
        self._conversations: dict[str, KeptConversation] = {}
        self._items: dict[str, dict[str, Any]] = {}
        self._lock = threading.RLock()

    # -- calls --------------------------------------------------------------------------------------------------------

    def resolved(self, body: dict[str, Any]) -> Resolved:
        """A call with what it names in the place of the names. Raises `RefusedError` for what is not kept."""
        name, place, given = body.get("previous_response_id"), body.get("conversation"), body.get("input")
        if name is not None and place is not None:
            raise RefusedError("previous_response_id and conversation exclude one another.", param="conversation")
        if not isinstance(given, str | list):
            return Resolved(body, [], None, None)  # which the reader refuses
        with self._lock:
            before = None if name is None else self.response(name, "previous_response_id")
            talk = None if place is None else self.conversation(place.get("id") if isinstance(place, dict) else place)
            earlier = list(_path(before)) if talk is None else list(talk.items)
            items = [self._own(item, index) for index, item in enumerate(_listed(given))]
        whole = {**body, "input": [*earlier, *items] if earlier or isinstance(given, list) else given}
        return Resolved(whole | ({} if talk is None else {"conversation": {"id": talk.id}}), items, before, talk)

    def keep(self, resolved: Resolved, value: dict[str, Any]) -> None:
        """Keeps a response, if its call lets it."""
        own = _with_ids([*resolved.items, *value["output"]])
        with self._lock:
            if resolved.conversation is not None:
                resolved.conversation.items += own
            if is_kept(resolved.body):
                self._responses[value["id"]] = KeptResponse(value, resolved.before, own)
            if resolved.conversation is not None or is_kept(resolved.body):
                self._know(own)

    def _own(self, item: Any, index: int) -> Any:
        """An item, or the one that a reference stands for."""
        is_named = isinstance(item, dict) and isinstance(item.get("id"), str)
        given = {name for name, value in item.items() if value is not None} if is_named else set()
        if not (is_named and (item.get("type") == "item_reference" or given == {"id"})):
            return item
        if (found := self._items.get(item["id"])) is None:
            raise RefusedError(
                f"input[{index}]: item {item['id']!r} is not kept here; it is of no earlier call of this episode that "
                "was stored.",
                status=404,
                param="input",
            )
        return found

    def _know(self, items: Items) -> None:
        for item in items:
            if isinstance(item, dict) and isinstance(item.get("id"), str):
                self._items[item["id"]] = item

    # -- responses ----------------------------------------------------------------------------------------------------

    def response(self, name: object, param: str = "response_id") -> KeptResponse:
        """Raises `RefusedError` for one that is not kept."""
        found = self._responses.get(name) if isinstance(name, str) else None
        if found is None:
            raise RefusedError(
                f"Response with id {shown(name)} not found: it is of no earlier call of this episode that was stored.",
                status=404,
                code="previous_response_not_found" if param == "previous_response_id" else "not_found",
                param=param,
            )
        return found

    def forget_response(self, name: str) -> dict[str, Any]:
        """The protocol's answer to a deletion. Responses that go on from it keep its items."""
        with self._lock:
            self.response(name)
            del self._responses[name]
        return {"id": name, "object": "response", "deleted": True}

    def input_items(self, name: str) -> dict[str, Any]:
        """All items that the model saw for a response, the last first, as the protocol lists them."""
        with self._lock:
            found = self.response(name)
            own = found.items[: len(found.items) - len(found.value["output"])]
            return _list([*_path(found.before), *own][::-1])

    # -- conversations ------------------------------------------------------------------------------------------------

    def begin(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A new conversation."""
        fields = Fields(dict(body))
        items, metadata = fields.take("items", list, default=[]), fields.take("metadata", dict, default={})
        fields.done()
        talk = KeptConversation(f"conv_{secrets.token_hex(16)}", int(time.time()), metadata)
        with self._lock:
            self._conversations[talk.id] = talk
            self._add(talk, items)
        return talk.value()

    def conversation(self, name: object) -> KeptConversation:
        """Raises `RefusedError` for one that was not begun in this episode."""
        found = self._conversations.get(name) if isinstance(name, str) else None
        if found is None:
            raise RefusedError(
                f"Conversation with id {shown(name)} not found: it was not begun in this episode.",
                status=404,
                code="not_found",
                param="conversation",
            )
        return found

    def change(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Gives a conversation other metadata."""
        with self._lock:
            talk = self.conversation(name)
            talk.metadata = Fields(dict(body)).take("metadata", dict, default={})
            return talk.value()

    def forget_conversation(self, name: str) -> dict[str, Any]:
        """The protocol's answer to a deletion; the items stay known."""
        with self._lock:
            self.conversation(name)
            del self._conversations[name]
        return {"id": name, "object": "conversation.deleted", "deleted": True}

    def items(self, name: str) -> dict[str, Any]:
        """Of a conversation, the last first."""
        with self._lock:
            return _list(self.conversation(name).items[::-1])

    def add_items(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Behind those that a conversation has; these."""
        with self._lock:
            talk = self.conversation(name)
            return _list(self._add(talk, Fields(dict(body)).need("items", list)))

    def _add(self, talk: KeptConversation, items: list[Any]) -> Items:
        for index, item in enumerate(items):
            if not isinstance(item, dict):
                raise RefusedError(f"items[{index}] must be an object, found {shown(item)}.", param="items")
        own = _with_ids(items)
        talk.items += own
        self._know(own)
        return own


def _with_ids(items: list[Any]) -> Items:
    """Each under an id, which those of clients need not have."""
    return [{"id": f"item_{secrets.token_hex(16)}", "type": "message", **item} for item in items]


def _listed(given: str | list[Any]) -> list[Any]:
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


def _path(last: KeptResponse | None) -> Iterator[dict[str, Any]]:
    """The items up to a response, and its own."""
    path = []
    while last is not None:
        path.append(last)
        last = last.before
    for response in reversed(path):
        yield from response.items


def _list(items: Items) -> dict[str, Any]:
    ids = [item.get("id") for item in items]
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": items, **ends, "has_more": False}
