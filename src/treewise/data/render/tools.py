"""Tools beside a conversation, and calls of them in its messages, checked and in one spelling.

Tools are a record's own, or a `tools_ref` into a file that lies beside the data.
"""

import ast
import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from treewise.data.io.field_checks import json_kind, shown
from treewise.data.io.files import Placed, parse_text, read_bytes, refuse_half_pairs, stem, tool_files
from treewise.data.render.messages import BAD_CALL, WEIGHTS, Message, Tools
from treewise.errors import DataError

OTHER_ARGUMENTS = ("input", "parameters", "args", "params", "kwargs")  # what others call them
BLANK_ARGUMENTS = "tool calls with blank arguments are read as calls without any ({})"
PYTHON_ARGUMENTS = "tool calls with arguments in Python's notation are read as JSON"


def tools_of(item: Placed) -> Tools:
    """Function schemas of a record, or None.

    Raises:
        DataError: a `tools_ref` without a file that holds it; tools that are not a list of objects.
    """
    record, data_file, location = item.value, item.file, item.location
    tools, name = record.get("tools"), record.get("tools_ref")
    if isinstance(older := record.get("functions"), list) and older:  # OpenAI's older name
        if tools:
            raise DataError(f"{location} has both functions and tools; give them once, as tools.")
        tools = [{"type": "function", "function": function} for function in older]
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
    refuse_half_pairs(value, str(path))
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


def clean_calls(calls: object, location: str) -> list[dict[str, Any]]:
    """Checked tool calls of a message, given as a list or as its JSON text. location: of the message."""
    where = f"{location}.tool_calls"
    calls = parse_text(calls, where) if isinstance(calls, str) else calls
    if not isinstance(calls, list):
        raise DataError(f"{location}: tool_calls must be a list, found {type(calls).__name__}.")
    return [_tool_call(call, where) for call in calls]


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
    if isinstance(call.get("id"), list | dict):
        raise DataError(f"{location}: an id must be text, found {shown(call['id'])}.")
    if (mark := next((name for name in WEIGHTS if call.get(name) is not None), None)) is not None:
        raise DataError(f"{location} has {mark}, which a call of its own does not take; write it beside the content.")
    rest = {key: item for key, item in call.items() if key != "function" and "function" in call}
    return {"type": "function", **rest, "function": {**function, "arguments": arguments}}


def with_arguments(message: Message, takes_text: Mapping[bool, bool], location: str, counted: Counter[str]) -> Message:
    """The message with all tool-call arguments as JSON text, or as objects: what the template at hand can write.

    Arguments that are no object are left, with the error as `BAD_CALL`: `Template.render` raises it for a message that
    some prompt or turn would hold.

    takes_text: which of them, by whether there are any arguments. counted: gets what was mended.
    """
    changed = []
    for number, call in enumerate(message["tool_calls"]):
        function = call["function"]
        try:
            written, read = arguments_of(function["arguments"], counted)
        except ValueError as error:
            where = f"{location}.tool_calls[{number}]"
            return {**message, BAD_CALL: f"{where}: the arguments of {shown(function['name'])} are {error}."}
        changed.append({**call, "function": {**function, "arguments": written if takes_text[bool(read)] else read}})
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


def marked_call(call: dict[str, Any], number: int, word_of: Callable[[str], str]) -> dict[str, Any]:
    """A call of the same shape whose texts are words that `word_of` gives to fields."""
    function = {**call["function"], "name": word_of(f"tool_calls[{number}].name")}
    arguments = function["arguments"]
    if arguments and arguments != "{}":
        key = word_of(f"tool_calls[{number}].arguments")
        function["arguments"] = f'{{"{key}": "x"}}' if isinstance(arguments, str) else {key: "x"}
    return {**call, "function": function}
