"""How families of models write tool calls and thinking, read back from text.

A family is recognised by what its chat template writes of a call. Each is the text that may begin a call, a pattern of
a whole one, and what is read of it. What begins like a call and is none is `Broken`, with the reason.
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
    ("<|channel>thought", "<channel|>"),
)


@dataclass(frozen=True, slots=True)
class Broken:
    """What begins like a call and cannot be carried out. why: for the policy."""

    why: str


@dataclass(frozen=True, slots=True)
class Family:
    """One of them.

    signs: the template's text of a call holds one of them. opens: what a call may begin with. block: a whole call, or
    several, from there. read: the calls in its match; none where it holds none, or what it raises. form: what a call
    looks like, for messages. closes: what ends it. is_whole: a call is the whole turn. looks: of such a family, what a
    turn has to begin like to be taken for a call that failed.
    """

    name: str
    signs: tuple[str, ...]
    opens: tuple[str, ...]
    block: re.Pattern[str]
    read: Callable[[re.Match[str], Types], list[Found]]
    form: str
    closes: str = ""
    is_whole: bool = False
    looks: re.Pattern[str] | None = None


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
    """A value that is written as text: JSON, or as Python prints it, where the schema does not say that it is text."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return value
    if value.strip() in _PRINTED:
        return _PRINTED[value.strip()]
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


def _braces(match: re.Match[str], _: Types) -> list[Found]:
    """`{key:<|"|>text<|"|>,other:[1,true]}`"""
    value, end = _braced(match["body"], 0)
    if not isinstance(value, dict) or end != len(match["body"]):
        raise ValueError(f"character {end} of its arguments")
    return [(match["name"].strip(), json.dumps(value, ensure_ascii=False))]


def _braced(text: str, at: int) -> tuple[Any, int]:
    """A value of that form, and where it ends."""
    if text.startswith(_QUOTE, at):
        end = text.index(_QUOTE, at + len(_QUOTE))
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text[at : at + 1] not in ("{", "["):
        word = _BARE.match(text, at)
        found = word.group().strip() if word else ""
        return (None if found in ("None", "null") else json.loads(found)), word.end() if word else at
    values, names, closing, at = list[Any](), list[str](), {"{": "}", "[": "]"}[text[at]], at + 1
    while not text.startswith(closing, at):
        if values and not text.startswith(",", at):
            raise ValueError(f"character {at} of its arguments")
        at += bool(values)
        if closing == "}":
            name = _KEY.match(text, at)
            if name is None:
                raise ValueError(f"character {at} of its arguments")
            names, at = [*names, name["key"].strip().removeprefix(_QUOTE).removesuffix(_QUOTE)], name.end()
        value, at = _braced(text, at)
        values.append(value)
    return (dict(zip(names, values, strict=True)) if closing == "}" else values), at + 1


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


_PRINTED = {"True": True, "False": False, "None": None}  # by Python, in templates that write values as they are
_QUOTE = '<|"|>'
_BARE, _KEY = re.compile(r"[^,\[\]{}]+"), re.compile(r"\s*(?P<key>[^:,\[\]{}]+):")
_ATEM = _pattern(r'<atem:parameter name="(?P<key>[^"]+)"[^>]*>(?P<value>.*?)</atem:parameter>')
_INVOKED = _pattern(r'<atem:invoke name="(?P<name>[^"]+)">(?P<body>.*?)</atem:invoke>')
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
HERMES = Family(  # also of templates that write tools, and calls in no form of their own
    "hermes",
    ("<tool_call>",),
    ("<tool_call>",),
    _pattern(r"<tool_call>(?P<body>.*?)</tool_call>"),
    _objects,
    '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>',
    "</tool_call>",
)
# The first whose sign the template writes; of those with one sign in common the more special ones come first.
FAMILIES = (
    Family(
        "xml",
        ("<function=",),
        ("<tool_call>",),
        _pattern(r"<tool_call>\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>\s*</tool_call>"),
        partial(_tagged, _PARAMETERS),
        "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
        "</tool_call>",
    ),
    Family(
        "glm",
        ("<arg_key>",),
        ("<tool_call>",),
        _pattern(r"<tool_call>(?P<name>[^<{]+)(?P<body>.*?)</tool_call>"),
        partial(_tagged, _ARGUMENTS),
        "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
        "</tool_call>",
    ),
    HERMES,
    Family(
        "mistral",
        ("[TOOL_CALLS]",),
        ("[TOOL_CALLS]",),
        _pattern(r"\[TOOL_CALLS\]\s*(?P<body>\[\s*\{.*\])\s*\Z"),
        _objects,
        "[TOOL_CALLS]NAME[ARGS]{...}",
    ),
    Family(
        "deepseek",
        ("<｜tool▁calls▁begin｜>",),
        ("<｜tool▁calls▁begin｜>",),
        _pattern(r"<｜tool▁calls▁begin｜>(?P<body>.*?)<｜tool▁calls▁end｜>"),
        partial(_named, _DEEPSEEK),
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    Family(
        "kimi",
        ("<|tool_calls_section_begin|>",),
        ("<|tool_calls_section_begin|>",),
        _pattern(r"<\|tool_calls_section_begin\|>(?P<body>.*?)<\|tool_calls_section_end\|>"),
        partial(_named, _KIMI),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_calls_section_end|>",
    ),
    Family(
        "cohere",
        ("<|START_ACTION|>",),
        ("<|START_ACTION|>",),
        _pattern(r"<\|START_ACTION\|>(?P<body>.*?)<\|END_ACTION\|>"),
        _objects,
        '<|START_ACTION|>[{"tool_name": NAME, "parameters": {...}}]<|END_ACTION|>',
        "<|END_ACTION|>",
    ),
    Family(
        "lfm",
        ("<|tool_call_start|>",),
        ("<|tool_call_start|>",),
        _pattern(r"<\|tool_call_start\|>(?P<body>.*?)<\|tool_call_end\|>"),
        _python,
        "<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>",
        "<|tool_call_end|>",
    ),
    Family(
        "phi",
        ("<|tool_call|>",),
        ("<|tool_call|>",),
        _pattern(r"<\|tool_call\|>(?P<body>.*?)(?:<\|/tool_call\|>|\Z)"),
        _objects,
        '<|tool_call|>[{"name": NAME, "arguments": {...}}]<|/tool_call|>',
    ),
    Family(
        "gemma",
        ("<|tool_call>call:",),
        ("<|tool_call>",),
        _pattern(r"<\|tool_call>\s*call:(?P<name>[^{]+)(?P<body>\{.*?\})\s*<tool_call\|>"),
        _braces,
        "<|tool_call>call:NAME{KEY:VALUE}<tool_call|>",
        "<tool_call|>",
    ),
    Family(
        "llama",
        ("<|python_tag|>", '"parameters": {"'),
        ("{", "<|python_tag|>"),
        _pattern(r"(?:<\|python_tag\|>)?\s*(?P<body>\{.*\})\s*\Z"),
        _objects,
        '{"name": NAME, "parameters": {...}}',
        is_whole=True,
        looks=_pattern(r'<\|python_tag\|>|\{\s*"(?:name|type|function|parameters)"\s*:'),
    ),
)
# Mistral's newer form has the sign of the older one; which of them a model writes, its text shows.
_NEWER = Family(
    "mistral", (), ("[TOOL_CALLS]",), _pattern(r"\[TOOL_CALLS\](?P<body>.*)\Z"), partial(_named, _MISTRAL), ""
)
# GPT-OSS (channels) and Muse: a turn is several messages, each to somebody.
MESSAGE = "<|message|>"
_MESSAGE = _pattern(
    r"(?:<\|start\|>assistant)?(?P<header>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>(?P<body>.*?)"
    r"(?:<\|end\|>|<\|call\|>|<\|return\|>|<\|eom\|>|<\|eot\|>|\Z)"
)
_TO = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def calls_in(family: Family, text: str, start: int, types: Types) -> tuple[list[Found], int]:
    """The calls that a text holds from `start` on, and where they end.

    Raises:
        ValueError: it holds none; says why.
    """
    why = ""
    for form in (family, _NEWER) if family.name == "mistral" else (family,):
        match = form.block.match(text, start)
        try:
            found = form.read(match, types) if match else []
        except (ValueError, SyntaxError, RecursionError, TypeError, AttributeError) as error:  # of json and ast
            is_json = isinstance(error, json.JSONDecodeError)
            why = why or (f"the call is not JSON: {error}" if is_json else f"the call cannot be read: {error}")
            continue
        if match and found:
            return found, match.end()
        why = why or ("a call needs a name and an object of arguments" if match else "")
    if not why:
        is_open = family.closes and family.closes not in text[start:]
        why = f"the call is not closed by {family.closes}" if is_open else "the call is in another form"
    raise ValueError(f"{why}; write {family.form}")


def messages_of(text: str, types: Types) -> tuple[str, str, list[Found | Broken]] | None:
    """Reasoning, content and calls of a turn of several messages; None where it is none."""
    reasoning, content, calls, end = "", "", list[Found | Broken](), 0
    for match in _MESSAGE.finditer(text):
        if match.start() != end:
            return None
        end, header, body = match.end(), match["header"], match["body"]
        to = _TO.search(header)
        if to is None or to.group(1) in ("self", "user"):
            if "analysis" in header or (to is not None and to.group(1) == "self"):
                reasoning += body
            else:
                content += body
            continue
        try:
            calls += _addressed(to.group(1), body, types)
        except (ValueError, RecursionError) as error:
            calls.append(Broken(f"the call of {to.group(1)} cannot be read: {error}"))
    return (reasoning, content, calls) if end == len(text) else None


def _addressed(name: str, body: str, types: Types) -> list[Found]:
    """The calls in a message to a function."""
    if "<atem:" in body:
        found = [call for match in _INVOKED.finditer(body) for call in _tagged(_ATEM, match, types)]
        if not found or body.count("<atem:invoke") != len(found):
            raise ValueError(
                'write <atem:invoke name="NAME"><atem:parameter name="KEY">VALUE</atem:parameter></atem:invoke>'
            )
        return found
    if not isinstance(json.loads(body), dict):
        raise ValueError("its arguments are no object")
    return [(name, body)]
