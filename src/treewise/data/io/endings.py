"""Why a reply ended, in the words of engines and providers, and what of it may be trained then. One table for chats,
importers and the online loop: an end of turn that was not sampled is never trained.

The words are those of OpenAI's chat completions, completions and Responses, Anthropic, Gemini, Bedrock, Cohere,
Mistral, OpenRouter, the AI SDK, vLLM, SGLang, TGI, llama.cpp, Ollama, slime, and of what logs them: langfuse,
LangSmith, OpenTelemetry.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from treewise.data.io.field_checks import shown
from treewise.data.io.replies import KEYS, REASONING_NAMES, STOP_SEQUENCE, TRUNCATED

# ended: the model sampled its end. cut: something else stopped it, so what it sampled is trained, and no end. unusable:
# what the log holds is not what the model would have said, or was not finished for a reason that says nothing of it.
Ending = Literal["ended", "cut", "unusable"]

_WORDS: dict[Ending, str] = {  # max_turns and what is like it are of episodes: the turn itself ended
    "ended": """stop stopped eos eos_token eos_found stop_token end end_turn end_of_turn end_of_message end_of_text
        endoftext tool_calls tool_call tool_use function_call function_calls complete completed finish finished done
        success max_turns max_steps max_iterations max_rounds""",
    "cut": """length max_tokens max_output_tokens max_new_tokens model_length token_limit limit out_of_tokens
        context_length model_context_window_exceeded error_limit incomplete truncated cut_off pause_turn repetition
        stop_sequence word stop_criteria_met""",
    "unusable": """content_filter content_filtered refusal safety image_safety recitation blocklist prohibited_content
        spii language other error error_toxic failed abort aborted cancelled canceled user_cancel timeout interrupted
        queued in_progress pending load unload guardrail_intervened malformed_function_call malformed_tool_use
        malformed_model_output unexpected_tool_call too_many_tool_calls insufficient_system_resource""",
}
_ENDINGS = {word: ending for ending, words in _WORDS.items() for word in words.split()}
_UNKNOWN = frozenset(("", "none", "null", "unknown", "unspecified", "finish_reason_unspecified"))
# Words that are in no table, by what is in them.
_LIKE_UNUSABLE = re.compile(
    "error|fail|filter|refus|abort|cancel|safety|block|prohibit|moderat|malform|time_?out|guard"
)
_LIKE_CUT = re.compile("length|max|limit|trunc|token|context|exceed|budget")
_REASON_NAMES = (
    *("finish_reason", "finishReason", "stop_reason", "stopReason", "done_reason", "completion_reason"),
    *("completionReason", "finish_reasons", "gen_ai.response.finish_reasons", "ai.response.finishReason"),
    *("llm.response.finish_reason", "llm.finish_reason", "stop_type"),
)
_HOLDERS = (
    *("response_metadata", "generation_info", "meta_info", "details", "choices", "metadata", "attributes"),
    *("additional_kwargs", "kwargs", "message"),
)
MAX_DEPTH = 3
_SEVERITY: tuple[Ending | None, ...] = (None, "ended", "cut", "unusable")


def ending_of(reason: str | None) -> Ending | None:
    """What of a reply may be trained; None where the reason says nothing of that."""
    word = "" if reason is None else _word(reason)
    if word in _UNKNOWN:
        return None
    if word not in _ENDINGS and _LIKE_UNUSABLE.search(word):
        return "unusable"
    return _ENDINGS.get(word, "cut")  # of a word that nobody knows, an end may not have been sampled


def is_known(reason: str) -> bool:
    """Whether a table or a pattern holds the reason."""
    word = _word(reason)
    is_like = _LIKE_UNUSABLE.search(word) or _LIKE_CUT.search(word)
    return word in _ENDINGS or word in _UNKNOWN or is_like is not None


def reason_in(value: Mapping[str, Any]) -> str | None:
    """The reason that a reply, a choice or a record of a log gives in any of the usual places; None without one."""
    return _found(value, depth=0)


def stop_sequence_in(value: Mapping[str, Any]) -> str | None:
    """The text that stopped a reply: Anthropic's `stop_sequence`, vLLM's `stop_reason`, SGLang's `matched`."""
    finish = value.get("finish_reason")
    matched = finish.get("matched") if isinstance(finish, Mapping) else None
    beside = value.get("stop_reason") if _text(finish) is not None else None
    for text in (value.get(STOP_SEQUENCE), matched, beside if not _is_reason(beside) else None):
        if isinstance(text, str) and text:
            return text
    return None


def with_reason(fields: dict[str, Any], *holders: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a record and how its reply ended, as chat records say it: by the first of some holders that does."""
    for holder in holders:
        reason, sequence = reason_in(holder), stop_sequence_in(holder)
        if sequence is not None and ending_of(reason) in ("ended", None):
            reason = STOP_SEQUENCE
        if reason is not None:
            found = {"finish_reason": reason, STOP_SEQUENCE: sequence}
            return {**fields, **{name: item for name, item in found.items() if item is not None}}
    return fields


def why_unusable(message: Mapping[str, Any], reason: str | None) -> str | None:
    """Why a reply cannot be trained as it is; None where it can be. Reasoning alone that was cut off can be, where the
    chat template writes it.
    """
    ending = ending_of(reason)
    if ending == "unusable":
        return f"a reply that ended with {shown(reason)}"
    if ending == "cut" and (message.get("tool_calls") or message.get("function_call")):
        return f"tool calls of a reply that was cut off ({shown(reason)}), so what was sampled is not known"
    if message.get("tool_calls") or message.get("function_call") or not _is_blank(message.get("content")):
        return None
    has_reasoning = any(message.get(name) for name in REASONING_NAMES)
    if has_reasoning and ending == "cut":
        return None
    holds = "refuses" if message.get("refusal") else f"holds {'only reasoning' if has_reasoning else 'nothing'}"
    return f"a reply that {holds}" + ("" if reason is None else f" and ended with {shown(reason)}")


def _is_blank(content: object) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, Mapping) and _is_blank(part.get("text", part)) for part in content)
    return not content.strip() if isinstance(content, str) else not content


def own_reason(value: Mapping[str, Any]) -> str | None:
    """The reason that a chat record or a message of one gives, by one of `KEYS`; the worst of several."""
    return _found({name: value[name] for name in KEYS if name in value}, depth=0)


def _found(value: Mapping[str, Any], depth: int) -> str | None:
    reasons = [
        (name, _text(value.get(name)))
        for name in _REASON_NAMES
        if not (name.startswith("stop") and isinstance(value.get(name), int))  # vLLM's token that stopped it
    ]
    if any(text is not None for name, text in reasons if not name.startswith("stop")):
        reasons = [reason for reason in reasons if not reason[0].startswith("stop") or _is_reason(reason[1])]
    found = [text for _, text in reasons if text is not None]
    details, status = value.get("incomplete_details"), value.get("status")
    if isinstance(details, Mapping):
        found.append(str(details.get("reason") or "incomplete"))
    is_response = value.get("object") == "response" or value.get("type") == "message"
    if is_response and isinstance(status, str) and ending_of(status) in ("cut", "unusable"):
        found.append(status)
    if value.get(TRUNCATED) is True or value.get("is_truncated") is True:
        found.append(TRUNCATED)
    if found:
        return max(found, key=lambda reason: _SEVERITY.index(ending_of(reason)))
    for name in _HOLDERS if depth < MAX_DEPTH else ():
        inner = value.get(name)
        inner = inner[0] if isinstance(inner, list) and len(inner) == 1 else inner
        if isinstance(inner, Mapping) and (reason := _found(inner, depth + 1)) is not None:
            return reason
    return None


def _is_reason(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[a-z_]+", _word(value)) is not None and is_known(value)


def _text(reason: object) -> str | None:
    """A reason as text, from that, from SGLang's `{"type": "length"}`, or from a list of one."""
    if isinstance(reason, str) and reason[:1] == "[":  # JSON text in attributes of OpenTelemetry
        reason = reason.strip('[]" ')
    if isinstance(reason, list | tuple) and len(reason) == 1:
        reason = reason[0]
    if isinstance(reason, Mapping):
        reason = reason.get("type")
    if reason is None or isinstance(reason, bool) or (isinstance(reason, str) and _word(reason) in _UNKNOWN):
        return None
    return reason if isinstance(reason, str) else shown(reason)


def _word(reason: str) -> str:
    """In lower case with underscores, without the name of an enumeration (`FinishReason.MAX_TOKENS`)."""
    text = reason.strip().rpartition(".")[2]
    text = text if text.isupper() else re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text)
    word = text.lower().replace("-", "_").replace(" ", "_").removeprefix("finish_reason_")
    return re.sub(r"^(.{3,}?)\1+$", r"\1", word)  # LangChain adds up what chunks say: `stopstop`
