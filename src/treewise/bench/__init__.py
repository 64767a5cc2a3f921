"""`treewise bench`: treewise against flat training and tree rows, paired in one process.

Names are imported when they are first used: those of workloads and contestants are choices of the command.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
