"""Chat messages of OpenAI's shape, checked and in one spelling; the tools beside them; and what of them is trained.

Tools are a record's own, or a `tools_ref` into a file that lies beside the data.
"""

import ast
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from treewise.data.io.endings import KEYS, REASONING_NAMES, with_reason
from treewise.data.io.field_checks import json_kind, shown, weight
from treewise.data.io.files import Placed, parse_text, read_bytes, stem
from treewise.errors import DataError

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
Span = tuple[int, int]
IMAGE = "\ue0b8"  # private use: no text holds it
IMAGES = "images"  # key of a message
COLUMN = object()  # an image part without a value, which is the next of the record's column
KINDS = ("image", "image_url", "input_image")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
BAD_CALL = "bad_call"  # key of a message with a tool call that cannot be written: the error
OTHER_ARGUMENTS = ("input", "parameters", "args", "params", "kwargs")  # what others call them
BLANK_ARGUMENTS = "tool calls with blank arguments are read as calls without any ({})"
PYTHON_ARGUMENTS = "tool calls with arguments in Python's notation are read as JSON"
WEIGHTS = ("weight", "train", "training")  # the last two are axolotl's
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
    message["content"], images = _text_and_images(message.get("content", ""), location)
    if images:
        message[IMAGES] = images
    if images and role == "assistant":
        raise DataError(f"{location} (assistant) holds an image, and images are not sampled; give it to another role.")
    trains = _train_mark(value, location)
    if role != "assistant":
        if isinstance(message.get("train_detail"), list) and any(
            isinstance(part, dict) and part.get("train") for part in message["train_detail"]
        ):
            raise DataError(f"{location} ({role}) has train_detail; only assistant messages can be trained.")
        message.pop("train_detail", None)
        if trains:
            raise DataError(f"{location} ({role}) has train: true; only assistant messages can be trained.")
        return message, 0.0
    said = {key: message.pop(key) for key in KEYS if key in message}
    message = with_reason(message, said)
    for other in REASONING_NAMES[1:]:
        if isinstance(message.get(other), str):
            message.setdefault("reasoning_content", message.pop(other))
    if not isinstance(message.get("reasoning_content", ""), str):
        raise DataError(f"{location}: reasoning_content must be text.")
    if old := message.pop("function_call", None):  # OpenAI's older name of the one tool call that it is
        if message.get("tool_calls"):
            raise DataError(f"{location} has both function_call and tool_calls; give the calls once, as tool_calls.")
        message["tool_calls"] = [old]
    if calls := message.pop("tool_calls", None):
        calls = parse_text(calls, f"{location}.tool_calls") if isinstance(calls, str) else calls
        if not isinstance(calls, list):
            raise DataError(f"{location}: tool_calls must be a list, found {type(calls).__name__}.")
        message["tool_calls"] = [_tool_call(call, f"{location}.tool_calls") for call in calls]
    own_weight = weight(value.get("weight"), location)
    if message.get("train_detail") is not None:
        if message.get("tool_calls") or message.get("reasoning_content"):
            raise DataError(
                f"{location}: train_detail marks parts of the content, and this message has tool calls or reasoning, "
                "too; put them into a message of their own, or mark the whole message by weight."
            )
        if not detail_spans(message["train_detail"], message["content"], location):
            return message, 0.0
    return message, 0.0 if trains is False else own_weight


def with_arguments(message: Message, as_text: bool, location: str, counted: Counter[str]) -> Message:
    """The message with all tool-call arguments as JSON text, or as objects: what the template at hand can write.

    Arguments that are no object are left, with the error as `BAD_CALL`: `Template.render` raises it for a message that
    some prompt or turn would hold.

    counted: gets what was mended.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed = []
    for number, call in enumerate(calls):
        function = call["function"]
        try:
            written, read = arguments_of(function["arguments"], counted)
        except ValueError as error:
            where = f"{location}.tool_calls[{number}]"
            return {**message, BAD_CALL: f"{where}: the arguments of {shown(function['name'])} are {error}."}
        changed.append({**call, "function": {**function, "arguments": written if as_text else read}})
    return {**message, "tool_calls": changed}


def arguments_of(given: str | dict[str, Any], counted: Counter[str]) -> tuple[str, dict[str, Any]]:
    """The arguments of a tool call as text, as it was sampled where it is JSON, and as an object.

    counted: gets what was mended: blank text, which is how several servers write no arguments, and Python's notation.

    Raises:
        ValueError: text of anything but an object; its message says what is wrong.
    """
    if isinstance(given, dict):
        return json.dumps(given, ensure_ascii=False), given
    if not given.strip():
        counted[BLANK_ARGUMENTS] += 1
        return "{}", {}
    try:
        value = parse_text(given, "")
    except DataError as error:
        value = _python_object(given)
        if value is None:
            raise ValueError(str(error).removeprefix(": ").removesuffix(".")) from None
        counted[PYTHON_ARGUMENTS] += 1
        return json.dumps(value, ensure_ascii=False), value
    if isinstance(value, dict):
        return given, value
    found = "JSON that was written as text once more" if isinstance(value, str) else json_kind(value).partition(";")[0]
    raise ValueError(f"{found}, not an object: {shown(given)}; give {{}} for none")


def _python_object(text: str) -> dict[str, Any] | None:
    """What `str` wrote of a dictionary; None for other text."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict) and len({ast.dump(key) for key in node.keys if key}) < len(node.keys):
                return None
        value = ast.literal_eval(tree)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, dict) and all(isinstance(key, str) for key in value) else None


def as_parts(message: Message, *, always: bool) -> Message:
    """A message as templates take it: content parts where it has images, or `always`; else text."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    if IMAGE not in content and not always:
        return message
    parts: list[Message] = []
    for index, text in enumerate(content.split(IMAGE)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**{key: value for key, value in message.items() if key != IMAGES}, "content": parts}


def _train_mark(value: Message, location: str) -> bool | None:
    """axolotl's mark of a message, `train` or `training`; None without one."""
    marks = [value[name] for name in WEIGHTS[1:] if value.get(name) is not None]
    if not marks:
        return None
    if len(set(map(str, marks))) > 1 or not isinstance(marks[0], bool | int) or marks[0] not in (0, 1):
        raise DataError(f"{location}: train is {shown(marks[0])}; give true, or false for a message that is context.")
    return bool(marks[0])


def _text_and_images(content: object, location: str) -> tuple[str, list[Any]]:
    """The text of a message, with `IMAGE` where an image stands, and its images in order."""
    if isinstance(content, str):
        return content, []
    if not isinstance(content, list):
        raise DataError(f"{location}: content must be text, found {type(content).__name__}.")
    parts, images = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind in KINDS:
            images.append(_image_of_part(part))
            parts.append(IMAGE)
            continue
        is_text = kind in ("text", "input_text", "output_text")
        if is_text and not isinstance(part.get("text"), str):
            raise DataError(f"{location}: a part of content of type {shown(kind)} has no text; give its `text`.")
        if not is_text:
            hint = OTHERS.get(str(kind), "")
            raise DataError(
                f"{location}: content of type {shown(kind)} is not supported, only text and images. {hint}".rstrip()
            )
        parts.append(part["text"])
    return "".join(parts), images


def _image_of_part(part: Message) -> object:
    """The image of a content part, as a path, bytes, an address or PIL; `COLUMN` where it names none."""
    for name in ("image", "image_url", "url", "path", "bytes", "source", "base64"):
        value = part.get(name)
        if isinstance(value, dict):  # {"url": ...} of OpenAI, {"data": ...} of Anthropic, {"bytes": ..., "path": ...}
            data = value.get("data")
            value = value.get("url") or (f"data:;base64,{data}" if data else value)
        if value is not None:
            return f"data:;base64,{value}" if name == "base64" else value
    return COLUMN


def _tool_call(call: Any, location: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{location} needs {{function: {{name, arguments}}}}, found {shown(call)}.")
    arguments = function.get("arguments")
    if arguments is None:
        other = next((key for key in OTHER_ARGUMENTS if function.get(key) or call.get(key)), None)
        if other is not None:
            raise DataError(f"{location}: {shown(function['name'])} has {other}; write it as arguments.")
        arguments = {}
    if not isinstance(arguments, str | dict):
        raise DataError(f"{location}: arguments must be an object or JSON text, found {type(arguments).__name__}.")
    rest = {key: item for key, item in call.items() if key != "function" and "function" in call}
    return {"type": "function", **rest, "function": {**function, "arguments": arguments}}


def detail_spans(value: object, content: str, location: str) -> list[Span]:
    """The trained spans of a content, from `train_detail`: `[{begin_offset, end_offset, train}, ...]`.

    Offsets count characters of the content, the last one included. What no entry covers is context.

    Raises:
        DataError: entries of another shape, or outside of the content.
    """
    if not isinstance(value, list):
        raise DataError(f"{location}: train_detail must be a list of parts, found {shown(value)}.")
    spans = []
    for index, part in enumerate(value):
        begin, end, train = (
            (part.get(key) for key in ("begin_offset", "end_offset", "train"))
            if isinstance(part, dict)
            else (None, None, None)
        )
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < len(content):
            raise DataError(
                f"{location}: train_detail[{index}] must be {{begin_offset, end_offset, train}} with 0 <= begin_offset "
                f"<= end_offset < {len(content)} (characters of the content), found {shown(part)}."
            )
        if not isinstance(train, bool):
            raise DataError(f"{location}: train_detail[{index}].train must be true or false, found {shown(train)}.")
        if train:
            spans.append((begin, end + 1))
    return union(spans)


def union(spans: Sequence[Span]) -> list[Span]:
    """Sorted spans that neither touch nor overlap; empty ones are left out."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def clip(spans: Sequence[Span], limits: Span) -> list[Span]:
    """What of the spans lies within the limits."""
    return union([(max(start, limits[0]), min(end, limits[1])) for start, end in spans])


def tool_files(data_file: Path) -> list[Path]:
    """Files that `tools_ref` of a data file may point into, nearest first; those that exist."""
    names = (f"{stem(data_file)}_tools.json", "tools.json")
    paths = [data_file.parent / f"{name}{suffix}" for name in names for suffix in ("", ".gz")]
    return [path for path in paths if path.is_file()]


def find_tools(item: Placed) -> Tools:
    """Function schemas of a record, or None.

    Raises:
        DataError: a `tools_ref` without a file that holds it; tools that are not a list of objects.
    """
    record, data_file, location = item.value, item.file, item.location
    tools, name = record.get("tools"), record.get("tools_ref")
    if tools is None and isinstance(record.get("functions"), list):  # OpenAI's older name
        tools = [{"type": "function", "function": function} for function in record["functions"]]
    if tools is not None or name is None:
        return clean_tools(tools, location)
    if data_file is None:
        raise DataError(
            f"{location}: tools_ref {shown(name)} is looked up beside the data file, and this record is from none; "
            "give `tools`."
        )
    files = tool_files(data_file)
    for path in files:
        known = _tools_of(path)
        if isinstance(name, str) and name in known:
            return clean_tools(known[name], f"{path}: {shown(name)}")
    looked = ", ".join(str(path) for path in files) or f"no tools.json or {stem(data_file)}_tools.json beside the file"
    raise DataError(f"{location}: tools_ref {shown(name)} was not found ({looked}); put it there, or give `tools`.")


@lru_cache(maxsize=64)
def _tools_of(path: Path) -> dict[str, Any]:
    content = read_bytes(path)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({shown(str(error))}).") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: must be one JSON object of tool lists by name.")
    return value


def clean_tools(value: object, location: str) -> Tools:
    """Function schemas; None where there are none."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{location}: tools must be a list of function schemas (objects), found {shown(value)}.")
    for tool in value:
        function = tool.get("function", tool)  # beside the type, in OpenAI's newer form
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") == "function" and not isinstance(name, str):
            raise DataError(f"{location}: a tool is a function without a name: {shown(tool)}.")
    return value or None
