"""Why replies ended, in the words of every engine and provider, and where their logs say it."""

import pytest

from treewise.data.io.endings import ending_of, is_known, own_reason, reason_in, why_unusable, with_reason

WORDS = {
    "ended": (
        *("stop", "tool_calls", "function_call", "end_turn", "tool_use", "STOP", "FinishReason.STOP", "COMPLETE"),
        *("TOOL_CALL", "eos", "eos_token", "completed", "tool-calls", "end_of_turn", "finish_reason_stop", "FINISHED"),
        *("stopstop", "tool_callstool_callstool_calls"),
    ),
    "cut": (
        *("length", "max_tokens", "max_output_tokens", "model_length", "MAX_TOKENS", "FinishReason.MAX_TOKENS"),
        *("model_context_window_exceeded", "incomplete", "truncated", "pause_turn", "stop_sequence", "LENGTH"),
        *("ERROR_LIMIT", "limit", "out_of_tokens", "maxTokens", "context_length_exceeded", "a word of tomorrow"),
    ),
    "unusable": (
        *("content_filter", "content-filter", "refusal", "SAFETY", "RECITATION", "error", "failed", "abort", "aborted"),
        *("cancelled", "guardrail_intervened", "MALFORMED_FUNCTION_CALL", "insufficient_system_resource", "timeout"),
        *("ERROR_TOXIC", "rate_limit_error", "other", "content_filtered"),
    ),
    None: ("", "unknown", "FINISH_REASON_UNSPECIFIED", None),
}


@pytest.mark.parametrize(("ending", "word"), [(ending, word) for ending, words in WORDS.items() for word in words])
def test_what_a_reason_lets_train(ending, word):
    assert ending_of(word) == ending
    assert word is None or is_known(word) == (word != "a word of tomorrow")


PLACES = {
    "a choice of OpenAI's": ({"index": 0, "finish_reason": "length", "message": {"content": "x"}}, "length"),
    "of vLLM, by a token": ({"finish_reason": "stop", "stop_reason": 151645}, "stop"),
    "of SGLang": ({"meta_info": {"finish_reason": {"type": "length", "length": 8}}}, "length"),
    "OpenAI's Responses": (
        {"object": "response", "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}},
        "max_output_tokens",
    ),
    "of Responses, failed": ({"object": "response", "status": "failed", "incomplete_details": None}, "failed"),
    "of Responses, complete": ({"object": "response", "status": "completed"}, None),
    "an item of Responses": ({"type": "message", "role": "assistant", "status": "incomplete"}, "incomplete"),
    "Anthropic's": ({"type": "message", "stop_reason": "max_tokens", "stop_sequence": None}, "max_tokens"),
    "Bedrock's": ({"stopReason": "guardrail_intervened"}, "guardrail_intervened"),
    "Gemini's": ({"finishReason": "MAX_TOKENS"}, "MAX_TOKENS"),
    "Ollama's": ({"done": True, "done_reason": "length"}, "length"),
    "LangChain's": ({"response_metadata": {"finish_reason": "length"}}, "length"),
    "LangChain's of Anthropic": (
        {"message": {"kwargs": {"response_metadata": {"stop_reason": "max_tokens"}}}},
        "max_tokens",
    ),
    "OpenTelemetry's": ({"metadata": {"attributes": {"gen_ai.response.finish_reasons": '["length"]'}}}, "length"),
    "the AI SDK's": ({"attributes": {"ai.response.finishReason": "content-filter"}}, "content-filter"),
    "both names, by a gateway": ({"finish_reason": "stop", "stop_reason": "max_tokens"}, "max_tokens"),
    "verifiers'": ({"is_truncated": True}, "truncated"),
    "not truncated": ({"is_truncated": False, "truncated": False}, None),
    "another status": ({"status": "failed"}, None),
}


@pytest.mark.parametrize("name", PLACES)
def test_where_logs_say_it(name):
    value, expected = PLACES[name]
    assert reason_in(value) == expected


def test_a_stop_sequence_is_not_the_end_of_a_turn():
    expected = {"finish_reason": "stop_sequence", "stop_sequence": "</a>"}
    assert with_reason({}, {"finish_reason": "stop", "stop_reason": "</a>"}) == expected
    assert with_reason({}, {"finish_reason": {"type": "stop", "matched": "</a>"}}) == expected
    assert with_reason({}, {"stop_reason": "stop_sequence", "stop_sequence": "</a>"}) == expected
    assert with_reason({}, {"finish_reason": "stop", "stop_reason": "end_turn"}) == {"finish_reason": "stop"}
    assert with_reason({}, {"finish_reason": "stop", "stop_reason": "</error>"})["finish_reason"] == "stop_sequence"
    assert with_reason({"a": 1}, {"role": "assistant"}, {"finish_reason": "length"}) == {
        "a": 1,
        "finish_reason": "length",
    }


def test_chat_records_say_it_by_few_keys():
    assert own_reason({"messages": [], "finish_reason": "length"}) == "length"
    assert own_reason({"metadata": {"finish_reason": "length"}}) is None
    assert own_reason({"truncated": True}) == "truncated"


def test_replies_that_cannot_be_trained_say_why():
    text, thought, call = {"content": "a"}, {"content": "", "reasoning": "a"}, {"content": None, "tool_calls": [{}]}
    assert why_unusable(text, "length") is why_unusable(text, None) is why_unusable(call, "tool_calls") is None
    assert why_unusable(thought, "length") is None
    assert why_unusable(thought, "stop") == "a reply that holds only reasoning and ended with 'stop'"
    assert why_unusable({"content": [{"type": "text", "text": " "}]}, "stop").startswith("a reply that holds nothing")
    assert why_unusable({"refusal": "no"}, None) == "a reply that refuses"
    assert why_unusable(text, "content_filter") == "a reply that ended with 'content_filter'"
    assert "so what was sampled is not known" in why_unusable(call, "length")
