"""The online loop: choose tasks, sample trees, reward, credit, train.

Both names are imported when they are first used: reports read what a run logged without its trainer.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
