"""Why a call did not go on where an earlier one of its episode ended.

The earlier call that has most messages in common with it is compared with it, in canonical form.
"""

from collections.abc import Sequence
from typing import Any

Items = Sequence[tuple[Any, ...]]
# Nothing that was written before is written again.
NEW, AGAIN, BRANCHED = "new conversation", "same messages again", "other message after the same ones"
FORKS = {
    NEW: "a conversation that shares no message with an earlier one: a sub-agent, or a first call",
    AGAIN: "the messages of an earlier call, or its first ones: a retry, or a step back",
    BRANCHED: "another message where an earlier call has one",
    "thinking dropped": "a turn came back without its reasoning",
    "turn edited": "a turn of the model came back with other content or calls",
    "result cut": "a tool's result came back shorter",
    "result edited": "a tool's result came back otherwise",
    "system prompt edited": "the first message is another one, and those after it are the same",
    "message edited": "a message is another one, and later ones are the same",
    "messages dropped": "messages are gone from between others",
    "summarised": "messages are gone, and another one stands in their place",
    "other turns": "turns follow that no call of this conversation sampled: another agent's, or written by hand",
    "tools changed": "the tools are others",
    "template": "the chat template writes a turn otherwise once messages follow it, as where it drops thinking",
    "end of turn": "a turn ended with another token, or text, than the template closes turns with",
}


def num_equal(one: Items, other: Items) -> int:
    """Messages at the beginning that are equal."""
    size = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        size += 1
    return size


def reason_of(asked: Items, earlier: Items, *, num_messages: int, same_tools: bool) -> str:
    """The reason, one of `FORKS`.

    Parameters:
        asked: the call's messages.
        earlier: those of an earlier call, and its reply.
        num_messages: of the earlier call, without its reply.
        same_tools: whether both have the same tools and variables of the template.
    """
    at = num_equal(asked, earlier)
    if at == 0:
        first = asked[0][0] == earlier[0][0] == "system" and len(asked) > 1 and asked[1:2] == earlier[1:2]
        return "system prompt edited" if first else NEW
    if not same_tools:
        return "tools changed"
    if at == len(earlier):  # where the template is the cause, that is found before
        return "other turns"
    if at == len(asked):
        return AGAIN
    new, old = asked[at], earlier[at]
    later = list(asked[at + 1 :])
    if new[0] == old[0] == "assistant":
        return "thinking dropped" if new[1] == old[1] and new[3] == old[3] and not new[2] else "turn edited"
    if new[0] == old[0] == "tool":
        return "result cut" if len(new[1]) < len(old[1]) else "result edited"
    if new in list(earlier[at + 1 :]):
        return "messages dropped"
    if any(item in list(earlier[at + 1 :]) for item in later):
        return "message edited" if len(asked) - at >= len(earlier) - at - 1 else "summarised"
    return "summarised" if at < num_messages and len(asked) < len(earlier) else BRANCHED
