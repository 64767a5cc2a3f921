"""How families of models write tool calls and thinking, read back from text.

A family is recognised by what its chat template writes of a call. Each is the text that may begin a call, a pattern of
a whole one, and what is read of it. What does not fit the pattern, or is no call, stays text.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

Found = tuple[str, str]  # of a call: its name, and its arguments as JSON text
Types = Mapping[str, Mapping[str, Any]]  # of each tool, the schemas of its parameters
THINKING = (
    *(("<think>", "</think>"), ("[THINK]", "[/THINK]")),
    *(("<seed:think>", "</seed:think>"), ("<thinking>", "</thinking>")),
)


@dataclass(frozen=True, slots=True)
class Family:
    """One of them.

    signs: the template's text of a call holds one of them. opens: what a call may begin with. block: a whole call, or
    several, from there. read: the calls in its match; none where it holds none, or what it raises. is_whole: a call is
    the whole turn.
    """

    name: str
    signs: tuple[str, ...]
    opens: tuple[str, ...]
    block: re.Pattern[str]
    read: Callable[[re.Match[str], Types], list[Found]]
    is_whole: bool = False


def _calls_of(value: Any) -> list[Found]:
    """Of an object, or a list of them: `name` or `tool_name`, `arguments` or `parameters`."""
    found: list[Found] = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return []
        name = function.get("name", function.get("tool_name"))
        arguments = function.get("arguments", function.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return []
        found.append((name, json.dumps(arguments, ensure_ascii=False)))
    return found


def _objects(match: re.Match[str], _: Types) -> list[Found]:
    """JSON objects or lists, one after the other, with white space or `;` between them."""
    text, found, decoder = match["body"].strip(), list[Found](), json.JSONDecoder()
    while text:
        value, end = decoder.raw_decode(text)
        own = _calls_of(value)
        if not own:
            return []
        found, text = found + own, text[end:].lstrip(" \n\r\t;,")
    return found


def _named(pattern: re.Pattern[str], match: re.Match[str], _: Types) -> list[Found]:
    """Names, each with a JSON object."""
    found: list[Found] = []
    for call in pattern.finditer(match["body"]):
        if not isinstance(json.loads(call["arguments"]), dict):
            return []
        found.append((call["name"].removeprefix("functions."), call["arguments"].strip()))
    return found


def _tagged(pattern: re.Pattern[str], match: re.Match[str], types: Types) -> list[Found]:
    """Arguments one by one between tags, as text; of the type that the tool's schema gives."""
    name = match["name"].strip()
    schemas = types.get(name, {})
    values = {argument["key"].strip(): argument["value"] for argument in pattern.finditer(match["body"])}
    arguments = {key: _typed(value, schemas.get(key)) for key, value in values.items()}
    return [(name, json.dumps(arguments, ensure_ascii=False))]


def _typed(value: str, schema: Any) -> Any:
    """A value that is written as text, as JSON where the schema does not say that it is text."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _python(match: re.Match[str], _: Types) -> list[Found]:
    """`[f(a=1), g()]`"""
    tree = ast.parse(match["body"].strip(), mode="eval").body
    found = []
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            return []
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        found.append((ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False)))
    return found


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


_PARAMETERS = _pattern(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>")
_ARGUMENTS = _pattern(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>")
_MISTRAL = _pattern(
    r"(?:\[TOOL_CALLS\])?\s*(?P<name>[^\[{\s]+)(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?"
    r"(?P<arguments>\{.*?\})(?=\s*(?:\[TOOL_CALLS\]|\Z))"
)
_DEEPSEEK = _pattern(
    r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]*?)(?:<｜tool▁sep｜>|\n)"
    r"(?:```json\n)?(?P<arguments>.*?)(?:\n```)?<｜tool▁call▁end｜>"
)
_KIMI = _pattern(
    r"<\|tool_call_begin\|>\s*(?P<name>[^:<\s]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>"
    r"(?P<arguments>.*?)<\|tool_call_end\|>"
)
# The first whose sign the template writes; of those with one sign in common the more special ones come first.
FAMILIES = (
    Family(
        "xml",
        ("<function=",),
        ("<tool_call>",),
        _pattern(r"<tool_call>\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>\s*</tool_call>"),
        partial(_tagged, _PARAMETERS),
    ),
    Family(
        "glm",
        ("<arg_key>",),
        ("<tool_call>",),
        _pattern(r"<tool_call>(?P<name>[^<{]+)(?P<body>.*?)</tool_call>"),
        partial(_tagged, _ARGUMENTS),
    ),
    Family(
        "hermes",
        ("<tool_call>",),
        ("<tool_call>",),
        _pattern(r"<tool_call>(?P<body>.*?)</tool_call>"),
        _objects,
    ),
    Family(
        "mistral",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]",),
        _pattern(r"\[TOOL_CALLS\]\s*(?P<body>\[\s*\{.*\])\s*\Z"),
        _objects,
    ),
    Family(
        "deepseek",
        ("<｜tool▁calls▁begin｜>",),
        ("<｜tool▁calls▁begin｜>",),
        _pattern(r"<｜tool▁calls▁begin｜>(?P<body>.*?)<｜tool▁calls▁end｜>"),
        partial(_named, _DEEPSEEK),
    ),
    Family(
        "kimi",
        ("<|tool_calls_section_begin|>",),
        ("<|tool_calls_section_begin|>",),
        _pattern(r"<\|tool_calls_section_begin\|>(?P<body>.*?)<\|tool_calls_section_end\|>"),
        partial(_named, _KIMI),
    ),
    Family(
        "cohere",
        ("<|START_ACTION|>",),
        ("<|START_ACTION|>",),
        _pattern(r"<\|START_ACTION\|>(?P<body>.*?)<\|END_ACTION\|>"),
        _objects,
    ),
    Family(
        "lfm",
        ("<|tool_call_start|>",),
        ("<|tool_call_start|>",),
        _pattern(r"<\|tool_call_start\|>(?P<body>.*?)<\|tool_call_end\|>"),
        _python,
    ),
    Family(
        "phi",
        ("<|tool_call|>",),
        ("<|tool_call|>",),
        _pattern(r"<\|tool_call\|>(?P<body>.*?)(?:<\|/tool_call\|>|\Z)"),
        _objects,
    ),
    Family(
        "llama",
        ("<|python_tag|>", '"parameters": {"zqkey"'),
        ("{", "<|python_tag|>"),
        _pattern(r"(?:<\|python_tag\|>)?\s*(?P<body>\{.*\})\s*\Z"),
        _objects,
        is_whole=True,
    ),
)
# Mistral's newer form has the sign of the older one; which of them a model writes, its text shows.
_NEWER = Family("mistral", (), ("[TOOL_CALLS]",), _pattern(r"\[TOOL_CALLS\](?P<body>.*)\Z"), partial(_named, _MISTRAL))
HARMONY = "<|channel|>"  # GPT-OSS: a turn is several messages, each with a channel
_HARMONY = _pattern(
    r"(?:<\|start\|>assistant)?(?P<header>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>(?P<body>.*?)"
    r"(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)"
)
_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def calls_in(family: Family, text: str, start: int, types: Types) -> tuple[list[Found], int]:
    """The calls that a text holds from `start` on, and where they end; none where it is no call."""
    for form in (family, _NEWER) if family.name == "mistral" else (family,):
        match = form.block.match(text, start)
        try:
            found = form.read(match, types) if match else []
        except (ValueError, SyntaxError, RecursionError, TypeError, AttributeError):  # of json and ast
            continue
        if match and found:
            return found, match.end()
    return [], start


def harmony_parts(text: str) -> tuple[str, str, list[Found]] | None:
    """Reasoning, content and calls of a turn of GPT-OSS; None where it is none."""
    reasoning, content, calls, end = "", "", list[Found](), 0
    for match in _HARMONY.finditer(text):
        if match.start() != end:
            return None
        end, header, body = match.end(), match["header"], match["body"]
        if to := _TO.search(header):
            try:
                if not isinstance(json.loads(body), dict):
                    return None
            except ValueError:
                return None
            calls.append((to.group(1), body))
        elif "analysis" in header:
            reasoning += body
        else:
            content += body
    return (reasoning, content, calls) if end == len(text) else None
