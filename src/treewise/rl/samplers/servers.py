"""Samplers on servers that complete token ids: a call per continuation, answers checked and cut at the stop conditions.

`OpenAISampler` speaks OpenAI's `POST /v1/completions` with the prompt as token ids and two fields that vLLM added: the
answer's ids (`return_token_ids`) and log-probs keyed by id (`return_tokens_as_token_ids`). It fits vLLM, SGLang, or any
other with their fields. Start vLLM with `--logprobs-mode processed_logprobs`; its default, raw log-probs, holds at
temperature 1 alone.

`VLLMSampler` goes through TRL's client, which also hands the weights over after each update. Start the server as TRL's
page on vLLM says: `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}'
--logprobs-mode processed_logprobs --max-logprobs -1`. Weights travel over NCCL, so the trainer needs a GPU; sampling
alone does not.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from treewise.data.io.field_checks import printable
from treewise.errors import ConfigError, SamplerError, pip_install
from treewise.rl.samplers.draw import can_be_drawn, stream_key
from treewise.rl.samplers.protocol import Completion, SampleRequest

LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")
RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)


def refuse_unanswerable(request: SampleRequest, logprobs_mode: str) -> None:
    """Checks that what a request asks for can be had from a server's log-probs.

    Raises:
        ConfigError: entropies are wanted, or the server's log-probs are not those of logits / temperature.
    """
    if request.want_entropy:
        raise ConfigError(
            "servers return no entropies; leave want_entropy off (branch on log-probs), or use TransformersSampler."
        )
    if logprobs_mode == "processed_logprobs" and request.truncates:
        raise ConfigError(
            f"the server's processed log-probs are those after top_p={request.top_p} and top_k={request.top_k}, which "
            "training cannot compare; sample with top_p=1 and top_k=0, or at temperature 1 with raw_logprobs."
        )
    if request.num_top < request.top_k and request.num_top and request.top_p < 1:
        raise ConfigError(
            f"num_top={request.num_top} of top_k={request.top_k} log-probs do not tell what top_p={request.top_p} "
            "leaves; ask for num_top (num_candidates of an online run) of at least top_k, or leave one of the cuts out."
        )
    if logprobs_mode == "raw_logprobs" and request.temperature not in (0.0, 1.0):
        raise ConfigError(
            f"the server's raw log-probs are those of temperature 1, and the request has {request.temperature}; "
            "start the server with --logprobs-mode processed_logprobs."
        )


def server_seed(request: SampleRequest, continuation: int) -> int:
    """The seed of one continuation, 31 bits: servers take one seed per call."""
    return stream_key(request.seed, continuation, 0) & 0x7FFFFFFF


def sample_each(
    requests: Sequence[SampleRequest], call: Callable[[SampleRequest, int], Completion], max_concurrent: int
) -> list[tuple[Completion, ...]]:
    """Calls once for every continuation, several at a time; completions in the order of requests."""
    jobs = [(request, request.first_continuation + i) for request in requests for i in range(request.num_continuations)]
    if not jobs:
        return []
    with ThreadPoolExecutor(max_workers=min(max_concurrent, len(jobs))) as executor:
        flat = iter(list(executor.map(lambda job: call(*job), jobs)))
    return [tuple(next(flat) for _ in range(request.num_continuations)) for request in requests]


def checked_completion(
    request: SampleRequest,
    continuation: int,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    tops: Sequence[dict[int, float]] | None,
    location: str,
) -> Completion:
    """A completion of what a server answered, cut after the first stop condition.

    Raises:
        SamplerError: no tokens, other counts of ids and log-probs, or a log-prob that is not a number.
    """
    if not token_ids:
        raise SamplerError(
            f"{location}: the server returned no tokens for a request of up to {request.max_new_tokens}."
        )
    if len(token_ids) != len(logprobs):
        raise SamplerError(f"{location}: the server returned {len(token_ids)} token ids and {len(logprobs)} log-probs.")
    ids = list(token_ids[: request.max_new_tokens])
    size = next((i for i in range(1, len(ids) + 1) if request.is_stopped(ids[:i])), len(ids))
    ids = ids[:size]
    values = np.array([np.nan if value is None else value for value in logprobs[:size]], dtype=np.float32)
    if not np.isfinite(values).all():
        raise SamplerError(f"{location}: log-prob {int(np.argmin(np.isfinite(values)))} is not a number.")
    if not request.is_stopped(ids) and size < request.max_new_tokens:
        raise SamplerError(
            f"{location}: the server ended after {size} of {request.max_new_tokens} tokens with id {ids[-1]}, which is "
            "no stop id of the request; add it to stop_ids, or raise the server's length limit."
        )
    top_ids, top_logprobs = _tops(request, tops, size, location)
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=values,
        finish_reason="stop" if request.is_stopped(ids) else "length",
        continuation=continuation,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def _tops(
    request: SampleRequest, tops: Sequence[dict[int, float]] | None, size: int, location: str
) -> tuple[np.ndarray | None, np.ndarray | None]:
    if not request.num_top:
        return None, None
    if tops is None or any(len(top) < request.num_top for top in tops[:size]):
        raise SamplerError(
            f"{location}: the server gave fewer than {request.num_top} log-probs a token; raise its --max-logprobs."
        )
    ordered = [sorted(top.items(), key=lambda item: -item[1])[: request.num_top] for top in tops[:size]]
    ids: list[list[Any]] = [[token for token, _ in top] for top in ordered]
    values = np.array([[value for _, value in top] for top in ordered], dtype=np.float32)
    return np.array(ids, dtype=np.int32), np.where(can_be_drawn(request, values), values, -np.inf).astype(np.float32)


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
        on_update: Callable[[nn.Module], None] | None = None,
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

    def update(self, model: nn.Module) -> None:
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


def _token_id(name: object) -> int | None:
    digits = str(name).removeprefix("token_id:")
    return int(digits) if str(name).startswith("token_id:") and digits.isdigit() else None


def _is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed when it is tried again."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in RETRIED
    return isinstance(error, httpx.TransportError)


class VLLMSampler:
    """A sampler on a vLLM server. Needs TRL and vLLM (`pip install trl[vllm]`).

    Parameters:
        client: a `trl.generation.vllm_client.VLLMClient`; made from the other arguments where None.
        device: the trainer's, for the transfer of weights.
    """

    def __init__(
        self,
        base_url: str = "http://localhost:8000",
        *,
        client: Any = None,
        device: torch.device | str | int = 0,
        connection_timeout_seconds: float = 240.0,
        max_concurrent: int = 64,
    ) -> None:
        self.client = _client(base_url, connection_timeout_seconds) if client is None else client
        self.device = device
        self.max_concurrent = max_concurrent
        self._is_connected = False

    def sample(self, requests: Sequence[SampleRequest]) -> list[tuple[Completion, ...]]:
        """See `Sampler`. Raises as `OpenAISampler.sample` does."""
        for request in requests:
            refuse_unanswerable(request, "processed_logprobs")
        return sample_each(requests, self._complete, self.max_concurrent)

    def update(self, model: nn.Module) -> None:
        """Sends every weight, adapters merged, and drops what the server computed with the old ones."""
        if not self._is_connected:
            self.client.init_communicator(device=self.device)
            self._is_connected = True
        with _merged_weights(model) as weights, self.client.weight_update():
            for name, tensor in weights:
                self.client.update_named_param(name, tensor)
        self.client.reset_prefix_cache()

    def close(self) -> None:
        """Leaves the group over which weights travel."""
        if self._is_connected:
            self.client.close_communicator()
            self._is_connected = False

    def _complete(self, request: SampleRequest, continuation: int) -> Completion:
        answer = self.client.generate(
            [list(request.prefix_ids)],
            n=1,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            max_tokens=request.max_new_tokens,
            logprobs=request.num_top,
            generation_kwargs={
                "seed": server_seed(request, continuation),
                "stop_token_ids": list(request.stop_ids),
                "ignore_eos": True,
            },
        )
        ids = answer["completion_ids"][0]
        tops = [
            dict(zip(tokens, values, strict=True))
            for tokens, values in zip(answer["logprob_token_ids"][0], answer["logprobs"][0], strict=True)
        ]
        logprobs = [top.get(token) for token, top in zip(ids, tops, strict=True)]
        return checked_completion(request, continuation, ids, logprobs, tops, "vLLM server")


@contextmanager
def _merged_weights(model: Any) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Names and tensors as the server's model has them; LoRA adapters are merged in meanwhile."""
    if not hasattr(model, "merge_adapter"):
        yield ((name, parameter.data) for name, parameter in model.named_parameters())
        return
    model.merge_adapter()
    try:
        yield (
            (name.removeprefix("base_model.model.").replace(".base_layer", ""), parameter.data)
            for name, parameter in model.named_parameters()
            if model.prefix not in name
        )
    finally:
        model.unmerge_adapter()


def _client(base_url: str, timeout: float) -> Any:
    try:
        from trl.generation.vllm_client import VLLMClient
    except ImportError:
        raise ConfigError("VLLMSampler needs TRL 1.16 or later and vLLM; pip install 'trl[vllm]'.") from None
    try:
        return VLLMClient(base_url=base_url, connection_timeout=timeout)
    except ImportError as error:
        raise ConfigError(f"VLLMSampler: {error}") from None
