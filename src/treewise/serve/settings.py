"""What `treewise serve` can be set to; its flags are made from these declarations."""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from typing_extensions import Doc

from treewise.base.http.server import check_host
from treewise.errors import ConfigError, check_fields
from treewise.rl.samplers.by_name import check_sampler


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Raises `ConfigError` for a value beyond its limits, and for a server that others can reach without a token."""

    model: Annotated[str, Doc("a folder, a Hub name, a .gguf file, or smollm2-demo")]
    folder: Annotated[str, Doc("where runs, checkpoints and the journal lie; one server at a time")] = "served"
    name: Annotated[
        str | None, Doc("names of the model for clients (base_model), by commas, before that of --model")
    ] = None
    host: Annotated[str, Doc("address to listen on; others than this machine's own need --token")] = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535), Doc("0: any that is free")] = 8000
    token: Annotated[str | None, Doc("the API key that clients must send (TINKER_API_KEY, begins with tml-)")] = None
    max_tokens: Annotated[str, Doc("budget of a micro-batch in tokens, auto, or none")] = "auto"
    share: Annotated[Literal["all", "none"], Doc("none: every row alone, to compare with")] = "all"
    window: Annotated[
        str, Doc("calls between two optimizer steps share: auto, none, or how many tokens a run keeps for it")
    ] = "auto"
    train: Annotated[Literal["lora", "full"], Doc("full: all weights, whatever adapters a client asks for")] = "lora"
    dtype: Annotated[str, Doc("of the base model: float32, bfloat16, float16, float64")] = "float32"
    device: Annotated[str, Doc("auto, cpu, cuda, ...")] = "auto"
    attention: Annotated[str, Doc("auto, reference, cascade, flex, flash, cudnn")] = "auto"
    sampler: Annotated[str, Doc("what continues prompts: transformers (this process), vllm, openai, module:Class")] = (
        "transformers"
    )
    sampler_settings: Annotated[
        dict[str, Any] | None,
        Doc("of a server (docs/servers.md), as in --sampler_settings.base_url http://host:8001/v1"),
    ] = None
    stable_reinforce: Annotated[
        Literal["refused", "importance_sampling", "ppo", "cispo"],
        Doc("the loss that stands in for stable_reinforce, whose formula is not published"),
    ] = "refused"
    seed: Annotated[
        int | None,
        Ge(0),
        Doc("new adapters and samples without a seed of the client's follow from it: two servers then draw alike"),
    ] = None
    max_models: Annotated[int, Ge(1), Doc("training runs in memory at a time; others wait on the disk")] = 16
    max_rank: Annotated[int, Ge(1), Doc("the largest rank of an adapter")] = 256
    max_queue: Annotated[int, Ge(1), Doc("requests that may wait; further ones are answered with 429")] = 1024
    max_request_mb: Annotated[int, Ge(1), Doc("the largest request, in MB; larger ones are answered with 413")] = 64
    max_uploads_mb: Annotated[
        int, Ge(1), Doc("requests that are under way at once, in MB, or one of max_request_mb; further ones: 503")
    ] = 256
    max_request_seconds: Annotated[
        int, Ge(1), Doc("seconds within which a request's body is there; slower ones are answered with 408")
    ] = 120
    max_sample_tokens: Annotated[int, Ge(1), Doc("the most tokens of one continuation")] = 32768
    snapshot_every: Annotated[int, Ge(1), Doc("optimizer steps between snapshots, from which a restart goes on")] = 10
    verify_saves: Annotated[
        bool,
        Doc("read saved weights back by transformers, PEFT and a server, and compare log-probs before they are there"),
    ] = True
    keep_samplers: Annotated[int, Ge(1), Doc("unnamed sampler weights kept of each run")] = 16
    max_starts: Annotated[int, Ge(1), Doc("starts that a request may end before its answer; then it is refused")] = 8

    def __post_init__(self) -> None:
        check_fields(self)
        if self.token is not None and not self.token.startswith("tml-"):
            raise ConfigError("token must begin with tml-, because the SDK sends no other.")
        check_host(self.host, self.token, "tml-...")
        check_sampler(self.sampler, self.sampler_settings)
        if self.max_tokens not in ("auto", "none") and not (self.max_tokens.isdecimal() and int(self.max_tokens)):
            raise ConfigError(f"max_tokens={self.max_tokens!r} must be a positive integer, auto or none.")
        if self.window not in ("auto", "none") and not (self.window.isdecimal() and int(self.window)):
            raise ConfigError(f"window={self.window!r} must be a positive integer, auto or none.")

    def seed_of(self, name: str) -> int:
        """For a run or a request that brings none: from its id; with `seed`, from that and what follows the session,
        which is another on each server."""
        text = name if self.seed is None else f"{self.seed}:{name.partition(':')[2]}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")

    @property
    def names(self) -> list[str]:
        """What clients may call the model, the first of them in answers."""
        return [*(name for name in (self.name or "").split(",") if name), self.model]

    @property
    def budget(self) -> int | str | None:
        """`max_tokens` as `TreeEngine` takes it: a number, `auto`, or None for whole trees."""
        return int(self.max_tokens) if self.max_tokens.isdecimal() else {"auto": "auto"}.get(self.max_tokens)
