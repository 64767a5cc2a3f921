"""Samplers: token ids in, token ids and log-probs out. `TransformersSampler` is the default.

Each name is imported when it is first used: a run that samples by itself loads nothing of servers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
