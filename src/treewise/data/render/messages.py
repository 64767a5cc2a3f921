"""Chat messages of OpenAI's shape, checked and in one spelling, and what of them is trained."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from treewise.base import features
from treewise.data.io.field_checks import shown, weight
from treewise.data.io.files import Placed, refuse_half_pairs
from treewise.data.io.forms import TOOLS
from treewise.data.io.replies import KEYS, REASONING_NAMES
from treewise.errors import DataError

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
# Keys of a message: its images in order, and for each how many characters of the content stand before it.
IMAGES, PLACES = "images", "image_places"
KINDS = ("image", "image_url", "input_image")
TEXTS = ("text", "input_text", "output_text")  # kinds of parts, as KINDS
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
BAD_CALL = "bad_call"  # key of a message with a tool call that cannot be written: the error
OF_ASSISTANT = ("tool_calls", "function_call", *REASONING_NAMES)
WEIGHTS = ("weight", "train", "training", "loss")  # two of axolotl's, and that of ms-swift and xtuner
# What blocks and items of other interfaces are in a chat record, where they are no text.
_AS_CALLS, _AS_REPLY = "Write it among the tool_calls of its message.", "Write it as a message of role tool."
_AS_REASONING = "Write it as the reasoning_content of its message."
OTHERS = {
    **{"tool_use": _AS_CALLS, "tool_result": _AS_REPLY, "thinking": _AS_REASONING},  # Anthropic's Messages
    **{"function_call": _AS_CALLS, "function_call_output": _AS_REPLY, "reasoning": _AS_REASONING},  # OpenAI's Responses
}


@dataclass(frozen=True, slots=True)
class WeightedMessages:
    """Messages as the template gets them, and the loss weight of each (0 where nothing was sampled)."""

    messages: list[Message]
    weights: list[float]


def clean_conversation(value: object, location: str, name: str = "messages") -> WeightedMessages:
    """Checked messages.

    Raises:
        DataError: not a list of objects, an unknown role, content that is not text, a bad weight or tool call.
    """
    if not isinstance(value, list):
        of_text = "text or " if name in ("prompt", "completion", "chosen", "rejected") else ""
        raise DataError(f"{location}: {name} must be {of_text}a list of messages, found {type(value).__name__}.")
    if not value:
        raise DataError(f"{location}: {name} is empty.")
    pairs = [clean_message(message, f"{location}: {name}[{turn}]") for turn, message in enumerate(value)]
    return WeightedMessages([message for message, _ in pairs], [weight for _, weight in pairs])


def clean_message(value: object, location: str) -> tuple[Message, float]:
    """One message without its weight, and the weight: what was given, else 1 for an assistant and 0 for others.

    Why a reply ended is its `finish_reason`, whatever key gave it; `turns` reads it, and templates do not get it.
    """
    if not isinstance(value, dict):
        raise DataError(f"{location} must be an object with role and content, found {type(value).__name__}.")
    refuse_half_pairs(value, location)
    if "trainable" in value:
        raise DataError(
            f"{location} has trainable; write weight (0: not trained), or let `treewise import` read the dump."
        )
    role = value.get("role")
    if role not in ROLES:
        hint = "Messages of from and value belong under conversations." if "from" in value else ""
        if role is None and str(value.get("type")) in OTHERS:
            raise DataError(f"{location} is an item of type {shown(value['type'])}. {OTHERS[value['type']]}")
        raise DataError(f"{location} has role {shown(role)}; supported are {', '.join(ROLES)}. {hint}".rstrip())
    message = {key: item for key, item in value.items() if key not in WEIGHTS and item is not None}
    if "content" not in message and role != "assistant":
        raise DataError(f"{location} ({role}) has no content.")
    message.pop(PLACES, None)
    message["content"], images, places = _text_and_images(message.get("content", ""), location)
    if images:
        message |= {IMAGES: images, PLACES: places}
    if images and role == "assistant":
        raise DataError(f"{location} (assistant) holds an image, and images are not sampled; give it to another role.")
    parts = value.get("content")
    if isinstance(parts, list) and any(part.get(name) is not None for part in parts for name in WEIGHTS):
        message = features.marked_parts.with_marked_parts(message, parts, location)
    trains, own_weight = train_mark(value, location), weight(value.get("weight"), location)
    if role != "assistant":
        if isinstance(message.get("train_detail"), list) and any(
            isinstance(part, dict) and part.get("train") for part in message["train_detail"]
        ):
            raise DataError(f"{location} ({role}) has train_detail; only assistant messages can be trained.")
        message.pop("train_detail", None)
        if (mark := next((name for name in WEIGHTS if value.get(name)), None)) is not None:
            given = "true" if value[mark] is True else shown(value[mark])
            raise DataError(f"{location} ({role}) has {mark}: {given}; only assistant messages can be trained.")
        if (own := next((name for name in OF_ASSISTANT if message.get(name)), None)) is not None:
            raise DataError(f"{location} ({role}) has {own}, which only messages of the assistant have.")
        if isinstance(message.get("tool_call_id"), list | dict):
            raise DataError(f"{location}: tool_call_id must be text, found {shown(message['tool_call_id'])}.")
        return message, 0.0
    if said := {key: message.pop(key) for key in KEYS if key in message}:
        message = features.endings.with_reason(message, said)
    for other in REASONING_NAMES[1:]:
        if not isinstance(message.get(other), str):
            continue
        if message.setdefault("reasoning_content", reasoning := message.pop(other)) != reasoning:
            raise DataError(f"{location} has reasoning twice, another one as {other}; give it once.")
    if not isinstance(message.get("reasoning_content", ""), str):
        raise DataError(f"{location}: reasoning_content must be text.")
    if old := message.pop("function_call", None):  # OpenAI's older name of the one tool call that it is
        if message.get("tool_calls"):
            raise DataError(f"{location} has both function_call and tool_calls; give the calls once, as tool_calls.")
        message["tool_calls"] = [old]
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = features.tools.clean_calls(calls, location)
    if message.get("train_detail") is not None:
        if message.get("tool_calls") or message.get("reasoning_content"):
            raise DataError(
                f"{location}: parts of the content are marked (train_detail, or weights of parts), and this message "
                "has tool calls or reasoning, too; put them into a message of their own, or mark the whole message by "
                "weight."
            )
        if not features.marked_parts.detail_spans(message["train_detail"], message["content"], location):
            return message, 0.0
    return message, 0.0 if trains is False else own_weight


def text_parts(message: Message) -> list[str]:
    """The texts of a message before, between and behind its images."""
    content, bounds = message["content"], [0, *message.get(PLACES, ()), len(message["content"])]
    return [content[low:high] for low, high in pairwise(bounds)]


def as_parts(message: Message, *, always: bool) -> Message:
    """A message as templates take it: content parts where it has images, or `always`; else text."""
    if not isinstance(message.get("content"), str) or not (message.get(PLACES) or always):
        return message
    parts: list[Message] = []
    for index, text in enumerate(text_parts(message)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**{key: value for key, value in message.items() if key not in (IMAGES, PLACES)}, "content": parts}


def train_mark(value: Message, location: str) -> bool | None:
    """The mark of a message (or part) in other libraries, `train`, `training` or `loss`; None without one."""
    marks = {name: value[name] for name in WEIGHTS[1:] if value.get(name) is not None}
    if not marks:
        return None
    name, mark = next(iter(marks.items()))
    if not isinstance(mark, bool | int) or any(each != mark for each in marks.values()) or mark not in (0, 1):
        raise DataError(f"{location}: {name} is {shown(mark)}; give true, or false for a message that is context.")
    return bool(mark)


def _text_and_images(content: object, location: str) -> tuple[str, list[Any], list[int]]:
    """The text of a message, its images in order, and the place of each in the text."""
    if isinstance(content, str):
        return content, [], []
    if not isinstance(content, list):
        raise DataError(f"{location}: content must be text, found {type(content).__name__}.")
    text, images, places = "", [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind in KINDS:
            images.append(features.image_records.image_of_part(part))
            places.append(len(text))
            continue
        is_text = kind in TEXTS
        if is_text and not isinstance(part.get("text"), str):
            raise DataError(f"{location}: a part of content of type {shown(kind)} has no text; give its `text`.")
        if not is_text:
            hint = OTHERS.get(str(kind), "")
            raise DataError(
                f"{location}: content of type {shown(kind)} is not supported, only text and images. {hint}".rstrip()
            )
        text += part["text"]
    return text, images, places


def find_tools(item: Placed) -> Tools:
    """Function schemas of a record, or None. Raises as `tools.tools_of` does."""
    return None if TOOLS.isdisjoint(item.value) else features.tools.tools_of(item)
