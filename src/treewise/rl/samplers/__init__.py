"""Samplers: token ids in, token ids and log-probs out. `TransformersSampler` is the default."""

from treewise.rl.samplers.protocol import Completion, Sampler, SampleRequest
from treewise.rl.samplers.servers import ServerSampler
from treewise.rl.samplers.transformers_sampler import TransformersSampler

__all__ = ["Completion", "SampleRequest", "Sampler", "ServerSampler", "TransformersSampler"]
