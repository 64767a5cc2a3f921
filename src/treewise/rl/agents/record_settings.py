"""What `treewise record` can be set to; its flags are made from these declarations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from typing_extensions import Doc

from treewise.base.http.server import check_host
from treewise.data.io.options import check_date
from treewise.errors import ConfigError, check_fields
from treewise.rl.agents.endpoint_settings import KEY_FORM, EndpointSettings
from treewise.rl.samplers.by_name import check_sampler


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """Raises `ConfigError` for a value beyond its limits, and for an output that is there."""

    model: Annotated[str, Doc("a folder, a Hub name, a .gguf file, or smollm2-demo; with --sampler its tokenizer")]
    output: Annotated[str, Doc("file of rows (.jsonl), which must not be there")]
    host: Annotated[str, Doc("address to listen on; others than this machine's own need --token")] = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535), Doc("0: any that is free")] = 8000
    token: Annotated[str | None, Doc("what keys must be: TOKEN, or TOKEN.EPISODE")] = None
    chat_template: Annotated[str | None, Doc("in place of the tokenizer's: a text, a file, chatml")] = None
    template_date: Annotated[
        str | None, Doc("the date that a chat template writes as today's, as 2026-11-28; that of the start")
    ] = None
    thinking: Annotated[
        Literal["as_sent", "keep"],
        Doc("keep: turns stay in front of later ones with the reasoning that the agent or the template drops"),
    ] = "as_sent"
    records_experts: Annotated[bool, Doc("rows hold the experts that a mixture's sampler chose (routed_experts)")] = (
        False
    )
    dtype: Annotated[str, Doc("of the model: float32, bfloat16, float16, float64")] = "float32"
    device: Annotated[str, Doc("auto, cpu, cuda, ...")] = "auto"
    sampler: Annotated[str, Doc("what continues prompts: transformers (this process), vllm, openai, module:Class")] = (
        "transformers"
    )
    sampler_settings: Annotated[
        dict[str, Any] | None,
        Doc("of it (docs/servers.md), as in --sampler_settings.base_url http://host:8001/v1"),
    ] = None
    models: Annotated[
        dict[str, Any] | None,
        Doc("by the name that a call asks for: train, context (not trained), or {base_url, model, api_key}"),
    ] = None
    temperature: Annotated[float | None, Ge(0), Doc("of all trained calls, whatever they ask for")] = None
    max_length: Annotated[int | None, Ge(2), Doc("tokens of prompt and reply; the model's positions")] = None
    max_new_tokens: Annotated[int, Ge(1), Doc("the most tokens of one reply")] = 4096
    max_calls: Annotated[int, Ge(1), Doc("calls of an episode; further ones are answered with 403")] = 1000
    calls_at_once: Annotated[int, Ge(1), Doc("calls of an episode at a time; further ones are answered with 429")] = 64
    max_waiting: Annotated[int, Ge(1), Doc("calls that may wait; further ones are answered with 429")] = 1024
    max_request_mb: Annotated[int, Ge(1), Doc("the largest request, in MB; larger ones are answered with 413")] = 16
    call_seconds: Annotated[float, Gt(0), Doc("for the reply to a call; then it is answered with 504")] = 600.0
    idle_seconds: Annotated[float, Ge(0), Doc("without a call, after which an episode ends; 0: none")] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_host(self.host, self.token, KEY_FORM)
        check_date(self.template_date)
        self.of_endpoint(None)
        path = Path(self.output)
        if path.exists() and not (path.is_file() and not path.stat().st_size):  # an empty one holds nothing to lose
            raise ConfigError(f"output={self.output} is there; give another name, or move it away.")
        check_sampler(self.sampler, self.sampler_settings)

    def of_endpoint(self, max_length: int | None) -> EndpointSettings:
        """Those that are the endpoint's. max_length: what the model follows."""
        names = ("temperature", "max_new_tokens", "max_calls", "calls_at_once", "max_waiting", "max_request_mb")
        values: dict[str, Any] = {name: getattr(self, name) for name in (*names, "call_seconds", "records_experts")}
        if self.models is not None:
            values["models"] = {"*": "train", **self.models}
        most = [limit for limit in (self.max_length, max_length) if limit is not None]
        keeps = self.thinking == "keep"
        return EndpointSettings(max_length=min(most, default=None), keeps_thinking=keeps, **values)
