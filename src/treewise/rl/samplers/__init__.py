"""Samplers: token ids in, token ids and log-probs out. `TransformersSampler` is the default."""

from treewise.rl.samplers.protocol import Completion, Sampler, SampleRequest
from treewise.rl.samplers.servers import OpenAISampler, VLLMSampler
from treewise.rl.samplers.transformers_sampler import TransformersSampler

__all__ = ["Completion", "OpenAISampler", "SampleRequest", "Sampler", "TransformersSampler", "VLLMSampler"]
