"""Tasks: prompts and rewards of one turn, and environments of several.

Each name is imported when it is first used: a run on tasks of one turn loads nothing of environments.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
