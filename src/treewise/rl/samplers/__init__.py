"""Samplers: token ids in, token ids and log-probs out. `TransformersSampler` is the default."""

from treewise.rl.samplers.openai_sampler import OpenAISampler
from treewise.rl.samplers.protocol import Completion, Sampler, SampleRequest
from treewise.rl.samplers.transformers_sampler import TransformersSampler
from treewise.rl.samplers.vllm_sampler import VLLMSampler

__all__ = ["Completion", "OpenAISampler", "SampleRequest", "Sampler", "TransformersSampler", "VLLMSampler"]
