from .by_name import SAMPLERS as SAMPLERS
from .by_name import sampler_named as sampler_named
from .protocol import Completion as Completion
from .protocol import Sampler as Sampler
from .protocol import SampleRequest as SampleRequest
from .servers import ServerSampler as ServerSampler
from .transformers_sampler import TransformersSampler as TransformersSampler
