"""Samples from a vLLM server through TRL's client, which also hands the weights over after each update.

Start the server as TRL's page on vLLM says: `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config
'{"backend": "nccl"}' --logprobs-mode processed_logprobs --max-logprobs -1`. Weights travel over NCCL, so the trainer
needs a GPU; sampling alone does not.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from treewise.errors import ConfigError
from treewise.rl.samplers.protocol import Completion, SampleRequest
from treewise.rl.samplers.remote import checked_completion, refuse_unanswerable, sample_each, server_seed


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

    def update(self, model: Any) -> None:
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
