"""ShareGPT's `conversations` and alpaca's `instruction` and `output`, rewritten as chats and pairs."""

from treewise.data.io.field_checks import shown
from treewise.data.io.files import parse_text
from treewise.data.io.forms import Record
from treewise.errors import DataError, did_you_mean

# Speakers of ShareGPT and its variants (FastChat, LLaMA-Factory, axolotl) as roles of OpenAI's.
ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "ipython"), "tool"),
}


def rewritten(record: Record, form: str, location: str) -> Record:
    """The record as a form of treewise's own has it."""
    return from_sharegpt(record, location) if form == "sharegpt" else from_alpaca(record, location)


def from_sharegpt(record: Record, location: str) -> Record:
    """A chat, from turns of `from` and `value` (or `role` and `content`), and `system` beside them."""
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{location}: conversations must be a non-empty list of {{from, value}}, found {shown(turns)}.")
    messages = [_message(turn, f"{location}: conversations[{index}]") for index, turn in enumerate(turns)]
    rest = {key: value for key, value in record.items() if key not in ("conversations", "system")}
    if record.get("system"):
        messages.insert(0, {"role": "system", "content": record["system"]})
    if isinstance(rest.get("tools"), list):
        rest["tools"] = [
            {"type": "function", "function": tool} if isinstance(tool, dict) and "function" not in tool else tool
            for tool in rest["tools"]
        ]
    return {**rest, "messages": messages}


def _message(turn: object, location: str) -> Record:
    if not isinstance(turn, dict):
        raise DataError(f"{location} must be {{from, value}}, found {shown(turn)}.")
    if "role" in turn:
        return turn
    speaker = turn.get("from")
    role = ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        hint = did_you_mean(speaker, ROLES)
        raise DataError(f"{location}: from {shown(speaker)} is not a known speaker ({', '.join(ROLES)}).{hint}")
    if "value" not in turn:
        hint = did_you_mean("value", [key for key in turn if key != "from"])
        raise DataError(f"{location} has no value; its keys are {', '.join(map(str, turn))}.{hint}")
    rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
    if str(speaker).lower() != "function_call":
        return {"role": role, "content": turn["value"], **rest}
    calls = turn["value"] if not isinstance(turn["value"], str) else parse_text(turn["value"], location)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise DataError(f"{location}: a function_call must be {{name, arguments}}, found {shown(turn['value'])}.")
    tool_calls = [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]
    return {"role": role, "content": "", "tool_calls": tool_calls, **rest}


def from_alpaca(record: Record, location: str) -> Record:
    """A prompt and a completion, from `instruction`, `input` (after an empty line) and `output`.

    With `history` ([[question, answer], ...]) it is a chat, of which every answer is trained.
    """
    texts = {name: record.get(name, "") for name in ("instruction", "input", "output", "system")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise DataError(f"{location}: {name} must be text, found {shown(text)}.")
    question = "\n\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    rest = {key: value for key, value in record.items() if key not in (*texts, "history")}
    before = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    answer = {"role": "assistant", "content": texts["output"]}
    past = record.get("history") or []
    if not past:
        return {**rest, "prompt": [*before, {"role": "user", "content": question}], "completion": [answer]}
    if not isinstance(past, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in past):
        raise DataError(f"{location}: history must be a list of [question, answer], found {shown(past)}.")
    for asked, answered in past:
        before += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return {**rest, "messages": [*before, {"role": "user", "content": question}, answer]}
