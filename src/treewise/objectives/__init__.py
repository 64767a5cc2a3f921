"""Losses on restored trajectories: small pure functions that never see a tree.

An objective selects tokens and their streams, and maps the model's values of these tokens (log-probs, entropies) to
losses, as it would for flat trajectories. Restoring is a gather, and the transpose of that gather is gradient
restoration (Tree Training, arXiv 2511.00413), so what is exact on flat trajectories is exact on trees.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
