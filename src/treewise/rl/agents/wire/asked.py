"""What a call asks for, in one spelling for all protocols, and how a call is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treewise.data.render.messages import Message, Tools

# What a call may not give as variables of the template: arguments of the function that writes it.
RESERVED = {"conversation", "tools", "chat_template", "add_generation_prompt", "tokenize", "documents", "padding"}
RESERVED |= {"continue_final_message", "return_dict", "return_tensors", "tokenizer_kwargs", "max_length", "truncation"}
RESERVED |= {"return_assistant_tokens_mask"}


class RefusedError(Exception):
    """A call that is answered with an error in its protocol's form.

    status: of HTTP. code: OpenAI's word for it. param: the field that is wrong. is_final: the answer says not to send
    the call again.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        is_final: bool = True,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.param, self.is_final = message, status, code, param, is_final


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A call.

    model: the name that it asks for. messages: of a chat, as the template gets them; or prompt: a text or token ids.
    tools: function schemas. reads_calls: whether tool calls are taken out of the text (not with a `tool_choice` of
    none). must_call: the function that has to be called, "" for any; None: the model decides. is_parallel: whether a
    turn may hold several calls. prefill: the beginning of the model's turn, which it goes on from. num_choices:
    continuations. max_tokens: of one; None: as many as there is room for. temperature, top_p, top_k, seed: None where
    the call does not say. stop: texts that end a continuation. num_top: most likely tokens of each position; None: no
    log-probs. variables: further ones of the chat template. is_streamed: by server-sent events. schema: the JSON schema
    that a reply has to keep to. namespaces: of functions, by the name that the model knows (`NamedTools`). ignored:
    fields that were given and change nothing.
    """

    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    tools: Tools = None
    reads_calls: bool = True
    must_call: str | None = None
    is_parallel: bool = True
    prefill: str = ""
    num_choices: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    num_top: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    is_streamed: bool = False
    schema: Mapping[str, Any] | None = None
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("n", self.num_choices, 1, 128),
            ("max_tokens", self.max_tokens, 1, None),
            ("temperature", self.temperature, 0.0, 2.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("top_k", self.top_k, 0, 2**31 - 1),
            ("top_logprobs", self.num_top, 0, 20),
        ):
            if value is not None and not (low <= value and (high is None or value <= high)):
                most = "" if high is None else f" and at most {high}"
                raise RefusedError(f"{name} is {value}; it must be at least {low}{most}.", param=name)
        if reserved := RESERVED & set(self.variables):
            raise RefusedError(
                f"chat_template_kwargs holds {', '.join(sorted(reserved))}; give the template's variables."
            )
        if self.top_p == 0.0:
            raise RefusedError("top_p is 0; it must be above 0.", param="top_p")
        if (
            self.messages
            and not self.prefill
            and self.messages[-1]["role"] == "assistant"
            and self.must_call is not None
        ):
            raise RefusedError("tool_choice: a turn that must call follows a message of another role.")
        names = [tool["function"]["name"] for tool in self.tools or ()]
        if self.must_call and self.must_call not in names:
            raise RefusedError(f"tool_choice names {self.must_call!r}, and no tool has that name.", param="tool_choice")
        if self.must_call is not None and not names:
            raise RefusedError("tool_choice asks for a call, and there are no tools.", param="tool_choice")


@dataclass(frozen=True, slots=True)
class GivenCall:
    """A tool call as it is given out. arguments: JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A choice as it is given out.

    finish: `stop`, `length`, `tool_calls`. stop_text: the text of `AgentRequest.stop` that ended it. token_ids,
    logprobs, tops (id to log-prob) and texts of its tokens, for those who ask.
    """

    content: str
    reasoning: str = ""
    calls: tuple[GivenCall, ...] = ()
    finish: str = "stop"
    stop_text: str | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[Mapping[int, float], ...] = ()

    def message(self) -> Message:
        """As the message that comes back in the next call."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message
