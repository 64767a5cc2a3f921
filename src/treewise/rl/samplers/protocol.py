"""What a sampler is asked for and what it gives back: token ids in, token ids and their log-probs out.

A sampler never sees text. Ids are kept as they were sampled, so nothing is ever tokenised twice. Which distribution
the log-probs belong to is fixed here, for every sampler:

* `Completion.logprobs` are log-softmax(logits / temperature), before top-k and top-p. This is what the engine computes
  for the same tokens at the same temperature (and what TRL and prime-rl train on), so the two may be compared and
  their ratio is an importance weight.
* Where top-k, top-p or the rules of a grammar cut the distribution, tokens were drawn from what was left, renormalised.
* Temperature 0 is greedy: the most likely token, its log-prob at temperature 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from treewise.errors import ConfigError
from treewise.tree.images import ImageSpan

if TYPE_CHECKING:
    from torch import nn

FinishReason = Literal["stop", "length"]
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30  # logits over less are beyond float32; over more they are all 0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Continuations of one prefix.

    prefix_ids: what the model sees, at least one id. max_new_tokens: the most tokens of one continuation.
    temperature: 0 is greedy. top_k: 0 keeps all. stop_ids: a continuation ends with the first of these (it is part of
    the completion). seed: continuation `i` draws from the random stream (seed, i). want_entropy: the entropy of each
    distribution. num_top: how many of the most likely ids to return per token, of those that can be drawn. want_routes:
    the experts that a mixture's routers choose. tree: a number that the rollouts of a tree have in common, which share
    prefixes; decides no answer, but on which of several servers it is computed. images: what their placeholders in the
    prefix stand for.
    """

    prefix_ids: tuple[int, ...]
    num_continuations: int = 1
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    want_entropy: bool = False
    num_top: int = 0
    want_routes: bool = False
    tree: int = 0
    images: tuple[ImageSpan, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix_ids", tuple(int(i) for i in self.prefix_ids))
        if not self.prefix_ids:
            raise ConfigError("a sample request has an empty prefix; the model needs at least one token before.")
        for name, low in (("num_continuations", 1), ("max_new_tokens", 1), ("top_k", 0), ("num_top", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} of a sample request is {getattr(self, name)}; it must be at least {low}.")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p of a sample request is {self.top_p}; it must be in (0, 1].")
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ConfigError(
                f"temperature of a sample request is {self.temperature}; it must be 0, or {MIN_TEMPERATURE:g} to "
                f"{MAX_TEMPERATURE:g}."
            )

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p take something away from the distribution."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1.0)

    def is_ended(self, token_ids: Sequence[int]) -> bool:
        """Whether these sampled ids end the continuation."""
        return token_ids[-1] in self.stop_ids

    def is_stopped(self, token_ids: Sequence[int]) -> bool:
        """Whether nothing is sampled behind these ids: they end the continuation, or nobody waits for more."""
        return self.is_ended(token_ids)


class TokenRules(Protocol):
    """Which ids may follow, of one continuation. schema: of JSON, that its text keeps to. is_plain: it holds nothing
    besides, so a server may be asked for it."""

    schema: Any
    is_plain: bool

    def allowed(self, token_ids: Sequence[int]) -> np.ndarray | None:
        """bool, by id, which may follow these sampled ids; None: all."""


@dataclass(frozen=True, slots=True)
class TextStops(SampleRequest):
    """Also ends where the text of the continuation, of which `decode` makes one, holds one of `stop_texts`; and once
    nobody waits for it. rules: tokens are drawn from those that they allow, renormalised, and recorded with their
    log-probs before that, as with top-k and top-p. on_tokens: is called with all ids so far, as they come, in the
    sampler's thread, and must not keep them."""

    stop_texts: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] = field(default=str, compare=False)
    is_cancelled: Callable[[], bool] = field(default=bool, compare=False)
    rules: TokenRules | None = field(default=None, compare=False)
    on_tokens: Callable[[Sequence[int]], None] | None = field(default=None, compare=False)

    def is_ended(self, token_ids: Sequence[int]) -> bool:
        """See `SampleRequest`."""
        if SampleRequest.is_ended(self, token_ids):
            return True
        if not self.stop_texts:
            return False
        tail = self.decode(token_ids[-max(len(text.encode()) for text in self.stop_texts) - 4 :])
        return any(text in tail for text in self.stop_texts)

    def is_stopped(self, token_ids: Sequence[int]) -> bool:
        """See `SampleRequest`."""
        if self.on_tokens is not None:
            self.on_tokens(token_ids)
        return self.is_cancelled() or self.is_ended(token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One continuation of T tokens. See the module for which distribution `logprobs` belong to.

    token_ids: int32 [T]. logprobs: float32 [T]. entropies: float32 [T], in nats, of the distribution that `logprobs`
    belong to. top_ids: int32 [T, num_top] and top_logprobs: float32 [T, num_top], of the distribution that `logprobs`
    belong to, most likely first; `-inf` where top-k, top-p or a temperature of 0 leave fewer to draw from. version: of
    the policy, as an online loop counts it; None where nobody counts. routed_experts: int16 [m, L, k], the experts that
    a mixture's routers chose for the tokens of prefix and completion, of all or all but the last, -1 where the sampler
    did not compute a token or did not record it. num_beyond: tokens that a server sampled behind the end, which are
    nobody's.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    entropies: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    version: int | None = None
    routed_experts: np.ndarray | None = None
    num_beyond: int = 0

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, the stop token included."""
        return len(self.token_ids)


@runtime_checkable
class Sampler(Protocol):
    """Anything that continues token ids. One that answers several calls at once, as a server does, has a number
    `max_concurrent` of them: the online loop then asks for each continuation on its own. One that computes a call in
    parts may have `sample_in_parts`; one that draws by `TextStops.rules` has `takes_rules`; and one that is given
    weights in two parts `begin_update`, which is `update` but returns what ends it: the model may change meanwhile. One
    that reads models from folders may have `read_saved` (`Reader` of `trainer/saved_model.py`).
    """

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        """For each request, in order, its `num_continuations` completions."""

    def update(self, model: "nn.Module") -> None:
        """The model is new or has been trained: hands the weights on, where the sampler holds weights of its own. Each
        process of a run calls this on its own sampler, before it samples and after each update."""

    def close(self) -> None:
        """Gives connections and memory back."""


Done = Callable[[int, tuple[Completion, ...]], None]


def sample_in_parts(sampler: Sampler, requests: Sequence[SampleRequest], done: Done) -> None:
    """Calls `done` with the number of a request and its completions, as soon as the sampler has them."""
    own = getattr(sampler, "sample_in_parts", None)
    if own is not None:
        own(requests, done)
        return
    for number, completions in enumerate(sampler.sample(requests)):
        done(number, completions)
