"""Samples from a server that completes token ids: vLLM, SGLang, or any other with their fields.

The call is OpenAI's `POST /v1/completions` with the prompt as token ids and two fields that vLLM added: the answer's
ids (`return_token_ids`) and log-probs keyed by id (`return_tokens_as_token_ids`). Start vLLM with
`--logprobs-mode processed_logprobs`; its default, raw log-probs, holds at temperature 1 alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

from treewise.data.io.printable import printable
from treewise.errors import ConfigError, SamplerError, pip_install
from treewise.rl.samplers.protocol import Completion, SampleRequest
from treewise.rl.samplers.remote import (
    LOGPROBS_MODES,
    checked_completion,
    refuse_unanswerable,
    sample_each,
    server_seed,
)

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)


class OpenAISampler:
    """A sampler on a server. Needs the extra `rl` (httpx, tenacity).

    Parameters:
        base_url: up to and with `/v1`.
        model: the name that the server gives the model.
        max_concurrent: calls that are under way at once.
        timeout_seconds: of one call. num_tries: calls before giving up, with exponential back-off between them.
        logprobs_mode: what the server's log-probs are; see `refuse_unanswerable`.
        on_update: is called with the model after each update and hands its weights to the server.
        fixed_weights: the server keeps its weights on purpose.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        max_concurrent: int = 32,
        timeout_seconds: float = 600.0,
        num_tries: int = 6,
        first_wait_seconds: float = 0.5,
        logprobs_mode: str = "processed_logprobs",
        on_update: Callable[[Any], None] | None = None,
        fixed_weights: bool = False,
    ) -> None:
        if logprobs_mode not in LOGPROBS_MODES:
            raise ConfigError(f"logprobs_mode is {logprobs_mode!r}; choose one of {', '.join(LOGPROBS_MODES)}.")
        if max_concurrent < 1 or num_tries < 1:
            raise ConfigError(f"max_concurrent ({max_concurrent}) and num_tries ({num_tries}) must be at least 1.")
        try:
            import httpx
            import tenacity
        except ImportError as error:
            raise ConfigError(f"OpenAISampler needs {error.name}: {pip_install('httpx', 'tenacity')}.") from None
        self.url = base_url.rstrip("/") + "/completions"
        self.model = model
        self.max_concurrent = max_concurrent
        self.logprobs_mode = logprobs_mode
        self.on_update = on_update
        self.fixed_weights = fixed_weights
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=max_concurrent)
        self._client = httpx.Client(timeout=timeout_seconds, headers=headers, limits=limits)
        self._post = tenacity.retry(
            retry=tenacity.retry_if_exception(_is_transient),
            stop=tenacity.stop_after_attempt(num_tries),
            wait=tenacity.wait_random_exponential(multiplier=first_wait_seconds, max=60),
            reraise=True,
        )(self._post_once)

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        """See `Sampler`.

        Raises:
            ConfigError: a request that the server's log-probs cannot answer.
            SamplerError: the server does not answer, refuses, or answers without token ids.
        """
        for request in requests:
            refuse_unanswerable(request, self.logprobs_mode)
        return sample_each(requests, self._complete, self.max_concurrent)

    def update(self, model: Any) -> None:
        """Hands the weights on by `on_update`.

        Raises:
            ConfigError: there is no `on_update`, and `fixed_weights` was not set.
        """
        if self.on_update is not None:
            self.on_update(model)
        elif not self.fixed_weights:
            raise ConfigError(
                f"the server at {self.url} would sample from old weights; give OpenAISampler on_update=, which hands "
                "the weights over, use VLLMSampler, or set fixed_weights=True if that is meant."
            )

    def close(self) -> None:
        """Closes all connections."""
        self._client.close()

    def _complete(self, request: SampleRequest, continuation: int) -> Completion:
        import httpx

        try:
            answer = self._post(self._payload(request, continuation))
        except httpx.HTTPStatusError as error:
            text = printable(error.response.text[:300])
            raise SamplerError(f"{self.url}: the server answers {error.response.status_code}: {text}") from error
        except httpx.TransportError as error:
            raise SamplerError(f"{self.url}: no answer ({type(error).__name__}: {printable(error)}).") from error
        return parsed_answer(answer, request, continuation, self.url)

    def _payload(self, request: SampleRequest, continuation: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": list(request.prefix_ids),
            "n": 1,
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "seed": server_seed(request, continuation),
            "logprobs": request.num_top,
            "stop_token_ids": list(request.stop_ids),
            "ignore_eos": True,  # the request alone says where to stop
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def _post_once(self, payload: dict[str, Any]) -> Any:
        response = self._client.post(self.url, json=payload)
        response.raise_for_status()
        try:
            return response.json()
        except ValueError:
            raise SamplerError(f"{self.url}: the answer is not JSON: {response.text[:200]!r}.") from None


def parsed_answer(answer: Any, request: SampleRequest, continuation: int, location: str) -> Completion:
    """A completion from the JSON of a server.

    Raises:
        SamplerError: fields are missing; the message says which and what to start the server with.
    """
    try:
        choice = answer["choices"][0]
        logprobs = choice["logprobs"]
        names = logprobs["tokens"]
        values = logprobs["token_logprobs"]
    except (KeyError, IndexError, TypeError):
        raise SamplerError(
            f"{location}: the answer has no choices[0].logprobs with tokens and token_logprobs; the server must return "
            "the log-prob of every sampled token."
        ) from None
    ids = choice.get("token_ids")
    if ids is None:
        ids = [_token_id(name) for name in names]
    if any(token is None for token in ids):
        raise SamplerError(
            f"{location}: the server returns text and no token ids, and text cannot be tokenised back exactly; use one "
            "that honours return_token_ids (vLLM 0.10.2 or later) or return_tokens_as_token_ids."
        )
    tops = None
    if request.num_top and logprobs.get("top_logprobs"):
        tops = [{_token_id(name): value for name, value in top.items()} for top in logprobs["top_logprobs"]]
        if any(token is None for top in tops for token in top):
            raise SamplerError(
                f"{location}: top_logprobs are keyed by text; return_tokens_as_token_ids is not honoured."
            )
    return checked_completion(request, continuation, ids, values, tops, location)  # type: ignore[arg-type]


def _token_id(name: Any) -> int | None:
    digits = str(name).removeprefix("token_id:")
    return int(digits) if str(name).startswith("token_id:") and digits.isdigit() else None


def _is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed when it is tried again."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in RETRIED
    return isinstance(error, httpx.TransportError)
